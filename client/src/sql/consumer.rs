//! The consumer as a user sets it up.

use std::sync::Arc;
use std::time::Duration;

use skyschedule_common::env;
use sqlx::mysql::MySqlRow;
use sqlx::postgres::PgRow;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, MySql, Pool, Postgres, Sqlite};
use tokio::sync::watch;

use super::database::Database;
use super::driver::Driver;
use super::engine::Engine;
use super::error::Error;
use super::metrics::Metrics;
use super::schema::Schema;
use super::statements::Statements;
use super::table::Table;
use super::task::Handler;
use crate::client::Client;

/// Largest batch, and largest number of handlers at a time.
const MAX_SIZE: usize = 10_000;

/// How a consumer works.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) batch: usize,
    pub(super) concurrency: usize,
    pub(super) timeout: Option<Duration>,
    pub(super) longest_idle: Duration,
    pub(super) mark_within: Duration,
    pub(super) database_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            batch: 100,
            concurrency: 8,
            timeout: None,
            longest_idle: Duration::from_secs(1),
            mark_within: Duration::from_millis(50),
            database_timeout: Duration::from_secs(30),
        }
    }
}

/// A consumer of the rows of `table` that are this client's.
pub fn consumer(client: &Client, table: Table) -> Builder {
    Builder {
        client: client.clone(),
        table,
        settings: Settings::default(),
    }
}

/// Sets a consumer up; made by [`consumer`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing before on() or connect()"]
pub struct Builder {
    client: Client,
    table: Table,
    settings: Settings,
}

impl Builder {
    /// Rows of a query, and at most so many tasks that run or are executed but not yet marked: what may be executed
    /// twice when the process is killed. 100 by default, at most 10,000.
    pub fn batch(mut self, rows: usize) -> Self {
        self.settings.batch = rows;
        self
    }

    /// Handlers that run at a time, 8 by default; never more than [`batch`](Self::batch).
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.settings.concurrency = handlers;
        self
    }

    /// How long a handler may take; no limit by default. It is dropped then, and the attempt has failed.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.settings.timeout = Some(limit);
        self
    }

    /// The longest wait between two queries while nothing is due, 1 second by default: so late may a task start.
    pub fn longest_idle(mut self, wait: Duration) -> Self {
        self.settings.longest_idle = wait;
        self
    }

    /// How long a task that is executed may wait for others to be marked with it, 50 milliseconds by default.
    pub fn mark_within(mut self, wait: Duration) -> Self {
        self.settings.mark_within = wait;
        self
    }

    /// After how long without an answer a statement has failed, 30 seconds by default.
    pub fn database_timeout(mut self, limit: Duration) -> Self {
        self.settings.database_timeout = limit;
        self
    }

    /// A consumer on a pool of one kind of database.
    ///
    /// # Errors
    /// When a setting is wrong, the database cannot be reached, or the table is not as described.
    pub async fn on<D: Driver>(self, pool: Pool<D>) -> Result<Consumer<D>, Error> {
        let settings = self.settings;
        for (name, value) in [
            ("batch", settings.batch),
            ("concurrency", settings.concurrency),
        ] {
            if !(1..=MAX_SIZE).contains(&value) {
                return Err(Error::Size {
                    name,
                    value,
                    max: MAX_SIZE,
                });
            }
        }
        let wrong = self.table.check();
        if !wrong.is_empty() {
            return Err(Error::Table(wrong));
        }
        let limit = settings.database_timeout;
        let schema = env::timeout(limit, Schema::read(&pool, &self.table))
            .await
            .map_err(|_| Error::Timeout(limit))??;
        let (stop, _) = watch::channel(false);
        let (metrics, _) = watch::channel(Metrics::default());
        Ok(Consumer {
            client: self.client,
            pool,
            statements: Arc::new(Statements::new(D::DIALECT, self.table, schema)),
            settings,
            stop,
            metrics,
        })
    }

    /// A consumer on whichever database this is.
    ///
    /// # Errors
    /// As [`on`](Self::on).
    pub async fn on_any(self, database: impl Into<Database>) -> Result<AnyConsumer, Error> {
        Ok(match database.into() {
            Database::Postgres(pool) => AnyConsumer::Postgres(self.on(pool).await?),
            Database::MySql(pool) => AnyConsumer::MySql(self.on(pool).await?),
            Database::Sqlite(pool) => AnyConsumer::Sqlite(self.on(pool).await?),
        })
    }

    /// A consumer on the database at this URL; see [`Database::connect`].
    ///
    /// # Errors
    /// As [`on`](Self::on), and when the scheme is unknown.
    pub async fn connect(self, url: &str) -> Result<AnyConsumer, Error> {
        const OWN_CONNECTIONS: u32 = 3;
        let database = Database::connect(url, OWN_CONNECTIONS).await?;
        self.on_any(database).await
    }
}

/// Works through the rows of a table that are its client's; `D` is `sqlx::Postgres`, `sqlx::MySql` or `sqlx::Sqlite`.
#[derive(Debug)]
pub struct Consumer<D: Driver> {
    client: Client,
    pool: Pool<D>,
    statements: Arc<Statements>,
    settings: Settings,
    stop: watch::Sender<bool>,
    metrics: watch::Sender<Metrics>,
}

