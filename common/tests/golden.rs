//! The bytes of version 1 on the wire, pinned: an old client works with a new server, and the other way
//! round, only while not one of them changes.
//!
//! `golden/protocol-v1.txt` has a line `name frame` for each message below, the frame as hex with its
//! header. **Lines are only ever added.** After a variant was appended to an enum, this file does not
//! compile until the variant is in the list of `variants!`; then the tests fail until there is a sample of
//! it (with and without its optional fields) and a line, which the failure prints. A failure for a line that
//! exists means that a published message was edited: undo that, and append a new variant instead.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Write as _};

use bytes::BytesMut;
use serde::Serialize;
use serde::de::DeserializeOwned;
use skyschedule_common::auth::{ClientExchange, Credentials, Decoys, Nonce, Salt, ServerExchange};
use skyschedule_common::auth::{MIN_ITERATIONS, StoredUser};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName, HandlerName, Incarnation, Membership};
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::codec::FrameCodec;
use skyschedule_common::protocol::messages::{
    AuthMethod, ClientHello, ClientMessage, Code, Consistency, Load, Login, Millis, Numbering,
    PeerHello, Refusal, ServerHello, ServerMessage, Serving, Terms,
};
use skyschedule_common::protocol::{MAGIC, MIN_VERSION, VERSION};
use skyschedule_common::share::{Numbers, Share};
use tokio_util::codec::{Decoder as _, Encoder as _};

const PROTOCOL: &str = include_str!("golden/protocol-v1.txt");
const LOGIN: &str = include_str!("golden/login-v1.txt");

/// Names the variant of a message, and lists all variants of the enum: a variant that is not in the list
/// is an error of the compiler.
macro_rules! variants {
    ($list:ident, $name:ident, $enum:ident { $($variant:ident),* $(,)? }) => {
        const $list: &[&str] = &[$(stringify!($variant)),*];

        fn $name(message: &$enum) -> &'static str {
            match message {
                $($enum::$variant { .. } => stringify!($variant),)*
            }
        }
    };
}

variants!(
    CLIENT,
    client_variant,
    ClientMessage {
        Hello,
        AuthFirst,
        AuthProof,
        Login,
        Attach,
        Detach,
        Heartbeat,
        Ping,
        Released,
        Update,
        Pull,
        Goodbye,
        Peer,
    }
);

variants!(
    SERVER,
    server_variant,
    ServerMessage {
        Hello,
        Refused,
        AuthChallenge,
        AuthDone,
        Serving,
        Welcome,
        Told,
        Alive,
        Pong,
        Wait,
        NotLeader,
        Gone,
        Fenced,
    }
);

fn text<const N: usize>(text: &str) -> BoundedString<N> {
    text.try_into().unwrap()
}

fn handlers(names: &[&str]) -> BoundedVec<HandlerName, 1024> {
    let names: Vec<_> = names.iter().map(|name| name.parse().unwrap()).collect();
    names.try_into().unwrap()
}

fn numbers(ranges: &[(u32, u32)]) -> Numbers {
    Numbers::from_ranges(ranges.to_vec()).unwrap()
}

const MEMBER: Membership = Membership::quorum(7);
const MINTED: Membership = Membership {
    number: 300,
    replica: 2,
};
const DEGRADED: Epoch = Epoch {
    quorum: 17,
    degraded: 2,
    replica: 3,
};

fn client_hello() -> ClientHello {
    ClientHello {
        magic: MAGIC,
        min_version: 1,
        max_version: 1,
        features: 0,
        agent: text("skyschedule-client/0.1.0"),
    }
}

/// The login of a client that says no more than it must.
fn short_login() -> Login {
    Login {
        group: GroupName::new("1000").unwrap(),
        client: ClientId::new("c-1").unwrap(),
        incarnation: Incarnation(0x0123_4567_89ab_cdef_0011_2233_4455_6677),
        membership: None,
        epoch: Epoch::ZERO,
        consistency: None,
        weight: 1,
        ends: None,
        ring_key: None,
        handlers: BoundedVec::new(),
    }
}

