//! A flood from one client is slowed down at its own connection, so that it disturbs no other.

use std::time::Duration;

use skyschedule_common::env::Instant;

/// Messages that may come at once.
const BURST: u32 = 1_024;
/// Time for one more.
const PERIOD: Duration = Duration::from_millis(2);

/// Whoever uses all of it up for so long is no client.
const FLOOD: Duration = Duration::from_secs(5);

/// A token bucket.
#[derive(Debug)]
pub(super) struct Allowance {
    left: u32,
    counted: Instant,
    /// Since when it has not been half full.
    low_since: Option<Instant>,
}

/// More messages than any client sends, for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Flood;

impl Allowance {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            counted: now,
            low_since: None,
        }
    }

    /// Takes one message; says how long to wait before the next is read.
    pub(super) fn take(&mut self, now: Instant) -> Result<Duration, Flood> {
        let passed = now.saturating_duration_since(self.counted);
        let gained = u32::try_from(passed.as_millis() / PERIOD.as_millis()).unwrap_or(u32::MAX);
        if gained > 0 {
            self.left = self.left.saturating_add(gained).min(BURST);
            self.counted = now;
        }
        if self.left >= BURST / 2 {
            self.low_since = None;
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return Ok(Duration::ZERO);
        }
        let low_since = *self.low_since.get_or_insert(now);
        if now.saturating_duration_since(low_since) >= FLOOD {
            return Err(Flood);
        }
        Ok(PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use skyschedule_common::env;

    use super::*;

    #[test]
    fn a_burst_passes_and_a_flood_is_slowed_down() {
        let start = env::now();
        let mut allowance = Allowance::new(start);
        assert!((0..BURST).all(|_| allowance.take(start) == Ok(Duration::ZERO)));
        assert_eq!(allowance.take(start), Ok(PERIOD));
        assert_eq!(allowance.take(start + PERIOD), Ok(Duration::ZERO));
        assert_eq!(allowance.take(start + PERIOD), Ok(PERIOD));
    }

    #[test]
    fn a_flood_that_does_not_end_is_ended_and_bursts_are_not() {
        let mut now = env::now();
        let mut allowance = Allowance::new(now);
        for _ in 0..20 {
            assert!((0..=BURST).all(|_| allowance.take(now).is_ok()));
            now += FLOOD;
        }
        let ended = (0..100_000).find(|_| {
            now += PERIOD / 2;
            allowance.take(now).is_err()
        });
        let lasted = PERIOD / 2 * ended.unwrap();
        assert!(lasted >= FLOOD && lasted < 3 * FLOOD, "{lasted:?}");
    }
}
