//! The messages. `spec/protocol` in the documentation has the rules that they follow.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::bounded::{BoundedString, BoundedVec};
use crate::epoch::Epoch;
use crate::ids::{ClientId, GroupName, HandlerName, Incarnation, Membership};
use crate::share::Share;

/// From the client to the server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ClientMessage {
    /// The first message of a connection.
    Hello(ClientHello),
    /// Opens the SCRAM exchange.
    AuthFirst {
        /// Who logs in.
        user: BoundedString<128>,
        /// The client's nonce.
        nonce: BoundedString<64>,
    },
    /// Proves that the client knows the password.
    AuthProof {
        /// The client proof of SCRAM-SHA-256.
        proof: [u8; 32],
    },
    /// Names the client and its group; on every connection, and again after each new membership.
    Login(Box<Login>),
    /// Asks this server to serve the client: to make it a member, or to go on with its membership.
    Attach {
        /// The membership to go on with.
        membership: Option<Membership>,
        /// Newest epoch that the client was told.
        epoch: Epoch,
    },
    /// Another server serves this client from now on.
    Detach {
        /// Whose.
        membership: Membership,
    },
    /// Asks for the lease to be renewed; only on the attached connection.
    Heartbeat {
        /// Whose lease.
        membership: Membership,
        /// Never repeats on a connection.
        seq: u64,
        /// Newest epoch that the client took.
        epoch: Epoch,
        /// What the executor does.
        load: Option<Load>,
    },
    /// Keeps a standby connection alive.
    Ping {
        /// Comes back in `Pong`.
        seq: u64,
    },
    /// Nothing outside the told share and `keeping` is worked on any more.
    Released {
        /// Who released.
        membership: Membership,
        /// The told share that this answers.
        epoch: Epoch,
        /// Rows still worked on that will be released later; empty when done.
        keeping: Share,
    },
    /// Changes what the login said.
    Update {
        /// Whose.
        membership: Membership,
        /// New weight.
        weight: Option<u32>,
        /// New set of handlers.
        handlers: Option<BoundedVec<HandlerName, MAX_HANDLERS>>,
        /// Whether the member's share moves away while it stays.
        drain: Option<bool>,
    },
    /// Asks for the present share; answered `Told`.
    Pull {
        /// Whose.
        membership: Membership,
    },
    /// Ends the membership; only after everything was released.
    Goodbye {
        /// Whose.
        membership: Membership,
    },
    /// The first message of another replica, in place of `Hello`. What follows is between replicas.
    Peer(PeerHello),
    /// In place of `Login`: carry this connection on to the server that leads, which the client cannot reach itself.
    /// Needs the feature of this name.
    Relay,
    /// Said by the server that does so, before anything that it carries: the end of this connection says nothing of
    /// the client. `Hello` follows, from the client.
    Relayed {
        /// The replica that says so.
        by: u16,
    },
    /// `Attach`, if this server leads; any other one does not answer it. It may be sent together with the first `Login` of a
    /// connection, before `Serving` has said how the server serves. Needs the feature of this name.
    AttachToLeader {
        /// The membership to go on with.
        membership: Option<Membership>,
        /// Newest epoch that the client was told.
        epoch: Epoch,
    },
}

