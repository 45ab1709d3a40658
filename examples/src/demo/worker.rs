//! A consumer of the demo: what a service would have, and beside it a pipe to its parent.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use skyschedule_client::sql::{self, Task, consumer};
use skyschedule_client::{Client, ConnectError, NoGoodbye};
use skyschedule_common::env;
use skyschedule_server::stderr::Stderr;
use tokio::sync::oneshot;

use super::folder::database;
use super::options::WorkerOptions;
use super::pipe;
use super::report::Report;
use super::table::Table;
use super::{GROUP, PASSWORD, USER};

/// How often it tells how much it executed.
const PROGRESS: Duration = Duration::from_millis(100);

/// Connections to the table: two for the consumer, two for the ledger.
const CONNECTIONS: u32 = 4;

/// Why a consumer fails.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("no connection to the servers: {0}")]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Consumer(#[from] sql::Error),
    #[error("the table cannot be opened: {0}")]
    Table(#[from] sqlx::Error),
    #[error("{0}")]
    Goodbye(#[from] NoGoodbye),
}

pub(super) async fn run(options: WorkerOptions, stderr: &Stderr) -> ExitCode {
    pipe::log(stderr);
    let stop = pipe::obey_parent(options.folder.clone());
    pipe::exit_code(work(options, stop).await, stderr)
}

async fn work(options: WorkerOptions, stop: oneshot::Receiver<()>) -> Result<(), Failure> {
    let client = Client::builder()
        .servers(options.servers)
        .group(GROUP)
        .client_id(options.name.as_str())
        .credentials(USER, PASSWORD)
        .connect()
        .await?;
    let table = Table::open(&database(&options.folder), CONNECTIONS).await?;
    let mut tasks = sql::Table::new("task_info").columns(["id"]);
    if let Some(slots) = options.slots {
        tasks = tasks.slot_index(slots);
    }
    let consumer = consumer(&client, tasks)
        .batch(options.batch)
        .concurrency(options.concurrency)
        .on(table.pool().clone())
        .await?;

    let executed = Arc::new(AtomicU64::new(0));
    env::spawn(tell(client.clone(), Arc::clone(&executed)));
    let stopper = consumer.stopper();
    env::spawn(async move {
        // The parent asks, or is dead: then the process ends anyway.
        let _ = stop.await;
        stopper.stop();
    });
    let takes = Duration::from_micros(options.work_us);
    let name: Arc<str> = options.name.into();
    let handler = move |task: Task<(i64,)>| {
        let (table, name, executed) = (table.clone(), Arc::clone(&name), Arc::clone(&executed));
        async move {
            let started_us = env::unix_micros();
            env::sleep(takes).await;
            let written = table.log(task.0, &name, task.epoch(), started_us).await;
            executed.fetch_add(1, Ordering::Relaxed);
            written
        }
    };
    consumer.run(handler).await;
    client.close().await?;
    Ok(())
}

/// Tells the parent of each change, until there is nobody to tell.
async fn tell(client: Client, executed: Arc<AtomicU64>) {
    let mut shares = client.shares();
    shares.mark_changed();
    let (mut told, mut next) = (0, env::now() + PROGRESS);
    loop {
        let report = tokio::select! {
            biased;
            changed = shares.changed() => {
                if changed.is_err() {
                    return;
                }
                Report::rows(&shares.borrow_and_update())
            }
            () = env::sleep_until(next) => {
                next = env::now() + PROGRESS;
                let count = executed.load(Ordering::Relaxed);
                if count == told {
                    continue;
                }
                told = count;
                Report::Executed { count }
            }
        };
        if pipe::say(&report).is_err() {
            return;
        }
    }
}
