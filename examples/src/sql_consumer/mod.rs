//! A consumer of a SQL task table, as a command: one process of a group that shares the table.
//!
//! It shows how a service uses [`skyschedule_client::sql`]: connect, describe the table, run a handler, and stop in good
//! order. `--create` and `--seed` make something to try it on; `--ledger` writes down each execution, so that one
//! can count what was executed twice and what never.

mod held;
mod ledger;
mod options;
mod table;

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use skyschedule_client::sql::{
    self, AnyBacklog, AnyConsumer, AnyTx, Database, Metrics, Stopper, Task,
};
use skyschedule_client::{Client, Closed, ConnectError};
use skyschedule_common::env;
use skyschedule_server::stderr::{Format, Stderr};
use tokio::signal::unix::{SignalKind, signal};

use held::Held;
use ledger::{Ledger, LedgerError};
use options::Delivery;
pub use options::Options;

/// Connections to the database: two for the consumer, one for the ledger, one to look whether anything is due; and
/// one for each transaction. They are opened when they are needed.
const CONNECTIONS: u32 = 4;

/// For so long nothing must be due, to call the table empty.
const EMPTY_FOR: Duration = Duration::from_secs(2);

/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Why it fails.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the password cannot be read from {file}: {source}")]
    Password { file: String, source: io::Error },
    #[error("a user needs a password: give --password-file or set SKY_PASSWORD")]
    NoPassword,
    #[error("the client cannot connect: {0}")]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Ended(#[from] Closed),
    #[error(transparent)]
    Consumer(#[from] sql::Error),
    #[error("the table cannot be prepared: {0}")]
    Prepare(sqlx::Error),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error("signals cannot be received: {0}")]
    Signals(io::Error),
}

