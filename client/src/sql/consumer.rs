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
use super::once::{self, AnyTx, TransactionHandler, Transactions, Tx};
use super::schema::Schema;
use super::statements::Statements;
use super::table::Table;
use super::task::{Handler, Task};
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
    pub(super) transactions: Transactions,
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
            transactions: Transactions::default(),
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
    /// At most so many tasks run or are executed but not yet marked: what may be executed twice when the process is
    /// killed. 100 by default, at most 10,000. A query asks for as many rows, or for up to ten times as many (at most 1,000)
    /// where handlers are done with them within some 100 milliseconds.
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

    /// Whether each task has a transaction of its own, or a batch shares one; only for
    /// [`run_in_transaction`](Consumer::run_in_transaction).
    pub fn transactions(mut self, transactions: Transactions) -> Self {
        self.settings.transactions = transactions;
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
        // Opened when needed: two at a time, and one more for each transaction.
        let handlers = u32::try_from(self.settings.concurrency).unwrap_or(u32::MAX);
        let connections = handlers.saturating_add(2).max(3);
        let database = Database::connect(url, connections).await?;
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

    /// Works until it is stopped, or its client is closed, closes or
    /// [ends by itself](Client::ended): then it begins no more rows, waits for the
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

impl<D: Driver> Consumer<D> {
    /// Works as [`run`](Self::run) does, but each task is claimed, executed and marked in one transaction, which its
    /// handler gets: what it writes there happens exactly once.
    ///
    /// ```
    /// # use skyschedule_server::{Server, config::Config};
    /// # use sqlx::Executor as _;
    /// use skyschedule_client::Client;
    /// use skyschedule_client::sql::{self, Table, Task, Tx};
    /// use skyschedule_client::sql::sqlx::{self, Sqlite}; // or Postgres, MySql
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let server = Server::start(Config::embedded(folder.path().join("server"))).await?;
    /// # let address = server.local_addr().to_string();
    /// # let url = format!("sqlite://{}?mode=rwc", folder.path().join("tasks.db").display());
    /// # let sql::Database::Sqlite(pool) = sql::Database::connect(&url, 2).await? else { unreachable!() };
    /// # pool.execute("CREATE TABLE task_info (id INTEGER PRIMARY KEY, task_data TEXT, task_time TEXT NOT NULL, \
    /// #     status INTEGER NOT NULL DEFAULT 0)").await?;
    /// # pool.execute("INSERT INTO task_info VALUES (7, 'a letter', datetime('now'), 0)").await?;
    /// # pool.execute("CREATE TABLE sent (task_id INTEGER NOT NULL, text TEXT)").await?;
    /// # let count = pool.clone();
    /// let client = Client::builder().servers([address]).group("orders").connect().await?;
    /// let table = Table::new("task_info").columns(["id", "task_data"]);
    /// let consumer = sql::consumer(&client, table).on(pool).await?;
    /// # let stopper = consumer.stopper();
    /// # let mut metrics = consumer.metrics();
    /// # tokio::spawn(async move {
    /// #     let _ = metrics.wait_for(|metrics| metrics.done == 1).await;
    /// #     stopper.stop();
    /// # });
    /// consumer
    ///     .run_in_transaction(|task: Task<(i64, String)>, mut tx: Tx<Sqlite>| async move {
    ///         let (id, text) = task.row();
    ///         sqlx::query("INSERT INTO sent (task_id, text) VALUES (?, ?)")
    ///             .bind(id)
    ///             .bind(text)
    ///             .execute(&mut *tx)
    ///             .await?;
    ///         Ok::<_, sqlx::Error>(()) // committed together with the mark; an Err undoes it
    ///     })
    ///     .await?;
    /// client.close().await?;
    /// # let sent: i64 = sqlx::query_scalar("SELECT count(*) FROM sent").fetch_one(&count).await?;
    /// # assert_eq!(sent, 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # What makes it once
    /// A task is claimed by `SELECT … WHERE id = … AND status = 0 … FOR UPDATE SKIP LOCKED`, so that its row is locked until
    /// the transaction ends, and marked in the same transaction. Whoever has claimed it, no other transaction can before
    /// this one has ended, and after a commit it is not new any more. Shares only keep consumers out of each other's
    /// way: the database decides.
    ///
    /// | what happens | what follows |
    /// |---|---|
    /// | the process is killed before the commit | the database rolls back; the next owner executes the task |
    /// | it stands still within the transaction | the row stays locked. Others leave it out, and take it when the lock is gone ([`Metrics::locked`]). When the process goes on, it rolls back what it does not own any more, or commits, and then nobody else has executed it |
    /// | it stands still before the claim | its claim finds that the row is done, or not its own |
    /// | the lease of an exclusive group, or the membership, is over | asked after the claim, before each step of the handler and before the commit: rolled back, and not counted as an attempt |
    /// | a deadlock, a serialization failure, a wait for a lock that is too long, a lost connection | rolled back and tried again after 50 milliseconds to 2 seconds, not counted as an attempt ([`Metrics::rolled_back`]) |
    /// | the connection is lost in the commit | the row is read before it is given back, and counted as what it is. If the commit is still under way then, the next claim meets its lock or its mark: a second effect is not possible |
    /// | the handler returns an error, panics or is out of time | what it did is undone (`ROLLBACK TO SAVEPOINT`) and the failure is marked, as without transactions |
    /// | the handler goes on after an error of its transaction, commits it, or keeps it | the attempt has failed, and nothing is kept of what can still be undone |
    ///
    /// So that a deadlock is seen as one, a handler returns the error of sqlx, or one that has it as its
    /// [`source`](std::error::Error::source). What it does elsewhere (mail, files, another database) is as without
    /// transactions: at least once.
    ///
    /// Transactions are READ COMMITTED on PostgreSQL, MariaDB and MySQL, whatever the session's default; on SQLite
    /// they begin with `BEGIN IMMEDIATE`, one at a time in the whole database: there a process that stands still
    /// within one holds up all others, so handlers should be short. With a [`timeout`](Builder::timeout) PostgreSQL and
    /// MariaDB are told to end statements that take longer, and PostgreSQL to end a transaction that is idle for 10 seconds
    /// longer than that; without one, a machine that vanishes within a transaction keeps its locks until the database
    /// notices (`tcp_keepalives_idle`, `idle_in_transaction_session_timeout`, `wait_timeout`).
    ///
    /// The pool needs a connection for each transaction, at most [`concurrency`](Builder::concurrency), and one more.
    ///
    /// # Errors
    /// At once, when the database cannot do it or does not let this user: it needs PostgreSQL, MariaDB 10.6, MySQL 8.0, or newer, or SQLite.
    pub async fn run_in_transaction<R, H>(self, handler: H) -> Result<Metrics, Error>
    where
        R: for<'r> FromRow<'r, D::Row> + Send + 'static,
        H: TransactionHandler<R, Tx<D>>,
    {
        let limit = self.settings.database_timeout;
        once::check(&self.pool, &self.statements, limit).await?;
        let metrics = self.metrics.clone();
        let engine = once::Engine::new(
            self.client,
            self.pool,
            self.statements,
            self.settings,
            handler,
            self.metrics,
        );
        engine.run(self.stop.subscribe()).await;
        Ok(metrics.borrow().clone())
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

    /// See [`Consumer::run_in_transaction`].
    ///
    /// # Errors
    /// As there.
    pub async fn run_in_transaction<R, H>(self, handler: H) -> Result<Metrics, Error>
    where
        R: AnyRow,
        H: TransactionHandler<R, AnyTx>,
    {
        match self {
            Self::Postgres(consumer) => consumer.run_in_transaction(on_one(handler)).await,
            Self::MySql(consumer) => consumer.run_in_transaction(on_one(handler)).await,
            Self::Sqlite(consumer) => consumer.run_in_transaction(on_one(handler)).await,
        }
    }
}

/// A handler for one database from one for all.
fn on_one<R, D, H>(handler: H) -> impl TransactionHandler<R, Tx<D>>
where
    R: AnyRow,
    D: Driver,
    Tx<D>: Into<AnyTx>,
    H: TransactionHandler<R, AnyTx>,
{
    let handler = Arc::new(handler);
    move |task: Task<R>, transaction: Tx<D>| {
        let handler = Arc::clone(&handler);
        async move { handler.handle(task, transaction.into()).await }
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
