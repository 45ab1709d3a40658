//! A member's share moves away while it stays connected, and comes back.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use skyschedule_common::env;
use skyschedule_tests::member::{Event, Member, Options, PATIENCE};
use skyschedule_tests::numbering::{covered, numbered};
use skyschedule_tests::server::Server;

const GROUP: &str = "1000";

/// A group of three members, with more settings.
async fn group(settings: Value) -> (Server, Vec<Member>) {
    let server = Server::start().await;
    server.admin().configure(GROUP, &settings).await;
    let consistency = settings["consistency"].as_str().unwrap_or("available");
    let start = |at| {
        Options::new(server.address(), GROUP, &format!("client-{at}"))
            .flag("--consistency", consistency)
            .start()
    };
    let members: Vec<Member> = (0..3).map(start).collect();
    covered(&members.iter().collect::<Vec<_>>()).await;
    (server, members)
}

/// Waits until a member is shown as wanted.
async fn shown(server: &Server, id: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = env::now() + PATIENCE;
    loop {
        let member = server.admin().member(GROUP, id).await.unwrap_or_default();
        if wanted(&member) {
            return member;
        }
        assert!(env::now() < deadline, "{id} is shown as {member}");
        env::sleep(Duration::from_millis(5)).await;
    }
}

fn drained(member: &Value) -> bool {
    member["state"] == "draining" && member["numbers"] == json!([])
}

/// One of its own rows.
fn row_of(member: &Member) -> i64 {
    let numbers = member.rows().share().unwrap();
    numbers.numbers().first().unwrap().into()
}

#[tokio::test]
async fn a_drained_members_rows_go_to_the_others_and_it_stays_connected() {
    let (server, mut members) = group(json!({})).await;
    let membership = members[1].membership();
    let (status, answer) = server.admin().drain(GROUP, "client-1").await;
    assert_eq!((status, &answer["state"]), (200, &json!("draining")));
    numbered(&[&members[0], &members[2]]).await;
    let member = shown(&server, "client-1", drained).await;
    assert!(member["address"].is_string(), "it is connected: {member}");
    assert_eq!(member["pending_since_ms"], Value::Null, "it owes nothing");
    assert!(!members[1].begin(0).await && !members[1].begin(1).await);
    assert_eq!(members[1].membership(), membership, "and is a member");
}

/// It takes the operator's word over a restart of the server, and over its own connection's end.
#[tokio::test]
async fn a_drain_outlives_the_server_and_the_connection() {
    let (mut server, mut members) = group(json!({})).await;
    // It was drained by its user before, who took that back.
    members[1].tell("drain 1").await;
    shown(&server, "client-1", drained).await;
    members[1].tell("drain 0").await;
    numbered(&members.iter().collect::<Vec<_>>()).await;
    let heard = |member: &Value| {
        member["heartbeat_age_ms"]
            .as_u64()
            .is_some_and(|ms| ms < 1_000)
    };
    shown(&server, "client-1", heard).await;
    let (status, _) = server.admin().drain(GROUP, "client-1").await;
    assert_eq!(status, 200);
    shown(&server, "client-1", drained).await;
    server.kill().await;
    server.restart().await;
    let connected = |member: &Value| member["heartbeat_age_ms"].is_u64();
    for id in ["client-0", "client-1", "client-2"] {
        shown(&server, id, connected).await;
    }
    numbered(&[&members[0], &members[2]]).await;
    let member = shown(&server, "client-1", connected).await;
    assert!(drained(&member), "{member}");
    // Also new settings, which every client is welcomed with anew, take nothing back.
    server
        .admin()
        .configure(GROUP, &json!({"settle_ms": 30}))
        .await;
    let pulled = |event: &Event| matches!(event, Event::Pulled { .. }).then_some(());
    members[1].ask("pull", pulled).await;
    assert!(drained(&shown(&server, "client-1", connected).await));
}

#[tokio::test]
async fn the_client_takes_a_drain_back_whoever_drained_it() {
    let (server, mut members) = group(json!({})).await;
    for _ in 0..2 {
        server.admin().drain(GROUP, "client-1").await;
        shown(&server, "client-1", drained).await;
        members[1].tell("drain 0").await;
        numbered(&members.iter().collect::<Vec<_>>()).await;
        shown(&server, "client-1", |member| member["state"] == "active").await;
    }
    members[1].tell("drain 1").await;
    numbered(&[&members[0], &members[2]]).await;
    shown(&server, "client-1", drained).await;
}

#[tokio::test]
async fn a_new_process_of_a_drained_client_is_not_drained() {
    // Nothing is kept for a client that had to go.
    let (server, mut members) = group(json!({"rejoin_grace_ms": 5_000})).await;
    server.admin().drain(GROUP, "client-1").await;
    numbered(&[&members[0], &members[2]]).await;
    members[1].signal(Signal::TERM);
    members[1].closed().await;
    members[1] = Member::start(server.address(), GROUP, "client-1");
    numbered(&members.iter().collect::<Vec<_>>()).await;
    shown(&server, "client-1", |member| member["state"] == "active").await;
}

