//! Clients work on rows while all kinds of things happen: no row is worked on by two at a time, and none is
//! left alone for long.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use skyschedule_common::env;
use skyschedule_tests::ledger::Ledger;
use skyschedule_tests::member::{Member, Options};
use skyschedule_tests::numbering::{covered, numbered};
use skyschedule_tests::server::Server;

const GROUP: &str = "1000";
const KEYS: i64 = 24;

/// Beyond what is promised: reading clocks and printing lines takes its time on a busy machine.
const SLACK: Duration = Duration::from_secs(3);

fn worker(server: &Server, id: &str, promise: &str) -> Member {
    Options::new(server.address(), GROUP, id)
        .flag("--consistency", promise)
        .flag("--keys", &KEYS.to_string())
        .flag("--work-ms", "4")
        .start()
}

async fn pause(millis: u64) {
    env::sleep(Duration::from_millis(millis)).await;
}

fn now() -> u64 {
    env::now().as_nanos()
}

#[tokio::test]
async fn while_clients_join_leave_and_die_each_row_has_one_worker_and_none_is_left_alone() {
    let server = Server::start().await;
    server.admin().short_leases(GROUP).await;
    let start = |id: &str| worker(&server, id, "available");
    let mut ledger = Ledger::default();
    let (a, mut b, mut c) = (start("a"), start("b"), start("c"));
    numbered(&[&a, &b, &c]).await;
    let begin = now();
    pause(300).await;
    let (d, e) = (start("d"), start("e"));
    numbered(&[&a, &b, &c, &d, &e]).await;
    pause(300).await;
    b.signal(Signal::TERM);
    pause(20).await;
    let killed = c.signal(Signal::KILL);
    b.closed().await;
    c.ended().await;
    numbered(&[&a, &d, &e]).await;
    pause(300).await;
    // A deploy: each is replaced, one after the other, by a new process of the same name.
    let mut replaced = Vec::new();
    for mut old in [a, d, e] {
        old.signal(Signal::TERM);
        old.closed().await;
        let new = start(old.id());
        new.has_rows().await;
        replaced.push((old, new));
    }
    let present: Vec<&Member> = replaced.iter().map(|(_, new)| new).collect();
    numbered(&present).await;
    pause(300).await;
    let end = now();

    ledger.add(&b, &[]);
    ledger.add(&c, &[killed]);
    for (old, new) in &replaced {
        ledger.add(old, &[]);
        ledger.add(new, &[end]);
    }
    println!("{} executions", ledger.len());
    assert!(ledger.len() > 500, "they worked: {}", ledger.len());
    assert_eq!(ledger.overlaps(), []);
    assert_eq!(ledger.epochs_that_go_back(), []);
    let idle = ledger.longest_idle(KEYS, begin, end);
    println!("a row was left alone for {idle:?} at most");
    assert!(idle < SLACK, "{idle:?}");
}

#[tokio::test]
async fn in_an_exclusive_group_pauses_kills_and_restarts_of_the_server_give_no_row_two_workers() {
    let mut server = Server::start().await;
    let settings =
        json!({ "consistency": "exclusive", "lease_ms": 2_000, "drain_timeout_ms": 1_000 });
    server.admin().configure(GROUP, &settings).await;
    let start = |server: &Server, id: &str| worker(server, id, "exclusive");
    let mut ledger = Ledger::default();
    let (a, b, mut c) = (
        start(&server, "a"),
        start(&server, "b"),
        start(&server, "c"),
    );
    numbered(&[&a, &b, &c]).await;
    pause(200).await;
    let begin = now();

    let paused = b.signal(Signal::STOP);
    covered(&[&a, &c]).await;
    pause(200).await;
    b.signal(Signal::CONT);
    numbered(&[&a, &b, &c]).await;

    server.kill().await;
    let killed = c.signal(Signal::KILL);
    c.ended().await;
    server.restart().await;
    covered(&[&a, &b]).await;
    pause(300).await;
    let end = now();

    ledger.add(&a, &[end]);
    ledger.add(&b, &[paused, end]);
    ledger.add(&c, &[killed]);
    println!("{} executions", ledger.len());
    assert!(ledger.len() > 300, "they worked: {}", ledger.len());
    assert_eq!(ledger.overlaps(), []);
    assert_eq!(ledger.epochs_that_go_back(), []);
    // One lease for the pause; for the kill one lease from the moment at which the server is back.
    let idle = ledger.longest_idle(KEYS, begin, end);
    println!("a row was left alone for {idle:?} at most");
    assert!(idle < Duration::from_secs(2) + SLACK, "{idle:?}");
}

/// Available groups wait for nobody longer than `drain_timeout`: what is overtaken may run twice, and is counted.
#[tokio::test]
async fn a_handler_that_takes_longer_than_the_drain_timeout_is_overtaken() {
    let server = Server::start().await;
    server.admin().short_leases(GROUP).await;
    let mut slow = Member::start(server.address(), GROUP, "slow");
    numbered(&[&slow]).await;
    assert!(slow.begin(1).await);
    let start = now();
    let newcomer = Member::start(server.address(), GROUP, "newcomer");
    let numbering = numbered(&[&slow, &newcomer]).await;
    assert!(
        numbering.after(start) > Duration::from_millis(900),
        "{:?}",
        numbering.after(start)
    );
    assert!(
        numbering.after(start) < Duration::from_secs(10),
        "{:?}",
        numbering.after(start)
    );
    assert_eq!(
        server.admin().metric("skyschedule_overtaken_total").await,
        1.0
    );
    slow.end(1).await;
}

#[tokio::test]
async fn in_an_exclusive_group_a_slow_handler_is_waited_for() {
    let server = Server::start().await;
    let settings =
        json!({ "consistency": "exclusive", "lease_ms": 2_000, "drain_timeout_ms": 500 });
    server.admin().configure(GROUP, &settings).await;
    let member = |id| {
        Options::new(server.address(), GROUP, id)
            .flag("--consistency", "exclusive")
            .start()
    };
    let mut slow = member("slow");
    numbered(&[&slow]).await;
    assert!(slow.begin(1).await);
    let newcomer = member("newcomer");
    newcomer.membership_other_than(None).await;
    pause(2_500).await;
    assert!(newcomer.rows().shares.is_empty(), "{newcomer}");
    assert!(!slow.begin(0).await, "it begins nothing meanwhile");
    let released = slow.end(1).await;
    let numbering = numbered(&[&slow, &newcomer]).await;
    assert!(
        numbering.after(released) < Duration::from_secs(1),
        "{:?}",
        numbering.after(released)
    );
    assert_eq!(
        server.admin().metric("skyschedule_overtaken_total").await,
        0.0
    );
}