/// Runs the command to its end.
pub async fn run(options: Options) -> ExitCode {
    let format = Format::Text {
        colours: io::stderr().is_terminal(),
    };
    // A consumer does not wait for whoever reads its log.
    let stderr = Stderr::start(format);
    if let Err(error) = stderr.log(format, "", "info") {
        stderr.say(&error.to_string());
    }
    match work(options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            stderr.say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

async fn work(options: Options) -> Result<(), Failure> {
    let transactions = match options.delivery {
        Delivery::AtLeastOnce => 0,
        Delivery::ExactlyOnce => u32::try_from(options.concurrency).unwrap_or(u32::MAX),
    };
    let connections = CONNECTIONS.saturating_add(transactions);
    let database = Database::connect(&options.database_url(), connections).await?;
    if options.create {
        let created = table::create(&database, &options.table).await;
        created.map_err(Failure::Prepare)?;
    }
    if options.seed > 0 {
        let seeded = table::seed(&database, &options.table, options.seed).await;
        seeded.map_err(Failure::Prepare)?;
        tracing::info!(tasks = options.seed, "added");
    }
    if options.prepare_only {
        return Ok(());
    }

    let client = connect(&options).await?;
    env::spawn(show_shares(client.clone()));
    let consumed = consume(&options, database, &client).await;
    // Also after a failure: nobody must wait for the lease of a consumer that does not work.
    if let Err(unheard) = client.close().await {
        // All the same everything is finished and marked.
        tracing::warn!("{unheard}");
    }
    consumed
}

async fn consume(options: &Options, database: Database, client: &Client) -> Result<(), Failure> {
    let mut table = options.table.described().columns(["task_data"]);
    if let Some(zone) = &options.time_zone {
        table = table.time_zone(zone);
    }
    let consumer = sql::consumer(client, table)
        .batch(options.batch)
        .concurrency(options.concurrency)
        .transactions(options.transactions.into())
        .on_any(database.clone())
        .await?;
    stop_when_asked(consumer.stopper())?;
    if options.until_empty {
        env::spawn(stop_when_empty(consumer.backlog(), consumer.stopper()));
    }
    let metrics = match options.delivery {
        Delivery::AtLeastOnce => at_least_once(options, consumer, database, client).await?,
        Delivery::ExactlyOnce => exactly_once(options, consumer, &database, client).await?,
    };
    tracing::info!(
        done = metrics.done,
        failed = metrics.failed,
        lost_marks = metrics.lost_marks,
        locked = metrics.locked,
        rolled_back = metrics.rolled_back,
        dropped = metrics.dropped,
        polls = metrics.polls,
        "stopped"
    );
    match client.ended() {
        Some(ended) => Err(ended.into()),
        None => Ok(()),
    }
}

async fn at_least_once(
    options: &Options,
    consumer: AnyConsumer,
    database: Database,
    client: &Client,
) -> Result<Metrics, Failure> {
    let ledger = match options.ledger {
        true => Some(Ledger::open(database, client.client_id()).await?),
        false => None,
    };
    let takes = Duration::from_millis(options.work_ms);
    let (ledger, client) = (Arc::new(ledger), client.clone());
    let handler = move |task: Task<(Option<String>,)>| {
        let (ledger, held) = (Arc::clone(&ledger), Held::begin(&client, task.key()));
        async move {
            let _held = held;
            let started_us = env::unix_micros();
            env::sleep(takes).await; // a service would work here
            match ledger.as_ref() {
                Some(ledger) => ledger.write(task.key(), task.epoch(), started_us).await,
                None => Ok(()),
            }
        }
    };
    Ok(consumer.run(handler).await)
}

/// The same; what it writes is committed with the mark.
async fn exactly_once(
    options: &Options,
    consumer: AnyConsumer,
    database: &Database,
    client: &Client,
) -> Result<Metrics, Failure> {
    if options.ledger {
        ledger::check(database).await?;
    }
    let (takes, with_ledger) = (Duration::from_millis(options.work_ms), options.ledger);
    let client = client.clone();
    let handler = move |task: Task<(Option<String>,)>, mut transaction: AnyTx| {
        let (client, held) = (client.client_id().clone(), Held::begin(&client, task.key()));
        async move {
            let _held = held;
            let started_us = env::unix_micros();
            env::sleep(takes).await; // a service would work here, through the transaction
            match with_ledger {
                true => {
                    let (key, epoch) = (task.key(), task.epoch());
                    ledger::write_within(&mut transaction, &client, key, epoch, started_us).await
                }
                false => Ok(()),
            }
        }
    };
    Ok(consumer.run_in_transaction(handler).await?)
}

async fn connect(options: &Options) -> Result<Client, Failure> {
    let mut builder = Client::builder()
        .servers(options.servers.iter())
        .group(options.group.as_deref().unwrap_or_default());
    if let Some(id) = &options.client_id {
        builder = builder.client_id(id);
    }
    if let Some(user) = &options.user {
        builder = builder.credentials(user, password(options)?);
    }
    if let Some(promise) = options.consistency {
        builder = builder.consistency(promise.into());
    }
    Ok(builder.connect().await?)
}

fn password(options: &Options) -> Result<String, Failure> {
    let Some(file) = &options.password_file else {
        return options.password.clone().ok_or(Failure::NoPassword);
    };
    let text = std::fs::read_to_string(file).map_err(|source| Failure::Password {
        file: file.display().to_string(),
        source,
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// One line a change, until the client is closed.
async fn show_shares(client: Client) {
    let mut shares = client.shares();
    shares.mark_changed();
    let mut shown = String::new();
    while shares.changed().await.is_ok() {
        let text = shares.borrow_and_update().to_string();
        if text != shown {
            tracing::info!("{text}");
            shown = text;
        }
    }
}

/// SIGTERM or Ctrl-C: what runs is finished. A second one: at once.
fn stop_when_asked(stopper: Stopper) -> Result<(), Failure> {
    let listen = |kind| signal(kind).map_err(Failure::Signals);
    let mut terminate = listen(SignalKind::terminate())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    env::spawn(async move {
        for asked in 1.. {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if asked > 1 {
                std::process::exit(1);
            }
            // First: whoever reads the log may not.
            stopper.stop();
            tracing::info!("stops when what runs is finished");
        }
    });
    Ok(())
}

/// Stops when nothing due is left in the whole table for a while.
async fn stop_when_empty(backlog: AnyBacklog, stopper: Stopper) {
    let mut since = None;
    loop {
        match backlog.is_empty().await {
            Ok(true) => {
                let since = *since.get_or_insert_with(env::now);
                if since.elapsed() >= EMPTY_FOR {
                    return stopper.stop();
                }
            }
            Ok(false) | Err(_) => since = None,
        }
        env::sleep(LOOK_EVERY).await;
    }
}
