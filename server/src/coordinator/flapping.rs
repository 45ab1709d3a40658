//! A client that keeps dying must not make all others renumber for ever.

use std::collections::BTreeMap;
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::ids::ClientId;

/// Deaths that are remembered, and for how long.
const WINDOW: Duration = Duration::from_secs(60);
/// This many deaths within [`WINDOW`] put the next join off.
const TOLERATED: usize = 3;
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// Clients that are remembered in one group.
const CLIENTS: usize = 10_000;
/// Deaths of one client that are remembered.
const DEATHS: usize = 16;

/// Deaths without goodbye, by client.
#[derive(Debug, Default)]
pub(super) struct Deaths(BTreeMap<ClientId, Vec<Instant>>);

impl Deaths {
    pub(super) fn count(&mut self, client: &ClientId, now: Instant) {
        self.0.retain(|_, deaths| {
            deaths
                .last()
                .is_some_and(|last| now.saturating_duration_since(*last) < WINDOW)
        });
        if self.0.len() >= CLIENTS {
            return;
        }
        let deaths = self.0.entry(client.clone()).or_default();
        deaths.push(now);
        if deaths.len() > DEATHS {
            deaths.remove(0);
        }
    }

    /// How long this client must still wait; doubles with each death.
    pub(super) fn delay(&self, client: &ClientId, now: Instant) -> Option<Duration> {
        let deaths = self.0.get(client)?;
        let recent = deaths
            .iter()
            .filter(|death| now.saturating_duration_since(**death) < WINDOW)
            .count();
        let exponent = u32::try_from(recent.checked_sub(TOLERATED)?)
            .unwrap_or(u32::MAX)
            .min(6);
        let until = *deaths.last()? + FIRST_DELAY.saturating_mul(1 << exponent).min(LONGEST_DELAY);
        let left = until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use skyschedule_common::env;

    use super::*;

    #[test]
    fn the_third_death_within_a_minute_costs_a_growing_delay() {
        let client = ClientId::new("c").unwrap();
        let mut deaths = Deaths::default();
        let start = env::now();
        let at = |s: u64| start + Duration::from_secs(s);
        deaths.count(&client, at(0));
        deaths.count(&client, at(1));
        assert_eq!(deaths.delay(&client, at(1)), None);
        deaths.count(&client, at(2));
        assert_eq!(deaths.delay(&client, at(2)), Some(Duration::from_secs(1)));
        deaths.count(&client, at(4));
        assert_eq!(deaths.delay(&client, at(4)), Some(Duration::from_secs(2)));
        assert_eq!(deaths.delay(&client, at(6)), None);
        assert_eq!(deaths.delay(&client, at(70)), None);
    }
}