impl<D: Driver> Consumer<D> {
    /// What it counts, and each change of it.
    pub fn metrics(&self) -> watch::Receiver<Metrics> {
        self.metrics.subscribe()
    }

    /// How to stop it from elsewhere.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.stop.clone())
    }

    /// How to ask whether anything in the whole table is due.
    pub fn backlog(&self) -> Backlog<D> {
        Backlog {
            pool: self.pool.clone(),
            statements: Arc::clone(&self.statements),
        }
    }

    /// Works until it is stopped, or its client is closed or closes: then it begins no more rows, waits for the
    /// handlers that run, marks what they did, and ends with what it counted.
    ///
    /// Whatever the database and the servers do meanwhile, it goes on. Dropping the future drops the handlers.
    /// It must run in a tokio runtime, best one of several threads.
    pub async fn run<R, H>(self, handler: H) -> Metrics
    where
        R: for<'r> FromRow<'r, D::Row> + Send + 'static,
        H: Handler<R>,
    {
        let metrics = self.metrics.clone();
        let engine = Engine::new(
            self.client,
            self.pool,
            self.statements,
            self.settings,
            handler,
            self.metrics,
        );
        engine.run(self.stop.subscribe()).await;
        metrics.borrow().clone()
    }
}

/// Stops a consumer: no new rows; those that run are finished and marked. The client stays a member.
#[derive(Debug, Clone)]
pub struct Stopper(watch::Sender<bool>);

impl Stopper {
    /// See the type.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

/// Asks whether anything in the whole table is due, whoever its rows belong to.
#[derive(Debug)]
pub struct Backlog<D: Driver> {
    pool: Pool<D>,
    statements: Arc<Statements>,
}

impl<D: Driver> Clone for Backlog<D> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            statements: Arc::clone(&self.statements),
        }
    }
}

impl<D: Driver> Backlog<D> {
    /// Whether there is a new task whose time has come, running ones included.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn is_empty(&self) -> Result<bool, sqlx::Error> {
        let mut connection = self.pool.acquire().await?;
        let rows = D::fetch(&mut connection, &self.statements.any_due()).await?;
        Ok(rows.is_empty())
    }
}

/// A consumer on a database that was chosen when the program ran.
#[derive(Debug)]
pub enum AnyConsumer {
    /// On PostgreSQL.
    Postgres(Consumer<Postgres>),
    /// On MariaDB or MySQL.
    MySql(Consumer<MySql>),
    /// On SQLite.
    Sqlite(Consumer<Sqlite>),
}

/// A row that can be read from every one of the databases: tuples of common types, and what derives `FromRow` with
/// such fields.
pub trait AnyRow:
    for<'r> FromRow<'r, PgRow>
    + for<'r> FromRow<'r, MySqlRow>
    + for<'r> FromRow<'r, SqliteRow>
    + Send
    + 'static
{
}

impl<R> AnyRow for R where
    R: for<'r> FromRow<'r, PgRow>
        + for<'r> FromRow<'r, MySqlRow>
        + for<'r> FromRow<'r, SqliteRow>
        + Send
        + 'static
{
}

macro_rules! whichever {
    ($any:expr, $consumer:ident => $answer:expr) => {
        match $any {
            AnyConsumer::Postgres($consumer) => $answer,
            AnyConsumer::MySql($consumer) => $answer,
            AnyConsumer::Sqlite($consumer) => $answer,
        }
    };
}

impl AnyConsumer {
    /// See [`Consumer::metrics`].
    pub fn metrics(&self) -> watch::Receiver<Metrics> {
        whichever!(self, consumer => consumer.metrics())
    }

    /// See [`Consumer::stopper`].
    pub fn stopper(&self) -> Stopper {
        whichever!(self, consumer => consumer.stopper())
    }

    /// The pool that it works on.
    pub fn database(&self) -> Database {
        whichever!(self, consumer => consumer.pool.clone().into())
    }

    /// See [`Backlog`].
    pub fn backlog(&self) -> AnyBacklog {
        match self {
            Self::Postgres(consumer) => AnyBacklog::Postgres(consumer.backlog()),
            Self::MySql(consumer) => AnyBacklog::MySql(consumer.backlog()),
            Self::Sqlite(consumer) => AnyBacklog::Sqlite(consumer.backlog()),
        }
    }

    /// See [`Consumer::run`].
    pub async fn run<R: AnyRow, H: Handler<R>>(self, handler: H) -> Metrics {
        whichever!(self, consumer => consumer.run(handler).await)
    }
}

/// A [`Backlog`] of whichever database.
#[derive(Debug, Clone)]
pub enum AnyBacklog {
    /// Of PostgreSQL.
    Postgres(Backlog<Postgres>),
    /// Of MariaDB or MySQL.
    MySql(Backlog<MySql>),
    /// Of SQLite.
    Sqlite(Backlog<Sqlite>),
}

impl AnyBacklog {
    /// See [`Backlog::is_empty`].
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn is_empty(&self) -> Result<bool, sqlx::Error> {
        match self {
            Self::Postgres(backlog) => backlog.is_empty().await,
            Self::MySql(backlog) => backlog.is_empty().await,
            Self::Sqlite(backlog) => backlog.is_empty().await,
        }
    }
}
