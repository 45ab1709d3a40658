//! Strangers at a running server: each is closed within its deadline, the server's memory stays bounded, and
//! honest clients are numbered meanwhile as if nothing were.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail and print like the test itself"
)]

use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::future::join_all;
use skyschedule_common::env;
use skyschedule_common::protocol::messages::{ClientMessage, Code, ServerMessage};
use skyschedule_tests::peer::{Peer, connect_from, exchange, hello, login, message, read_to_end};
use skyschedule_tests::scene::{GROUP, LOGIN_DEADLINE, SLACK, Scene};
use skyschedule_tests::server::USER;
use tokio::io::AsyncWriteExt as _;

/// Connections that each begin with these bytes and send no more are closed, all at the same time.
async fn closes(scene: &Scene, beginnings: Vec<Vec<u8>>, within: Duration) {
    let connections = beginnings.into_iter().map(|bytes| async move {
        let mut stream = scene.stranger().await;
        // The server may have closed it already.
        let _ = stream.write_all(&bytes).await;
        read_to_end(&mut stream, within).await
    });
    join_all(connections).await;
}

fn random(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    env::rng::fill(&mut bytes);
    bytes
}

#[tokio::test]
async fn garbage_is_closed_at_the_latest_when_a_login_would_be_due() {
    let scene = Scene::new().await;
    let mut beginnings: Vec<Vec<u8>> = (0..200).map(|length| random(length * 7)).collect();
    beginnings.push(b"GET / HTTP/1.1\r\nHost: sky\r\n\r\n".to_vec());
    // The beginning of TLS, and of SSH.
    beginnings.push(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec());
    beginnings.push(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec());
    let start = env::now();
    let (_, ()) = tokio::join!(
        closes(&scene, beginnings, LOGIN_DEADLINE + SLACK),
        scene.numbers_a_newcomer()
    );
    println!("all closed after {:?}", start.elapsed());
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn a_frame_of_4_gib_and_other_impossible_lengths_are_refused_on_sight() {
    let scene = Scene::new().await;
    let lengths = [u32::MAX, 1 << 31, 1 << 20, 4_097, 0];
    let beginnings = lengths
        .iter()
        .map(|length| length.to_be_bytes().to_vec())
        .collect();
    closes(&scene, beginnings, LOGIN_DEADLINE / 2).await;

    // Also from a client that is logged in.
    for length in [u32::MAX, (1 << 20) + 1, 0] {
        let mut peer = Peer::logged_in(scene.server.address(), GROUP, "evil").await;
        peer.send_bytes(&length.to_be_bytes()).await;
        let said = peer.ended_within(LOGIN_DEADLINE / 2).await;
        assert!(
            matches!(said.last(), Some(ServerMessage::Refused(refusal)) if refusal.code == Code::PROTOCOL),
            "{said:?}"
        );
    }
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn half_frames_are_waited_for_no_longer_than_the_login_may_take() {
    let scene = Scene::new().await;
    let whole = message(&ClientMessage::Hello(hello()));
    let beginnings = (0..whole.len())
        .map(|length| whole[..length].to_vec())
        .collect();
    closes(&scene, beginnings, LOGIN_DEADLINE + SLACK).await;

    // What a frame announces costs nothing before it comes, also after the login.
    let mut announcing = Vec::new();
    for at in 0..100 {
        let mut peer = Peer::logged_in(scene.server.address(), GROUP, &format!("evil-{at}")).await;
        peer.send_bytes(&(1_u32 << 20).to_be_bytes()).await;
        peer.send_bytes(&random(1_000)).await;
        announcing.push(peer);
    }
    scene.numbers_a_newcomer().await;
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn slow_senders_get_no_more_time_than_others() {
    let scene = Scene::new().await;
    let trickle = |_| async {
        let mut stream = scene.stranger().await;
        let start = env::now();
        for byte in message(&ClientMessage::Hello(hello())).iter().cycle() {
            // They do not stop by themselves: the server must stop them.
            if stream.write_all(&[*byte]).await.is_err() {
                break;
            }
            env::sleep(Duration::from_millis(300)).await;
            assert!(
                start.elapsed() < LOGIN_DEADLINE + SLACK,
                "a slow sender is still connected"
            );
        }
    };
    let (_, ()) = tokio::join!(join_all((0..50).map(trickle)), scene.numbers_a_newcomer());
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn five_thousand_idle_connections_cost_little_and_are_closed() {
    let scene = Scene::new().await;
    let mut idle = Vec::new();
    for _ in 0..5_000 {
        idle.push(scene.stranger().await);
    }
    let connected = env::now();
    scene.numbers_a_newcomer().await;
    scene.memory_is_bounded();
    for stream in &mut idle {
        let left = (LOGIN_DEADLINE + SLACK).saturating_sub(connected.elapsed());
        read_to_end(stream, left).await;
    }
    println!(
        "all closed {:?} after the last was opened",
        connected.elapsed()
    );
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn who_knows_a_client_id_but_no_password_can_do_nothing_with_it() {
    let scene = Scene::new().await;
    let attempts = [
        vec![],
        vec![ClientMessage::AuthFirst {
            user: USER.try_into().unwrap(),
            nonce: exchange(USER, "x").nonce().clone(),
        }],
    ];
    for before in attempts {
        let mut peer = Peer::connect(scene.server.address()).await;
        peer.send(ClientMessage::Hello(hello())).await;
        for message in before {
            peer.send(message).await;
        }
        peer.send(ClientMessage::Login(Box::new(login(GROUP, "honest"))))
            .await;
        let said = peer.ended_within(LOGIN_DEADLINE / 2).await;
        assert!(
            matches!(said.last(), Some(ServerMessage::Refused(refusal)) if refusal.code == Code::PROTOCOL),
            "{said:?}"
        );
    }
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn thousands_of_failing_logins_keep_nobody_out() {
    let scene = Scene::new().await;
    let failing = |at: u8| {
        let scene = &scene;
        async move {
            let source = Ipv4Addr::new(127, 0, 1, at % 30 + 1);
            let mut stream = connect_from(source.into(), scene.server.address())
                .await
                .unwrap();
            let first = ClientMessage::AuthFirst {
                user: USER.try_into().unwrap(),
                nonce: exchange(USER, "x").nonce().clone(),
            };
            let proof = ClientMessage::AuthProof { proof: [at; 32] };
            for sent in [ClientMessage::Hello(hello()), first, proof] {
                stream.write_all(&message(&sent)).await.unwrap();
            }
            read_to_end(&mut stream, LOGIN_DEADLINE + SLACK).await
        }
    };
    let attempts = (0..3_000_u32).map(|at| failing(u8::try_from(at % 256).unwrap()));
    let (answers, ()) = tokio::join!(join_all(attempts), scene.numbers_a_newcomer());
    assert!(
        answers.iter().all(|answer| !answer.is_empty()),
        "each is told"
    );
    assert!(
        scene
            .server
            .admin()
            .metric("skyschedule_logins_total")
            .await
            >= 3_000.0
    );
    scene.is_undisturbed().await;
}
