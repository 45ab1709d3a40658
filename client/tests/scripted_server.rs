//! The client over real sockets, against a server that says what the test wants.
#![cfg(not(sim))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "what goes wrong here fails the test"
)]

mod scripted;

use std::time::Duration;

use futures_util::SinkExt as _;
use scripted::{M, Server, refusal, share};
use skyschedule_client::{
    Client, Code, ConnectError, Consistency, Dialect, Epoch, Link, Mode, NoGoodbye,
};
use skyschedule_common::env;
use skyschedule_common::protocol::codec::CodecError;
use skyschedule_common::protocol::messages::{AuthMethod, ClientMessage, Millis, ServerMessage};
use tokio::io::AsyncWriteExt as _;

const LEASE: Millis = Millis(6_000);
const SOON: Duration = Duration::from_secs(10);

/// A member with every row of an available group, and its server's end.
async fn member() -> (Client, scripted::Peer, Server) {
    let server = Server::start().await;
    let (client, peer) = tokio::join!(
        server.client().connect(),
        server.accept_member(share(1, &[0]), Consistency::Available, LEASE)
    );
    (client.unwrap(), peer, server)
}

#[tokio::test]
async fn a_member_works_on_its_rows_and_releases_them_when_they_are_done() {
    let (client, mut peer, _server) = member().await;
    let work = client.acquire().await.unwrap();
    assert_eq!(work.share().predicate(Dialect::Sqlite, "id"), "1 = 1");
    assert_eq!(client.node(), Some((1, 0)));
    let row = work.begin(2).unwrap();
    assert_eq!(row.epoch(), Epoch::quorum(1));
    assert!(client.holds(2) && client.inspect().running == [2.into()]);

    let recalled = work.recalled();
    peer.tell(share(2, &[1])).await;
    env::timeout(SOON, recalled).await.expect("rows left");
    assert!(work.begin(4).is_none() && !row.is_revoked());
    assert_eq!(client.inspect().running_outside, 1);
    // The heartbeat says that the share was taken; the release waits for the row.
    peer.alive(LEASE).await;
    drop(row);
    let released = ClientMessage::Released {
        membership: M,
        epoch: Epoch::quorum(2),
        keeping: share(2, &[]),
    };
    assert_eq!(peer.next_of_note().await, released);
    let mut shares = client.shares();
    shares
        .wait_for(|status| status.node == Some((2, 1)))
        .await
        .unwrap();
    assert_eq!(
        shares.borrow().to_string(),
        "share total=2 numbers=1 epoch=2"
    );
}

#[tokio::test]
async fn close_drains_says_goodbye_and_ends_with_a_fin() {
    let (client, mut peer, _server) = member().await;
    let work = client.acquire().await.unwrap();
    let row = work.begin(1).unwrap();
    let closing = env::spawn({
        let client = client.clone();
        async move { client.close().await }
    });
    env::timeout(SOON, work.recalled()).await.unwrap();
    assert!(work.begin(2).is_none() && client.acquire().await.is_err());
    assert!(!row.is_revoked());
    drop(row);
    while peer.serve(LEASE).await.unwrap().unwrap() != (ClientMessage::Goodbye { membership: M }) {}
    assert!(peer.hear().await.is_none(), "a FIN");
    drop(peer);
    assert_eq!(closing.await.unwrap(), Ok(()));
    let state = client.state().borrow().clone();
    assert!(state.closed && state.servers[0].link == Link::Down);
    assert_eq!(client.close().await, Ok(()), "once more");
}

#[tokio::test]
async fn a_member_whose_group_was_made_again_with_another_promise_ends_and_says_why() {
    const SHORT: Millis = Millis(200);
    let server = Server::start().await;
    let (client, peer) = tokio::join!(
        server.client().connect(),
        server.accept_member(share(1, &[0]), Consistency::Exclusive, SHORT)
    );
    let client = client.unwrap();
    assert!(client.ended().is_none());
    drop(peer);
    let refused = async {
        // While its lease runs its group cannot have been deleted: that leader is one of yesterday.
        let mut peers = Vec::new();
        loop {
            let mut peer = server.accept_login().await;
            let again = Some(Duration::from_millis(50));
            let refusal = refusal(Code::CONSISTENCY, again);
            peer.say(ServerMessage::Refused(refusal)).await;
            peers.push(peer);
        }
    };
    let rows_end = async {
        loop {
            match client.acquire().await {
                Ok(_) => env::sleep(Duration::from_millis(1)).await,
                Err(ended) => return ended,
            }
        }
    };
    let ended = env::timeout(SOON, async {
        tokio::select! {
            biased;
            ended = rows_end => ended,
            never = refused => never,
        }
    });
    let ended = ended.await.unwrap();
    assert!(ended.to_string().contains("(consistency)"), "{ended}");
    assert_eq!(client.ended(), Some(ended));
    assert!(client.state().borrow().closed);
    assert_eq!(client.close().await, Ok(()), "nothing is left to end");
}

