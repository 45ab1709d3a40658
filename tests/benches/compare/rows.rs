//! What a newcomer is there for: its first row, read from the same table whoever gave it its slots.

use std::path::Path;

use skyschedule_common::share::Share;
use sqlx::SqlitePool;
use sqlx::sqlite::SqliteConnectOptions;

use crate::common::Result;

/// Rows due in each slot.
const ROWS_A_SLOT: u32 = 100;

/// A task table, each row in one slot.
#[derive(Debug, Clone)]
pub(crate) struct Rows(SqlitePool);

impl Rows {
    /// Creates the table, with due rows in every slot.
    pub(crate) async fn create(path: &Path, slots: u32) -> Result<()> {
        let options = SqliteConnectOptions::new().filename(path);
        let pool = SqlitePool::connect_with(options.create_if_missing(true)).await?;
        let statements = "CREATE TABLE tasks (id INTEGER PRIMARY KEY, slot INTEGER NOT NULL, due INTEGER NOT NULL);
             CREATE INDEX tasks_due ON tasks (slot, due);";
        sqlx::raw_sql(statements).execute(&pool).await?;
        sqlx::query(
            "WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?1 * ?2)
             INSERT INTO tasks SELECT n, n % ?1, n FROM numbers",
        )
        .bind(slots)
        .bind(ROWS_A_SLOT)
        .execute(&pool)
        .await?;
        pool.close().await;
        Ok(())
    }

    /// A connection is open from here on, as it is in a service that joins.
    pub(crate) async fn open(path: &Path) -> Result<Self> {
        let options = SqliteConnectOptions::new().filename(path).read_only(true);
        let rows = Self(SqlitePool::connect_with(options).await?);
        rows.first(0).await?;
        Ok(rows)
    }

    /// The first row that is due in this slot.
    pub(crate) async fn first(&self, slot: u32) -> Result<i64> {
        let query = "SELECT id FROM tasks WHERE slot = ? ORDER BY due LIMIT 1";
        Ok(sqlx::query_scalar(query)
            .bind(slot)
            .fetch_one(&self.0)
            .await?)
    }

    /// The first row of a share of slots.
    pub(crate) async fn first_of(&self, share: &Share) -> Result<i64> {
        let slot = share.numbers().first().ok_or("a share without a slot")?;
        self.first(slot).await
    }
}
