//! Tasks, and how one is executed.

use std::any::Any;
use std::fmt::Display;
use std::future::poll_fn;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;

use super::key::Key;
use crate::work::Row;

/// A task that a handler works on. It dereferences to the user's row.
///
/// While it, or what the consumer keeps of it, lives, the row is this client's: the consumer gives the row back when
/// its mark is committed.
#[derive(Debug)]
pub struct Task<R> {
    pub(super) row: R,
    pub(super) key: Key,
    /// Failed attempts so far.
    pub(super) attempts: i64,
    pub(super) guard: Arc<Row>,
}

impl<R> Task<R> {
    /// The id.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Which attempt this is, from 1; always 1 for a table without such a column.
    pub fn attempt(&self) -> u32 {
        u32::try_from(self.attempts.saturating_add(1)).unwrap_or(1)
    }

    /// The fencing token: see [`Row::epoch`].
    pub fn epoch(&self) -> Epoch {
        self.guard.epoch()
    }

    /// Whether the work must stop: see [`Row::is_revoked`]. The handler's future is dropped then anyway; this is for
    /// work that goes on elsewhere, on another thread say.
    pub fn is_revoked(&self) -> bool {
        self.guard.is_revoked()
    }

    /// Ends when [`is_revoked`](Self::is_revoked) is true.
    pub fn revoked(&self) -> impl Future<Output = ()> + Send + use<R> {
        self.guard.revoked()
    }

    /// The user's row.
    pub fn row(&self) -> &R {
        &self.row
    }

    /// The user's row alone.
    pub fn into_row(self) -> R {
        self.row
    }
}

impl<R> Deref for Task<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.row
    }
}

/// What is done with each task.
///
/// Any `Fn(Task<R>) -> impl Future<Output = Result<(), E>> + Send` is one.
///
/// `Ok`: the task is done. `Err`, a panic, or no end within the consumer's
/// [`timeout`](super::Builder::timeout): this attempt has failed, other tasks go on. A handler whose future is
/// dropped because the row is revoked has not failed: its attempt does not count.
pub trait Handler<R>: Send + Sync + 'static {
    /// Works on one task.
    fn handle(&self, task: Task<R>) -> impl Future<Output = Result<(), String>> + Send;
}

impl<R, F, W, E> Handler<R> for F
where
    R: Send + 'static,
    F: Fn(Task<R>) -> W + Send + Sync + 'static,
    W: Future<Output = Result<(), E>> + Send,
    E: Display,
{
    async fn handle(&self, task: Task<R>) -> Result<(), String> {
        // The text at once: an error need not be Send.
        self(task).await.map_err(|error| error.to_string())
    }
}

/// How an execution ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Failed(Failure),
    /// The row was revoked.
    Interrupted,
}

/// Why a task failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    #[error("{0}")]
    Error(String),
    /// Only within a transaction of ours: it is rolled back, and this is no attempt.
    #[error("another transaction was in the way: {0}")]
    Conflict(String),
    #[error("the handler panicked: {0}")]
    Panic(String),
    #[error("the handler did not end within {0:?}")]
    Timeout(Duration),
    #[error("the row cannot be read: {0}")]
    Unreadable(String),
}

/// Runs a handler until it ends, its time is over, or the row is revoked; then it is dropped.
pub(super) async fn execute(
    guard: &Row,
    limit: Option<Duration>,
    work: impl Future<Output = Result<(), Failure>>,
) -> Outcome {
    let until = limit.map(|limit| (limit, env::now() + limit));
    let mut work = pin!(AssertUnwindSafe(work).catch_unwind());
    // Made for those handlers that wait.
    let mut broken_off: Option<BoxFuture<'static, Outcome>> = None;
    // Whether the row is revoked is asked before each step of the handler, by the clock: a process that stood
    // still must not go on with a row that is another's by now.
    poll_fn(|context| {
        if guard.is_revoked() {
            return Poll::Ready(Outcome::Interrupted);
        }
        match work.as_mut().poll(context) {
            Poll::Ready(Ok(Ok(()))) => Poll::Ready(Outcome::Done),
            Poll::Ready(Ok(Err(failure))) => Poll::Ready(Outcome::Failed(failure)),
            Poll::Ready(Err(panic)) => {
                let text = text_of(panic.as_ref());
                Poll::Ready(Outcome::Failed(Failure::Panic(text)))
            }
            Poll::Pending => broken_off
                .get_or_insert_with(|| Box::pin(revoked_or_late(guard.revoked(), until)))
                .as_mut()
                .poll(context),
        }
    })
    .await
}

async fn revoked_or_late(
    revoked: impl Future<Output = ()>,
    until: Option<(Duration, Instant)>,
) -> Outcome {
    let Some((limit, until)) = until else {
        revoked.await;
        return Outcome::Interrupted;
    };
    tokio::select! {
        biased;
        () = env::sleep_until(until) => Outcome::Failed(Failure::Timeout(limit)),
        () = revoked => Outcome::Interrupted,
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a text").to_owned()
}
