//! The bytes of version 1 on the wire, pinned: an old client works with a new server, and the other way
//! round, only while not one of them changes.
//!
//! `golden/protocol-v1.txt` has a line `name frame` for each of the `samples`, the frame as hex with its
//! header. **Lines are only ever added.** After a variant was appended to an enum, this file does not
//! compile until the variant is in the list of `variants!`; then the tests fail until there is a sample of
//! it (with and without its optional fields) and a line, which the failure prints. A failure for a line that
//! exists means that a published message was edited: undo that, and append a new variant instead.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

#[path = "golden/samples.rs"]
mod samples;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Write as _};

use bytes::BytesMut;
use serde::Serialize;
use serde::de::DeserializeOwned;
use skyschedule_common::auth::{ClientExchange, Credentials, Decoys, Nonce, Salt, ServerExchange};
use skyschedule_common::auth::{MIN_ITERATIONS, StoredUser};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::codec::FrameCodec;
use skyschedule_common::protocol::messages::{
    AuthMethod, ClientMessage, Code, Consistency, Millis, Numbering, ServerHello, ServerMessage,
    Serving, Terms,
};
use skyschedule_common::protocol::{MIN_VERSION, VERSION};
use skyschedule_common::share::Share;
use tokio_util::codec::{Decoder as _, Encoder as _};

use samples::{client_hello, client_samples, server_samples, short_login, text};

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
        Relay,
        Relayed,
        AttachToLeader,
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
        Servers,
        Relaying,
    }
);

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
    // It became a member under epoch 1, and was told its first share under epoch 2.
    let epoch = Epoch::quorum(2);
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
    let names: Vec<String> = (1..=14).map(|code| Code(code).to_string()).collect();
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
            "no_relay",
            "code_14",
        ]
    );
}
