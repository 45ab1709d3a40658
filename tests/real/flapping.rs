//! A client in a crash loop, and what it costs those who do not crash.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use skyschedule_client::Client;
use skyschedule_common::env;
use skyschedule_tests::member::{Member, Options};
use skyschedule_tests::numbering::numbered;
use skyschedule_tests::server::{PASSWORD, Server, USER};
use tokio::sync::watch;

const GROUP: &str = "1000";

/// Members that never crash.
const STEADY: usize = 19;
/// How long the crash loop lasts.
const LOOP: Duration = Duration::from_secs(30);
/// How long each row of a steady member takes.
const WORK: Duration = Duration::from_millis(20);
/// How often each of them is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Members within this process, which work all the time.
async fn steady(server: &Server) -> Vec<Client> {
    let mut clients = Vec::new();
    for at in 0..STEADY {
        let client = Client::builder()
            .servers([server.address().to_string()])
            .group(GROUP)
            .client_id(format!("steady-{at}"))
            .credentials(USER, PASSWORD)
            .connect();
        clients.push(client.await.unwrap());
    }
    for client in &clients {
        env::spawn(labour(client.clone()));
    }
    clients
}

/// Works on rows of its own, one after the other, as long as the client is open.
async fn labour(client: Client) {
    while let Ok(work) = client.acquire().await {
        let rows = work.share().shares().iter();
        let first = rows.filter_map(|share| share.numbers().first()).next();
        if let Some(row) = first.and_then(|row| work.begin(i64::from(row))) {
            env::sleep(WORK).await;
            drop(row);
        }
    }
}

/// Whether a row of the client may begin now.
fn may_begin(client: &Client) -> bool {
    let rows = client.shares().borrow().rows.clone();
    let mut first = rows
        .shares()
        .iter()
        .filter_map(|share| share.numbers().first());
    first.any(|row| client.may_begin(i64::from(row)))
}

/// The part of its time in which each client may begin rows, until `over` says so.
async fn working_time(clients: Vec<Client>, mut over: watch::Receiver<bool>) -> Vec<f64> {
    let mut worked = vec![Duration::ZERO; clients.len()];
    let (start, mut last) = (env::now(), env::now());
    while !*over.borrow_and_update() {
        env::sleep(LOOK).await;
        let now = env::now();
        for (client, worked) in clients.iter().zip(&mut worked) {
            if may_begin(client) {
                *worked += now.saturating_duration_since(last);
            }
        }
        last = now;
    }
    let all = start.elapsed().as_secs_f64();
    worked
        .iter()
        .map(|worked| worked.as_secs_f64() / all)
        .collect()
}

/// A process that is killed as soon as it is a member, and started again at once, for a while; how many
/// lives it had.
async fn crash_loop(server: &Server, id: impl Fn(usize) -> String) -> usize {
    let start = env::now();
    let mut lives = 0;
    while start.elapsed() < LOOP {
        let mut crashing = Options::new(server.address(), GROUP, &id(lives))
            .flag("--connect-timeout-ms", "60000")
            .start();
        let left = LOOP.saturating_sub(start.elapsed());
        let member = crashing.membership_other_than(None);
        if env::timeout(left, member).await.is_ok() {
            lives += 1;
        }
        crashing.signal(Signal::KILL);
        crashing.ended().await;
    }
    lives
}

/// The crash loop, and the least part of its time in which a steady member worked.
async fn trouble(server: &Server, id: impl Fn(usize) -> String) -> (usize, f64) {
    let clients = steady(server).await;
    let before = server.admin().metric("skyschedule_handovers_total").await;
    let (over, is_over) = watch::channel(false);
    let working = env::spawn(working_time(clients, is_over));
    let lives = crash_loop(server, id).await;
    over.send(true).unwrap();
    let worked = working.await.unwrap();
    let least = worked.iter().copied().fold(1.0, f64::min);
    let mean = worked.iter().sum::<f64>() / worked.len() as f64;
    let handovers = server.admin().metric("skyschedule_handovers_total").await - before;
    println!(
        "{lives} lives, {handovers} renumberings; steady members worked {least:.4} of their time at least, {mean:.4} on average"
    );
    (lives, least)
}

