//! What can be decided.

use serde::{Deserialize, Serialize};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_common::protocol::messages::{Consistency, Millis};
use skyschedule_common::share::Share;

use super::Settings;

/// One entry of the command log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Each new leader's own first entry: it acts only once this is applied.
    Ready {
        /// Tells this leadership from others.
        leader: u64,
    },
    /// Concerns one group.
    Group {
        /// Which.
        group: GroupName,
        /// What changes.
        change: Change,
    },
}

/// What changes in a group. Members are named by the numbers of their memberships.
///
/// `start`: pacing allows that a handover begins in the same step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Change {
    /// The operator's settings.
    Configure {
        /// All of them.
        settings: Settings,
        /// See [`Change`].
        start: bool,
    },
    /// The length of leases that are given from now on.
    LeaseLength(Millis),
    /// A client knows of more than this state: it was lost. Numbers continue above what was known.
    Recover {
        /// Membership number that a client knows.
        number: u64,
        /// Epoch that it knows.
        epoch: Epoch,
    },
    /// Clients become members.
    Join {
        /// Who.
        members: Vec<Joining>,
        /// See [`Change`].
        start: bool,
    },
    /// Members are proven dead, or their leases are over.
    Dead {
        /// Who.
        members: Vec<u64>,
        /// See [`Change`].
        start: bool,
    },
    /// Members said goodbye.
    Leave {
        /// Who.
        members: Vec<u64>,
        /// See [`Change`].
        start: bool,
    },
    /// Members released all of what they must give up, except `keeping`.
    Release(Vec<(u64, Epoch, Share)>),
    /// Members did not release in time, and others go on without it.
    Overtake(Vec<(u64, Epoch)>),
    /// Members did not release in time, and their leases are not renewed any more.
    Fence(Vec<u64>),
    /// Members change what they said at login.
    Update {
        /// Who, and what.
        members: Vec<Update>,
        /// See [`Change`].
        start: bool,
    },
    /// Clients did not come back in time for the shares that were kept for them.
    Vacate {
        /// Who.
        clients: Vec<ClientId>,
        /// See [`Change`].
        start: bool,
    },
    /// A handover that earlier changes made necessary begins.
    Start,
    /// Members know of later epochs than were told: they are told again, above them.
    Reissue(Vec<(u64, Epoch)>),
    /// The operator wants the group no more. Only one without members goes.
    Delete,
}

/// A client that becomes a member.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Joining {
    /// Its name.
    pub client: ClientId,
    /// Its identity.
    pub incarnation: Incarnation,
    /// Its part of the whole.
    pub weight: u32,
    /// What it relies on; decides for a group that never had a member.
    pub consistency: Option<Consistency>,
}

/// What a member changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// Who.
    pub member: u64,
    /// Its part of the whole.
    pub weight: Option<u32>,
    /// Whether its share moves away while it stays.
    pub drain: Option<bool>,
}
