//! Logged-in clients that break the rules: they harm themselves and nobody else.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail and print like the test itself"
)]

use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::join_all;
use skyschedule_client::Epoch;
use skyschedule_common::env;
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::codec;
use skyschedule_common::protocol::messages::{ClientMessage, ServerMessage};
use skyschedule_common::share::Share;
use skyschedule_tests::member::Member;
use skyschedule_tests::peer::{Peer, frame, login, message};
use skyschedule_tests::scene::{GROUP, LOGIN_DEADLINE, SLACK, Scene};
use skyschedule_tests::server::{PASSWORD, USER};
use tokio::net::{TcpSocket, TcpStream};

/// A plain connection whose receiver has room for little.
async fn narrow(scene: &Scene) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(2_048).unwrap();
    socket.connect(scene.server.address()).await.unwrap()
}

#[tokio::test]
async fn a_client_that_never_reads_is_dropped() {
    let scene = Scene::new().await;
    let mut deaf = Peer::over(narrow(&scene).await);
    deaf.authenticate(USER, PASSWORD).await.unwrap();
    deaf.send(ClientMessage::Login(Box::new(login("deaf", "one"))))
        .await;
    let membership = deaf.attach().await.membership;
    let pull = message(&ClientMessage::Pull { membership }).repeat(1_000);
    let start = env::now();
    while deaf.try_send_bytes(&pull).await {}
    println!("dropped after {:?}", start.elapsed());
    assert!(
        start.elapsed() < LOGIN_DEADLINE + SLACK,
        "{:?}",
        start.elapsed()
    );
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn floods_of_messages_delay_nobody() {
    let scene = Scene::new().await;
    let address = scene.server.address();
    let mut floods = Vec::new();
    for at in 0..8_u64 {
        let (peer, welcomed) = Peer::member(address, "flood", &format!("client-{at}")).await;
        let membership = welcomed.membership;
        let flood = match at % 4 {
            0 => message(&ClientMessage::Heartbeat {
                membership,
                seq: at,
                epoch: welcomed.epoch,
                load: None,
            }),
            1 => message(&ClientMessage::Released {
                membership,
                epoch: welcomed.epoch,
                keeping: Share::NONE,
            }),
            2 => message(&ClientMessage::Attach {
                membership: Some(membership),
                epoch: welcomed.epoch,
            }),
            _ => message(&ClientMessage::Detach { membership }),
        };
        floods.push((peer, flood.repeat(1_000)));
    }
    let until = env::now() + Duration::from_secs(4);
    let flooding = join_all(floods.into_iter().map(|(mut peer, flood)| async move {
        let mut sent = 0_u64;
        while let Ok(true) = env::timeout_at(until, peer.try_send_bytes(&flood)).await {
            sent += 1_000;
            peer.skip().await;
        }
        sent
    }));
    let (sent, ()) = tokio::join!(flooding, async {
        env::sleep(Duration::from_millis(500)).await;
        scene.numbers_a_newcomer().await;
    });
    println!("sent {sent:?} messages");
    scene.is_undisturbed().await;
}

/// What it goes on sending does not keep a connection open that the server has done with.
#[tokio::test]
async fn a_flood_does_not_delay_its_own_end() {
    let scene = Scene::new().await;
    let mut peer = Peer::logged_in(scene.server.address(), GROUP, "evil").await;
    let forbidden = message(&ClientMessage::Login(Box::new(login(GROUP, "another"))));
    let flood = message(&ClientMessage::Detach {
        membership: Membership::quorum(1),
    })
    .repeat(1_000);
    let first = [&flood[..], &forbidden, &flood].concat();
    peer.send_bytes(&first).await;
    let start = env::now();
    while peer.try_send_bytes(&flood).await {}
    println!("closed after {:?}", start.elapsed());
    assert!(start.elapsed() < LOGIN_DEADLINE, "{:?}", start.elapsed());
    scene.is_undisturbed().await;
}

/// A renumbering for each message would leave nobody time to work.
#[tokio::test]
async fn a_client_that_changes_its_weight_all_the_time_delays_nobody() {
    let scene = Scene::new().await;
    let (mut peer, welcomed) = Peer::member(scene.server.address(), "flood", "fickle").await;
    let membership = welcomed.membership;
    let update = |weight| {
        message(&ClientMessage::Update {
            membership,
            weight: Some(weight),
            handlers: None,
            drain: None,
        })
    };
    let flood: BytesMut = (0..500_u32)
        .map(|at| update(at % 7))
        .collect::<Vec<_>>()
        .concat()[..]
        .into();
    let until = env::now() + Duration::from_secs(3);
    tokio::join!(
        async {
            while let Ok(true) = env::timeout_at(until, peer.try_send_bytes(&flood)).await {
                peer.skip().await;
            }
        },
        scene.numbers_a_newcomer()
    );
    scene.is_undisturbed().await;
}

#[tokio::test]
async fn what_is_too_large_or_impossible_inside_a_frame_ends_the_connection() {
    let scene = Scene::new().await;
    let address = scene.server.address();
    let honest_login =
        codec::encode(&ClientMessage::Login(Box::new(login(GROUP, "evil"))), 1_000).unwrap();
    let heavy = {
        let mut heavy = login(GROUP, "evil");
        heavy.weight = 1_001;
        message(&ClientMessage::Login(Box::new(heavy)))
    };
    // Its last byte says that there are no handlers: now there are 1,025.
    let mut many_handlers = honest_login[..honest_login.len() - 1].to_vec();
    many_handlers.extend([251, 0x01, 0x04]);
    many_handlers.extend(b"\x01a".repeat(1_025));
    let instead_of_a_login = [heavy, frame(&many_handlers), frame(&[3; 300]), frame(&[99])];
    for bytes in instead_of_a_login {
        let mut peer = Peer::authenticated(address).await;
        peer.send_bytes(&bytes).await;
        refused(peer).await;
    }
    // A share of 2^20 + 1, and one of more ranges than there can be.
    let mut huge_total = vec![8, 1, 0, 1, 0, 0, 252];
    huge_total.extend(((1_u32 << 20) + 1).to_le_bytes());
    huge_total.push(0);
    let mut many_ranges = vec![8, 1, 0, 1, 0, 0, 252];
    many_ranges.extend((1_u32 << 20).to_le_bytes());
    many_ranges.extend([252, 0, 0, 2, 0]);
    for at in 0..100_000_u32 {
        for end in [2 * at, 2 * at] {
            many_ranges.push(252);
            many_ranges.extend(end.to_le_bytes());
        }
    }
    for body in [huge_total, many_ranges[..1_000_000].to_vec()] {
        let mut peer = Peer::logged_in(address, GROUP, "evil").await;
        // It may be closed before all is sent.
        peer.try_send_bytes(&frame(&body)).await;
        refused(peer).await;
    }
    scene.is_undisturbed().await;
}

async fn refused(peer: Peer) {
    let said = peer.ended_within(LOGIN_DEADLINE / 2).await;
    assert!(
        matches!(
            said.last(),
            None | Some(ServerMessage::Refused(_) | ServerMessage::Serving { .. })
        ),
        "{said:?}"
    );
}

#[tokio::test]
async fn nobody_can_speak_for_another_member() {
    let scene = Scene::new().await;
    let address = scene.server.address();
    let (mut victim, welcomed) = Peer::member(address, GROUP, "victim").await;
    let membership = welcomed.membership;
    let (mut evil, _) = Peer::member(address, GROUP, "evil").await;
    let epoch = Epoch::quorum(50);
    let words = || {
        [
            ClientMessage::Released {
                membership,
                epoch,
                keeping: Share::NONE,
            },
            ClientMessage::Update {
                membership,
                weight: Some(0),
                handlers: None,
                drain: Some(true),
            },
            ClientMessage::Detach { membership },
            ClientMessage::Goodbye { membership },
        ]
    };
    for word in words() {
        evil.send(word).await;
    }
    // Not even under its name: another incarnation is another client.
    let mut thief = login(GROUP, "victim");
    thief.membership = Some(membership);
    let mut false_victim = Peer::authenticated(address).await;
    false_victim
        .send(ClientMessage::Login(Box::new(thief)))
        .await;
    for word in words() {
        false_victim.send(word).await;
    }
    false_victim.send(ClientMessage::Pull { membership }).await;
    false_victim
        .until(|message| matches!(message, ServerMessage::Gone { .. }).then_some(()))
        .await;

    victim.heartbeat(membership, 1, welcomed.epoch).await;
    let group = scene.server.admin().group(GROUP).await.unwrap();
    let shown = group["members"]
        .as_array()
        .unwrap()
        .iter()
        .find(|member| member["client_id"] == "victim");
    assert_eq!(shown.unwrap()["weight"], 1, "{group}");
    assert_ne!(shown.unwrap()["state"], "draining", "{group}");

    // Nor can anybody keep it alive: it falls silent, and is dropped at the end of its lease.
    let deadline = env::now() + Duration::from_secs(2) + SLACK;
    let mut seq = 0;
    while scene
        .server
        .admin()
        .members(GROUP)
        .await
        .iter()
        .any(|member| member == "victim")
    {
        assert!(
            env::now() < deadline,
            "somebody else's heartbeats keep it alive"
        );
        seq += 1;
        evil.send(ClientMessage::Heartbeat {
            membership,
            seq,
            epoch,
            load: None,
        })
        .await;
        evil.until(|message| match message {
            ServerMessage::Alive {
                membership: renewed,
                ..
            } => {
                panic!("renewed {renewed} for somebody else")
            }
            ServerMessage::Gone { .. } => Some(()),
            _ => None,
        })
        .await;
        env::sleep(Duration::from_millis(100)).await;
    }
}

/// Counters that no server gave must neither overflow nor lock honest clients out.
#[tokio::test]
async fn invented_memberships_and_epochs_harm_nobody() {
    let scene = Scene::new().await;
    let address = scene.server.address();
    let invented = [
        u64::MAX,
        u64::MAX - 1,
        1 << 63,
        (1 << 62) + 1,
        1 << 62,
        (1 << 62) - 1,
    ];
    for (at, number) in invented.into_iter().enumerate() {
        let (membership, epoch) = (Membership::quorum(number), Epoch::quorum(number));
        let claims = [
            ClientMessage::Attach {
                membership: Some(membership),
                epoch,
            },
            ClientMessage::Heartbeat {
                membership,
                seq: 1,
                epoch,
                load: None,
            },
            ClientMessage::Released {
                membership,
                epoch,
                keeping: Share::NONE,
            },
        ];
        // As one that claims to have been a member, and as one that is.
        let mut returning = login("claims", &format!("returning-{at}"));
        (returning.membership, returning.epoch) = (Some(membership), epoch);
        let mut peer = Peer::authenticated(address).await;
        peer.try_send(ClientMessage::Login(Box::new(returning)))
            .await;
        for claim in claims {
            peer.try_send(claim).await;
        }
        let (mut peer, welcomed) = Peer::member(address, "claims", &format!("present-{at}")).await;
        peer.try_send(ClientMessage::Heartbeat {
            membership: welcomed.membership,
            seq: 1,
            epoch,
            load: None,
        })
        .await;
        let goodbye = ClientMessage::Goodbye {
            membership: welcomed.membership,
        };
        peer.try_send(goodbye).await;
    }
    // An honest client joins this very group, and keeps its membership.
    let server = &scene.server;
    let member = Member::start(server.address(), "claims", "honest");
    member.has_rows().await;
    let membership = member.membership_other_than(None).await;
    env::sleep(Duration::from_secs(7)).await;
    assert!(member.rows().is_leased(), "{member}");
    assert_eq!(member.membership(), Some(membership), "{member}");
    assert_eq!(
        server.admin().members("claims").await,
        ["honest"],
        "{}",
        server.log()
    );
    scene.is_undisturbed().await;
}
