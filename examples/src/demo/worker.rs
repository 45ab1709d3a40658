//! A consumer of the demo.

use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use skyschedule_client::{Client, Dialect};
use skyschedule_common::env;
use tokio::sync::oneshot;

use super::folder::{database, remove_orphaned};
use super::options::WorkerOptions;
use super::report::{Report, STOP};
use super::table::Table;
use super::{GROUP, PASSWORD, USER};

/// How often it tells how much it executed.
const PROGRESS: Duration = Duration::from_millis(100);

type Failure = Box<dyn std::error::Error + Send + Sync>;

pub(super) async fn run(options: WorkerOptions) -> ExitCode {
    let stop = obey_parent(options.folder.clone());
    match work(options, stop).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

async fn work(options: WorkerOptions, stop: oneshot::Receiver<()>) -> Result<(), Failure> {
    let table = Table::open(&database(&options.folder), 4).await?;
    let client = Client::builder()
        .servers([options.server.as_str()])
        .group(GROUP)
        .client_id(options.name.as_str())
        .credentials(USER, PASSWORD)
        .connect()
        .await?;
    let executed = Arc::new(AtomicU64::new(0));
    env::spawn(tell(client.clone(), Arc::clone(&executed)));
    let closing = client.clone();
    env::spawn(async move {
        let _ = stop.await;
        let _ = closing.close().await;
    });
    let takes = Duration::from_micros(options.work_us);
    while let Ok(work) = client.acquire().await {
        let sql = format!(
            "SELECT id FROM task_info WHERE status = 0 AND task_time <= datetime('now') AND {} ORDER BY task_time, id LIMIT {}",
            work.share().predicate(Dialect::Sqlite, "id"),
            options.batch
        );
        let ids: Vec<i64> = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .fetch_all(table.pool())
            .await?;
        if ids.is_empty() {
            env::sleep(Duration::from_millis(50)).await;
            continue;
        }
        let run = |id: i64| {
            let row = work.begin(id);
            let (table, name, executed) = (&table, &options.name, &executed);
            async move {
                let row = row?;
                let started = env::unix_micros();
                env::sleep(takes).await;
                sqlx::query("INSERT INTO task_log VALUES (?, ?, ?, ?, ?)")
                    .bind(id)
                    .bind(name)
                    .bind(row.epoch().to_string())
                    .bind(started)
                    .bind(env::unix_micros())
                    .execute(table.pool())
                    .await
                    .ok()?;
                executed.fetch_add(1, Ordering::Relaxed);
                Some((id, row))
            }
        };
        let concurrency = usize::try_from(options.concurrency)?;
        let done: Vec<_> = futures_util::stream::iter(ids)
            .map(|id| async move { id })
            .buffered(1)
            .map(run)
            .buffer_unordered(concurrency)
            .filter_map(async |done| done)
            .collect()
            .await;
        let list: Vec<String> = done.iter().map(|(id, _)| id.to_string()).collect();
        let sql = format!(
            "UPDATE task_info SET status = 1 WHERE status = 0 AND id IN ({})",
            list.join(",")
        );
        sqlx::query(sqlx::AssertSqlSafe(sql))
            .execute(table.pool())
            .await?;
    }
    client.close().await?;
    Ok(())
}

fn obey_parent(folder: PathBuf) -> oneshot::Receiver<()> {
    let (stop, stopped) = oneshot::channel();
    std::thread::spawn(move || {
        let mut stop = Some(stop);
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if line == STOP
                && let Some(stop) = stop.take()
            {
                let _ = stop.send(());
            }
        }
        remove_orphaned(&folder);
        std::process::exit(1);
    });
    stopped
}

async fn tell(client: Client, executed: Arc<AtomicU64>) {
    let mut shares = client.shares();
    shares.mark_changed();
    let mut told = 0;
    let mut next = env::now() + PROGRESS;
    loop {
        let report = tokio::select! {
            biased;
            changed = shares.changed() => {
                if changed.is_err() { return }
                Report::rows(&shares.borrow_and_update())
            }
            () = env::sleep_until(next) => {
                next = env::now() + PROGRESS;
                let count = executed.load(Ordering::Relaxed);
                if count == told { continue }
                told = count;
                Report::Executed { count }
            }
        };
        if say(&report).is_err() {
            return;
        }
    }
}

fn say(report: &Report) -> Result<(), Failure> {
    let line = serde_json::to_string(report)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
