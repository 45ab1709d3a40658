//! Who is let in, who is not, and what they are told.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, BytesMut};
use rustix::process::Signal;
use skyschedule_common::auth::Challenge;
use skyschedule_common::env::{self, net::Stream};
use skyschedule_common::protocol::features;
use skyschedule_common::protocol::messages::{ClientMessage, Code, ServerMessage};
use skyschedule_tests::member::{Member, Options};
use skyschedule_tests::numbering::numbered;
use skyschedule_tests::peer::{Peer, exchange, frame, hello, read_to_end};
use skyschedule_tests::proxy::Proxy;
use skyschedule_tests::server::{PASSWORD, Server, USER};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const GROUP: &str = "1000";

/// The login of version 1, byte by byte, as `skyschedule-common` pins it.
const GOLDEN: &str = include_str!("../../common/tests/golden/login-v1.txt");

#[tokio::test]
async fn a_wrong_password_and_an_unknown_user_are_refused_alike() {
    let server = Server::start().await;
    let mut refusals = Vec::new();
    for (user, password) in [(USER, "runner"), ("sun", PASSWORD), ("sun", "runner")] {
        let mut peer = Peer::connect(server.address()).await;
        let refusal = peer.authenticate(user, password).await.unwrap_err();
        assert_eq!(refusal.code, Code::CREDENTIALS);
        refusals.push(refusal);
        assert!(peer.ended_within(Duration::from_secs(5)).await.is_empty());
    }
    assert_eq!(refusals[0], refusals[1]);
    assert_eq!(refusals[0], refusals[2]);
    assert!(
        !server.log().contains(PASSWORD) && !server.log().contains("runner"),
        "no secret is logged"
    );
}

#[tokio::test]
async fn wrong_passwords_cost_more_time_with_each_try_and_right_ones_none() {
    let server = Server::start().await;
    let mut took = Vec::new();
    for _ in 0..4 {
        let start = env::now();
        let mut peer = Peer::connect(server.address()).await;
        peer.authenticate(USER, "runner").await.unwrap_err();
        took.push(start.elapsed());
    }
    assert!(took[0] >= Duration::from_millis(100), "{took:?}");
    assert!(took[3] >= Duration::from_millis(800), "{took:?}");
    // Whoever knows the password comes in at once, also from the same address.
    let start = env::now();
    Peer::authenticated(server.address()).await;
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
}

/// It cannot heal with time, so the client says so at once instead of trying for ever.
#[tokio::test]
async fn a_client_with_a_wrong_password_fails_at_once_and_says_why() {
    let server = Server::start().await;
    let mut member = Options::new(server.address(), GROUP, "one")
        .password("runner")
        .start();
    let start = env::now();
    let error = member.failure().await;
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(error.contains("password"), "{error}");
    assert!(error.contains(&server.address().to_string()), "{error}");
    assert!(!error.contains("runner"), "{error}");
    assert_eq!(member.ended().await.code(), Some(1));
    assert_eq!(server.admin().group(GROUP).await, None);
}

#[tokio::test]
async fn a_recorded_login_is_useless() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.address()).await;
    let mut member = Member::start(proxy.address(), GROUP, "one");
    numbered(&[&member]).await;
    let recorded = proxy.recorded();
    member.signal(Signal::TERM);
    member.closed().await;
    assert!(
        recorded.windows(4).any(|bytes| bytes == b"SKYS"),
        "it is the beginning of a connection"
    );

    let mut thief = Stream::connect(server.address()).await.unwrap();
    thief.write_all(&recorded).await.unwrap();
    let mut answers = BytesMut::from(&read_to_end(&mut thief, Duration::from_secs(10)).await[..]);
    let mut said = Vec::new();
    while let Some(frame) = next_frame(&mut answers) {
        said.push(decode(&frame));
    }
    assert!(
        matches!(said.as_slice(), [
            ServerMessage::Hello(_),
            ServerMessage::AuthChallenge { .. },
            ServerMessage::Refused(refusal),
        ] if refusal.code == Code::CREDENTIALS),
        "{said:?}"
    );
    assert!(server.admin().members(GROUP).await.is_empty());
}

