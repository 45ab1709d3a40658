//! Pauses, cut networks and blocked handlers: what a lease survives, and what it does not.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use skyschedule_common::env;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::protocol::messages::{ClientMessage, ServerMessage};
use skyschedule_tests::member::{Event, Member, Options};
use skyschedule_tests::numbering::{numbered, settled};
use skyschedule_tests::peer::{Peer, Welcomed};
use skyschedule_tests::proxy::{Direction, Flow, Proxy};
use skyschedule_tests::server::Server;

const GROUP: &str = "1000";
const LEASE: Duration = Duration::from_secs(2);

/// A member renews its lease three times while it lasts.
const HEARTBEAT: Duration = Duration::from_millis(667);

/// How much later than the lease the others may be renumbered: ten times what is aimed at.
const SLACK: Duration = Duration::from_secs(10);

async fn server() -> Server {
    let server = Server::start().await;
    server.admin().short_leases(GROUP).await;
    server
}

async fn exclusive_server(trust_fin: bool) -> Server {
    let server = Server::start().await;
    let settings = json!({
        "consistency": "exclusive", "trust_fin": trust_fin, "lease_ms": 2_000, "drain_timeout_ms": 1_000,
    });
    server.admin().configure(GROUP, &settings).await;
    server
}

#[tokio::test]
async fn a_paused_client_is_dropped_at_the_end_of_its_lease_and_begins_nothing_when_it_wakes() {
    let server = server().await;
    let (a, mut b, c) = (
        Member::start(server.address(), GROUP, "a"),
        Member::start(server.address(), GROUP, "b"),
        Member::start(server.address(), GROUP, "c"),
    );
    numbered(&[&a, &b, &c]).await;
    let old = b.membership_other_than(None).await;
    let row = i64::from(b.rows().node.unwrap().1);

    let paused = b.signal(Signal::STOP);
    let without = numbered(&[&a, &c]).await;
    println!(
        "renumbered {:?} after the pause began",
        without.after(paused)
    );
    assert!(
        without.after(paused) > LEASE - HEARTBEAT - Duration::from_millis(100),
        "a lease is kept"
    );
    assert!(
        without.after(paused) < LEASE + SLACK,
        "{:?}",
        without.after(paused)
    );

    // It is asked to begin a row before it can hear that it was dropped.
    b.tell(&format!("begin {row}")).await;
    b.signal(Signal::CONT);
    let epoch = b
        .wait_for("it answers", |events| {
            events.iter().find_map(|event| match event {
                Event::Begun { epoch, .. } => Some(epoch.clone()),
                _ => None,
            })
        })
        .await;
    if let Some(epoch) = epoch {
        let reached = without
            .rows
            .iter()
            .filter_map(|rows| rows.epoch.as_ref()?.parse::<u64>().ok())
            .max();
        assert!(
            epoch.parse::<u64>().ok() > reached,
            "it began a row of a share that was taken from it: epoch {epoch}, others have {reached:?}"
        );
    }

    // It comes back as another member, and works on.
    let new = b.membership_other_than(Some(&old)).await;
    assert_ne!(new, old);
    numbered(&[&a, &b, &c]).await;
}

#[tokio::test]
async fn a_pause_shorter_than_the_lease_moves_nothing() {
    let server = server().await;
    let (a, b) = (
        Member::start(server.address(), GROUP, "a"),
        Member::start(server.address(), GROUP, "b"),
    );
    let before = settled(&[&a, &b]).await;
    b.signal(Signal::STOP);
    env::sleep(LEASE - HEARTBEAT - Duration::from_millis(500)).await;
    b.signal(Signal::CONT);
    // Longer than the lease that began before the pause.
    env::sleep(LEASE).await;
    let after = settled(&[&a, &b]).await;
    for (before, after) in before.rows.iter().zip(&after.rows) {
        assert_eq!(before.epoch, after.epoch);
    }
}

/// Heartbeats share no thread with user code.
#[tokio::test]
async fn a_handler_that_blocks_its_runtime_costs_no_lease() {
    let server = server().await;
    let (a, mut b) = (
        Member::start(server.address(), GROUP, "a"),
        Member::start(server.address(), GROUP, "b"),
    );
    let before = settled(&[&a, &b]).await;
    let membership = b.membership_other_than(None).await;
    b.tell("block 5000").await;
    b.wait_for("it is unblocked", |events| {
        events
            .iter()
            .any(|event| matches!(event, Event::Unblocked { .. }))
            .then_some(())
    })
    .await;
    let (mode, left) = b
        .ask("inspect", |event| match event {
            Event::Inspection {
                mode,
                lease_left_ms,
                ..
            } => Some((mode.clone(), *lease_left_ms)),
            _ => None,
        })
        .await;
    assert_eq!(mode, "leased");
    assert!(left > 0);
    assert_eq!(b.membership(), Some(membership));
    let after = settled(&[&a, &b]).await;
    assert_eq!(before.rows[0].epoch, after.rows[0].epoch);
    assert_eq!(before.rows[1].epoch, after.rows[1].epoch);
}

