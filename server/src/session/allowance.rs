//! A flood from one client is slowed down at its own connection, so that it disturbs no other.

use std::time::Duration;

use skyschedule_common::env::Instant;

/// Messages that may come at once.
const BURST: u32 = 1_024;
/// Time for one more.
const PERIOD: Duration = Duration::from_millis(2);

/// A token bucket.
#[derive(Debug)]
pub(super) struct Allowance {
    left: u32,
    counted: Instant,
}

impl Allowance {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            counted: now,
        }
    }

    /// Takes one message; says how long to wait before the next is read.
    pub(super) fn take(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.counted);
        let gained = u32::try_from(passed.as_millis() / PERIOD.as_millis()).unwrap_or(u32::MAX);
        if gained > 0 {
            self.left = self.left.saturating_add(gained).min(BURST);
            self.counted = now;
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            Duration::ZERO
        } else {
            PERIOD
        }
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
        assert!((0..BURST).all(|_| allowance.take(start).is_zero()));
        assert_eq!(allowance.take(start), PERIOD);
        assert!(allowance.take(start + PERIOD).is_zero());
        assert_eq!(allowance.take(start + PERIOD), PERIOD);
    }
}