#[tokio::test]
async fn of_two_processes_with_one_id_the_second_waits_and_gets_in_when_the_first_is_gone() {
    let server = Server::start().await;
    let mut first = Member::start(server.address(), GROUP, "twin");
    let before = numbered(&[&first]).await;

    let impatient = Options::new(server.address(), GROUP, "twin")
        .flag("--connect-timeout-ms", "1500")
        .start();
    let error = impatient.failure().await;
    assert!(
        error.contains("id_in_use") && error.contains("a client with this id"),
        "{error}"
    );

    let second = Member::start(server.address(), GROUP, "twin");
    // Time for several tries.
    env::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(second.membership(), None, "{second}");
    assert_eq!(
        numbered(&[&first]).await.rows[0].epoch,
        before.rows[0].epoch,
        "the first is not disturbed"
    );

    let killed = first.signal(Signal::KILL);
    let numbering = numbered(&[&second]).await;
    assert!(
        numbering.after(killed) < Duration::from_secs(10),
        "{:?}",
        numbering.after(killed)
    );
    first.ended().await;
    assert!(numbering.rows[0].epoch > before.rows[0].epoch);
}

#[tokio::test]
async fn an_id_in_use_is_refused_with_a_time_to_try_again() {
    let server = Server::start().await;
    let (_first, _) = Peer::member(server.address(), GROUP, "twin").await;
    let mut second = Peer::logged_in(server.address(), GROUP, "twin").await;
    second
        .send(ClientMessage::Attach {
            membership: None,
            epoch: skyschedule_common::epoch::Epoch::ZERO,
        })
        .await;
    let refusal = second
        .until(|message| match message {
            ServerMessage::Wait(refusal) => Some(refusal),
            _ => None,
        })
        .await;
    assert_eq!(refusal.code, Code::ID_IN_USE);
    let wait = refusal.retry_after.unwrap().duration();
    assert!(
        (Duration::from_millis(50)..=Duration::from_secs(2)).contains(&wait),
        "{wait:?}"
    );
}

#[tokio::test]
async fn a_client_that_relies_on_more_than_the_group_promises_is_refused() {
    let server = Server::start().await;
    let member = Member::start(server.address(), GROUP, "one");
    numbered(&[&member]).await;
    let other = Options::new(server.address(), GROUP, "two")
        .flag("--consistency", "exclusive")
        .start();
    let error = other.failure().await;
    assert!(error.contains("consistency"), "{error}");
}

#[tokio::test]
async fn a_version_that_the_server_does_not_speak_is_refused_with_the_reason() {
    let server = Server::start().await;
    let mut peer = Peer::connect(server.address()).await;
    let mut future = hello();
    (future.min_version, future.max_version) = (700, 701);
    peer.send(ClientMessage::Hello(future)).await;
    let Some(ServerMessage::Refused(refusal)) = peer.receive().await else {
        panic!("not refused");
    };
    assert_eq!(refusal.code, Code::VERSION);
    assert!(refusal.text.contains("700"), "{}", refusal.text);

    // One that speaks newer ones beside this is understood.
    let mut peer = Peer::connect(server.address()).await;
    let mut newer = hello();
    (newer.max_version, newer.features) = (u16::MAX, u64::MAX);
    peer.send(ClientMessage::Hello(newer)).await;
    let Some(ServerMessage::Hello(hello)) = peer.receive().await else {
        panic!("not understood");
    };
    assert_eq!((hello.version, hello.features), (1, features::ALL));
}

#[tokio::test]
async fn a_server_without_users_asks_nobody_who_they_are() {
    let server = Server::start_open().await;
    let (_peer, welcomed) = Peer::member(server.address(), GROUP, "one").await;
    assert_eq!(welcomed.share.total(), 1);
}

