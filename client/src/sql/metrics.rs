//! What a consumer counts.

use std::time::Duration;

/// Counters since the consumer began to run, and its present state.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Metrics {
    /// Tasks whose handler was started.
    pub started: u64,
    /// Tasks marked as done (or deleted).
    pub done: u64,
    /// Tasks marked as failed for good.
    pub failed: u64,
    /// Failed attempts after which the task is tried again.
    pub retried: u64,
    /// Failed attempts that were panics.
    pub panicked: u64,
    /// Failed attempts that were out of time.
    pub timed_out: u64,
    /// Executions that were stopped because the row was revoked. They count as no attempt.
    pub interrupted: u64,
    /// Rows that were fetched, but were no longer this client's when their turn came.
    pub dropped: u64,
    /// Rows left for later because another transaction has them locked, each time they were met. Only with
    /// transactions.
    pub locked: u64,
    /// Executions that were rolled back and are tried again: a deadlock, a serialization failure, a wait for a lock that
    /// was too long, a lost connection, or another task of the batch. They count as no attempt. Only with transactions.
    pub rolled_back: u64,
    /// Commits that were not answered: what became of them was read from the table. Only with transactions.
    pub unanswered_commits: u64,
    /// Marks that changed nothing, because the row was not new any more: it was executed twice, its status was changed
    /// by hand or by its handler, or the query that found it was answered by a replica of the database that lags behind.
    pub lost_marks: u64,
    /// Tasks whose mark the database refused for a reason of the row's own (a constraint, a trigger). They are
    /// left alone for a minute, then executed again.
    pub refused_marks: u64,
    /// Executed tasks that could not be marked before the consumer stopped: they are executed again.
    pub unmarked: u64,
    /// Rows whose key cannot be read, each time they were seen.
    pub unreadable: u64,
    /// Queries for rows.
    pub polls: u64,
    /// Statements that failed.
    pub database_errors: u64,
    /// Handlers that run now.
    pub running: usize,
    /// Rows that wait for a handler in this process.
    pub waiting: usize,
    /// For how long the oldest task that was last found had been due, by the database's clock; zero when
    /// nothing was.
    pub lag: Duration,
    /// Why the last statement failed; `None` once one succeeded.
    pub trouble: Option<String>,
}
