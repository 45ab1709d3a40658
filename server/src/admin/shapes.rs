//! What the interface shows of groups.

use serde::{Deserialize, Serialize};
use skyschedule_common::protocol::messages::{Consistency, Numbering};
use skyschedule_common::share::Share;
use utoipa::ToSchema;

use crate::state::Settings;
use crate::view::{GroupView, MemberState, MemberView, ranges};

/// All groups.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(super) struct GroupList {
    /// By name.
    groups: Vec<GroupBody>,
    /// There is no leader, or it does not answer: this is what the replica knows that was asked.
    stale: bool,
}

/// A group and its members.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(super) struct GroupBody {
    /// Its name.
    name: String,
    /// How its rows are numbered.
    numbering: NumberingName,
    /// The total of its shares.
    total: u32,
    /// The newest epoch that any member was told.
    #[schema(example = "17")]
    epoch: String,
    /// What it promises.
    consistency: ConsistencyName,
    /// Whether a replica without a quorum numbers it.
    degraded: bool,
    /// There is no leader, or it does not answer: this is what the replica knows that was asked.
    stale: bool,
    /// What must be put right, for people: rows that no member is to have, although there are members; null: nothing.
    #[schema(required)]
    problem: Option<String>,
    /// What operators set.
    settings: SettingsBody,
    /// The members, oldest first.
    members: Vec<MemberBody>,
}

/// A member of a group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(super) struct MemberBody {
    /// Its name.
    client_id: String,
    /// The numbers that it holds now, as inclusive ranges.
    #[schema(example = json!([[0, 0], [4, 7]]))]
    numbers: Vec<[u32; 2]>,
    /// Its part of the whole.
    weight: u32,
    /// Its state.
    #[schema(inline)]
    state: MemberState,
    /// Where its connection comes from; null while it is away.
    #[schema(required)]
    address: Option<String>,
    /// Milliseconds since its last heartbeat; null if there was none yet.
    #[schema(required)]
    heartbeat_age_ms: Option<u64>,
    /// The numbers that it should hold, where these are others.
    #[schema(required)]
    target: Option<Vec<[u32; 2]>>,
    /// Milliseconds for which a release has been waited for.
    #[schema(required)]
    pending_since_ms: Option<u64>,
}

/// What operators set for a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SettingsBody {
    /// How rows are numbered.
    numbering: NumberingName,
    /// Number of slots, a power of two from 16 to 65536; null with modulo.
    slots: Option<u32>,
    /// What is promised.
    consistency: ConsistencyName,
    /// Exclusive groups: a proven end of stream frees a share.
    trust_fin: bool,
    /// Available groups: how long the others wait for a release.
    drain_timeout_ms: u32,
    /// Exclusive groups: after how long a member that does not release is fenced.
    max_drain_ms: u32,
    /// Least time between two barriers.
    settle_ms: u32,
    /// How long a share is kept for a client that left or died.
    rejoin_grace_ms: u32,
    /// Available groups: how long after a reset a member is taken for dead.
    reset_grace_ms: u32,
    /// Length of leases; null: by the number of clients.
    lease_ms: Option<u32>,
    /// Most slots of one member; null: no bound.
    max_slots: Option<u32>,
}

/// How rows are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum NumberingName {
    /// The total is the sum of the weights.
    Modulo,
    /// The total is fixed.
    Slots,
}

/// What a group promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ConsistencyName {
    /// Work goes on without any server; rows may be held twice while something fails.
    Available,
    /// No two members ever hold one row; work may wait.
    Exclusive,
}

impl From<Vec<GroupView>> for GroupList {
    fn from(groups: Vec<GroupView>) -> Self {
        Self {
            stale: groups.iter().any(|group| group.stale),
            groups: groups.into_iter().map(GroupBody::from).collect(),
        }
    }
}

impl From<GroupView> for GroupBody {
    fn from(group: GroupView) -> Self {
        Self {
            name: group.name,
            numbering: group.numbering.into(),
            total: group.total,
            epoch: group.epoch.to_string(),
            consistency: group.consistency.into(),
            degraded: group.degraded,
            stale: group.stale,
            problem: group.unowned.map(|unowned| unowned.to_string()),
            settings: (&group.settings).into(),
            members: group.members.into_iter().map(MemberBody::from).collect(),
        }
    }
}

impl From<MemberView> for MemberBody {
    fn from(member: MemberView) -> Self {
        let numbers = |share: &Share| ranges(share.numbers());
        Self {
            client_id: member.client_id,
            numbers: numbers(&member.held),
            weight: member.weight,
            state: member.state,
            address: member.address,
            heartbeat_age_ms: member.heartbeat_age_ms,
            target: member.target.as_ref().map(numbers),
            pending_since_ms: member.pending_since_ms,
        }
    }
}

impl From<&Settings> for SettingsBody {
    fn from(settings: &Settings) -> Self {
        Self {
            numbering: settings.numbering.into(),
            slots: match settings.numbering {
                Numbering::Modulo => None,
                Numbering::Slots(slots) => Some(slots),
            },
            consistency: settings.consistency.into(),
            trust_fin: settings.trust_fin,
            drain_timeout_ms: settings.drain_timeout.0,
            max_drain_ms: settings.max_drain.0,
            settle_ms: settings.settle.0,
            rejoin_grace_ms: settings.rejoin_grace.0,
            reset_grace_ms: settings.reset_grace.0,
            lease_ms: settings.lease.map(|lease| lease.0),
            max_slots: settings.max_slots,
        }
    }
}

impl From<Numbering> for NumberingName {
    fn from(numbering: Numbering) -> Self {
        match numbering {
            Numbering::Modulo => Self::Modulo,
            Numbering::Slots(_) => Self::Slots,
        }
    }
}

impl From<Consistency> for ConsistencyName {
    fn from(consistency: Consistency) -> Self {
        match consistency {
            Consistency::Available => Self::Available,
            Consistency::Exclusive => Self::Exclusive,
        }
    }
}
