//! What the coordinator must do later. A timer only says "look again": whoever set it need not cancel
//! it, since its handler checks whether there is still something to do.

use std::collections::BTreeSet;

use skyschedule_common::env::Instant;
use skyschedule_common::ids::{ClientId, GroupName};

/// Something to look at.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// The lease of a member may be over.
    Lease(GroupName, u64),
    /// A connection of a member ended at this time, and it may not have been heard since.
    ResetGrace(GroupName, u64, Instant),
    /// Members may have taken too long to release.
    Drain(GroupName),
    /// Gathered releases may be acted on.
    Gather(GroupName),
    /// Heartbeats may be confirmed.
    Round,
    /// The next handover may begin.
    Start(GroupName),
    /// A client may not have come back for its share.
    Vacate(GroupName, ClientId, u64),
    /// The last of the longer leases may be over.
    Shorten(GroupName),
}

#[derive(Debug, Default)]
pub(super) struct Timers(BTreeSet<(Instant, Timer)>);

impl Timers {
    pub(super) fn set(&mut self, at: Instant, timer: Timer) {
        self.0.insert((at, timer));
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Takes the next timer that is due.
    pub(super) fn due(&mut self, now: Instant) -> Option<Timer> {
        if self.next()? <= now {
            self.0.pop_first().map(|(_, timer)| timer)
        } else {
            None
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
