//! Marks: what became of a batch of tasks, written in as few statements as possible.

use std::collections::BTreeMap;
use std::sync::Arc;

use skyschedule_common::env::Instant;
use sqlx::pool::PoolConnection;

use super::driver::{Driver, Statement};
use super::key::Key;
use super::statements::{Mark, Statements};
use crate::work::Row;

/// A task that was executed and is to be marked. Its row is given back when this is dropped.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) key: Key,
    pub(super) mark: Mark,
    pub(super) guard: Arc<Row>,
    pub(super) at: Instant,
}

/// What the database said.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Marked {
    /// Rows that were not new any more.
    pub(super) lost: u64,
    /// Rows that cannot be marked.
    pub(super) refused: Vec<(Key, String)>,
}

/// Marks all of these. On an error nothing is known to be marked: all can be tried again, since marks are conditional.
pub(super) async fn mark<D: Driver>(
    connection: &mut PoolConnection<D>,
    statements: &Statements,
    finished: &[Finished],
) -> Result<Marked, sqlx::Error> {
    match together(connection, &plan(statements, finished)).await {
        Ok(lost) => Ok(Marked {
            lost,
            refused: Vec::new(),
        }),
        Err(error) if is_of_a_row(&error) => one_by_one(connection, statements, finished).await,
        Err(error) => Err(error),
    }
}

/// One row must not keep all others from being marked.
async fn one_by_one<D: Driver>(
    connection: &mut PoolConnection<D>,
    statements: &Statements,
    finished: &[Finished],
) -> Result<Marked, sqlx::Error> {
    let mut marked = Marked::default();
    for one in finished {
        match together(connection, &plan(statements, std::slice::from_ref(one))).await {
            Ok(lost) => marked.lost += lost,
            Err(error) if is_of_a_row(&error) => {
                marked.refused.push((one.key.clone(), error.to_string()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(marked)
}

/// Statements with the number of rows that each is to change.
pub(super) fn plan(statements: &Statements, finished: &[Finished]) -> Vec<(Statement, u64)> {
    let mut groups: BTreeMap<(u8, i64, u128), (Mark, Vec<Key>)> = BTreeMap::new();
    for one in finished {
        let order = match one.mark {
            Mark::Done => (0, 0, 0),
            Mark::Failed => (1, 0, 0),
            Mark::Again { attempts, wait } => (2, attempts, wait.as_millis()),
        };
        let (_, keys) = groups
            .entry(order)
            .or_insert_with(|| (one.mark, Vec::new()));
        keys.push(one.key.clone());
    }
    let statement = |(mark, keys): (Mark, Vec<Key>)| {
        let count = u64::try_from(keys.len()).unwrap_or(u64::MAX);
        (statements.mark(mark, &keys), count)
    };
    groups.into_values().map(statement).collect()
}

/// Executes all or nothing; how many rows were not changed although they should have been.
async fn together<D: Driver>(
    connection: &mut PoolConnection<D>,
    plan: &[(Statement, u64)],
) -> Result<u64, sqlx::Error> {
    let marked = if let [(only, expected)] = plan {
        let changed = D::execute(connection, only).await;
        changed.map(|changed| expected.saturating_sub(changed))
    } else {
        in_transaction(connection, plan).await
    };
    if marked.as_ref().is_err_and(|error| !is_of_a_row(error)) {
        connection.close_on_drop();
    }
    marked
}

async fn in_transaction<D: Driver>(
    connection: &mut PoolConnection<D>,
    plan: &[(Statement, u64)],
) -> Result<u64, sqlx::Error> {
    let mut transaction = D::begin(connection).await?;
    let mut lost = 0;
    for (statement, expected) in plan {
        lost += expected.saturating_sub(D::execute(&mut transaction, statement).await?);
    }
    transaction.commit().await?;
    Ok(lost)
}

/// Whether the database refuses this row, and would again: bad data, a constraint, an error raised by a trigger.
/// Everything else (a lost connection, a deadlock, a lock, a full disk) may pass with time.
pub(super) fn is_of_a_row(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else {
        return false;
    };
    let Some(code) = error.code() else {
        return false;
    };
    // Five characters: SQLSTATE, whose class comes first. Otherwise SQLite's number, whose low byte is the kind.
    if code.len() == 5
        && error
            .try_downcast_ref::<sqlx::sqlite::SqliteError>()
            .is_none()
    {
        return ["22", "23", "44", "45", "P0"]
            .iter()
            .any(|class| code.starts_with(class));
    }
    const CONSTRAINT: u32 = 19;
    const MISMATCH: u32 = 20;
    code.parse::<u32>()
        .is_ok_and(|code| matches!(code & 0xff, CONSTRAINT | MISMATCH))
}
