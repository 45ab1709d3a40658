//! Servers that follow and carry clients on to the one that leads, for clients that are not honest, too.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use skyschedule_common::env;
use skyschedule_common::protocol::MAGIC;
use skyschedule_common::protocol::messages::{ClientMessage, Code, PeerHello, ServerMessage};
use skyschedule_tests::cluster::Cluster;
use skyschedule_tests::peer::{Peer, hello, login, message};
use skyschedule_tests::scene::{LOGIN_DEADLINE, SLACK};
use skyschedule_tests::server::{PASSWORD, Server, USER};

const GROUP: &str = "1000";
const LEASE: Duration = Duration::from_secs(4);

/// Three servers, and the places of the one that leads and of one that follows.
async fn servers() -> (Cluster, usize, usize) {
    let mut cluster = Cluster::prepared();
    for server in &mut cluster.servers {
        server.flag("--max-connections", "40");
        server.launch();
    }
    cluster.ready().await;
    let leader = cluster.leader().await;
    (cluster, leader, (leader + 1) % 3)
}

/// Asks this server to be carried on; the refusal, if it refuses.
async fn ask(to: SocketAddr) -> Result<Peer, (Code, String)> {
    let mut peer = Peer::authenticated(to).await;
    peer.send(ClientMessage::Relay).await;
    match peer.receive().await {
        Some(ServerMessage::Relaying) => Ok(peer),
        Some(ServerMessage::Refused(refusal)) => Err((refusal.code, refusal.text.to_string())),
        other => panic!("{other:?} in answer to a relay"),
    }
}

/// Carried on, and known to the leader.
async fn carried(to: SocketAddr) -> Peer {
    let mut peer = ask(to).await.unwrap();
    let known = peer.authenticate(USER, PASSWORD).await;
    known.unwrap();
    peer
}

fn refused(said: &[ServerMessage]) -> Option<Code> {
    match said.last() {
        Some(ServerMessage::Refused(refusal)) => Some(refusal.code),
        _ => None,
    }
}

#[tokio::test]
async fn a_relayed_client_is_a_member_like_any_other_but_the_end_of_its_connection_proves_nothing()
{
    let (cluster, leader, follower) = servers().await;
    let admin = cluster.servers[leader].admin();
    let settings = json!({ "lease_ms": 4_000, "drain_timeout_ms": 1_000, "reset_grace_ms": 0 });
    admin.configure(GROUP, &settings).await;
    let mut peer = carried(cluster.servers[follower].address()).await;
    peer.send(ClientMessage::Login(Box::new(login(GROUP, "far"))))
        .await;
    let welcomed = peer.attach().await;
    peer.heartbeat(welcomed.membership, 1, welcomed.epoch).await;
    let carrying = cluster.servers[follower].admin();
    assert_eq!(carrying.metric("skyschedule_relays").await, 1.0);
    assert_eq!(carrying.metric("skyschedule_relayed_total").await, 1.0);
    cluster.servers[follower]
        .until_logged("carries a client on to the leader")
        .await;

    // Over a direct connection either end would be its death within milliseconds.
    let heard = env::now();
    drop(peer);
    while carrying.metric("skyschedule_relays").await > 0.0 {
        assert!(heard.elapsed() < SLACK, "the relay has not ended");
        env::sleep(Duration::from_millis(10)).await;
    }
    while admin.members(GROUP).await == ["far"] {
        assert!(heard.elapsed() < LEASE + SLACK, "it is never given up");
        env::sleep(Duration::from_millis(20)).await;
    }
    assert!(heard.elapsed() > LEASE, "{:?}", heard.elapsed());
    assert_eq!(cluster.leader().await, leader, "the test needs one leader");
}

