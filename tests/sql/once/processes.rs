//! Real processes that are killed and stopped.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use skyschedule_common::env::{self, rng};
use skyschedule_tests::server::Server;
use tempfile::TempDir;

use crate::common::consumers::{Consumer, prepare};
use crate::common::crew::PATIENCE;
use crate::common::place::Place;

const GROUP: &str = "1000";

/// What all of these consumers are told.
const ONCE: [&str; 2] = ["--delivery", "exactly-once"];

/// Each task is done, and the ledger has each once.
async fn each_once(place: &Place, tasks: i64) {
    assert_eq!(place.with_status(1).await, tasks);
    assert_eq!(place.number("SELECT COUNT(*) FROM task_log").await, tasks);
    let distinct = "SELECT COUNT(DISTINCT task_id) FROM task_log";
    assert_eq!(place.number(distinct).await, tasks);
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = env::now() + PATIENCE;
    while !holds().await {
        assert!(env::now() < deadline, "it does not come to this: {what}");
        env::sleep(Duration::from_millis(20)).await;
    }
}

/// An owner is stopped with transactions open, and rows in its queue that it has not claimed yet; another one does
/// all the rest meanwhile. Later it is killed, with transactions open again.
async fn stopped_and_killed(place: Place) {
    /// Transactions of the slow one.
    const OPEN: i64 = 4;
    prepare(&place, 200).await;
    // One task is never free: so there is work until the end.
    let holder = place.session().await;
    holder.execute("BEGIN").await;
    holder
        .execute("SELECT id FROM task_info WHERE id = 200 FOR UPDATE")
        .await;
    let server = Server::start().await;
    let exclusive =
        json!({ "consistency": "exclusive", "lease_ms": 2_000, "drain_timeout_ms": 1_000 });
    server.admin().configure(GROUP, &exclusive).await;
    let logs = TempDir::new().unwrap();
    let start = |id: &str, work_ms: &str| {
        let exclusive = ["--consistency", "exclusive", "--concurrency", "4"];
        let flags: Vec<&str> = ONCE.into_iter().chain(exclusive).collect();
        let flags = [&flags[..], &["--work-ms", work_ms]].concat();
        Consumer::start(&server, &place, &logs, id, &flags)
    };
    // Nearly all of the time it is within its transactions.
    let mut slow = start("slow", "1500");
    let new = async || place.with_status(0).await;
    until("the slow one works", async || new().await <= 200 - OPEN).await;
    // Most of the next ones are claimed.
    env::sleep(Duration::from_millis(300)).await;
    slow.signal(Signal::STOP);
    let stopped_at = new().await;
    let mut next = start("next", "5");
    until("all is done but the rows that are locked", async || {
        new().await <= 1 + OPEN
    })
    .await;
    println!(
        "{stopped_at} tasks when it was stopped, {} rows locked",
        new().await
    );

    slow.signal(Signal::CONT);
    until("what it had locked is done", async || new().await == 1).await;
    assert_eq!(place.number("SELECT COUNT(*) FROM task_log").await, 199);

    until("both have rows", async || {
        let group = server.admin().group(GROUP).await.unwrap();
        let members = group["members"].as_array().unwrap();
        let with_rows = |member: &&Value| {
            member["numbers"]
                .as_array()
                .is_some_and(|all| !all.is_empty())
        };
        members.iter().filter(with_rows).count() == 2
    })
    .await;
    prepare(&place, 100).await;
    let by_slow = "SELECT COUNT(*) FROM task_log WHERE client_id = 'slow'";
    let so_far = place.number(by_slow).await;
    until("the slow one works again", async || {
        place.number(by_slow).await > so_far
    })
    .await;
    slow.signal(Signal::KILL);
    slow.ended().await;
    until("what it had locked is done", async || new().await == 1).await;
    holder.execute("ROLLBACK").await;
    assert!(next.ended().await.success(), "{}", next.log());
    each_once(&place, 300).await;
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_owner_holds_nobody_up_and_does_nothing_twice_when_it_goes_on() {
    tokio::join!(
        stopped_and_killed(Place::postgres().await),
        stopped_and_killed(Place::mariadb().await),
    );
}

/// Five consumers; every now and then one of them is killed and starts again.
async fn killed_again_and_again(place: Place, tasks: i64, work_ms: &str) {
    prepare(&place, u64::try_from(tasks).unwrap()).await;
    let server = Server::start().await;
    server.admin().short_leases(GROUP).await;
    let logs = TempDir::new().unwrap();
    let start = |n: usize, life: usize| {
        let scope = if n.is_multiple_of(2) {
            "per-task"
        } else {
            "per-batch"
        };
        let flags = [
            "--concurrency",
            "4",
            "--batch",
            "50",
            "--work-ms",
            work_ms,
            "--transactions",
            scope,
        ];
        let flags: Vec<&str> = ONCE.into_iter().chain(flags).collect();
        Consumer::start(&server, &place, &logs, &format!("{n}-{life}"), &flags)
    };
    let mut consumers: Vec<Consumer> = (0..5).map(|n| start(n, 0)).collect();
    let mut kills = 0;
    while place.with_status(0).await > tasks / 10 {
        env::sleep(Duration::from_millis(200 + rng::below(200))).await;
        let victim = kills % 5;
        consumers[victim].signal(Signal::KILL);
        consumers[victim].ended().await;
        kills += 1;
        consumers[victim] = start(victim, kills);
    }
    for consumer in &mut consumers {
        assert!(consumer.ended().await.success(), "{}", consumer.log());
    }
    println!("{kills} kills");
    assert!(kills >= 5, "the tasks do not last: {kills} kills");
    each_once(&place, tasks).await;
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ledger_of_five_consumers_that_are_killed_has_each_task_once() {
    tokio::join!(
        killed_again_and_again(Place::postgres().await, 4_000, "5"),
        killed_again_and_again(Place::mariadb().await, 4_000, "5"),
        killed_again_and_again(Place::sqlite().await, 1_000, "1"),
    );
}
