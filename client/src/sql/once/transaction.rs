//! A transaction that is open.

use std::sync::Arc;
use std::time::Duration;

use skyschedule_common::env;
use skyschedule_common::share::Dialect;
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, Pool, SqlSafeStr as _};
use sqlx_core::transaction::TransactionManager;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::super::driver::{Driver, Statement};
use super::super::error::Error;
use super::super::statements::{Lock, Mark, Statements};
use super::problem::within;

/// What a handler's effects are undone to. sqlx gives its own savepoints other names.
const SAVEPOINT: &str = "SAVEPOINT skyschedule";
const RELEASE: &str = "RELEASE SAVEPOINT skyschedule";
const UNDO: &str = "ROLLBACK TO SAVEPOINT skyschedule";

/// So much longer than a handler may take a statement of it: the handler is out of time first.
const STATEMENT_MARGIN: Duration = Duration::from_millis(500);

/// So much longer than a handler may take a session of PostgreSQL may be idle within its transaction.
const IDLE_MARGIN: Duration = Duration::from_secs(10);

/// Longest time that the databases can be told: 24 days.
const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);

/// A connection with a transaction. Unless that is ended in good order the connection is closed when this is
/// dropped, whereby the database rolls back.
pub(super) struct Open<D: Driver> {
    connection: PoolConnection<D>,
    /// The time of statements was limited.
    limited: bool,
    ended: bool,
}

impl<D: Driver> Drop for Open<D> {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.close_on_drop();
        }
    }
}

impl<D: Driver> Open<D> {
    /// Begins one, in which no statement may take much longer than `handler`, the time of a handler.
    pub(super) async fn begin(
        pool: &Pool<D>,
        handler: Option<Duration>,
    ) -> Result<Self, sqlx::Error> {
        let mut open = Self {
            connection: pool.acquire().await?,
            limited: handler.is_some(),
            ended: false,
        };
        let begin = AssertSqlSafe(begin_text(D::DIALECT, handler)).into_sql_str();
        D::TransactionManager::begin(&mut open.connection, Some(begin)).await?;
        Ok(open)
    }

    pub(super) fn connection(&self) -> &D::Connection {
        &self.connection
    }

    pub(super) fn connection_mut(&mut self) -> &mut D::Connection {
        &mut self.connection
    }

    /// Whether a transaction within this one was left open.
    pub(super) fn is_nested(&self) -> bool {
        D::TransactionManager::get_transaction_depth(&self.connection) != 1
    }

    pub(super) async fn fetch(
        &mut self,
        statement: &Statement,
    ) -> Result<Vec<D::Row>, sqlx::Error> {
        D::fetch(&mut self.connection, statement).await
    }

    pub(super) async fn execute(&mut self, statement: &Statement) -> Result<u64, sqlx::Error> {
        D::execute(&mut self.connection, statement).await
    }

    pub(super) async fn set_savepoint(&mut self) -> Result<(), sqlx::Error> {
        D::command(&mut self.connection, SAVEPOINT).await
    }

    /// Keeps what was done since the savepoint. Fails where the transaction is not the one it was set in.
    pub(super) async fn keep(&mut self) -> Result<(), sqlx::Error> {
        D::command(&mut self.connection, RELEASE).await
    }

    /// Undoes what was done since the savepoint; the locks of before stay.
    pub(super) async fn undo(&mut self) -> Result<(), sqlx::Error> {
        D::command(&mut self.connection, UNDO).await
    }

    pub(super) async fn commit(&mut self) -> Result<(), sqlx::Error> {
        D::TransactionManager::commit(&mut self.connection).await
    }

    pub(super) async fn roll_back(&mut self) -> Result<(), sqlx::Error> {
        D::TransactionManager::rollback(&mut self.connection).await
    }

