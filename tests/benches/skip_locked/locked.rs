//! Workers as they are written without SkySchedule: each batch is one transaction that locks the oldest due rows that
//! nobody else has locked, works, marks them in one statement and commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::future::try_join_all;
use skyschedule_client::sql::Database;
use skyschedule_common::env::{self, JoinHandle};
use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection, PgConnection};

use super::Result;
use super::place::{BY_TIME, CONNECTIONS, Place};
use super::rounds::{BATCH, Crew};

/// How a worker uses its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// One transaction after the other.
    One,
    /// As many transactions at a time as it has connections.
    All,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::One => "one transaction at a time",
            Self::All => "two transactions at a time",
        }
    }
}

/// Workers that run.
pub(crate) struct Workers {
    marked: Arc<AtomicU64>,
    stopping: Arc<AtomicBool>,
    running: Vec<JoinHandle<Result<()>>>,
    _pools: Vec<Database>,
}

impl Workers {
    pub(crate) async fn start(place: &Place, count: usize, way: Way) -> Result<Self> {
        let mut workers = Self {
            marked: Arc::default(),
            stopping: Arc::default(),
            running: Vec::new(),
            _pools: try_join_all((0..count).map(|_| place.pool())).await?,
        };
        let lanes = match way {
            Way::One => 1,
            Way::All => CONNECTIONS,
        };
        for pool in &workers._pools {
            for _ in 0..lanes {
                let (marked, stopping) =
                    (Arc::clone(&workers.marked), Arc::clone(&workers.stopping));
                // Held, so that it is not tested before each transaction.
                let mut session = Session::of(pool).await?;
                workers.running.push(env::spawn(async move {
                    while !stopping.load(Ordering::Relaxed) {
                        let rows = session.batch().await?;
                        marked.fetch_add(rows, Ordering::Relaxed);
                        if rows == 0 {
                            env::sleep(std::time::Duration::from_millis(10)).await;
                        }
                    }
                    Ok(())
                }));
            }
        }
        Ok(workers)
    }
}

impl Crew for Workers {
    fn marked(&self) -> u64 {
        self.marked.load(Ordering::Relaxed)
    }

    async fn stop(self) -> Result<()> {
        self.stopping.store(true, Ordering::Relaxed);
        for worker in self.running {
            worker.await??;
        }
        Ok(())
    }
}

enum Session {
    Postgres(PgConnection),
    MySql(MySqlConnection),
}

/// What the handler gets, as the library's consumer hands it over.
type Row = (i64, String);

impl Session {
    async fn of(pool: &Database) -> Result<Self> {
        match pool {
            Database::Postgres(pool) => Ok(Self::Postgres(pool.acquire().await?.detach())),
            Database::MySql(pool) => Ok(Self::MySql(pool.acquire().await?.detach())),
            Database::Sqlite(_) => Err("SQLite locks no rows".into()),
        }
    }

    /// One transaction; how many rows it marked.
    async fn batch(&mut self) -> Result<u64> {
        match self {
            Self::Postgres(connection) => {
                let mut transaction = connection.begin().await?;
                let rows: Vec<Row> = sqlx::query_as(AssertSqlSafe(claim("now()")))
                    .fetch_all(&mut *transaction)
                    .await?;
                let ids = work(rows);
                let mark = format!("UPDATE {BY_TIME} SET status = 1 WHERE id = ANY($1)");
                let marked = sqlx::query(AssertSqlSafe(mark))
                    .bind(ids)
                    .execute(&mut *transaction)
                    .await?
                    .rows_affected();
                transaction.commit().await?;
                Ok(marked)
            }
            Self::MySql(connection) => {
                let mut transaction = connection.begin().await?;
                let rows: Vec<Row> = sqlx::query_as(AssertSqlSafe(claim("NOW(6)")))
                    .fetch_all(&mut *transaction)
                    .await?;
                let ids = work(rows);
                let mut marked = 0;
                if !ids.is_empty() {
                    let places = vec!["?"; ids.len()].join(", ");
                    let mark = format!("UPDATE {BY_TIME} SET status = 1 WHERE id IN ({places})");
                    marked = ids
                        .iter()
                        .fold(sqlx::query(AssertSqlSafe(mark)), |query, id| query.bind(id))
                        .execute(&mut *transaction)
                        .await?
                        .rows_affected();
                }
                transaction.commit().await?;
                Ok(marked)
            }
        }
    }
}

fn claim(now: &str) -> String {
    format!(
        "SELECT id, task_data FROM {BY_TIME} WHERE status = 0 AND task_time <= {now} \
         ORDER BY task_time, id LIMIT {BATCH} FOR UPDATE SKIP LOCKED"
    )
}

/// The handler does nothing.
fn work(rows: Vec<Row>) -> Vec<i64> {
    rows.into_iter().map(|(id, _)| id).collect()
}
