//! What the server shows of itself: the shapes of the admin interface.

use serde::{Deserialize, Serialize};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::protocol::messages::{Consistency, Numbering};
use skyschedule_common::share::{Numbers, Share};
use utoipa::ToSchema;

use crate::state::{Settings, Unowned};

/// A replica, and what it knows of the others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClusterView {
    /// The replica that answers.
    pub replica_id: u16,
    /// The leader it knows.
    pub leader: Option<u16>,
    /// Counts leaderships.
    pub term: u64,
    /// Whether the replica that answers numbers clients by itself, since it has no quorum.
    #[serde(default)]
    pub degraded: bool,
    /// Whether the replica that answers is in a cluster. It is in none before the first of its replicas have found each
    /// other, or before it is added: who would vote is not decided then.
    #[serde(default)]
    pub formed: bool,
    /// All replicas.
    pub replicas: Vec<ReplicaView>,
}

/// One replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaView {
    /// Its id.
    pub id: u16,
    /// Where clients reach it.
    pub address: String,
    /// Whether it votes.
    pub voter: bool,
    /// Whether the answering replica hears it.
    pub reachable: bool,
    /// How many entries of the log it lacks; only the leader knows.
    #[schema(required)]
    pub lag: Option<u64>,
}

/// A group and its members.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupView {
    /// Its name.
    pub name: String,
    /// How its rows are numbered.
    pub numbering: Numbering,
    /// The total of its shares.
    pub total: u32,
    /// Newest epoch that any member was told.
    pub epoch: Epoch,
    /// What it promises.
    pub consistency: Consistency,
    /// Whether a replica without a quorum numbers it.
    pub degraded: bool,
    /// Whether the replica that answers does not lead: it shows what it knows.
    pub stale: bool,
    /// Length of leases in force, in milliseconds.
    pub lease_ms: u32,
    /// Whether rows are moving.
    pub in_handover: bool,
    /// Rows that no member is to have, although there are members.
    pub unowned: Option<Unowned>,
    /// What operators set, so that a change of one setting keeps the others.
    pub settings: Settings,
    /// The members, oldest first.
    pub members: Vec<MemberView>,
}

/// A member.
#[derive(Debug, Clone, PartialEq)]
pub struct MemberView {
    /// Its name.
    pub client_id: String,
    /// What it may still be working on.
    pub held: Share,
    /// What it should have, where that differs.
    pub target: Option<Share>,
    /// Its part of the whole.
    pub weight: u32,
    /// Its state.
    pub state: MemberState,
    /// Address that its connection comes from; none while it is away.
    pub address: Option<String>,
    /// Milliseconds since its last heartbeat was read; none if none was yet.
    pub heartbeat_age_ms: Option<u64>,
    /// Milliseconds since it was asked for a release that it has not given.
    pub pending_since_ms: Option<u64>,
}

/// The state of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// Connected, and served.
    Active,
    /// Its share moves away while it stays.
    Draining,
    /// Not connected; its lease still runs.
    Away,
}

/// What happened, for those who watch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ServerEvent {
    /// A client became a member.
    Joined {
        /// The group.
        group: String,
        /// The client.
        client_id: String,
    },
    /// A client said goodbye.
    Left {
        /// The group.
        group: String,
        /// The client.
        client_id: String,
    },
    /// A member died, or its lease is over.
    Expired {
        /// The group.
        group: String,
        /// The client.
        client_id: String,
        /// How the server knows.
        why: String,
    },
    /// A member did not release in time, and others went on.
    Overtaken {
        /// The group.
        group: String,
        /// The client.
        client_id: String,
    },
    /// A member's weight changed, or its share moves away, or does so no more.
    Updated {
        /// The group.
        group: String,
        /// The client.
        client_id: String,
        /// Its part of the whole.
        weight: u32,
        /// Whether its share moves away while it stays.
        draining: bool,
    },
    /// A client that died too often is let in only after a delay.
    Delayed {
        /// The group.
        group: String,
        /// The client.
        client_id: String,
        /// The delay in milliseconds.
        retry_after_ms: u64,
    },
    /// A handover is over.
    Renumbered {
        /// The group.
        group: String,
        /// The new total.
        total: u32,
        /// The newest epoch, as text.
        epoch: String,
        /// How long it took, in milliseconds.
        took_ms: u64,
    },
    /// The settings of a group changed.
    Configured {
        /// The group.
        group: String,
    },
    /// An operator deleted a group.
    Deleted {
        /// The group.
        group: String,
    },
    /// This replica numbers clients by itself, since it has no quorum, or does so no more.
    Degraded {
        /// Which.
        replica_id: u16,
        /// Whether it does.
        degraded: bool,
    },
    /// This replica became the leader.
    Leader {
        /// Which.
        replica_id: u16,
    },
}

/// Ranges of numbers as the interface shows them.
pub fn ranges(numbers: &Numbers) -> Vec<[u32; 2]> {
    numbers
        .ranges()
        .iter()
        .map(|&(first, last)| [first, last])
        .collect()
}
