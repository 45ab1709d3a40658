//! Starting handlers: one in a task of the runtime, or several, one after the other, while they end at once.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use skyschedule_common::env;
use tokio::sync::mpsc;

use super::key::Key;
use super::task::{Failure, Handler, Outcome, Task, execute};

/// About so long a group of handlers may take until its last one has ended or waits.
const GROUP: Duration = Duration::from_micros(50);

/// Most handlers of a group. A handler that blocks its thread holds up those behind it.
const LARGEST: usize = 128;

/// After so long what has ended is not kept back for the rest of its group.
const LATE: Duration = Duration::from_millis(1);

/// A handler's end.
pub(super) struct Ended {
    pub(super) key: Key,
    pub(super) outcome: Outcome,
}

/// What groups tell.
pub(super) enum Report {
    /// These have ended.
    Ended(Vec<Ended>),
    /// This one waits for something; it has a task of its own now.
    Apart(Key, Running),
    /// The group with this number is over, and these have ended too.
    Over {
        group: u64,
        ended: Vec<Ended>,
        pace: Pace,
    },
}

/// How quick a group was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    handlers: u32,
    took: Duration,
    /// Whether all ended at once.
    at_once: bool,
}

/// A task of the runtime: its handlers are dropped when this is.
pub(super) struct Running(env::JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts handlers.
pub(super) struct Groups<H> {
    handler: Arc<H>,
    limit: Option<Duration>,
    reports: mpsc::Sender<Report>,
    size: usize,
    last: u64,
}

impl<H> Groups<H> {
    /// Handlers may take as long as `limit`.
    pub(super) fn new(handler: H, limit: Option<Duration>, reports: mpsc::Sender<Report>) -> Self {
        Self {
            handler: Arc::new(handler),
            limit,
            reports,
            size: 1,
            last: 0,
        }
    }

    /// How many handlers are to be started together.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Whether handlers end at once: they wait for nothing, a connection of the pool say.
    pub(super) fn are_quick(&self) -> bool {
        self.size > 1
    }

    /// Learns from a group: the first ones are alone.
    pub(super) fn learn(&mut self, pace: Pace) {
        let each = pace.took / pace.handlers.max(1);
        let fit = GROUP.as_nanos() / each.as_nanos().max(1);
        let fit = usize::try_from(fit).unwrap_or(LARGEST);
        self.size = if pace.at_once {
            fit.clamp(1, (self.size * 2).min(LARGEST))
        } else {
            1
        };
    }

    /// Starts a group; its number, and its task.
    pub(super) fn start<R>(&mut self, tasks: Vec<Task<R>>) -> (u64, Running)
    where
        R: Send + 'static,
        H: Handler<R>,
    {
        self.last += 1;
        let group = self.last;
        let (handler, limit) = (Arc::clone(&self.handler), self.limit);
        let reports = self.reports.clone();
        let running = env::spawn(async move {
            let begun = env::now();
            let handlers = u32::try_from(tasks.len()).unwrap_or(u32::MAX);
            let mut ended = Vec::with_capacity(tasks.len());
            let mut at_once = true;
            for task in tasks {
                let key = task.key.clone();
                let mut execution = Box::pin(one(Arc::clone(&handler), task, limit));
                let first = poll_fn(|context| Poll::Ready(execution.as_mut().poll(context)));
                let outcome = match first.await {
                    Poll::Ready(outcome) => outcome,
                    Poll::Pending if handlers == 1 => {
                        at_once = false;
                        execution.await
                    }
                    Poll::Pending => {
                        at_once = false;
                        let (own, reports_of_own) = (key.clone(), reports.clone());
                        let apart = Running(env::spawn(async move {
                            let outcome = execution.await;
                            let ended = vec![Ended { key: own, outcome }];
                            let _ = reports_of_own.send(Report::Ended(ended)).await;
                        }));
                        let _ = reports.send(Report::Apart(key, apart)).await;
                        continue;
                    }
                };
                ended.push(Ended { key, outcome });
                if handlers > 1 && begun.elapsed() >= LATE {
                    let ended = std::mem::take(&mut ended);
                    let _ = reports.send(Report::Ended(ended)).await;
                }
            }
            let pace = Pace {
                handlers,
                took: begun.elapsed(),
                at_once,
            };
            // Nobody listens once the consumer is dropped.
            let _ = reports.send(Report::Over { group, ended, pace }).await;
        });
        (group, Running(running))
    }
}

async fn one<R, H: Handler<R>>(handler: Arc<H>, task: Task<R>, limit: Option<Duration>) -> Outcome {
    let guard = Arc::clone(&task.guard);
    // The call itself is inside: what it does before its first wait may panic too.
    let work = async { handler.handle(task).await.map_err(Failure::Error) };
    execute(&guard, limit, work).await
}

#[cfg(all(test, not(sim)))]
mod tests {
    use super::*;

    #[test]
    fn groups_grow_while_handlers_end_at_once_and_shrink_when_they_do_not() {
        let (reports, _) = mpsc::channel(1);
        let mut groups = Groups::new((), None, reports);
        let pace = |handlers, micros, at_once| Pace {
            handlers,
            took: Duration::from_micros(micros),
            at_once,
        };
        assert!(!groups.are_quick(), "the first one is alone");
        for _ in 0..20 {
            groups.learn(pace(10, 4, true));
        }
        assert_eq!(groups.size(), 125.min(LARGEST));
        groups.learn(pace(100, 1_000, true));
        assert_eq!(groups.size(), 5);
        groups.learn(pace(5, 10_000, true));
        assert!(!groups.are_quick(), "a handler that computes for long");
        groups.learn(pace(1, 1, true));
        groups.learn(pace(2, 2, false));
        assert!(!groups.are_quick(), "a handler that waits");
    }
}
