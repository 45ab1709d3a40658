//! What replicas say to each other about consensus.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};
use serde::{Deserialize, Serialize};

use super::identity::{ClusterId, Standing};
use super::lineage::Seen;
use super::raft::{LogId, Place, SnapshotMeta, StoredMembership, TypeConfig, Vote};

/// What is asked, and in which cluster.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Envelope {
    /// Cluster of whoever asks, once it is in one.
    pub(super) cluster: Option<ClusterId>,
    /// What is asked.
    pub(super) request: Request,
}

/// What can be asked.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// How the other one is.
    Status,
    /// All replicas are blank: they are one cluster from now on.
    Form {
        /// Which.
        cluster: ClusterId,
        /// Of which replicas.
        replicas: BTreeSet<u16>,
    },
    /// A leader's entries, or its heartbeat.
    Append {
        /// These.
        request: AppendEntriesRequest<TypeConfig>,
        /// The leaderships that it knows of.
        seen: Seen,
    },
    /// Whether it would vote.
    PreVote(VoteRequest<TypeConfig>),
    /// To vote.
    Vote(VoteRequest<TypeConfig>),
    /// A leader's snapshot.
    Snapshot {
        /// Of the leader.
        vote: Vote,
        /// What it covers.
        meta: SnapshotMeta,
        /// The leaderships that the leader knows of.
        seen: Seen,
        /// The state.
        state: Bytes,
    },
    /// To lead in place of the one that asks.
    Transfer {
        /// Of the leader.
        vote: Vote,
        /// Who shall lead.
        to: u64,
        /// It must have this entry.
        last: Option<LogId>,
    },
    /// The cluster is about to take this blank replica in.
    Join {
        /// Which.
        cluster: ClusterId,
        /// Of the leader.
        term: u64,
    },
    /// The one that asks ends, since it and another one have decided different things.
    Split {
        /// That other one.
        other: u16,
        /// How that shows.
        why: String,
    },
}

/// The answer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// To `Status`.
    Status(Status),
    /// To `Form`, `Transfer`, `Join` and `Split`.
    Done,
    /// To `Append`.
    Append(AppendEntriesResponse<TypeConfig>),
    /// To `PreVote` and `Vote`.
    Vote(VoteResponse<TypeConfig>),
    /// To `Snapshot`.
    Snapshot(SnapshotResponse<TypeConfig>),
}

/// How a replica is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Status {
    /// Its cluster, once it is in one.
    pub(super) cluster: Option<ClusterId>,
    /// What it may do.
    pub(super) standing: Standing,
    /// No entry ever came to its disk.
    pub(super) empty: bool,
    /// The newest term that it knows.
    pub(super) term: u64,
    /// The replica that it follows, and heard from a moment ago; itself, if it leads.
    pub(super) follows: Option<u16>,
    /// Where clients reach it.
    pub(super) advertise: String,
    /// All replicas by its configuration, itself included.
    pub(super) replicas: BTreeSet<u16>,
    /// The replicas that it knows of.
    pub(super) known: Option<Known>,
}

/// The replicas of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    /// Whether this is decided, or may be taken back.
    pub(super) decided: bool,
    /// The entry that says so.
    pub(super) since: Option<LogId>,
    /// All of them, and where each is.
    pub(super) places: BTreeMap<u16, Place>,
    /// Those that vote. While they change, those of before and those of after.
    pub(super) voters: BTreeSet<u16>,
}

impl Known {
    /// What a membership says; `None`, where there is none yet.
    pub(super) fn of(stored: &StoredMembership, decided: bool) -> Option<Self> {
        let id = |id: u64| u16::try_from(id).ok();
        let places: BTreeMap<u16, Place> = stored
            .nodes()
            .filter_map(|(node, place)| Some((id(*node)?, place.clone())))
            .collect();
        (!places.is_empty()).then(|| Self {
            decided,
            since: *stored.log_id(),
            places,
            voters: stored.voter_ids().filter_map(id).collect(),
        })
    }
}