/// From the server to the client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ServerMessage {
    /// Answers the client's `Hello`.
    Hello(ServerHello),
    /// The request cannot be granted; the connection ends.
    Refused(Refusal),
    /// Answers `AuthFirst`.
    AuthChallenge {
        /// The client's nonce, continued by the server.
        nonce: BoundedString<128>,
        /// Salt of the key derivation.
        salt: BoundedVec<u8, 64>,
        /// Rounds of the key derivation.
        iterations: u32,
    },
    /// The proof was right, and here is the server's own.
    AuthDone {
        /// The server signature of SCRAM-SHA-256.
        signature: [u8; 32],
    },
    /// How this server serves at present; on login, and whenever it changes.
    Serving {
        /// How.
        mode: Serving,
        /// Address of a server that serves by quorum, where known.
        hint: Option<BoundedString<256>>,
    },
    /// Answers `Attach`: the client is a member.
    Welcome {
        /// The membership, new or resumed.
        membership: Membership,
        /// Epoch of the share.
        epoch: Epoch,
        /// The present share.
        share: Share,
        /// What the group is like.
        terms: Terms,
        /// Length of the lease. It begins with the first answered heartbeat.
        lease: Millis,
    },
    /// The member's new share.
    Told {
        /// Whose.
        membership: Membership,
        /// Orders what is told.
        epoch: Epoch,
        /// All that the member may hold from now on.
        share: Share,
    },
    /// Answers `Heartbeat`: the lease counts from the moment that heartbeat `seq` was sent.
    Alive {
        /// Whose lease.
        membership: Membership,
        /// Of the heartbeat.
        seq: u64,
        /// Length of the lease.
        lease: Millis,
        /// The epoch in which the group's numbering settled, when it has.
        settled: Option<Epoch>,
    },
    /// Answers `Ping`.
    Pong {
        /// Of the ping.
        seq: u64,
    },
    /// Not yet: attach again after a while. To a member that is served: what it asked for last is not done, and all stays
    /// as it was.
    Wait(Refusal),
    /// This server cannot serve now.
    NotLeader {
        /// Address of the one that can, where known.
        hint: Option<BoundedString<256>>,
    },
    /// This membership is over.
    Gone {
        /// Which.
        membership: Membership,
    },
    /// This membership did not release in time: it is over as soon as its lease ends.
    Fenced {
        /// Which.
        membership: Membership,
    },
    /// Where all servers are; after `Welcome`, and whenever it changes. Needs the feature of this name.
    Servers {
        /// `host:port` of each.
        addresses: BoundedVec<BoundedString<256>, MAX_SERVERS>,
    },
    /// Answers `Relay`: what follows, both ways, is between the client and the server that leads, which begins with
    /// the client's `Hello`.
    Relaying,
}

/// Most servers that a client is told.
pub const MAX_SERVERS: usize = 16;

/// Most handlers that one client registers.
pub const MAX_HANDLERS: usize = 1_024;

/// The first message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientHello {
    /// [`super::MAGIC`].
    pub magic: [u8; 4],
    /// Oldest version that the client speaks.
    pub min_version: u16,
    /// Newest version that the client speaks.
    pub max_version: u16,
    /// Bits of optional features that the client knows: [`super::features`].
    pub features: u64,
    /// Name and version of the client library, for the log.
    pub agent: BoundedString<64>,
}

/// The first message of a replica that connects to another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerHello {
    /// [`super::MAGIC`]: tells our replicas from strangers.
    pub magic: [u8; 4],
    /// Version of what replicas say to each other; both must speak the same.
    pub version: u16,
    /// The replica that connects.
    pub from: u16,
    /// The replica that it wants to reach.
    pub to: u16,
    /// Drawn anew for each connection.
    pub nonce: [u8; 32],
}

/// The server's answer to a `Hello`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerHello {
    /// Version that both speak from now on.
    pub version: u16,
    /// Bits of optional features that both know.
    pub features: u64,
    /// How the client must authenticate.
    pub auth: AuthMethod,
    /// Name and version of the server, for the log.
    pub agent: BoundedString<64>,
}

/// How a client proves who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AuthMethod {
    /// Not at all: a server without users, which listens on loopback only.
    None,
    /// SCRAM-SHA-256.
    ScramSha256,
}

/// Names the client and its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Login {
    /// The clients that share one task table.
    pub group: GroupName,
    /// The client's name in the group.
    pub client: ClientId,
    /// Drawn anew for each new membership.
    pub incarnation: Incarnation,
    /// The membership that this connection carries, if any yet.
    pub membership: Option<Membership>,
    /// Newest epoch that the client was told.
    pub epoch: Epoch,
    /// What the client relies on; a group of the other kind refuses it.
    pub consistency: Option<Consistency>,
    /// Its part of the whole, at most [`super::MAX_WEIGHT`]; 0 owns nothing.
    pub weight: u32,
    /// Local and peer address of the connection as the client sees them.
    pub ends: Option<(SocketAddr, SocketAddr)>,
    /// Where it stands on the consistent-hash ring; its client id by default.
    pub ring_key: Option<BoundedString<256>>,
    /// Names of the jobs that it can run.
    pub handlers: BoundedVec<HandlerName, MAX_HANDLERS>,
}