#[tokio::test]
async fn a_member_that_does_not_finish_is_shown_with_how_long_it_has_been() {
    let (server, mut members) =
        group(json!({"numbering": "slots", "slots": 16, "consistency": "exclusive"})).await;
    let row = row_of(&members[1]);
    assert!(members[1].begin(row).await);
    let (done, text) = server.command(&["drain", GROUP, "client-1"]).await;
    assert!(
        done && text.starts_with("client-1 drains and holds "),
        "{text}"
    );
    let long = |member: &Value| {
        member["pending_since_ms"]
            .as_u64()
            .is_some_and(|ms| ms >= 300)
    };
    let member = shown(&server, "client-1", long).await;
    assert_eq!(member["state"], "draining");
    assert_eq!(
        member["numbers"],
        json!([[row, row]]),
        "all but the slot that it works on has moved"
    );
    let (done, table) = server.command(&["members", GROUP]).await;
    let line = table
        .lines()
        .find(|line| line.trim_start().starts_with("client-1"))
        .unwrap();
    assert!(done && line.contains("draining"), "{table}");
    assert!(line.trim_end().ends_with(" s"), "for so long: {table}");
    assert!(table.contains("PENDING"), "{table}");

    members[1].end(row).await;
    covered(&[&members[0], &members[2]]).await;
    let member = shown(&server, "client-1", drained).await;
    assert_eq!(member["pending_since_ms"], Value::Null);
    let (_, text) = server.command(&["drain", GROUP, "client-1"]).await;
    assert_eq!(text, "client-1 drains and holds nothing\n");
}

#[tokio::test]
async fn an_overtaken_member_is_shown_until_it_has_finished() {
    let (server, mut members) = group(json!({"drain_timeout_ms": 100})).await;
    let row = row_of(&members[1]);
    assert!(members[1].begin(row).await);
    server.admin().drain(GROUP, "client-1").await;
    numbered(&[&members[0], &members[2]]).await;
    let member = shown(&server, "client-1", drained).await;
    assert!(
        member["pending_since_ms"].is_u64(),
        "it still works: {member}"
    );
    assert!(server.admin().metric("skyschedule_overtaken_total").await > 0.0);
    members[1].end(row).await;
    shown(&server, "client-1", |member| {
        member["pending_since_ms"].is_null()
    })
    .await;
}

#[tokio::test]
async fn a_drained_member_that_never_finishes_is_fenced_in_an_exclusive_group() {
    let settings = json!({
        "consistency": "exclusive", "lease_ms": 2_000, "drain_timeout_ms": 200, "max_drain_ms": 500,
    });
    let (server, mut members) = group(settings).await;
    let row = row_of(&members[1]);
    assert!(members[1].begin(row).await);
    server.admin().drain(GROUP, "client-1").await;
    numbered(&[&members[0], &members[2]]).await;
    assert!(server.admin().metric("skyschedule_fenced_total").await > 0.0);
}

#[tokio::test]
async fn when_the_only_member_drains_its_rows_are_nobodys_and_that_is_shown() {
    let server = Server::start().await;
    let slots = json!({"numbering": "slots", "slots": 16});
    server.admin().configure("slotted", &slots).await;
    for (group, total) in [(GROUP, 0), ("slotted", 16)] {
        let only = Member::start(server.address(), group, "only");
        only.has_rows().await;
        server.admin().drain(group, "only").await;
        only.rows_that("it has nothing", |rows| {
            rows.share().is_some_and(|share| share.is_empty()) || rows.shares.is_empty()
        })
        .await;
        let deadline = env::now() + PATIENCE;
        loop {
            let shown = server.admin().group(group).await.unwrap();
            if shown["members"][0]["numbers"] == json!([]) {
                assert_eq!(shown["members"][0]["state"], "draining");
                assert_eq!(shown["total"], total);
                break;
            }
            assert!(env::now() < deadline, "{shown}");
        }
        let other = Member::start(server.address(), group, "other");
        covered(&[&other]).await;
    }
}

#[tokio::test]
async fn who_is_no_member_cannot_be_drained() {
    let (server, mut members) = group(json!({"rejoin_grace_ms": 5_000})).await;
    for (group, client) in [("none", "client-1"), (GROUP, "client-9")] {
        let (status, answer) = server.admin().drain(group, client).await;
        assert_eq!(status, 404, "{answer}");
        let (done, text) = server.command(&["drain", group, client]).await;
        assert_eq!(
            (done, text),
            (false, format!("group {group} has no member {client}\n"))
        );
    }
    // One that left and may come back is none either.
    members[1].signal(Signal::TERM);
    members[1].closed().await;
    assert_eq!(server.admin().drain(GROUP, "client-1").await.0, 404);
}