#[tokio::test]
async fn dropping_the_last_handle_resets_and_revokes() {
    let (client, mut peer, _server) = member().await;
    let work = client.acquire().await.unwrap();
    let row = work.begin(1).unwrap();
    let other = client.clone();
    drop(client);
    assert!(!row.is_revoked());
    drop(other);
    env::timeout(SOON, row.revoked()).await.unwrap();
    assert!(work.begin(2).is_none());
    let end = loop {
        match peer.hear().await {
            Some(Ok(_)) => {}
            end => break end,
        }
    };
    assert!(
        matches!(end, Some(Err(CodecError::Io(_)))),
        "a reset, no FIN: {end:?}"
    );
}

#[test]
fn rows_outlive_the_runtime_that_made_them() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let server_runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let server = server_runtime.block_on(Server::start());
    let builder = server.client();
    let peer = server_runtime.spawn(async move {
        let peer = server
            .accept_member(share(1, &[0]), Consistency::Available, LEASE)
            .await;
        (peer, server)
    });
    // A runtime without timers and sockets is enough for the user's side.
    let (client, row) = runtime.block_on(async {
        let client = builder.connect().await.unwrap();
        let row = client.acquire().await.unwrap().begin(1).unwrap();
        (client, row)
    });
    drop(runtime);
    drop(row);
    drop(client);
    server_runtime.block_on(peer).unwrap();
}

#[test]
fn a_handler_that_blocks_its_thread_costs_no_lease() {
    const SHORT: Millis = Millis(600);
    let (tell_address, address) = std::sync::mpsc::channel();
    // The server has a thread of its own, and answers heartbeats until the client ends.
    let serving = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let server = Server::start().await;
            tell_address.send(server.client()).unwrap();
            let mut peer = server
                .accept_member(share(1, &[0]), Consistency::Exclusive, SHORT)
                .await;
            while let Some(Ok(_)) = peer.serve(SHORT).await {}
        });
    });
    let builder = address.recv().unwrap();
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(async {
            let client = builder.connect().await.unwrap();
            let work = client.acquire().await.unwrap();
            let row = work.begin(1).unwrap();
            std::thread::sleep(SHORT.duration() * 3);
            assert!(!row.is_revoked());
            assert!(work.begin(2).is_some());
        });
    serving.join().unwrap();
}

#[tokio::test]
async fn an_exclusive_lease_that_is_over_revokes_its_rows() {
    let lease = Millis(600);
    let server = Server::start().await;
    let (client, _silent) = tokio::join!(
        server
            .client()
            .consistency(Consistency::Exclusive)
            .connect(),
        server.accept_member(share(1, &[0]), Consistency::Exclusive, lease)
    );
    let client = client.unwrap();
    let work = client.acquire().await.unwrap();
    let row = work.begin(1).unwrap();
    // The server is silent from here on.
    env::timeout(SOON, row.revoked()).await.expect("revoked");
    assert!(work.is_revoked() && work.begin(2).is_none() && !client.holds(1));
    // The silent connection was replaced. News are taken there without a lease.
    let mut peer = server.accept_login().await;
    let attach = peer.next().await;
    assert!(matches!(
        attach,
        ClientMessage::Attach {
            membership: Some(_),
            ..
        }
    ));
    peer.welcome(share(1, &[0]), Consistency::Exclusive, lease)
        .await;
    peer.tell(share(2, &[0])).await;
    let mut shares = client.shares();
    shares
        .wait_for(|status| status.epoch == Some(Epoch::quorum(2)))
        .await
        .unwrap();
    assert_eq!(shares.borrow().mode, Mode::Asking);
}

