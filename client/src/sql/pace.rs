//! How long to wait: between queries that find nothing, and after errors.

use std::time::Duration;

use futures_util::future::BoxFuture;
use skyschedule_common::env::{Instant, rng};

const SHORTEST_IDLE: Duration = Duration::from_millis(20);
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LONGEST_RETRY: Duration = Duration::from_secs(5);

/// The last half of each wait is random, so that replicas do not ask in step.
const JITTER: f64 = 0.5;

/// The waits between queries: none while there is more, longer and longer while there is nothing.
#[derive(Debug)]
pub(super) struct Idle {
    longest: Duration,
    next: Duration,
}

impl Idle {
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            longest,
            next: SHORTEST_IDLE.min(longest),
        }
    }

    /// After a query that `found` new rows or not, and where there may be `more` at once.
    pub(super) fn wait(&mut self, found: bool, more: bool) -> Duration {
        if found {
            self.next = SHORTEST_IDLE.min(self.longest);
        }
        if more {
            return Duration::ZERO;
        }
        let wait = self.next;
        self.next = (self.next * 2).min(self.longest);
        rng::jitter(wait, JITTER)
    }
}

/// The waits after errors of the database.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    wait: Duration,
    until: Option<Instant>,
}

impl Trouble {
    /// An error, at this time; how long to wait.
    pub(super) fn note(&mut self, now: Instant) -> Duration {
        self.wait = (self.wait * 2).clamp(FIRST_RETRY, LONGEST_RETRY);
        let wait = rng::jitter(self.wait, JITTER);
        self.until = Some(now + wait);
        wait
    }

    /// A success; whether there was an error before.
    pub(super) fn end(&mut self) -> bool {
        self.wait = Duration::ZERO;
        self.until.take().is_some()
    }

    pub(super) fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| now < *until)
    }

    pub(super) fn lasts(&self, now: Instant) -> bool {
        self.until(now).is_some()
    }
}

/// The future's answer, or none ever.
pub(super) async fn pending_or<T>(future: &mut Option<BoxFuture<'static, T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

#[cfg(all(test, not(sim)))]
mod tests {
    use super::*;

    #[test]
    fn idle_waits_grow_to_their_bound_and_a_row_ends_them() {
        let mut idle = Idle::new(Duration::from_secs(1));
        assert_eq!(idle.wait(true, true), Duration::ZERO);
        let waits: Vec<Duration> = (0..20).map(|_| idle.wait(false, false)).collect();
        assert!(waits[0] <= SHORTEST_IDLE && waits[0] >= SHORTEST_IDLE / 2);
        assert!(waits[19] <= Duration::from_secs(1) && waits[19] >= Duration::from_millis(500));
        assert!(idle.wait(true, false) <= SHORTEST_IDLE);
    }

    #[test]
    fn waits_after_errors_grow_and_a_success_ends_them() {
        let mut trouble = Trouble::default();
        let now = Instant::from_nanos(0);
        assert!(trouble.note(now) <= FIRST_RETRY);
        for _ in 0..20 {
            assert!(trouble.note(now) <= LONGEST_RETRY);
        }
        assert!(trouble.lasts(now) && trouble.end() && !trouble.lasts(now) && !trouble.end());
    }
}
