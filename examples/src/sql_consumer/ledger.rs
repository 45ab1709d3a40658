//! The ledger: a row for each execution, written before the task is done.

use skyschedule_client::sql::{Database, Key};
use skyschedule_client::{ClientId, Epoch};
use skyschedule_common::env;
use sqlx::QueryBuilder;
use tokio::sync::{mpsc, oneshot};

/// Executions that one statement writes.
const A_STATEMENT: usize = 100;

/// Why an execution cannot be written down.
#[derive(Debug, thiserror::Error)]
pub(super) enum LedgerError {
    #[error("the ledger cannot be written: {0}; --create makes the table task_log")]
    Database(String),
    #[error("the ledger takes integer ids only, not {0}")]
    Key(Key),
    #[error("the ledger is closed")]
    Closed,
}

#[derive(Debug)]
struct Execution {
    task: i64,
    epoch: String,
    started_us: i64,
    finished_us: i64,
    written: oneshot::Sender<Result<(), String>>,
}

/// See the module. Executions that end while others are being written are written together.
#[derive(Debug)]
pub(super) struct Ledger(mpsc::Sender<Execution>);

impl Ledger {
    /// Opens it, and checks that it is there.
    pub(super) async fn open(database: Database, client: &ClientId) -> Result<Self, LedgerError> {
        const QUERY: &str =
            "SELECT task_id, client_id, epoch, started_us, finished_us FROM task_log WHERE 1 = 0";
        let there = match &database {
            Database::Postgres(pool) => sqlx::query(QUERY).execute(pool).await.map(|_| ()),
            Database::MySql(pool) => sqlx::query(QUERY).execute(pool).await.map(|_| ()),
            Database::Sqlite(pool) => sqlx::query(QUERY).execute(pool).await.map(|_| ()),
        };
        there.map_err(|error| LedgerError::Database(error.to_string()))?;
        let (sender, receiver) = mpsc::channel(A_STATEMENT);
        env::spawn(write_all(database, client.to_string(), receiver));
        Ok(Self(sender))
    }

    /// Writes that a task was executed from then until now, and returns when it is on disk.
    pub(super) async fn write(
        &self,
        key: &Key,
        epoch: Epoch,
        started_us: i64,
    ) -> Result<(), LedgerError> {
        let Key::Integer(task) = *key else {
            return Err(LedgerError::Key(key.clone()));
        };
        let (written, answer) = oneshot::channel();
        let execution = Execution {
            task,
            epoch: epoch.to_string(),
            started_us,
            finished_us: env::unix_micros(),
            written,
        };
        let sent = self.0.send(execution).await;
        sent.map_err(|_| LedgerError::Closed)?;
        let answer = answer.await.map_err(|_| LedgerError::Closed)?;
        answer.map_err(LedgerError::Database)
    }
}

async fn write_all(database: Database, client: String, mut queue: mpsc::Receiver<Execution>) {
    let mut executions = Vec::with_capacity(A_STATEMENT);
    while queue.recv_many(&mut executions, A_STATEMENT).await > 0 {
        let written = write(&database, &client, &executions).await;
        let answer = written.map_err(|error| error.to_string());
        for execution in executions.drain(..) {
            // The handler may have been stopped meanwhile.
            let _ = execution.written.send(answer.clone());
        }
    }
}

async fn write(database: &Database, client: &str, executions: &[Execution]) -> sqlx::Result<()> {
    macro_rules! insert {
        ($pool:expr) => {{
            let mut query = QueryBuilder::new(
                "INSERT INTO task_log (task_id, client_id, epoch, started_us, finished_us) ",
            );
            query.push_values(executions, |mut row, execution| {
                row.push_bind(execution.task)
                    .push_bind(client)
                    .push_bind(execution.epoch.as_str())
                    .push_bind(execution.started_us)
                    .push_bind(execution.finished_us);
            });
            query.build().execute($pool).await.map(|_| ())
        }};
    }
    match database {
        Database::Postgres(pool) => insert!(pool),
        Database::MySql(pool) => insert!(pool),
        Database::Sqlite(pool) => insert!(pool),
    }
}
