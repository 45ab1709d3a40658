//! A database with the two tables: the same rows, each with the index that is best for one way of sharing them.

use std::time::Duration;

use clap::ValueEnum;
use skyschedule_client::sql::{Database, Table};
use skyschedule_common::env;
use sqlx::{AssertSqlSafe, MySqlConnection, PgConnection};

use super::Result;

/// Connections of each consumer and each worker.
pub(crate) const CONNECTIONS: u32 = 2;

/// Slots of the group, and of the index.
pub(crate) const SLOTS: u32 = 1_024;

/// The table for `modulo` and for `SKIP LOCKED`: its index begins with the due time.
pub(crate) const BY_TIME: &str = "skip_locked_by_time";

/// The table for `slots`.
pub(crate) const BY_SLOT: &str = "skip_locked_by_slot";

/// In which order rows are due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// In another one than they were added in, as tasks with different delays are.
    Mixed,
    /// In the order they were added in: done, due and future rows each lie together.
    Added,
}

impl Order {
    /// The place of a row in the order of due times, from 0, of so many rows.
    fn rank(self, id: &str, all: u64) -> String {
        match self {
            // A prime: every row has a place of its own.
            Self::Mixed => format!("({id} * 2654435761 % {all})"),
            Self::Added => format!("({id} - 1)"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Postgres,
    Mariadb,
}

impl Kind {
    fn variable(self) -> &'static str {
        match self {
            Self::Postgres => "SKY_TEST_POSTGRES_URL",
            Self::Mariadb => "SKY_TEST_MYSQL_URL",
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Postgres => "PostgreSQL",
            Self::Mariadb => "MariaDB",
        }
    }
}

/// See the module.
pub(crate) struct Place {
    pub(crate) kind: Kind,
    pub(crate) rows: u64,
    order: Order,
    url: String,
    own: Database,
}

/// A session that still sees the tables as they were, until it is dropped.
#[allow(dead_code, reason = "it is held, and not used")]
pub(crate) enum Snapshot {
    Postgres(PgConnection),
    MySql(MySqlConnection),
}

impl Place {
    pub(crate) async fn connect(kind: Kind, rows: u64, order: Order) -> Result<Self> {
        let variable = kind.variable();
        let url = std::env::var(variable).map_err(|_| {
            format!(
                "{variable} is not set. Run this by tests/databases/with, which starts private databases, \
                 or choose the others with --database"
            )
        })?;
        let own = Database::connect(&url, CONNECTIONS).await?;
        Ok(Self {
            kind,
            rows,
            order,
            url,
            own,
        })
    }

    /// Connections for one consumer or worker: the library's sessions for both.
    pub(crate) async fn pool(&self) -> Result<Database> {
        Ok(Database::connect(&self.url, CONNECTIONS).await?)
    }

    /// The table as the library is told of it.
    pub(crate) fn table(&self, name: &str) -> Table {
        let table = Table::new(name).columns(["id", "task_data"]);
        match (name, self.kind) {
            (BY_SLOT, Kind::Postgres) => table.slot_index(SLOTS),
            (BY_SLOT, Kind::Mariadb) => table.slot_column("slot", SLOTS),
            _ => table,
        }
    }

    /// Makes both tables: done rows, due ones of the last hour, and those of tomorrow.
    pub(crate) async fn fill(&self) -> Result<()> {
        self.clear().await?;
        let (rows, all) = (self.rows, self.rows * 3);
        let rank = |id| self.order.rank(id, all);
        let (n, seq) = (rank("n"), rank("seq"));
        for table in [BY_TIME, BY_SLOT] {
            let statements = match self.kind {
                Kind::Postgres => vec![
                    format!(
                        "CREATE TABLE {table} (id BIGINT PRIMARY KEY, task_data TEXT, task_time TIMESTAMPTZ NOT NULL, \
                         status SMALLINT NOT NULL DEFAULT 0)"
                    ),
                    format!(
                        "INSERT INTO {table} SELECT n, 'task ' || n, now() - interval '2 hours' \
                         + {n} * interval '1 hour' / {rows} + CASE WHEN {n} >= {rows} * 2 THEN interval '1 day' ELSE '0' END, \
                         CASE WHEN {n} < {rows} THEN 1 ELSE 0 END FROM generate_series(1, CAST({all} AS bigint)) AS n"
                    ),
                    if table == BY_SLOT {
                        format!(
                            "CREATE INDEX {table}_due ON {table} ((id & {}), task_time, id) WHERE status = 0",
                            SLOTS - 1
                        )
                    } else {
                        format!(
                            "CREATE INDEX {table}_due ON {table} (task_time, id) WHERE status = 0"
                        )
                    },
                    format!("VACUUM ANALYZE {table}"),
                ],
                Kind::Mariadb => vec![
                    format!(
                        "CREATE TABLE {table} (id BIGINT PRIMARY KEY, task_data TEXT, task_time TIMESTAMP(6) NOT NULL, \
                         status TINYINT NOT NULL DEFAULT 0)"
                    ),
                    format!(
                        "INSERT INTO {table} SELECT seq, CONCAT('task ', seq), NOW(6) - INTERVAL 2 HOUR \
                         + INTERVAL ({seq} * 3600000000 DIV {rows}) MICROSECOND + INTERVAL IF({seq} >= {rows} * 2, 1, 0) DAY, \
                         IF({seq} < {rows}, 1, 0) FROM seq_1_to_{all}"
                    ),
                    if table == BY_SLOT {
                        format!(
                            "ALTER TABLE {table} ADD slot SMALLINT UNSIGNED AS (id & {}) VIRTUAL, \
                             ADD INDEX task_slot (slot, status, task_time, id)",
                            SLOTS - 1
                        )
                    } else {
                        format!("ALTER TABLE {table} ADD INDEX task_due (status, task_time, id)")
                    },
                    format!("ANALYZE TABLE {table}"),
                ],
            };
            for statement in statements {
                self.run(&statement).await?;
            }
        }
        Ok(())
    }

    pub(crate) async fn clear(&self) -> Result<()> {
        self.run(&format!("DROP TABLE IF EXISTS {BY_TIME}, {BY_SLOT}"))
            .await
    }

    /// The rows that were due at first.
    fn were_due(&self) -> String {
        let rank = self.order.rank("id", self.rows * 3);
        format!("{rank} >= {} AND {rank} < {}", self.rows, self.rows * 2)
    }

    /// Makes the rows due again that were marked, and waits until what that left behind is cleaned up.
    pub(crate) async fn put_back(&self, table: &str) -> Result<()> {
        let due = self.were_due();
        self.run(&format!(
            "UPDATE {table} SET status = 0 WHERE status = 1 AND {due}"
        ))
        .await?;
        self.clean_up(table).await
    }

    /// Waits until the old versions of rows are removed.
    async fn clean_up(&self, table: &str) -> Result<()> {
        match self.kind {
            Kind::Postgres => self.run(&format!("VACUUM {table}")).await,
            Kind::Mariadb => {
                for _ in 0..300 {
                    let purge = "SELECT CAST(COUNT AS SIGNED) FROM information_schema.INNODB_METRICS \
                        WHERE NAME = 'trx_rseg_history_len'";
                    if self.number(purge).await? < 100 {
                        break;
                    }
                    env::sleep(Duration::from_millis(100)).await;
                }
                Ok(())
            }
        }
    }

    /// Due rows that are marked.
    pub(crate) async fn marked(&self, table: &str) -> Result<i64> {
        let due = self.were_due();
        self.number(&format!(
            "SELECT CAST(count(*) AS {}) FROM {table} WHERE status = 1 AND {due}",
            match self.kind {
                Kind::Postgres => "BIGINT",
                Kind::Mariadb => "SIGNED",
            }
        ))
        .await
    }

    /// Marks the due rows of some slots.
    pub(crate) async fn empty(&self, slots: &str) -> Result<()> {
        let due = self.were_due();
        self.run(&format!(
            "UPDATE {BY_SLOT} SET status = 1 WHERE {due} AND (id & {}) IN ({slots})",
            SLOTS - 1
        ))
        .await?;
        self.clean_up(BY_SLOT).await
    }

    pub(crate) async fn snapshot(&self) -> Result<Snapshot> {
        match self.pool().await? {
            Database::Postgres(pool) => {
                let mut session = pool.acquire().await?.detach();
                let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class";
                sqlx::raw_sql(begin).execute(&mut session).await?;
                Ok(Snapshot::Postgres(session))
            }
            Database::MySql(pool) => {
                let mut session = pool.acquire().await?.detach();
                for begin in [
                    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
                    "START TRANSACTION WITH CONSISTENT SNAPSHOT",
                ] {
                    sqlx::raw_sql(begin).execute(&mut session).await?;
                }
                Ok(Snapshot::MySql(session))
            }
            Database::Sqlite(_) => Err("SQLite is not measured".into()),
        }
    }

    /// Version and settings that matter.
    pub(crate) async fn settings(&self) -> Result<String> {
        let text = match &self.own {
            Database::Postgres(pool) => {
                sqlx::query_scalar::<_, String>(
                    "SELECT 'PostgreSQL ' || split_part(current_setting('server_version'), ' ', 1) || \
                     ', shared_buffers ' || current_setting('shared_buffers') || \
                     ', synchronous_commit ' || current_setting('synchronous_commit') || \
                     ', fsync ' || current_setting('fsync')",
                )
                .fetch_one(pool)
                .await?
            }
            Database::MySql(pool) => {
                sqlx::query_scalar::<_, String>(
                    "SELECT CONCAT('MariaDB ', substring_index(version(), '-', 1), ', innodb_buffer_pool_size ', \
                     @@innodb_buffer_pool_size DIV 1048576, 'MB, innodb_flush_log_at_trx_commit ', \
                     @@innodb_flush_log_at_trx_commit, ', READ COMMITTED')",
                )
                .fetch_one(pool)
                .await?
            }
            Database::Sqlite(_) => String::new(),
        };
        Ok(text)
    }

    async fn run(&self, statement: &str) -> Result<()> {
        let statement = sqlx::raw_sql(AssertSqlSafe(statement));
        match &self.own {
            Database::Postgres(pool) => statement.execute(pool).await.map(|_| ())?,
            Database::MySql(pool) => statement.execute(pool).await.map(|_| ())?,
            Database::Sqlite(_) => {}
        }
        Ok(())
    }

    async fn number(&self, query: &str) -> Result<i64> {
        let query = AssertSqlSafe(query);
        Ok(match &self.own {
            Database::Postgres(pool) => sqlx::query_scalar(query).fetch_one(pool).await?,
            Database::MySql(pool) => sqlx::query_scalar(query).fetch_one(pool).await?,
            Database::Sqlite(_) => 0,
        })
    }
}