#[tokio::test]
async fn the_password_is_proven_and_so_is_the_server() {
    let server = Server::start().await;
    let with = |password: &str| server.client().credentials("moon", password.to_owned());

    let (client, _peer) = tokio::join!(with("walker").connect(), async {
        let mut peer = server.accept().await;
        assert!(peer.authenticate("walker", true).await);
        assert!(matches!(peer.next().await, ClientMessage::Login(_)));
        peer.say(ServerMessage::Serving {
            mode: skyschedule_common::protocol::messages::Serving::Quorum,
            hint: None,
        })
        .await;
        assert!(matches!(peer.next().await, ClientMessage::Attach { .. }));
        peer.welcome(share(1, &[0]), Consistency::Available, LEASE)
            .await;
        peer
    });
    assert_eq!(client.unwrap().client_id().as_str(), "one");

    let (wrong, ()) = tokio::join!(with("wrong").connect(), async {
        let mut peer = server.accept().await;
        assert!(!peer.authenticate("walker", true).await);
        peer.say(ServerMessage::Refused(refusal(Code::CREDENTIALS, None)))
            .await;
    });
    assert!(
        matches!(
            wrong,
            Err(ConnectError::Refused {
                code: Code::CREDENTIALS,
                ..
            })
        ),
        "{wrong:?}"
    );

    let (impostor, ()) = tokio::join!(with("walker").connect(), async {
        let mut peer = server.accept().await;
        peer.authenticate("walker", false).await;
        assert!(
            peer.hear().await.is_some_and(|end| end.is_err()),
            "a reset instead of a login"
        );
    });
    assert!(
        matches!(impostor, Err(ConnectError::Login { .. })),
        "{impostor:?}"
    );

    let (none, ()) = tokio::join!(server.client().connect(), async {
        server.accept().await.hello(AuthMethod::ScramSha256).await;
    });
    assert!(none.unwrap_err().to_string().contains("credentials"));
}

#[tokio::test]
async fn an_id_in_use_is_waited_for_and_named_when_the_time_is_up() {
    let server = Server::start().await;
    let busy = || ServerMessage::Wait(refusal(Code::ID_IN_USE, Some(Duration::from_millis(100))));

    let (joined, _peer) = tokio::join!(server.client().connect(), async {
        let mut peer = server.accept_login().await;
        for _ in 0..2 {
            assert!(matches!(
                peer.next_of_note().await,
                ClientMessage::Attach { .. }
            ));
            peer.say(busy()).await;
        }
        assert!(matches!(
            peer.next_of_note().await,
            ClientMessage::Attach { .. }
        ));
        peer.welcome(share(1, &[0]), Consistency::Available, LEASE)
            .await;
        peer
    });
    drop(joined.unwrap());

    let impatient = server
        .client()
        .connect_timeout(Duration::from_millis(400))
        .connect();
    let (refused, ()) = tokio::join!(impatient, async {
        let mut peer = server.accept_login().await;
        while let Some(Ok(message)) = peer.hear().await {
            assert!(matches!(message, ClientMessage::Attach { .. }));
            // The client may be gone by now.
            let _ = peer.frames.send(busy()).await;
        }
    });
    assert!(
        matches!(
            refused,
            Err(ConnectError::Refused {
                code: Code::ID_IN_USE,
                ..
            })
        ),
        "{refused:?}"
    );
}

#[tokio::test]
async fn any_one_server_is_enough() {
    let server = Server::start().await;
    // Nothing listens there any more.
    let gone = Server::start().await.address;
    let builder = server.client().servers([gone.to_string()]);
    let (client, _peer) = tokio::join!(
        builder.connect(),
        server.accept_member(share(1, &[0]), Consistency::Available, LEASE)
    );
    let client = client.unwrap();
    let mut state = client.state();
    let links = state
        .wait_for(|state| state.servers[1].trouble.is_some())
        .await
        .unwrap();
    assert_eq!(links.servers[0].link, Link::Attached);
    assert_eq!(links.membership, Some(M));
}

#[tokio::test]
async fn without_a_server_connect_names_each_ones_trouble() {
    let gone = Server::start().await.address;
    let builder = Client::builder()
        .servers([gone.to_string()])
        .group("orders");
    let error = builder
        .connect_timeout(Duration::from_millis(300))
        .connect()
        .await
        .unwrap_err();
    assert!(matches!(&error, ConnectError::Unavailable { servers } if servers.len() == 1));
    assert!(error.to_string().contains(&gone.to_string()), "{error}");
}

