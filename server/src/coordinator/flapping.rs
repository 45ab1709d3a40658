//! Those who keep dying must not make all others renumber for ever.
//!
//! A client id that died several times is let in again only after a growing delay. That does not help
//! against processes that draw a new id each time, as clients do by default: so a group of which
//! members keep dying young also keeps its barriers further apart.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::ids::ClientId;

/// For how long deaths are remembered, and how long a membership counts as young.
const WINDOW: Duration = Duration::from_secs(60);
/// This many deaths within [`WINDOW`] put the next join off, or the next barrier.
const TOLERATED: usize = 3;
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// Deaths that are remembered in one group.
const DEATHS: usize = 10_000;

/// In a restless group members work so many times as long as the last barrier took: 98 % of their time.
const RESTLESS: u32 = 49;
/// But nobody waits longer than this for a share because others die. A barrier that waits for a process which
/// ended with a reset takes `reset_grace`, a second, and costs them 5 % then.
const LONGEST_DISTANCE: Duration = Duration::from_secs(20);

/// Deaths without goodbye.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    /// All, the oldest first.
    all: VecDeque<(Instant, ClientId)>,
    /// The same by client.
    by_client: BTreeMap<ClientId, VecDeque<Instant>>,
}

impl Deaths {
    pub(super) fn count(&mut self, client: &ClientId, now: Instant) {
        while let Some((at, _)) = self.all.front()
            && (self.all.len() >= DEATHS || now.saturating_duration_since(*at) >= WINDOW)
        {
            self.forget_oldest();
        }
        self.all.push_back((now, client.clone()));
        self.by_client
            .entry(client.clone())
            .or_default()
            .push_back(now);
    }

    fn forget_oldest(&mut self) {
        let Some((_, client)) = self.all.pop_front() else {
            return;
        };
        if let Some(deaths) = self.by_client.get_mut(&client) {
            deaths.pop_front();
            if deaths.is_empty() {
                self.by_client.remove(&client);
            }
        }
    }

    /// How long this client must still wait; doubles with each death.
    pub(super) fn delay(&self, client: &ClientId, now: Instant) -> Option<Duration> {
        let deaths = self.by_client.get(client)?;
        let recent = deaths
            .iter()
            .filter(|death| now.saturating_duration_since(**death) < WINDOW)
            .count();
        let exponent = u32::try_from(recent.checked_sub(TOLERATED)?)
            .unwrap_or(u32::MAX)
            .min(6);
        let until = *deaths.back()? + FIRST_DELAY.saturating_mul(1 << exponent).min(LONGEST_DELAY);
        let left = until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

/// Members that died young, whatever their client ids: when the last of them did.
#[derive(Debug, Default)]
pub(super) struct ShortLives(VecDeque<Instant>);

impl ShortLives {
    /// A member died that had joined at `joined`; `None`: before this leader came.
    pub(super) fn count(&mut self, joined: Option<Instant>, now: Instant) {
        if joined.is_some_and(|joined| now.saturating_duration_since(joined) < WINDOW) {
            self.0.push_back(now);
            if self.0.len() > TOLERATED {
                self.0.pop_front();
            }
        }
    }

    /// Time from the end of a barrier that took so long to the next one.
    pub(super) fn distance(&self, barrier: Duration, now: Instant) -> Duration {
        let oldest = self.0.front().filter(|_| self.0.len() == TOLERATED);
        if oldest.is_some_and(|at| now.saturating_duration_since(*at) < WINDOW) {
            (barrier * RESTLESS).min(LONGEST_DISTANCE).max(barrier)
        } else {
            barrier
        }
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

    #[test]
    fn what_is_remembered_is_bounded_and_the_newest_stays() {
        let mut deaths = Deaths::default();
        let now = env::now();
        let id = |at: usize| ClientId::new(format!("c{at}")).unwrap();
        for at in 0..2 * DEATHS {
            deaths.count(&id(at), now);
        }
        assert_eq!((deaths.all.len(), deaths.by_client.len()), (DEATHS, DEATHS));
        for _ in 0..TOLERATED {
            deaths.count(&id(7), now);
        }
        assert_eq!(deaths.delay(&id(7), now), Some(FIRST_DELAY));
        deaths.count(&id(8), now + WINDOW);
        assert_eq!((deaths.all.len(), deaths.by_client.len()), (1, 1));
    }

    #[test]
    fn barriers_keep_a_distance_while_members_die_young() {
        let start = env::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let (short, long) = (Duration::from_millis(10), Duration::from_secs(5));
        let mut lives = ShortLives::default();
        // Old ones, and those of which nobody knows, are no sign of a crash loop.
        for _ in 0..5 {
            lives.count(Some(start), at(60));
            lives.count(None, at(60));
        }
        lives.count(Some(at(59)), at(60));
        lives.count(Some(at(59)), at(61));
        assert_eq!(lives.distance(short, at(61)), short);
        lives.count(Some(at(3)), at(62));
        assert_eq!(lives.distance(short, at(62)), 49 * short);
        assert_eq!(lives.distance(long, at(62)), LONGEST_DISTANCE);
        assert_eq!(lives.distance(5 * long, at(62)), 5 * long);
        assert_eq!(lives.distance(short, at(120)), short);
    }
}