/// The reference system keeps a half-open client for ever.
#[tokio::test]
async fn a_half_open_client_is_dropped_at_the_end_of_its_lease_and_comes_back() {
    let server = server().await;
    let proxy = Proxy::start(server.address()).await;
    let a = Member::start(server.address(), GROUP, "a");
    let b = Member::start(proxy.address(), GROUP, "b");
    settled(&[&a, &b]).await;
    let old = b.membership_other_than(None).await;

    let cut = env::now().as_nanos();
    proxy.admit(false);
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.set(direction, Flow::Stall);
    }
    let without = numbered(&[&a]).await;
    assert!(
        without.after(cut) < LEASE + SLACK,
        "{:?}",
        without.after(cut)
    );
    // Promise 3: no server answers, so it works on with the rows that it had.
    let alone = b
        .rows_that("it works on alone", |rows| rows.mode == "autonomous")
        .await;
    assert_eq!(alone.node.map(|node| node.0), Some(2));
    // Its connection is closed, too.
    let deadline = env::now() + 3 * LEASE + SLACK;
    while server.admin().metric("skyschedule_connections").await > 1.0 {
        assert!(
            env::now() < deadline,
            "the server keeps the half-open connection"
        );
        env::sleep(Duration::from_millis(100)).await;
    }

    proxy.admit(true);
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.set(direction, Flow::Pass);
    }
    b.membership_other_than(Some(&old)).await;
    numbered(&[&a, &b]).await;
}

/// What it sends on one connection is lost on the way, and nothing tells it so.
#[tokio::test]
async fn a_connection_that_went_deaf_is_replaced() {
    let server = server().await;
    let proxy = Proxy::start(server.address()).await;
    let a = Member::start(server.address(), GROUP, "a");
    let b = Member::start(proxy.address(), GROUP, "b");
    let before = settled(&[&a, &b]).await;
    let deaf = proxy.links().pop().unwrap();
    deaf.set(Direction::ToServer, Flow::Discard);
    let deadline = env::now() + LEASE + SLACK;
    while deaf.is_open() {
        assert!(env::now() < deadline, "{b}");
        env::sleep(Duration::from_millis(20)).await;
    }
    // In time: its membership goes on over another connection, and nothing moves.
    let after = settled(&[&a, &b]).await;
    assert_eq!(before.rows[0].epoch, after.rows[0].epoch);
    assert_eq!(before.rows[1].epoch, after.rows[1].epoch);
}

#[tokio::test]
async fn nobody_stands_still_while_it_is_open_whether_another_one_died() {
    let server = Server::start().await;
    let settings = json!({ "lease_ms": 12_000, "reset_grace_ms": 4_000 });
    server.admin().configure(GROUP, &settings).await;
    let proxy = Proxy::start(server.address()).await;
    let a = Member::start(server.address(), GROUP, "a");
    let b = Member::start(proxy.address(), GROUP, "b");
    settled(&[&a, &b]).await;

    // Its end proves nothing behind a proxy, and a barrier for the newcomer would wait for it.
    let killed = b.signal(Signal::KILL);
    let c = Member::start(server.address(), GROUP, "c");
    let without = numbered(&[&a, &c]).await;
    assert!(without.after(killed) > Duration::from_millis(3_900));
    let history = a.history();
    let pauses = history
        .windows(2)
        .filter(|rows| rows[0].shares.is_empty())
        .map(|rows| Duration::from_nanos(rows[1].at - rows[0].at));
    let longest = pauses.max().unwrap();
    assert!(longest < Duration::from_secs(2), "{longest:?}: {history:?}");
}

