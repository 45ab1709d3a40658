//! What is executed is marked soon, as long as the database answers: no other statement, no lost or missing connection and
//! no other handler holds a mark up.

#![allow(
    clippy::unwrap_used,
    reason = "a helper of a test may fail like the test itself"
)]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::try_join_all;
use skyschedule_client::sql::{Builder, Database, Key, Table, Task};
use skyschedule_common::env;
use skyschedule_tests::proxy::{Direction, Flow, Proxy};
use tokio::sync::Semaphore;

use crate::common::crew::{Crew, NoColumns};
use crate::common::place::Place;

const TASKS: &str = "task_info";

/// A database with so many connections at most, behind a proxy.
async fn behind_proxy(place: &Place, connections: u32) -> (Proxy, Database) {
    let (before, after) = place.url.split_once('@').unwrap();
    let (target, path) = after.split_once('/').unwrap();
    let proxy = Proxy::start(target.parse::<SocketAddr>().unwrap()).await;
    let url = format!("{before}@{}/{path}", proxy.address());
    let database = Database::connect(&url, connections).await.unwrap();
    (proxy, database)
}

/// Handlers end while queries for rows fail again and again, and are tried again seldom.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_that_fail_hold_no_mark_up() {
    let place = Place::postgres().await;
    place.create_tasks().await;
    place.add_tasks(0..8).await;
    let crew = Crew::new().await;
    let gate = Arc::new(Semaphore::new(0));
    let pass = Arc::clone(&gate);
    let handler = move |_: Task<NoColumns>| {
        let gate = Arc::clone(&pass);
        async move { gate.acquire().await.map(|permit| permit.forget()) }
    };
    let table = Table::new(TASKS).columns(["task_data"]);
    let member = crew
        .join_with("a", &place.database, table, |builder| builder, handler)
        .await;
    member
        .until("all run", |metrics| metrics.running == 8)
        .await;
    place
        .execute("ALTER TABLE task_info RENAME COLUMN task_data TO other_data")
        .await;
    member
        .until("queries fail", |metrics| metrics.database_errors >= 7)
        .await;
    // The next query is 2.5 to 5 seconds away.
    let ended = env::now();
    gate.add_permits(8);
    member
        .until("all are marked", |metrics| metrics.done == 8)
        .await;
    let took = ended.elapsed();
    assert!(took < Duration::from_millis(2_400), "{took:?}");
    member.close().await;
    place.remove().await;
}

/// All connections of a pool are lost at a time when nobody uses them.
async fn lost_connections(place: Place) {
    place.create_tasks().await;
    let (proxy, database) = behind_proxy(&place, 10).await;
    match &database {
        Database::Postgres(pool) => {
            drop(try_join_all((0..8).map(|_| pool.acquire())).await.unwrap());
        }
        Database::MySql(pool) => drop(try_join_all((0..8).map(|_| pool.acquire())).await.unwrap()),
        Database::Sqlite(_) => {}
    }
    let crew = Crew::new().await;
    let member = crew.join("a", &database, Table::new(TASKS)).await;
    member
        .until("it is idle", |metrics| metrics.polls > 5)
        .await;
    let links = proxy.links();
    assert!(links.len() >= 8, "{}", links.len());
    links.iter().for_each(|link| link.reset());
    place.add_tasks(0..100).await;
    member
        .until("all are marked", |metrics| metrics.done == 100)
        .await;
    let metrics = member.close().await;
    assert!(
        metrics.database_errors <= 1,
        "a query that was under way at most: {metrics:?}"
    );
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connections_cost_one_statement_and_not_one_each() {
    tokio::join!(
        lost_connections(Place::postgres().await),
        lost_connections(Place::mariadb().await),
    );
}

/// The database takes no more connections: those that a pool asks for do not come, and it waits for them in silence.
async fn no_new_connections(place: Place) {
    place.create_tasks().await;
    place.add_tasks(0..500).await;
    let (proxy, database) = behind_proxy(&place, 3).await;
    let links = proxy.links();
    proxy.set(Direction::ToClient, Flow::Stall);
    for link in &links {
        link.set(Direction::ToClient, Flow::Pass);
    }
    let crew = Crew::new().await;
    let handler = |_: Task<NoColumns>| async {
        env::sleep(Duration::from_millis(2)).await;
        Ok::<_, String>(())
    };
    let small = |builder: Builder| builder.batch(10);
    let member = crew
        .join_with("a", &database, Table::new(TASKS), small, handler)
        .await;
    member
        .until("all are marked", |metrics| metrics.done == 500)
        .await;
    let metrics = member.close().await;
    // Waiting for a connection would have been given up.
    assert_eq!(metrics.database_errors, 0, "{metrics:?}");
    assert!(
        proxy.links().len() > links.len(),
        "it asked for new connections"
    );
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mark_waits_for_no_new_connection_where_there_is_another() {
    tokio::join!(
        no_new_connections(Place::postgres().await),
        no_new_connections(Place::mariadb().await),
    );
}

/// A handler that blocks its thread among others that end at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_holds_no_other_up() {
    const ALL: u64 = 3_000;
    let place = Place::sqlite().await;
    place.create_tasks().await;
    place.add_tasks(0..i64::try_from(ALL).unwrap()).await;
    let crew = Crew::new().await;
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let gate = Arc::new(Mutex::new(gate));
    let handler = move |task: Task<NoColumns>| {
        let blocks = *task.key() == Key::Integer(2_050);
        let gate = Arc::clone(&gate);
        async move {
            if blocks {
                let _ = gate.lock().unwrap().recv();
            }
            Ok::<_, String>(())
        }
    };
    let wide = |builder: Builder| builder.concurrency(100);
    let member = crew
        .join_with("a", &place.database, Table::new(TASKS), wide, handler)
        .await;
    member
        .until("all others are marked", |metrics| metrics.done == ALL - 1)
        .await;
    open.send(()).unwrap();
    member
        .until("all are marked", |metrics| metrics.done == ALL)
        .await;
    member.close().await;
    place.remove().await;
}