fn client_samples() -> Vec<(&'static str, ClientMessage)> {
    use ClientMessage as M;
    let full = Login {
        membership: Some(MINTED),
        epoch: DEGRADED,
        consistency: Some(Consistency::Exclusive),
        weight: 1_000,
        ends: Some((
            "10.1.2.3:50000".parse().unwrap(),
            "[2001:db8::1]:9991".parse().unwrap(),
        )),
        ring_key: Some(text("ring")),
        handlers: handlers(&["mail", "report"]),
        ..short_login()
    };
    let load = Load {
        running: 3,
        queued: 70_000,
        cpu_permille: 250,
        memory_permille: 1_000,
    };
    vec![
        ("client.hello", M::Hello(client_hello())),
        (
            "client.hello.other_versions",
            M::Hello(ClientHello {
                min_version: 2,
                max_version: 300,
                features: u64::MAX,
                agent: text(""),
                ..client_hello()
            }),
        ),
        (
            "client.auth_first",
            M::AuthFirst {
                user: text("moon"),
                nonce: text("AQEBAQEBAQEBAQEBAQEBAQEB"),
            },
        ),
        ("client.auth_proof", M::AuthProof { proof: [0xa5; 32] }),
        ("client.login", M::Login(Box::new(short_login()))),
        ("client.login.full", M::Login(Box::new(full))),
        (
            "client.login.available",
            M::Login(Box::new(Login {
                consistency: Some(Consistency::Available),
                ..short_login()
            })),
        ),
        (
            "client.attach",
            M::Attach {
                membership: None,
                epoch: Epoch::ZERO,
            },
        ),
        (
            "client.attach.full",
            M::Attach {
                membership: Some(MINTED),
                epoch: DEGRADED,
            },
        ),
        ("client.detach", M::Detach { membership: MEMBER }),
        (
            "client.heartbeat",
            M::Heartbeat {
                membership: MEMBER,
                seq: 1,
                epoch: Epoch::quorum(17),
                load: None,
            },
        ),
        (
            "client.heartbeat.full",
            M::Heartbeat {
                membership: MINTED,
                seq: u64::MAX,
                epoch: DEGRADED,
                load: Some(load),
            },
        ),
        ("client.ping", M::Ping { seq: 251 }),
        (
            "client.released",
            M::Released {
                membership: MEMBER,
                epoch: Epoch::quorum(17),
                keeping: Share::NONE,
            },
        ),
        (
            "client.released.keeping",
            M::Released {
                membership: MEMBER,
                epoch: Epoch::quorum(70_000),
                keeping: Share::new(1_024, numbers(&[(4, 4), (300, 511)])).unwrap(),
            },
        ),
        (
            "client.update",
            M::Update {
                membership: MEMBER,
                weight: None,
                handlers: None,
                drain: None,
            },
        ),
        (
            "client.update.full",
            M::Update {
                membership: MEMBER,
                weight: Some(0),
                handlers: Some(handlers(&["mail"])),
                drain: Some(true),
            },
        ),
        ("client.pull", M::Pull { membership: MEMBER }),
        ("client.goodbye", M::Goodbye { membership: MEMBER }),
        (
            "client.peer",
            M::Peer(PeerHello {
                magic: MAGIC,
                version: 1,
                from: 1,
                to: 300,
                nonce: [0x5a; 32],
            }),
        ),
    ]
}

fn server_samples() -> Vec<(&'static str, ServerMessage)> {
    use ServerMessage as M;
    let hello = |auth| {
        M::Hello(ServerHello {
            version: 1,
            features: 0,
            auth,
            agent: text("skyschedule/0.1.0"),
        })
    };
    let refusal = |retry_after| Refusal {
        code: Code::ID_IN_USE,
        text: text("the id is in use"),
        retry_after,
    };
    let welcome = |consistency, numbering, total, ranges: &[(u32, u32)]| M::Welcome {
        membership: MEMBER,
        epoch: Epoch::quorum(17),
        share: Share::new(total, numbers(ranges)).unwrap(),
        terms: Terms {
            consistency,
            numbering,
            drain_timeout: Millis(5_000),
        },
        lease: Millis(6_000),
    };
    let alive = |settled| M::Alive {
        membership: MEMBER,
        seq: 1,
        lease: Millis(6_000),
        settled,
    };
    vec![
        ("server.hello", hello(AuthMethod::None)),
        ("server.hello.scram", hello(AuthMethod::ScramSha256)),
        ("server.refused", M::Refused(refusal(None))),
        (
            "server.refused.retry",
            M::Refused(refusal(Some(Millis(1_500)))),
        ),
        (
            "server.auth_challenge",
            M::AuthChallenge {
                nonce: text("AQEBAQEBAQEBAQEBAQEBAQEBAgICAgICAgICAgICAgICAgIC"),
                salt: vec![9; 16].try_into().unwrap(),
                iterations: 100_000,
            },
        ),
        (
            "server.auth_done",
            M::AuthDone {
                signature: [0x5a; 32],
            },
        ),
        (
            "server.serving",
            M::Serving {
                mode: Serving::Quorum,
                hint: None,
            },
        ),
        (
            "server.serving.degraded",
            M::Serving {
                mode: Serving::Degraded,
                hint: Some(text("sky-2:9991")),
            },
        ),
        (
            "server.serving.none",
            M::Serving {
                mode: Serving::None,
                hint: None,
            },
        ),
        (
            "server.welcome",
            welcome(Consistency::Available, Numbering::Modulo, 3, &[(1, 1)]),
        ),
        (
            "server.welcome.slots",
            welcome(
                Consistency::Exclusive,
                Numbering::Slots(65_536),
                65_536,
                &[(0, 0), (250, 300), (60_000, 65_535)],
            ),
        ),
        (
            "server.told",
            M::Told {
                membership: MINTED,
                epoch: DEGRADED,
                share: Share::none_of(3),
            },
        ),
        ("server.alive", alive(None)),
        ("server.alive.settled", alive(Some(Epoch::quorum(17)))),
        ("server.pong", M::Pong { seq: 251 }),
        ("server.wait", M::Wait(refusal(Some(Millis(70_000))))),
        ("server.not_leader", M::NotLeader { hint: None }),
        (
            "server.not_leader.hint",
            M::NotLeader {
                hint: Some(text("sky-2:9991")),
            },
        ),
        ("server.gone", M::Gone { membership: MEMBER }),
        ("server.fenced", M::Fenced { membership: MINTED }),
    ]
}

