//! The task table, and the ledger of what was executed.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use skyschedule_client::Epoch;
use skyschedule_common::env;
use sqlx::AssertSqlSafe;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

use super::audit::Execution;

/// The table of the README with its index, and the ledger: one row for each execution.
const SCHEMA: [&str; 2] = [
    "CREATE TABLE task_info (
        id        INTEGER PRIMARY KEY,
        task_data TEXT NOT NULL,
        task_time TEXT NOT NULL,
        status    INTEGER NOT NULL DEFAULT 0
    )",
    "CREATE TABLE task_log (
        task_id     INTEGER NOT NULL,
        client_id   TEXT NOT NULL,
        epoch       TEXT NOT NULL,
        started_us  INTEGER NOT NULL,
        finished_us INTEGER NOT NULL
    )",
];

/// The index that the README recommends for this numbering.
fn index(slots: Option<u32>) -> String {
    let slot = slots.map_or_else(String::new, |slots| format!("(id & {}), ", slots - 1));
    format!("CREATE INDEX task_due ON task_info ({slot}task_time, id) WHERE status = 0")
}

/// Both tables, in one SQLite file.
#[derive(Debug, Clone)]
pub(super) struct Table(SqlitePool);

impl Table {
    /// Opens the file, which may be new.
    pub(super) async fn open(file: &Path, connections: u32) -> sqlx::Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            // Readers do not wait for the one writer; nothing here must survive a power failure.
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Off)
            .busy_timeout(Duration::from_secs(30));
        let pool = SqlitePoolOptions::new()
            .max_connections(connections)
            .connect_with(options)
            .await?;
        Ok(Self(pool))
    }

    /// Makes both tables, with a due task for each of the ids, and an index for this many slots, or for modulo.
    pub(super) async fn fill(
        &self,
        ids: &RangeInclusive<i64>,
        slots: Option<u32>,
    ) -> sqlx::Result<()> {
        let mut transaction = self.0.begin().await?;
        for statement in SCHEMA {
            sqlx::query(statement).execute(&mut *transaction).await?;
        }
        sqlx::query(AssertSqlSafe(index(slots)))
            .execute(&mut *transaction)
            .await?;
        let tasks = "INSERT INTO task_info (id, task_data, task_time)
            WITH RECURSIVE ids(id) AS (SELECT ?1 UNION ALL SELECT id + 1 FROM ids WHERE id < ?2)
            SELECT id, 'task ' || id, datetime('now', '-1 minute') FROM ids";
        sqlx::query(tasks)
            .bind(ids.start())
            .bind(ids.end())
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await
    }

    /// How many tasks are not marked yet.
    pub(super) async fn remaining(&self) -> sqlx::Result<u64> {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM task_info WHERE status = 0")
            .fetch_one(&self.0)
            .await?;
        Ok(count.unsigned_abs())
    }

    /// Every task's id and status.
    pub(super) async fn statuses(&self) -> sqlx::Result<Vec<(i64, i64)>> {
        sqlx::query_as("SELECT id, status FROM task_info")
            .fetch_all(&self.0)
            .await
    }

    /// Every execution.
    pub(super) async fn ledger(&self) -> sqlx::Result<Vec<Execution>> {
        let rows: Vec<(i64, String, i64)> =
            sqlx::query_as("SELECT task_id, client_id, finished_us FROM task_log")
                .fetch_all(&self.0)
                .await?;
        let executions = rows
            .into_iter()
            .map(|(task, client, finished_us)| Execution {
                task,
                client,
                finished_us,
            });
        Ok(executions.collect())
    }

    /// Writes an execution that is just finished into the ledger.
    pub(super) async fn log(
        &self,
        task: i64,
        client: &str,
        epoch: Epoch,
        started_us: i64,
    ) -> sqlx::Result<()> {
        sqlx::query("INSERT INTO task_log VALUES (?1, ?2, ?3, ?4, ?5)")
            .bind(task)
            .bind(client)
            .bind(epoch.to_string())
            .bind(started_us)
            .bind(env::unix_micros())
            .execute(&self.0)
            .await?;
        Ok(())
    }

    pub(super) fn pool(&self) -> &SqlitePool {
        &self.0
    }

    pub(super) async fn close(&self) {
        self.0.close().await;
    }
}

/// The ids of so many tasks: half of them negative.
pub(super) fn ids(tasks: u32) -> RangeInclusive<i64> {
    let tasks = i64::from(tasks);
    let first = -(tasks / 2);
    first..=first + tasks - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::folder::Folder;

    #[test]
    fn half_of_the_ids_are_negative() {
        assert_eq!(ids(20_000), -10_000..=9_999);
        assert_eq!(ids(1), 0..=0);
        assert_eq!(ids(3).count(), 3);
    }

    #[tokio::test]
    async fn a_filled_table_has_one_due_task_for_each_id() {
        let folder = Folder::new().unwrap();
        let table = Table::open(&folder.database(), 1).await.unwrap();
        table.fill(&ids(7), Some(16)).await.unwrap();
        assert_eq!(table.remaining().await.unwrap(), 7);
        let statuses = table.statuses().await.unwrap();
        assert_eq!(statuses, (-3..=3).map(|id| (id, 0)).collect::<Vec<_>>());
        assert_eq!(table.ledger().await.unwrap(), []);
    }
}