#[tokio::test]
async fn a_client_may_start_before_its_servers() {
    let address = Server::start().await.address;
    let client = Client::builder()
        .servers([address.to_string()])
        .group("orders")
        .connect_in_background()
        .unwrap();
    let mut state = client.state();
    state
        .wait_for(|state| {
            state
                .servers
                .first()
                .is_some_and(|server| server.trouble.is_some())
        })
        .await
        .unwrap();
    let server = Server::start_at(address).await;
    let (work, _peer) = tokio::join!(
        client.acquire(),
        server.accept_member(share(1, &[0]), Consistency::Available, LEASE)
    );
    assert!(work.unwrap().begin(1).is_some());
}

#[tokio::test]
async fn a_goodbye_that_no_server_hears_is_reported() {
    let short = Millis(300);
    let server = Server::start().await;
    let (client, peer) = tokio::join!(
        server.client().connect(),
        server.accept_member(share(1, &[0]), Consistency::Available, short)
    );
    drop((peer, server));
    let client = client.unwrap();
    let mut state = client.state();
    state
        .wait_for(|state| state.servers[0].link == Link::Down)
        .await
        .unwrap();
    assert_eq!(env::timeout(SOON, client.close()).await, Ok(Err(NoGoodbye)));
}

#[tokio::test]
async fn a_connection_that_breaks_is_made_again_with_the_same_membership() {
    let (client, peer, server) = member().await;
    let work = client.acquire().await.unwrap();
    drop(peer);
    let mut peer = server.accept().await;
    peer.hello(AuthMethod::None).await;
    let ClientMessage::Login(login) = peer.next().await else {
        panic!("a login")
    };
    assert_eq!((login.membership, login.epoch), (Some(M), Epoch::quorum(1)));
    assert!(login.ends.is_some());
    assert!(work.begin(1).is_some(), "the lease runs on");
}

#[tokio::test]
async fn what_a_hostile_server_sends_ends_the_connection_and_nothing_else() {
    let (client, _peer, server) = member().await;
    let answers: [&[u8]; 4] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        &[0xff; 64],
        &[0, 0, 0, 0],
        &[0, 0, 0, 2, 99, 99],
    ];
    drop(_peer);
    for bytes in answers {
        let mut peer = server.accept().await;
        let stream = peer.frames.get_mut();
        stream.write_all(bytes).await.unwrap();
        while let Some(Ok(_)) = peer.hear().await {}
    }
    let work = client.acquire().await.unwrap();
    assert!(work.begin(1).is_some());
}

#[tokio::test]
async fn the_present_share_can_be_asked_for() {
    let (client, mut peer, _server) = member().await;
    let (answer, ()) = tokio::join!(client.pull(), async {
        loop {
            if let ClientMessage::Pull { membership } = peer.next().await {
                let (epoch, share) = (Epoch::quorum(1), share(1, &[0]));
                return peer
                    .say(ServerMessage::Told {
                        membership,
                        epoch,
                        share,
                    })
                    .await;
            }
        }
    });
    assert_eq!(answer, Ok((Epoch::quorum(1), share(1, &[0]))));
}

#[tokio::test]
async fn several_clients_and_groups_live_in_one_process() {
    let server = Server::start().await;
    let builder = |group: &str| {
        server
            .client()
            .group(group)
            .client_id(format!("{group}-client"))
    };
    let (one, two, peers) = tokio::join!(
        builder("orders").connect(),
        builder("invoices").connect(),
        async {
            let mut peers = Vec::new();
            for number in 0..2 {
                peers.push(
                    server
                        .accept_member(share(2, &[number]), Consistency::Available, LEASE)
                        .await,
                );
            }
            peers
        }
    );
    let clients = [one.unwrap(), two.unwrap()];
    for (client, group) in clients.iter().zip(["orders", "invoices"]) {
        assert_eq!(client.group().as_str(), group);
        let work = client.acquire().await.unwrap();
        let rows = [0, 1].map(|id| work.begin(id).is_some());
        assert!(rows == [true, false] || rows == [false, true], "{rows:?}");
    }
    let serving = peers.into_iter().map(|mut peer| {
        env::spawn(async move { while let Some(Ok(_)) = peer.serve(LEASE).await {} })
    });
    let _serving: Vec<_> = serving.collect();
    // One ends, the other goes on.
    let [one, two] = clients;
    assert_eq!(one.close().await, Ok(()));
    assert!(two.acquire().await.is_ok());
}
