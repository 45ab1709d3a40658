//! What clients and servers say to each other.
//!
//! One message a frame: a length of four bytes, then a [`messages::ClientMessage`] or
//! [`messages::ServerMessage`] in bincode. The first message of each side is `Hello`, which agrees on
//! the version and the features; then comes the SCRAM exchange (see [`crate::auth`]), then `Login`.
//! The layout of `Hello` and `Refused` never changes, so that any two versions can tell each other
//! why they do not talk. Messages are only ever appended to: a published variant is never edited.
//!
//! A client that reaches a server that follows, but not the one that leads, says `Relay` in place of `Login`. Once that is
//! answered by `Relaying`, the server carries bytes between the client and the leader until either side ends, and looks into
//! none of them: the client begins again with `Hello`, and each of the two proves itself to the other as over any network.
//! So the one between is trusted with nothing; it can at most be slow or end, as a network can. The leader knows by
//! `Relayed` that the connection is such a one, and takes its end for silence: the server between may have died, not the
//! client. Leases count from the client's own sending, so the longer way cannot stretch them, which is why this is as safe
//! for exclusive groups as it is for available ones.

pub mod bounded;
pub mod codec;
pub mod messages;

/// Newest version of the protocol that this build speaks.
pub const VERSION: u16 = 1;

/// Oldest version of the protocol that this build speaks.
pub const MIN_VERSION: u16 = 1;

/// First bytes of the first message: tells a lost HTTP client from one of ours.
pub const MAGIC: [u8; 4] = *b"SKYS";

/// Bits of optional features, as both ends say in their first messages.
pub mod features {
    /// The client understands `Servers`.
    pub const SERVERS: u64 = 1;

    /// The server understands `Relay`.
    pub const RELAY: u64 = 2;

    /// The server understands `AttachToLeader`.
    pub const ATTACH_TO_LEADER: u64 = 4;

    /// All that this build knows.
    pub const ALL: u64 = SERVERS | RELAY | ATTACH_TO_LEADER;
}

/// Largest weight of a member.
pub const MAX_WEIGHT: u32 = 1_000;