/// The value of each line that is neither empty nor a comment, by name.
fn lines(file: &str) -> BTreeMap<&str, &str> {
    let mut lines = BTreeMap::new();
    for line in file
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (name, value) = line.split_once(' ').unwrap();
        assert!(lines.insert(name, value).is_none(), "{name} is there twice");
    }
    lines
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn unhex(text: &str) -> BytesMut {
    assert!(text.len().is_multiple_of(2), "{text}");
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn frame<T: Serialize>(message: T) -> BytesMut {
    let mut bytes = BytesMut::new();
    FrameCodec::<(), T>::new()
        .encode(message, &mut bytes)
        .unwrap();
    bytes
}

/// Compares in both directions, and lists all lines that are missing at once.
fn compare<T>(prefix: &str, samples: Vec<(&'static str, T)>)
where
    T: Serialize + DeserializeOwned + Clone + Debug + PartialEq,
{
    let golden: BTreeMap<_, _> = lines(PROTOCOL)
        .into_iter()
        .filter(|(name, _)| name.starts_with(prefix))
        .collect();
    let known: BTreeSet<_> = samples.iter().map(|(name, _)| *name).collect();
    assert_eq!(known.len(), samples.len(), "two samples have one name");
    let unknown: Vec<_> = golden
        .keys()
        .filter(|name| !known.contains(*name))
        .collect();
    assert!(
        unknown.is_empty(),
        "published messages without a sample: {unknown:?}"
    );
    let mut missing = String::new();
    for (name, message) in samples {
        let bytes = frame(message.clone());
        let Some(expected) = golden.get(name) else {
            writeln!(missing, "{name} {}", hex(&bytes)).unwrap();
            continue;
        };
        assert_eq!(hex(&bytes), *expected, "the bytes of {name} have changed");
        let mut bytes = unhex(expected);
        let decoded = FrameCodec::<T, ()>::new().decode(&mut bytes).unwrap();
        assert_eq!(decoded, Some(message), "{name} is read as something else");
        assert!(bytes.is_empty());
    }
    assert!(
        missing.is_empty(),
        "lines to add to golden/protocol-v1.txt:\n{missing}"
    );
}

fn covered<'a>(all: &[&'a str], sampled: impl Iterator<Item = &'a str>) {
    let sampled: BTreeSet<_> = sampled.collect();
    let missing: Vec<_> = all.iter().filter(|name| !sampled.contains(*name)).collect();
    assert!(missing.is_empty(), "variants without a sample: {missing:?}");
}

#[test]
fn what_clients_send_has_the_bytes_that_were_published() {
    compare("client.", client_samples());
}

#[test]
fn what_servers_send_has_the_bytes_that_were_published() {
    compare("server.", server_samples());
}

#[test]
fn every_message_is_pinned() {
    covered(
        CLIENT,
        client_samples()
            .iter()
            .map(|(_, message)| client_variant(message)),
    );
    covered(
        SERVER,
        server_samples()
            .iter()
            .map(|(_, message)| server_variant(message)),
    );
    let strangers: Vec<_> = lines(PROTOCOL)
        .into_keys()
        .filter(|name| !name.starts_with("client.") && !name.starts_with("server."))
        .collect();
    assert!(strangers.is_empty(), "{strangers:?}");
}

/// The login of version 1 from the first byte to the first renewed lease, with fixed nonces and secrets.
fn login_conversation() -> Vec<(&'static str, BytesMut)> {
    let salt = Salt::try_from((0..16).collect::<Vec<u8>>()).unwrap();
    let stored = StoredUser::derive(&"walker".into(), salt, MIN_ITERATIONS).unwrap();
    let credentials = Credentials::new("moon", "walker").unwrap();
    let client_nonce = Nonce::try_from("client-nonce-of-a-test").unwrap();
    let server_nonce = Nonce::try_from("server-nonce-of-a-test").unwrap();
    let client = ClientExchange::new(&credentials, client_nonce).unwrap();
    let auth_first = ClientMessage::AuthFirst {
        user: client.user().clone(),
        nonce: client.nonce().clone(),
    };
    let (challenge, server) = ServerExchange::challenge(
        Some(&stored),
        &Decoys::new([7; 32], MIN_ITERATIONS),
        "moon",
        client.nonce(),
        &server_nonce,
    )
    .unwrap();
    let (proof, check) = client.respond(&challenge).unwrap();
    let signature = server.verify(&proof).unwrap();
    check.verify(&signature).unwrap();
    let member = Membership::quorum(1);
    let epoch = Epoch::quorum(1);
    vec![
        ("client.hello", frame(ClientMessage::Hello(client_hello()))),
        (
            "server.hello",
            frame(ServerMessage::Hello(ServerHello {
                version: 1,
                features: 0,
                auth: AuthMethod::ScramSha256,
                agent: text("skyschedule/0.1.0"),
            })),
        ),
        ("client.auth_first", frame(auth_first)),
        (
            "server.auth_challenge",
            frame(ServerMessage::AuthChallenge {
                nonce: challenge.nonce.clone(),
                salt: challenge.salt.clone(),
                iterations: challenge.iterations,
            }),
        ),
        (
            "client.auth_proof",
            frame(ClientMessage::AuthProof { proof }),
        ),
        (
            "server.auth_done",
            frame(ServerMessage::AuthDone { signature }),
        ),
        (
            "client.login",
            frame(ClientMessage::Login(Box::new(short_login()))),
        ),
        (
            "server.serving",
            frame(ServerMessage::Serving {
                mode: Serving::Quorum,
                hint: None,
            }),
        ),
        (
            "client.attach",
            frame(ClientMessage::Attach {
                membership: None,
                epoch: Epoch::ZERO,
            }),
        ),
        (
            "server.welcome",
            frame(ServerMessage::Welcome {
                membership: member,
                epoch,
                share: Share::everything(),
                terms: Terms {
                    consistency: Consistency::Available,
                    numbering: Numbering::Modulo,
                    drain_timeout: Millis(5_000),
                },
                lease: Millis(6_000),
            }),
        ),
        (
            "client.heartbeat",
            frame(ClientMessage::Heartbeat {
                membership: member,
                seq: 1,
                epoch,
                load: None,
            }),
        ),
        (
            "server.alive",
            frame(ServerMessage::Alive {
                membership: member,
                seq: 1,
                lease: Millis(6_000),
                settled: Some(epoch),
            }),
        ),
        (
            "client.goodbye",
            frame(ClientMessage::Goodbye { membership: member }),
        ),
    ]
}

#[test]
fn a_login_has_the_bytes_that_were_published() {
    let now: Vec<String> = login_conversation()
        .iter()
        .map(|(name, bytes)| format!("{name} {}", hex(bytes)))
        .collect();
    let published: Vec<&str> = LOGIN
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    assert_eq!(
        now,
        published,
        "a client of version 1 could not log in any more:\n{}",
        now.join("\n")
    );
}

#[test]
fn version_1_is_still_spoken() {
    assert_eq!(
        MIN_VERSION, 1,
        "clients of version 1 exist: give up a version only in a new major release"
    );
    const { assert!(VERSION >= MIN_VERSION) };
}

/// Programs act on codes, so the numbers stand for what they always stood for.
#[test]
fn codes_keep_their_meaning() {
    let names: Vec<String> = (1..=13).map(|code| Code(code).to_string()).collect();
    assert_eq!(
        names,
        [
            "protocol",
            "version",
            "credentials",
            "forbidden",
            "deadline",
            "too_many",
            "consistency",
            "id_in_use",
            "back_off",
            "limit",
            "stopping",
            "too_slow",
            "code_13",
        ]
    );
}
