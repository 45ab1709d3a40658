//! Five consumers, each a process, work through 20,000 tasks while one joins, one is killed, one is stopped, one is
//! paused, and the server restarts and goes away. The ledger tells what was executed.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail like the test itself"
)]

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common::consumers::{Consumer, prepare};
use crate::common::place::Place;
use rustix::process::Signal;
use skyschedule_client::sql::Database;
use skyschedule_common::env;
use skyschedule_tests::server::Server;
use tempfile::TempDir;
use tokio::sync::Mutex;

const GROUP: &str = "1000";
const TASKS: u64 = 20_000;
const BATCH: usize = 100;

/// One at a time: three would only take each other's processor.
static TURN: Mutex<()> = Mutex::const_new(());

async fn pause(millis: u64) {
    env::sleep(Duration::from_millis(millis)).await;
}

/// Who executed each task, in the order of the starts.
async fn ledger(place: &Place) -> BTreeMap<i64, Vec<String>> {
    const SQL: &str = "SELECT task_id, client_id FROM task_log ORDER BY started_us";
    let rows: Vec<(i64, String)> = match &place.database {
        Database::Postgres(pool) => sqlx::query_as(SQL).fetch_all(pool).await,
        Database::MySql(pool) => sqlx::query_as(SQL).fetch_all(pool).await,
        Database::Sqlite(pool) => sqlx::query_as(SQL).fetch_all(pool).await,
    }
    .unwrap();
    let mut executions: BTreeMap<i64, Vec<String>> = BTreeMap::new();
    for (task, client) in rows {
        executions.entry(task).or_default().push(client);
    }
    executions
}

on_each_database! {
    async fn nothing_is_lost_and_twice_runs_only_what_a_killed_or_paused_owner_had_not_marked(place: &Place) {
        let _turn = TURN.lock().await;
        prepare(place, TASKS).await;
        let mut server = Server::start().await;
        server.admin().short_leases(GROUP).await;
        let logs = TempDir::new().unwrap();
        let flags = ["--work-ms", "40", "--batch", "100", "--concurrency", "10"];
        let start = |server: &Server, id: &str| Consumer::start(server, place, &logs, id, &flags);
        let begun = env::now();

        let mut killed = start(&server, "killed");
        let mut stopped = start(&server, "stopped");
        let mut paused = start(&server, "paused");
        let mut others = vec![start(&server, "steady-1"), start(&server, "steady-2")];
        pause(2_500).await;
        others.push(start(&server, "joined"));
        pause(1_000).await;
        killed.signal(Signal::KILL);
        killed.ended().await;
        pause(1_000).await;
        stopped.signal(Signal::TERM);
        assert!(stopped.ended().await.success(), "{}", stopped.log());
        paused.signal(Signal::STOP);
        // Two leases.
        pause(4_000).await;
        paused.signal(Signal::CONT);
        pause(1_000).await;
        server.kill().await;
        server.restart().await;
        pause(2_000).await;
        server.kill().await;
        // Four leases without any server.
        let before = place.with_status(0).await;
        pause(8_000).await;
        let after = place.with_status(0).await;
        assert!(before > 0, "the tasks do not last until the server goes away");
        assert!(after < before || after == 0, "work goes on without a server");
        server.restart().await;
        for consumer in others.iter_mut().chain([&mut paused]) {
            assert!(consumer.ended().await.success(), "{}", consumer.log());
        }
        println!("{TASKS} tasks in {:?}, {before} of them left when the server went away", begun.elapsed());

        let executions = ledger(place).await;
        let tasks = usize::try_from(TASKS).unwrap();
        assert_eq!(executions.len(), tasks, "lost: {}", tasks - executions.len());
        assert_eq!(place.with_status(1).await, i64::try_from(TASKS).unwrap());
        let twice: Vec<_> = executions.iter().filter(|(_, by)| by.len() > 1).collect();
        let of = |id: &str| twice.iter().filter(|(_, by)| by.iter().any(|own| own == id)).count();
        println!("executed twice: {} of the killed one, {} of the paused one, {} in all",
            of("killed"), of("paused"), twice.len());
        // Each of the two may have left it unmarked, one after the other.
        let excused = |by: &[String]| ["killed", "paused"].iter().filter(|id| by.iter().any(|own| own == *id)).count();
        let unexplained: Vec<_> = twice
            .iter()
            .filter(|(_, by)| by.len() > 1 + excused(by))
            .collect();
        assert!(unexplained.is_empty(), "{unexplained:?}");
        assert!(of("killed") <= BATCH && of("paused") <= BATCH, "more than a batch was not marked");
    }
}
