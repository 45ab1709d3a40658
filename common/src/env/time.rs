use super::{Instant, world};
use std::future::Future;
use std::time::Duration;

/// The longest single wait of a timer. The runtime's timers stand still while the machine is
/// suspended, [`now`] does not: after a suspend a sleep is over at most this much too late.
pub(super) const SLICE: Duration = Duration::from_secs(1);

/// A wait ended because its time limit passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no answer within the time limit")]
pub struct Elapsed;

/// Now, by the clock that decides: it never goes back and counts the time in which the machine or the
/// process was suspended or stopped.
pub fn now() -> Instant {
    Instant::from_nanos(world::nanos())
}

/// Microseconds since 1970 by the wall clock. For display and logs only: it may jump either way, and
/// decides nothing.
pub fn unix_micros() -> i64 {
    world::unix_micros()
}

/// Waits for `duration`.
pub async fn sleep(duration: Duration) {
    sleep_until(now() + duration).await;
}

/// Waits until `deadline`, never less; after a suspend at most one second more than that.
pub async fn sleep_until(deadline: Instant) {
    loop {
        let left = deadline.saturating_duration_since(now());
        if left.is_zero() {
            return;
        }
        world::timer(left.min(SLICE)).await;
    }
}

/// Waits for about `duration`: it may be over early, and after a suspend it is late by the time of that. For
/// those of which there are many, and who look at the clock when it is over.
pub async fn sleep_roughly(duration: Duration) {
    world::timer(duration).await;
}

/// What `future` yields, if it does so within `limit`; otherwise it is dropped.
pub async fn timeout<F: Future>(limit: Duration, future: F) -> Result<F::Output, Elapsed> {
    timeout_at(now() + limit, future).await
}

/// What `future` yields, if it does so before `deadline`; otherwise it is dropped.
pub async fn timeout_at<F: Future>(deadline: Instant, future: F) -> Result<F::Output, Elapsed> {
    tokio::select! {
        biased;
        output = future => Ok(output),
        () = sleep_until(deadline) => Err(Elapsed),
    }
}

#[cfg(test)]
#[cfg(not(sim))]
mod tests {
    use super::*;

    #[test]
    fn the_clock_counts_from_boot_and_never_goes_back() {
        let mut last = now();
        for _ in 0..10_000 {
            let next = now();
            assert!(next >= last);
            last = next;
        }
        #[cfg(target_os = "linux")]
        {
            let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
            let seconds: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
            let after = now();
            let between =
                last.as_nanos() as f64 / 1e9 - 0.02..=after.as_nanos() as f64 / 1e9 + 0.02;
            assert!(
                between.contains(&seconds),
                "{seconds} is not within {between:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_sleep_is_never_shorter_than_asked() {
        for wait in [Duration::from_micros(300), Duration::from_millis(7)] {
            let start = now();
            sleep(wait).await;
            assert!(start.elapsed() >= wait);
        }
    }

    #[tokio::test]
    async fn a_sleep_until_the_past_is_over_at_once() {
        let mut sleeping = std::pin::pin!(sleep_until(now() - Duration::from_secs(1)));
        let first =
            std::future::poll_fn(|cx| std::task::Poll::Ready(sleeping.as_mut().poll(cx))).await;
        assert!(first.is_ready());
    }

    #[tokio::test]
    async fn a_time_limit_ends_the_wait_and_nothing_else() {
        assert_eq!(
            timeout(Duration::from_millis(1), std::future::pending::<()>()).await,
            Err(Elapsed)
        );
        assert_eq!(timeout(Duration::ZERO, async { 7 }).await, Ok(7));
    }
}
