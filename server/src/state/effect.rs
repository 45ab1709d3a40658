//! What follows from a decision.

use std::fmt;

use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_common::protocol::messages::{Consistency, Millis};
use skyschedule_common::share::Share;

use super::{Settings, SettingsError};

/// What follows from one command.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// This leadership may act.
    Ready {
        /// Of the command.
        leader: u64,
    },
    /// Something happened in a group.
    Group {
        /// Which.
        group: GroupName,
        /// What.
        event: Event,
    },
}

/// What happened in a group. Members are named by the numbers of their memberships.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A client became a member.
    Joined {
        /// Its number.
        member: u64,
        /// Its name.
        client: ClientId,
        /// Its identity.
        incarnation: Incarnation,
    },
    /// A client cannot become a member.
    JoinRefused {
        /// Its name.
        client: ClientId,
        /// Its identity.
        incarnation: Incarnation,
        /// Why.
        why: JoinRefusal,
    },
    /// A member is told a new share.
    Told {
        /// Who.
        member: u64,
        /// Orders what is told.
        epoch: Epoch,
        /// All that it may hold from now on.
        share: Share,
    },
    /// A membership is over.
    Parted {
        /// Whose.
        member: u64,
        /// Its name.
        client: ClientId,
        /// How.
        how: Parting,
        /// Whether its share is kept for its client to come back.
        vacant: bool,
    },
    /// A member did not release in time; these rows may be held twice for a while.
    Overtaken {
        /// Who.
        member: u64,
        /// What it held beyond what it was told.
        held: Share,
    },
    /// A member's weight changed, or it drains, or does so no more; a new numbering follows where that changes
    /// shares, when pacing allows it.
    Updated {
        /// Whose.
        member: u64,
    },
    /// A member's lease is not renewed any more.
    Fenced {
        /// Who.
        member: u64,
    },
    /// A share that was kept is given out.
    Vacated {
        /// For whom it was kept.
        client: ClientId,
    },
    /// Rows began to move.
    HandoverStarted,
    /// Every member has what it should have.
    HandoverEnded,
    /// The settings changed.
    Configured(Settings),
    /// The settings are impossible, and nothing changed.
    ConfigureRefused(SettingsError),
    /// Leases have a new length.
    LeaseLength(Millis),
    /// Numbers continue above those that a client knew.
    Recovered,
    /// A member's new weight is not taken: the weights would add up to more than a total may be.
    WeightRefused {
        /// Whose.
        member: u64,
    },
    /// There is no such group any more.
    Deleted,
    /// The group stays, for it has members.
    DeleteRefused {
        /// How many.
        members: usize,
    },
}

/// How a membership ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parting {
    /// Proven dead, or its lease is over.
    Dead,
    /// It said goodbye.
    Left,
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dead => "dead",
            Self::Left => "left",
        })
    }
}

/// Why a client cannot become a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JoinRefusal {
    /// A member with this client id lives; as another incarnation.
    #[error(
        "a client with this id is a member; it can come back once that one has left, or its lease is over"
    )]
    IdInUse,
    /// The weights add up to more than a total may be.
    #[error(
        "the weights of the group's members would add up to more than 65536, the largest total; lower the weights, or use slots"
    )]
    TotalTooLarge,
    /// The cluster has too many groups.
    #[error("this cluster has as many groups as it can keep; use an existing group")]
    TooManyGroups,
    /// The group promises something else than the client relies on.
    #[error(
        "the group is {is}, and the client relies on {wanted}; change the client, or choose another group"
    )]
    Consistency {
        /// What the group promises.
        is: Consistency,
        /// What the client relies on.
        wanted: Consistency,
    },
}