/// A client of version 1 that knows nothing of this code: it sends the published bytes, and of the
/// server's answers it looks at those that it must understand.
#[tokio::test]
async fn an_old_client_logs_in_to_this_server() {
    let golden: BTreeMap<&str, BytesMut> = GOLDEN
        .lines()
        .filter_map(|line| line.split_once(' ').filter(|(name, _)| name.contains('.')))
        .map(|(name, hex)| (name, unhex(hex)))
        .collect();
    let server = Server::start().await;
    let mut old = OldClient::connect(&server).await;

    old.send(&golden["client.hello"]).await;
    let answer = old.receive().await;
    // Version 1, no features, SCRAM; the length and the server's name are its own.
    assert_eq!(answer[4..8], golden["server.hello"][4..8]);

    let login = exchange(USER, PASSWORD);
    let mut first = BytesMut::from(&[1, 4][..]);
    first.put_slice(USER.as_bytes());
    first.put_u8(u8::try_from(login.nonce().len()).unwrap());
    first.put_slice(login.nonce().as_bytes());
    old.send(&frame(&first)).await;
    let mut challenge = old.receive().await;
    let mut challenge = challenge.split_off(4);
    assert_eq!(challenge.get_u8(), 2, "a challenge");
    let length = usize::from(challenge.get_u8());
    let nonce = challenge.split_to(length);
    let length = usize::from(challenge.get_u8());
    let salt = challenge.split_to(length);
    // A number above 65,535 is written as 252 and four bytes, one above 250 as 251 and two.
    let iterations = match challenge.get_u8() {
        251 => u32::from(challenge.get_u16_le()),
        252 => challenge.get_u32_le(),
        other => panic!("{other} is no size of iterations"),
    };
    assert!(challenge.is_empty());
    let challenge = Challenge {
        nonce: std::str::from_utf8(&nonce).unwrap().try_into().unwrap(),
        salt: salt.to_vec().try_into().unwrap(),
        iterations,
    };
    let (proof, check) = login.respond(&challenge).unwrap();
    let mut second = BytesMut::from(&[2][..]);
    second.put_slice(&proof);
    old.send(&frame(&second)).await;
    let mut done = old.receive().await;
    let mut done = done.split_off(4);
    assert_eq!(done.get_u8(), 3, "the server's proof");
    check.verify(&done[..].try_into().unwrap()).unwrap();

    for (sent, answer) in [
        ("client.login", "server.serving"),
        ("client.attach", "server.welcome"),
        ("client.heartbeat", "server.alive"),
    ] {
        old.send(&golden[sent]).await;
        old.expect(&golden[answer], answer).await;
    }
    assert_eq!(server.admin().members(GROUP).await, ["c-1"]);
    old.send(&golden["client.goodbye"]).await;
    while !server.admin().members(GROUP).await.is_empty() {
        env::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(
        server.admin().metric("skyschedule_expired_total").await,
        0.0
    );
    assert_eq!(
        server
            .admin()
            .metric("skyschedule_protocol_errors_total")
            .await,
        0.0
    );
}

struct OldClient {
    stream: Stream,
    received: BytesMut,
}

impl OldClient {
    async fn connect(server: &Server) -> Self {
        Self {
            stream: Stream::connect(server.address()).await.unwrap(),
            received: BytesMut::new(),
        }
    }

    async fn send(&mut self, frame: &[u8]) {
        self.stream.write_all(frame).await.unwrap();
    }

    /// The next frame, with its header.
    async fn receive(&mut self) -> BytesMut {
        loop {
            if let Some(frame) = next_frame(&mut self.received) {
                return frame;
            }
            let read = self.stream.read_buf(&mut self.received);
            let length = env::timeout(Duration::from_secs(10), read)
                .await
                .unwrap()
                .unwrap();
            assert!(length > 0, "the server ended the connection");
        }
    }

    /// Waits for exactly this frame. Shares may be told meanwhile: an old client takes them in.
    async fn expect(&mut self, frame: &[u8], name: &str) {
        let mut next = self.receive().await;
        while let ServerMessage::Told { .. } = decode(&next) {
            next = self.receive().await;
        }
        assert_eq!(next, frame, "{name} expected, and {:?} came", decode(&next));
    }
}

fn next_frame(bytes: &mut BytesMut) -> Option<BytesMut> {
    let header = *bytes.first_chunk::<4>()?;
    let length = 4 + usize::try_from(u32::from_be_bytes(header)).unwrap();
    (bytes.len() >= length).then(|| bytes.split_to(length))
}

fn decode(frame: &[u8]) -> ServerMessage {
    skyschedule_common::protocol::codec::decode(&frame[4..], frame.len()).unwrap()
}

fn unhex(text: &str) -> BytesMut {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}
