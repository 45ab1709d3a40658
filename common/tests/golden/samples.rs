//! A sample of every message, with and without what is optional in it.

use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName, HandlerName, Incarnation, Membership};
use skyschedule_common::protocol::MAGIC;
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::messages::{
    AuthMethod, ClientHello, ClientMessage, Code, Consistency, Load, Login, Millis, Numbering,
    PeerHello, Refusal, ServerHello, ServerMessage, Serving, Terms,
};
use skyschedule_common::share::{Numbers, Share};

pub(crate) fn text<const N: usize>(text: &str) -> BoundedString<N> {
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

pub(crate) fn client_hello() -> ClientHello {
    ClientHello {
        magic: MAGIC,
        min_version: 1,
        max_version: 1,
        features: 0,
        agent: text("skyschedule-client/0.1.0"),
    }
}

/// The login of a client that says no more than it must.
pub(crate) fn short_login() -> Login {
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

pub(crate) fn client_samples() -> Vec<(&'static str, ClientMessage)> {
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
        ("client.relay", M::Relay),
        ("client.relayed", M::Relayed { by: 300 }),
        (
            "client.attach_to_leader",
            M::AttachToLeader {
                membership: Some(Membership::quorum(9)),
                epoch: Epoch::quorum(300),
            },
        ),
    ]
}

pub(crate) fn server_samples() -> Vec<(&'static str, ServerMessage)> {
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
        (
            "server.servers",
            M::Servers {
                addresses: vec![text("sky-1:9991"), text("[2001:db8::1]:9991")]
                    .try_into()
                    .unwrap(),
            },
        ),
        ("server.relaying", M::Relaying),
    ]
}