    /// Makes the connection, whose transaction is over, what it was before; otherwise it is closed.
    pub(super) async fn restore(&mut self) -> Result<(), sqlx::Error> {
        if D::DIALECT == Dialect::MySql {
            let before = match self.limited {
                true => "SET autocommit = 1 /*M!100100 , max_statement_time = DEFAULT */",
                false => "SET autocommit = 1",
            };
            D::command(&mut self.connection, before).await?;
        }
        self.ended = true;
        Ok(())
    }
}

/// How a transaction begins, whatever the session's defaults.
///
/// READ COMMITTED: a claim sees what was committed before it, also by an owner whose lock it met, and MariaDB locks
/// no gaps between rows. SQLite has one writer at a time, and so nothing to isolate. A statement of a handler that is
/// out of time must end by itself: until then it keeps the locks of its task.
fn begin_text(dialect: Dialect, handler: Option<Duration>) -> String {
    let after = |margin| handler.map(|limit| limit.saturating_add(margin).min(LONGEST));
    match dialect {
        Dialect::Postgres => {
            let mut text = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE".to_owned();
            for (setting, limit) in [
                ("statement_timeout", after(STATEMENT_MARGIN)),
                ("idle_in_transaction_session_timeout", after(IDLE_MARGIN)),
            ] {
                if let Some(limit) = limit {
                    text.push_str(&format!("; SET LOCAL {setting} = {}", limit.as_millis()));
                }
            }
            text
        }
        // A deadlock ends the whole transaction. A handler that goes on all the same must not commit each
        // statement by itself from there on: hence autocommit.
        Dialect::MySql => {
            let limit = after(STATEMENT_MARGIN).map_or(String::new(), limited_mariadb);
            format!(
                "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET autocommit = 0{limit}; \
                 START TRANSACTION READ WRITE"
            )
        }
        // One that reads first and writes then fails at once where another one writes.
        Dialect::Sqlite => "BEGIN IMMEDIATE".to_owned(),
    }
}

/// Only MariaDB knows this setting, and only MariaDB reads such comments.
fn limited_mariadb(limit: Duration) -> String {
    format!(
        " /*M!100100 , max_statement_time = {:.3} */",
        limit.as_secs_f64()
    )
}

/// A transaction that is lent to handlers, one after the other.
pub(super) struct Lent<D: Driver>(Arc<Mutex<Open<D>>>);

impl<D: Driver> Lent<D> {
    pub(super) fn new(open: Open<D>) -> Self {
        Self(Arc::new(Mutex::new(open)))
    }

    /// Whether a handler has it.
    pub(super) fn is_kept(&self) -> bool {
        self.0.try_lock().is_err()
    }

    /// It, when nobody has it any more; `None` if that takes longer than `limit`.
    pub(super) async fn take(&self, limit: Duration) -> Option<OwnedMutexGuard<Open<D>>> {
        env::timeout(limit, Arc::clone(&self.0).lock_owned())
            .await
            .ok()
    }
}

/// Whether the database can do what this needs, and lets this user do it.
pub(in super::super) async fn check<D: Driver>(
    pool: &Pool<D>,
    statements: &Statements,
    limit: Duration,
) -> Result<(), Error> {
    let tried = within(limit, async {
        let mut open = Open::begin(pool, None).await?;
        open.fetch(&statements.claim(&[], Lock::Skip)).await?;
        open.execute(&statements.mark(Mark::Done, &[])).await?;
        open.roll_back().await?;
        open.restore().await
    });
    tried
        .await
        .map_err(|problem| Error::NoTransactions(problem.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_isolation_is_said_in_each_transaction() {
        let with = |dialect| begin_text(dialect, Some(Duration::from_secs(2)));
        assert_eq!(
            with(Dialect::Postgres),
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL statement_timeout = 2500; \
             SET LOCAL idle_in_transaction_session_timeout = 12000"
        );
        assert!(
            with(Dialect::MySql).starts_with("SET TRANSACTION ISOLATION LEVEL READ COMMITTED; ")
        );
        assert_eq!(with(Dialect::Sqlite), "BEGIN IMMEDIATE");
    }
}
