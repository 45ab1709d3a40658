//! Starting handlers: one in a task of the runtime, or several, one after the other, while they end at once. Where such a
//! group takes too long all the same, what is left of it goes on without it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use skyschedule_common::env;
use tokio::sync::mpsc;

use super::key::Key;
use super::task::{Failure, Handler, Outcome, Task, execute};
use crate::work::Row;

/// About so long a group of handlers may take until its last one has ended or waits.
const GROUP: Duration = Duration::from_micros(50);

/// Most handlers of a group.
const LARGEST: usize = 128;

/// After so long a group is broken up.
pub(super) const LATE: Duration = Duration::from_millis(10);

/// A row whose handler was begun.
pub(super) struct Begun {
    pub(super) key: Key,
    /// Failed attempts before.
    pub(super) attempts: i64,
    pub(super) guard: Arc<Row>,
}

impl Begun {
    fn of<R>(task: &Task<R>) -> Self {
        Self {
            key: task.key.clone(),
            attempts: task.attempts,
            guard: Arc::clone(&task.guard),
        }
    }
}

/// A handler's end.
pub(super) type Ended = (Begun, Outcome);

/// What is left of a handler that waits for something.
pub(super) type Rest = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// What groups tell.
pub(super) enum Report {
    /// These have ended.
    Ended(Vec<Ended>),
    /// This one waits for something: it is to have a task of its own.
    Waits(Begun, Rest),
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

/// Handlers that run one after the other.
pub(super) struct Group<R> {
    state: Arc<Mutex<State<R>>>,
    _running: Running,
}

struct State<R> {
    waiting: VecDeque<Task<R>>,
    ended: Vec<Ended>,
}

impl<R> Group<R> {
    /// Takes what has ended, and what has not begun: a handler that blocks its thread must not hold them up.
    pub(super) fn break_up(&self) -> (Vec<Ended>, VecDeque<Task<R>>) {
        let mut state = lock(&self.state);
        (mem::take(&mut state.ended), mem::take(&mut state.waiting))
    }
}

fn lock<R>(state: &Mutex<State<R>>) -> MutexGuard<'_, State<R>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts away what has ended; the next one.
fn next<R>(state: &Mutex<State<R>>, ended: Option<Ended>) -> Option<Task<R>> {
    let mut state = lock(state);
    state.ended.extend(ended);
    state.waiting.pop_front()
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
        if pace.handlers == 0 {
            return; // All were taken from it.
        }
        let each = pace.took / pace.handlers;
        let fit = GROUP.as_nanos() / each.as_nanos().max(1);
        let fit = usize::try_from(fit).unwrap_or(LARGEST);
        self.size = if pace.at_once {
            fit.clamp(1, (self.size * 2).min(LARGEST))
        } else {
            1
        };
    }

    /// Starts a group; its number, and itself.
    pub(super) fn start<R>(&mut self, tasks: VecDeque<Task<R>>) -> (u64, Group<R>)
    where
        R: Send + 'static,
        H: Handler<R>,
    {
        self.last += 1;
        let group = self.last;
        let (handler, limit) = (Arc::clone(&self.handler), self.limit);
        let reports = self.reports.clone();
        let is_single = tasks.len() == 1;
        let state = Arc::new(Mutex::new(State {
            ended: Vec::with_capacity(tasks.len()),
            waiting: tasks,
        }));
        let own = Arc::clone(&state);
        let running = Running(env::spawn(async move {
            let begun = env::now();
            let (mut handlers, mut at_once) = (0, true);
            let mut ended = None;
            while let Some(task) = next(&own, ended.take()) {
                handlers += 1;
                let row = Begun::of(&task);
                let mut execution = Box::pin(one(Arc::clone(&handler), task, limit));
                let first = poll_fn(|context| Poll::Ready(execution.as_mut().poll(context)));
                let outcome = match first.await {
                    Poll::Ready(outcome) => outcome,
                    Poll::Pending if is_single => {
                        at_once = false;
                        execution.await
                    }
                    Poll::Pending => {
                        at_once = false;
                        let _ = reports.send(Report::Waits(row, execution)).await;
                        continue;
                    }
                };
                ended = Some((row, outcome));
            }
            let pace = Pace {
                handlers,
                took: begun.elapsed(),
                at_once,
            };
            let ended = mem::take(&mut lock(&own).ended);
            // Nobody listens once the consumer is dropped.
            let _ = reports.send(Report::Over { group, ended, pace }).await;
        }));
        let handlers = Group {
            state,
            _running: running,
        };
        (group, handlers)
    }

    /// Goes on with one that waits.
    pub(super) fn go_on(&self, row: Begun, rest: Rest) -> Running {
        let reports = self.reports.clone();
        Running(env::spawn(async move {
            let outcome = rest.await;
            let _ = reports.send(Report::Ended(vec![(row, outcome)])).await;
        }))
    }
}

/// Not an `async fn`, which would keep one more copy of the task.
fn one<R, H>(
    handler: Arc<H>,
    task: Task<R>,
    limit: Option<Duration>,
) -> impl Future<Output = Outcome> + Send
where
    R: Send + 'static,
    H: Handler<R>,
{
    let guard = Arc::clone(&task.guard);
    // The call itself is inside: what it does before its first wait may panic too.
    let work = async move { handler.handle(task).await.map_err(Failure::Error) };
    async move { execute(&guard, limit, work).await }
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
