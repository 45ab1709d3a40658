//! What a replica has given out by itself, and must never give out again (rule D2).

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::codec::{self, CodecError};

use crate::state::MAX_GROUPS;

/// What clients claim to know is believed up to here: above it, counting on could overflow.
const MAX_QUORUM: u64 = 1 << 62;
const MAX_DEGRADED: u32 = 1 << 31;

/// Largest form, in bytes.
const MAX_BYTES: usize = 8 << 20;

/// The newest epoch of each group, and the next number of a membership. It goes to the disk before anything
/// that it gives out goes to a client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Memberships given out.
    minted: u64,
    epochs: BTreeMap<GroupName, (u64, u32)>,
}

impl Memory {
    /// As it is kept.
    pub(crate) fn encode(&self) -> Result<Bytes, CodecError> {
        codec::encode(self, MAX_BYTES)
    }

    /// From what was kept.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode(bytes, MAX_BYTES)
    }

    /// Whether one more group can be kept.
    pub(super) fn has_room_for(&self, group: &GroupName) -> bool {
        self.epochs.len() < MAX_GROUPS || self.epochs.contains_key(group)
    }

    /// A membership that nobody has.
    pub(super) fn mint(&mut self, replica: u16) -> Membership {
        self.minted = self.minted.saturating_add(1);
        Membership {
            number: self.minted,
            replica,
        }
    }

    /// An epoch above all that were given out here, and above `known`, the newest that others gave.
    pub(super) fn next_epoch(&mut self, group: &GroupName, known: Epoch, replica: u16) -> Epoch {
        let (quorum, degraded) = self.epochs.entry(group.clone()).or_default();
        *quorum = known.quorum.max(*quorum);
        *degraded = known.degraded.max(*degraded).saturating_add(1);
        Epoch {
            quorum: *quorum,
            degraded: *degraded,
            replica,
        }
    }
}

/// What a client says to know, where a server may have told it.
pub(super) fn believed(epoch: Epoch) -> Epoch {
    if epoch.quorum > MAX_QUORUM || epoch.degraded > MAX_DEGRADED || broken(Rule::D2) {
        Epoch::ZERO
    } else {
        epoch
    }
}
