//! The ledger: a row for each execution, written before the task is done.

use skyschedule_client::sql::{AnyTx, Database, Key};
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
    Database(#[from] sqlx::Error),
    #[error("the ledger cannot be written: {0}")]
    Together(String),
    #[error("the ledger takes integer ids only, not {0}")]
    Key(Key),
    #[error("the ledger is closed")]
    Closed,
}

/// An execution that ends now.
#[derive(Debug)]
struct Execution {
    task: i64,
    epoch: String,
    started_us: i64,
    finished_us: i64,
}

impl Execution {
    fn new(key: &Key, epoch: Epoch, started_us: i64) -> Result<Self, LedgerError> {
        let Key::Integer(task) = *key else {
            return Err(LedgerError::Key(key.clone()));
        };
        Ok(Self {
            task,
            epoch: epoch.to_string(),
            started_us,
            finished_us: env::unix_micros(),
        })
    }
}

#[derive(Debug)]
struct Waiting {
    execution: Execution,
    written: oneshot::Sender<Result<(), String>>,
}

/// See the module. Executions that end while others are being written are written together.
#[derive(Debug)]
pub(super) struct Ledger(mpsc::Sender<Waiting>);

impl Ledger {
    /// Opens it, and checks that it is there.
    pub(super) async fn open(database: Database, client: &ClientId) -> Result<Self, LedgerError> {
        check(&database).await?;
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
        let execution = Execution::new(key, epoch, started_us)?;
        let (written, answer) = oneshot::channel();
        let sent = self.0.send(Waiting { execution, written }).await;
        sent.map_err(|_| LedgerError::Closed)?;
        let answer = answer.await.map_err(|_| LedgerError::Closed)?;
        answer.map_err(LedgerError::Together)
    }
}

/// One statement for all of these executions.
macro_rules! insert {
    ($executor:expr, $client:expr, $executions:expr) => {{
        let mut query = QueryBuilder::new(
            "INSERT INTO task_log (task_id, client_id, epoch, started_us, finished_us) ",
        );
        query.push_values($executions, |mut row, execution| {
            row.push_bind(execution.task)
                .push_bind($client)
                .push_bind(execution.epoch.as_str())
                .push_bind(execution.started_us)
                .push_bind(execution.finished_us);
        });
        query.build().execute($executor).await.map(|_| ())
    }};
}

/// Whether it is there.
pub(super) async fn check(database: &Database) -> Result<(), LedgerError> {
    const QUERY: &str =
        "SELECT task_id, client_id, epoch, started_us, finished_us FROM task_log WHERE 1 = 0";
    match database {
        Database::Postgres(pool) => sqlx::query(QUERY).execute(pool).await.map(|_| ()),
        Database::MySql(pool) => sqlx::query(QUERY).execute(pool).await.map(|_| ()),
        Database::Sqlite(pool) => sqlx::query(QUERY).execute(pool).await.map(|_| ()),
    }
    .map_err(LedgerError::Database)
}

/// Writes that a task was executed from then until now into the task's own transaction.
pub(super) async fn write_within(
    transaction: &mut AnyTx,
    client: &ClientId,
    key: &Key,
    epoch: Epoch,
    started_us: i64,
) -> Result<(), LedgerError> {
    let execution = [Execution::new(key, epoch, started_us)?];
    let client = client.to_string();
    match transaction {
        AnyTx::Postgres(tx) => insert!(&mut **tx, &client, &execution),
        AnyTx::MySql(tx) => insert!(&mut **tx, &client, &execution),
        AnyTx::Sqlite(tx) => insert!(&mut **tx, &client, &execution),
    }
    .map_err(LedgerError::Database)
}

async fn write_all(database: Database, client: String, mut queue: mpsc::Receiver<Waiting>) {
    let mut waiting = Vec::with_capacity(A_STATEMENT);
    while queue.recv_many(&mut waiting, A_STATEMENT).await > 0 {
        let (executions, written): (Vec<Execution>, Vec<_>) = waiting
            .drain(..)
            .map(|one| (one.execution, one.written))
            .unzip();
        let answer = match &database {
            Database::Postgres(pool) => insert!(pool, &client, &executions),
            Database::MySql(pool) => insert!(pool, &client, &executions),
            Database::Sqlite(pool) => insert!(pool, &client, &executions),
        };
        let answer = answer.map_err(|error| error.to_string());
        for written in written {
            // The handler may have been stopped meanwhile.
            let _ = written.send(answer.clone());
        }
    }
}
