//! Exactly-once effects: claim, handler and mark of a task in one transaction.
//!
//! `transaction` is a transaction that is open, `problem` what its errors mean, `lane` one transaction from claim to
//! commit, `engine` the loop that finds rows and hands them to lanes.

mod engine;
mod lane;
mod problem;
mod transaction;

use std::error::Error as StdError;
use std::fmt;
use std::ops::{Deref, DerefMut};

use sqlx::{MySql, Postgres, Sqlite};
use tokio::sync::OwnedMutexGuard;

use super::driver::Driver;
use super::task::Task;
pub(super) use engine::Engine;
use transaction::Open;
pub(super) use transaction::check;

/// How many tasks share a transaction, with [`run_in_transaction`](super::Consumer::run_in_transaction).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transactions {
    /// Each task has its own. Tasks run at the same time, at most [`concurrency`](super::Builder::concurrency).
    #[default]
    PerTask,
    /// Up to a [`batch`](super::Builder::batch) of tasks, one after the other, for as long as a second: fewer commits for short
    /// tasks. At most [`concurrency`](super::Builder::concurrency) transactions at a time. A task that fails is undone
    /// alone, by a savepoint; if the database breaks the transaction off, its tasks are tried again one by one.
    PerBatch,
}

/// The transaction in which a task is claimed, executed and marked: what its handler writes through it is
/// committed together with the mark, or not at all.
///
/// It dereferences to the connection, as `sqlx::Transaction` does: `query.execute(&mut *tx)`. A transaction within it
/// (`tx.begin()` of [`sqlx::Connection`]) is a savepoint. The handler gives it back by dropping it, and neither
/// commits it nor rolls it back; statements that commit by themselves (`CREATE TABLE` in MariaDB) do not belong here.
pub struct Tx<D: Driver>(OwnedMutexGuard<Open<D>>);

impl<D: Driver> Deref for Tx<D> {
    type Target = D::Connection;

    fn deref(&self) -> &D::Connection {
        self.0.connection()
    }
}

impl<D: Driver> DerefMut for Tx<D> {
    fn deref_mut(&mut self) -> &mut D::Connection {
        self.0.connection_mut()
    }
}

impl<D: Driver> fmt::Debug for Tx<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx").finish_non_exhaustive()
    }
}

/// A [`Tx`] on whichever database.
#[derive(Debug)]
pub enum AnyTx {
    /// On PostgreSQL.
    Postgres(Tx<Postgres>),
    /// On MariaDB or MySQL.
    MySql(Tx<MySql>),
    /// On SQLite.
    Sqlite(Tx<Sqlite>),
}

impl From<Tx<Postgres>> for AnyTx {
    fn from(transaction: Tx<Postgres>) -> Self {
        Self::Postgres(transaction)
    }
}

impl From<Tx<MySql>> for AnyTx {
    fn from(transaction: Tx<MySql>) -> Self {
        Self::MySql(transaction)
    }
}

impl From<Tx<Sqlite>> for AnyTx {
    fn from(transaction: Tx<Sqlite>) -> Self {
        Self::Sqlite(transaction)
    }
}

/// Why a handler failed. Errors of sqlx, texts, `anyhow::Error` and all types that implement
/// [`Error`](std::error::Error) become one.
pub type HandlerError = Box<dyn StdError + Send + Sync>;

/// What is done with each task in its transaction, which is a [`Tx`], or an [`AnyTx`] for an
/// [`AnyConsumer`](super::AnyConsumer).
///
/// Any `Fn(Task<R>, T) -> impl Future<Output = Result<(), E>> + Send` is one. What follows its end is told at
/// [`run_in_transaction`](super::Consumer::run_in_transaction).
pub trait TransactionHandler<R, T>: Send + Sync + 'static {
    /// Works on one task.
    fn handle(
        &self,
        task: Task<R>,
        transaction: T,
    ) -> impl Future<Output = Result<(), HandlerError>> + Send;
}

impl<R, T, F, W, E> TransactionHandler<R, T> for F
where
    R: Send + 'static,
    T: Send + 'static,
    F: Fn(Task<R>, T) -> W + Send + Sync + 'static,
    W: Future<Output = Result<(), E>> + Send,
    E: Into<HandlerError>,
{
    async fn handle(&self, task: Task<R>, transaction: T) -> Result<(), HandlerError> {
        self(task, transaction).await.map_err(Into::into)
    }
}