/// Waits as long as the longest delay.
async fn is_one_of_20(server: &Server, member: &Member) {
    let deadline = env::now() + Duration::from_secs(60);
    while member.rows().node.is_none_or(|node| node.0 != 20) {
        let group = server.admin().group(GROUP).await;
        assert!(env::now() < deadline, "{member}\n{group:?}");
        env::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn steady_members_work_while_another_one_keeps_crashing() {
    let server = Server::start().await;
    let (lives, worked) = trouble(&server, |_| "crashing".to_owned()).await;
    assert!(worked >= 0.95, "{worked}");
    assert!((4..=10).contains(&lives), "the delay grows: {lives} lives");
    assert!(
        server
            .admin()
            .metric("skyschedule_delayed_joins_total")
            .await
            > 0.0
    );
    // Once it stops dying it gets in.
    let recovered = Member::start(server.address(), GROUP, "crashing");
    is_one_of_20(&server, &recovered).await;
}

/// As with the ids that clients draw themselves: no id comes twice.
#[tokio::test]
async fn steady_members_work_while_processes_with_ever_new_ids_keep_crashing() {
    let server = Server::start().await;
    let (lives, worked) = trouble(&server, |life| format!("crashing-{life}")).await;
    assert!(worked >= 0.95, "{worked}");
    assert!(lives > 20, "nobody is kept out: {lives} lives");
    // Whoever stays gets its share.
    let stays = Member::start(server.address(), GROUP, "stays");
    is_one_of_20(&server, &stays).await;
}

#[tokio::test]
async fn steady_members_of_a_slot_group_work_while_ever_new_processes_keep_crashing() {
    let server = Server::start().await;
    server
        .admin()
        .configure(GROUP, &json!({"numbering": "slots"}))
        .await;
    let (lives, worked) = trouble(&server, |life| format!("crashing-{life}")).await;
    assert!(worked >= 0.95, "{worked}");
    assert!(lives > 20, "nobody is kept out: {lives} lives");
}

#[tokio::test]
async fn a_client_that_is_put_off_knows_why_and_until_when_and_so_does_the_operator() {
    let server = Server::start().await;
    let steady = Member::start(server.address(), GROUP, "steady");
    let mut events = server.admin().events().await;
    for _ in 0..4 {
        let mut dying = Member::start(server.address(), GROUP, "dying");
        numbered(&[&steady, &dying]).await;
        dying.signal(Signal::KILL);
        dying.ended().await;
        numbered(&[&steady]).await;
    }
    // The second delay is of two seconds: this one has given up before.
    let mut hasty = Options::new(server.address(), GROUP, "dying")
        .flag("--connect-timeout-ms", "700")
        .start();
    let why = hasty.failure().await;
    assert!(why.contains("died several times within a minute"), "{why}");
    let seconds = why
        .split("again in ")
        .nth(1)
        .and_then(|text| text.split(' ').next());
    let seconds: f64 = seconds.unwrap_or_else(|| panic!("{why}")).parse().unwrap();
    assert!((0.1..=2.0).contains(&seconds), "{why}");
    hasty.ended().await;

    let delayed = events.until("delayed").await;
    assert_eq!(
        (&delayed["group"], &delayed["client_id"]),
        (&json!(GROUP), &json!("dying"))
    );
    assert!(
        delayed["retry_after_ms"].as_u64().is_some_and(|ms| ms > 0),
        "{delayed}"
    );
    assert!(
        server
            .admin()
            .metric("skyschedule_delayed_joins_total")
            .await
            > 0.0
    );
    assert!(
        server.logged("is let in only after a delay"),
        "{}",
        server.log()
    );

    let dying = Member::start(server.address(), GROUP, "dying");
    numbered(&[&steady, &dying]).await;
}
