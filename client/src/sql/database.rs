//! Databases by URL.

use std::str::FromStr as _;
use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::pool::PoolOptions;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Executor as _, MySqlPool, PgPool, SqlitePool};

use super::error::Error;
use super::session::is_alive;

/// How long to wait for a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection that was idle for longer is tested before it is used: the database may have been restarted.
const UNTESTED: Duration = Duration::from_millis(50);

/// How long a writer of SQLite waits for its turn: one writes at a time.
const BUSY: Duration = Duration::from_secs(20);

/// A pool of connections to one of the databases, chosen by the scheme of a URL.
#[derive(Debug, Clone)]
pub enum Database {
    /// `postgres://`, `postgresql://`.
    Postgres(PgPool),
    /// `mysql://`, `mariadb://`.
    MySql(MySqlPool),
    /// `sqlite://FILE`, `sqlite:FILE`.
    Sqlite(SqlitePool),
}

impl Database {
    /// Connects, with at most `connections` connections at a time; a consumer itself needs two.
    ///
    /// PostgreSQL plans each statement once (`plan_cache_mode`), so that statistics which are old, after many tasks
    /// were added say, do not turn a page into a sort of the whole table. Sessions of MariaDB and MySQL keep the server's time zone, and read what is committed (READ COMMITTED); SQLite
    /// writes ahead (WAL), waits 20 seconds for a lock, and creates the file only if the URL says
    /// `?mode=rwc`.
    ///
    /// # Errors
    /// When the scheme is unknown or the database cannot be reached.
    pub async fn connect(url: &str, connections: u32) -> Result<Self, Error> {
        let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
        match scheme {
            "postgres" | "postgresql" => {
                let options = PgConnectOptions::from_str(url)?.application_name("skyschedule");
                let pool =
                    sized(PgPoolOptions::new(), connections).after_connect(|connection, _| {
                        Box::pin(async move {
                            let query = "SET plan_cache_mode = force_generic_plan";
                            // A server that does not know it plans as it always did.
                            let _ = connection.execute(query).await;
                            Ok(())
                        })
                    });
                Ok(Self::Postgres(pool.connect_with(options).await?))
            }
            "mysql" | "mariadb" => {
                // The driver's default is UTC, which would shift every DATETIME.
                let options = MySqlConnectOptions::from_str(url)?.timezone(None);
                let pool =
                    sized(MySqlPoolOptions::new(), connections).after_connect(|connection, _| {
                        Box::pin(async move {
                            let query = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
                            connection.execute(query).await.map(|_| ())
                        })
                    });
                Ok(Self::MySql(pool.connect_with(options).await?))
            }
            "sqlite" => {
                let options = SqliteConnectOptions::from_str(url)?
                    .journal_mode(SqliteJournalMode::Wal)
                    // A mark that a power failure loses is a task executed again.
                    .synchronous(SqliteSynchronous::Normal)
                    .busy_timeout(BUSY);
                let pool = sized(SqlitePoolOptions::new(), connections);
                Ok(Self::Sqlite(pool.connect_with(options).await?))
            }
            other => Err(Error::Scheme(other.to_owned())),
        }
    }
}

fn sized<D: sqlx::Database>(options: PoolOptions<D>, connections: u32) -> PoolOptions<D> {
    options
        .max_connections(connections.max(2))
        .acquire_timeout(PATIENCE)
        // A test is one more way to the database each time. Where statements follow each other, one that fails tells as
        // much; and until it is tried again all other connections have been idle for long enough.
        .test_before_acquire(false)
        .before_acquire(|connection, known| {
            Box::pin(async move {
                match known.idle_for < UNTESTED || is_alive(connection).await {
                    true => Ok(true),
                    // Not `false`, which would say goodbye to who does not answer.
                    false => Err(sqlx::Error::PoolTimedOut),
                }
            })
        })
}

impl From<PgPool> for Database {
    fn from(pool: PgPool) -> Self {
        Self::Postgres(pool)
    }
}

impl From<MySqlPool> for Database {
    fn from(pool: MySqlPool) -> Self {
        Self::MySql(pool)
    }
}

impl From<SqlitePool> for Database {
    fn from(pool: SqlitePool) -> Self {
        Self::Sqlite(pool)
    }
}