#[tokio::test]
async fn behind_a_proxy_the_end_of_a_connection_is_only_a_hint() {
    let server = Server::start().await;
    let settings = json!({ "lease_ms": 12_000, "reset_grace_ms": 1_500 });
    server.admin().configure(GROUP, &settings).await;
    let proxy = Proxy::start(server.address()).await;
    let a = Member::start(server.address(), GROUP, "a");
    let b = Member::start(proxy.address(), GROUP, "b");
    let before = settled(&[&a, &b]).await;
    let membership = b.membership_other_than(None).await;

    // It lives, and only its connections end: it is heard again in time, and nothing moves.
    for link in proxy.links() {
        link.set(Direction::ToServer, Flow::Fin);
    }
    env::sleep(Duration::from_millis(500)).await;
    for link in proxy.links() {
        link.reset();
    }
    env::sleep(Duration::from_millis(2_500)).await;
    let after = settled(&[&a, &b]).await;
    assert_eq!(before.rows[0].epoch, after.rows[0].epoch);
    assert_eq!(before.rows[1].epoch, after.rows[1].epoch);
    assert_eq!(b.membership(), Some(membership));

    // It dies: it is not heard again, and after the grace, long before the end of its lease, it is dropped.
    let killed = b.signal(Signal::KILL);
    let without = numbered(&[&a]).await;
    assert!(
        without.after(killed) > Duration::from_millis(1_400),
        "{:?}",
        without.after(killed)
    );
    assert!(
        without.after(killed) < Duration::from_secs(7),
        "{:?}",
        without.after(killed)
    );
}

#[tokio::test]
async fn a_slow_network_costs_no_lease() {
    let server = server().await;
    let proxy = Proxy::start(server.address()).await;
    let a = Member::start(server.address(), GROUP, "a");
    let b = Member::start(proxy.address(), GROUP, "b");
    let before = settled(&[&a, &b]).await;
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.set(direction, Flow::Delay(Duration::from_millis(300)));
    }
    env::sleep(2 * LEASE).await;
    let after = settled(&[&a, &b]).await;
    assert_eq!(before.rows[1].epoch, after.rows[1].epoch);
}

/// A server that was restored from a backup knows less than its members, who must not go on with what they know.
#[tokio::test]
async fn a_member_that_knows_a_later_share_is_told_another_before_its_lease_is_renewed() {
    let server = server().await;
    let (mut peer, welcomed) = Peer::member(server.address(), GROUP, "a").await;
    let Welcomed {
        membership, epoch, ..
    } = welcomed;
    let later = Epoch::quorum(epoch.quorum + 7);
    peer.send(ClientMessage::Heartbeat {
        membership,
        seq: 1,
        epoch: later,
        load: None,
    })
    .await;
    let mut newest = epoch;
    loop {
        match peer.receive().await.unwrap() {
            ServerMessage::Told { epoch, .. } => newest = newest.max(epoch),
            ServerMessage::Alive { seq, .. } => {
                assert_eq!(seq, 1);
                assert!(newest > later, "renewed with {later}, told {newest}");
                return;
            }
            _ => {}
        }
    }
}

/// One of two members of an exclusive group is killed; the other one then has all rows.
async fn rows_of_a_killed_client_are_given_out_after(trust_fin: bool) -> Duration {
    let server = exclusive_server(trust_fin).await;
    let start = |id| {
        Options::new(server.address(), GROUP, id)
            .flag("--consistency", "exclusive")
            .start()
    };
    let (a, b) = (start("a"), start("b"));
    numbered(&[&a, &b]).await;
    let killed = b.signal(Signal::KILL);
    numbered(&[&a]).await.after(killed)
}

/// Only goodbye or a lease that is over frees a share: a FIN may come from somebody between.
#[tokio::test]
async fn in_an_exclusive_group_a_killed_client_is_waited_for_until_its_lease_is_over() {
    let after = rows_of_a_killed_client_are_given_out_after(false).await;
    let least = LEASE - HEARTBEAT - Duration::from_millis(100);
    assert!(after > least && after < LEASE + SLACK, "{after:?}");
}

#[tokio::test]
async fn an_exclusive_group_may_trust_the_end_of_a_direct_connection() {
    let after = rows_of_a_killed_client_are_given_out_after(true).await;
    assert!(after < Duration::from_secs(1), "{after:?}");
}

/// What a paused handler does cannot be stopped, but the row is revoked before the next one is begun.
#[tokio::test]
async fn in_an_exclusive_group_the_rows_of_a_paused_client_are_revoked() {
    let server = exclusive_server(false).await;
    let start = |id| {
        Options::new(server.address(), GROUP, id)
            .flag("--consistency", "exclusive")
            .start()
    };
    let (a, mut b) = (start("a"), start("b"));
    numbered(&[&a, &b]).await;
    let row = i64::from(b.rows().node.unwrap().1);
    assert!(b.begin(row).await);
    b.signal(Signal::STOP);
    numbered(&[&a]).await;
    b.signal(Signal::CONT);
    let revoked = b
        .ask(&format!("end {row}"), |event| match event {
            Event::Ended { revoked, .. } => Some(*revoked),
            _ => None,
        })
        .await;
    assert!(revoked);
    numbered(&[&a, &b]).await;
}