#[tokio::test]
async fn who_asks_for_a_relay_that_cannot_be_gets_a_clear_answer_and_costs_nobody_anything() {
    let (cluster, leader, follower) = servers().await;
    let [at_leader, at_follower] = [leader, follower].map(|at| cluster.servers[at].address());
    let honest = cluster.member("2000", "honest").start();
    honest.has_rows().await;

    // Where it leads nowhere.
    let (code, text) = ask(at_leader).await.unwrap_err();
    assert_eq!(code, Code::NO_RELAY);
    assert!(text.contains("leads itself"), "{text}");
    let alone = Server::start().await;
    let (code, text) = ask(alone.address()).await.unwrap_err();
    assert_eq!(code, Code::NO_RELAY);
    assert!(text.contains("alone"), "{text}");

    // A relay of a relay; another replica's words, and the announcement, over one.
    let mut peer = carried(at_follower).await;
    peer.send(ClientMessage::Relay).await;
    let said = peer.ended_within(SLACK).await;
    assert_eq!(refused(&said), Some(Code::NO_RELAY), "{said:?}");
    let replica = PeerHello {
        magic: MAGIC,
        version: 1,
        from: 2,
        to: 1,
        nonce: [7; 32],
    };
    for words in [
        ClientMessage::Peer(replica),
        ClientMessage::Relayed { by: 3 },
    ] {
        let mut peer = ask(at_follower).await.expect("it is carried on");
        peer.send(words).await;
        let said = peer.ended_within(SLACK).await;
        assert_eq!(refused(&said), Some(Code::PROTOCOL), "{said:?}");
    }

    // The announcement of who is no server of this cluster, or is one elsewhere.
    for by in [leader, 9].map(|by| u16::try_from(by + 1).unwrap()) {
        let mut peer = Peer::connect(at_leader).await;
        peer.send(ClientMessage::Relayed { by }).await;
        let said = peer.ended_within(SLACK).await;
        assert_eq!(refused(&said), Some(Code::NO_RELAY), "{by}: {said:?}");
    }

    // Who has not proven anything, at either end.
    let mut peer = Peer::connect(at_follower).await;
    peer.send(ClientMessage::Hello(hello())).await;
    peer.send(ClientMessage::Relay).await;
    let said = peer.ended_within(SLACK).await;
    assert_eq!(refused(&said), Some(Code::PROTOCOL), "{said:?}");
    let mut peer = ask(at_follower).await.expect("it is carried on");
    let refusal = peer.authenticate(USER, "no password").await.unwrap_err();
    assert_eq!(refusal.code, Code::CREDENTIALS);

    // Many, that say nothing then: a quarter of the connections, and no longer than a login may take.
    let mut silent = Vec::new();
    let text = loop {
        match ask(at_follower).await {
            Ok(peer) => silent.push(peer),
            Err((code, text)) => {
                assert_eq!(code, Code::TOO_MANY);
                break text;
            }
        }
    };
    assert!(text.contains("as many clients"), "{text}");
    assert!((1..=10).contains(&silent.len()), "{}", silent.len());
    let newcomer = cluster.member("2000", "newcomer").start();
    newcomer.has_rows().await;
    for peer in silent {
        let said = peer.ended_within(LOGIN_DEADLINE + SLACK).await;
        assert_eq!(refused(&said), Some(Code::DEADLINE), "{said:?}");
    }
    // A flood, and away: it counts until the leader has read it, and that reads no flood without end.
    let mut flood = carried(at_follower).await;
    flood
        .send(ClientMessage::Login(Box::new(login("3000", "flood"))))
        .await;
    let pings = message(&ClientMessage::Ping { seq: 1 }).repeat(5_000);
    assert!(flood.try_send_bytes(&pings).await);
    // Time for the server between to pass all on.
    env::sleep(Duration::from_millis(700)).await;
    drop(flood);
    let gone = env::now();
    let carrying = cluster.servers[follower].admin();
    while carrying.metric("skyschedule_relays").await > 0.0 {
        assert!(gone.elapsed() < SLACK + Duration::from_secs(10));
        env::sleep(Duration::from_millis(50)).await;
    }
    assert!(
        gone.elapsed() > Duration::from_secs(2),
        "{:?}",
        gone.elapsed()
    );
    drop(carried(at_follower).await);
    let leased = honest.history().into_iter();
    let mut since = leased.skip_while(|rows| !rows.is_leased());
    assert!(since.all(|rows| rows.is_leased()), "{honest}");
}