/// What an executor does at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Load {
    /// Runs in progress.
    pub running: u32,
    /// Runs that wait.
    pub queued: u32,
    /// Use of the processors, in thousandths.
    pub cpu_permille: u16,
    /// Use of the memory, in thousandths.
    pub memory_permille: u16,
}

/// How a server serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Serving {
    /// It is the leader: attach here.
    Quorum,
    /// It has no quorum, and numbers those that attach to it.
    Degraded,
    /// Not at all at present.
    None,
}

/// What a group promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Consistency {
    /// Rows may be held twice while something fails; work goes on without any server.
    #[default]
    Available,
    /// No two members ever hold one row; work may wait.
    Exclusive,
}

/// How a group's rows are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Numbering {
    /// The total is the sum of the members' weights.
    #[default]
    Modulo,
    /// The total is fixed; members own sets of slots.
    Slots(u32),
}

/// What a member must know of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// What the group promises.
    pub consistency: Consistency,
    /// How its rows are numbered.
    pub numbering: Numbering,
    /// How long a member may take to finish what it must give up before others take it (available groups).
    pub drain_timeout: Millis,
}

/// A duration in whole milliseconds.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Millis(pub u32);

impl Millis {
    /// The duration in whole milliseconds, at most 49 days.
    pub fn from_duration(duration: Duration) -> Self {
        Self(u32::try_from(duration.as_millis()).unwrap_or(u32::MAX))
    }

    /// As a duration.
    pub const fn duration(self) -> Duration {
        Duration::from_millis(self.0 as u64)
    }
}

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Available => "available",
            Self::Exclusive => "exclusive",
        })
    }
}

impl fmt::Display for Numbering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Modulo => f.write_str("modulo"),
            Self::Slots(slots) => write!(f, "slots({slots})"),
        }
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.0)
    }
}

/// Why a request is not granted, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// For programs.
    pub code: Code,
    /// For people: what is wrong and what to do.
    pub text: BoundedString<512>,
    /// When to try again; `None`: not before something was changed.
    pub retry_after: Option<Millis>,
}

/// Tells a program why it was refused. Unknown codes come from newer servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Code(pub u16);

impl Code {
    /// The message breaks the protocol.
    pub const PROTOCOL: Self = Self(1);
    /// No version of the protocol in common.
    pub const VERSION: Self = Self(2);
    /// User or password is wrong.
    pub const CREDENTIALS: Self = Self(3);
    /// The user may not use this group.
    pub const FORBIDDEN: Self = Self(4);
    /// The login took too long.
    pub const DEADLINE: Self = Self(5);
    /// Too many connections.
    pub const TOO_MANY: Self = Self(6);
    /// The group is of the other consistency.
    pub const CONSISTENCY: Self = Self(7);
    /// A member with this client id lives.
    pub const ID_IN_USE: Self = Self(8);
    /// The client died too often of late.
    pub const BACK_OFF: Self = Self(9);
    /// A limit of the server or the group is reached.
    pub const LIMIT: Self = Self(10);
    /// The server stops.
    pub const STOPPING: Self = Self(11);
    /// The client reads too slowly.
    pub const TOO_SLOW: Self = Self(12);
    /// No server that leads can be reached through this one.
    pub const NO_RELAY: Self = Self(13);
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::PROTOCOL => "protocol",
            Self::VERSION => "version",
            Self::CREDENTIALS => "credentials",
            Self::FORBIDDEN => "forbidden",
            Self::DEADLINE => "deadline",
            Self::TOO_MANY => "too_many",
            Self::CONSISTENCY => "consistency",
            Self::ID_IN_USE => "id_in_use",
            Self::BACK_OFF => "back_off",
            Self::LIMIT => "limit",
            Self::STOPPING => "stopping",
            Self::TOO_SLOW => "too_slow",
            Self::NO_RELAY => "no_relay",
            Self(other) => return write!(f, "code_{other}"),
        })
    }
}

impl Refusal {
    /// A refusal; a text above 512 bytes is cut.
    pub fn new(code: Code, text: &str, retry_after: Option<Duration>) -> Self {
        Self {
            code,
            text: BoundedString::truncated(text),
            retry_after: retry_after.map(Millis::from_duration),
        }
    }
}
