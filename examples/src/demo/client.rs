//! What the demo knows of one consumer.

use std::collections::VecDeque;
use std::time::Duration;

use skyschedule_common::env::Instant;

use super::crew::Process;

/// The time over which a speed is an average.
const WINDOW: Duration = Duration::from_millis(1_500);

/// How a consumer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It has not got rows yet.
    Starting,
    /// It has rows, or had some and waits for others.
    Working,
    /// It was killed by the demo.
    Killed,
    /// It was asked to end, and said goodbye.
    Left,
    /// It ended though nobody had asked it to.
    Failed,
}

/// One consumer.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) name: String,
    /// None once it has ended.
    pub(super) process: Option<Process>,
    pub(super) state: State,
    /// Its rows in words; none while they move.
    pub(super) rows: Option<String>,
    /// Tasks that it said to have executed.
    pub(super) executed: u64,
    pub(super) speed: Speed,
}

impl Client {
    pub(super) fn new(name: String, process: Process) -> Self {
        Self {
            name,
            process: Some(process),
            state: State::Starting,
            rows: None,
            executed: 0,
            speed: Speed::default(),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.process.is_some() && self.state != State::Killed
    }
}

/// Executions a second of late.
#[derive(Debug, Default)]
pub(super) struct Speed(VecDeque<(Instant, u64)>);

impl Speed {
    /// Takes a count of now, and tells the speed.
    pub(super) fn take(&mut self, now: Instant, count: u64) -> f64 {
        self.0.push_back((now, count));
        while self.0.len() > 2
            && self
                .0
                .get(1)
                .is_some_and(|(at, _)| now.saturating_duration_since(*at) >= WINDOW)
        {
            self.0.pop_front();
        }
        let Some(&(first, before)) = self.0.front() else {
            return 0.0;
        };
        let seconds = now.saturating_duration_since(first).as_secs_f64();
        let more = u32::try_from(count.saturating_sub(before)).unwrap_or(u32::MAX);
        if seconds > 0.0 {
            f64::from(more) / seconds
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_forgets_what_is_long_ago() {
        let mut speed = Speed::default();
        let at = |millis: u64| Instant::from_nanos(millis * 1_000_000);
        assert!(speed.take(at(0), 0) < 0.1);
        assert!((speed.take(at(1_000), 500) - 500.0).abs() < 0.1);
        for tick in 2..100 {
            speed.take(at(tick * 1_000), 500);
        }
        assert!(speed.take(at(100_000), 500) < 0.1);
    }
}
