//! One membership: its share, its lease, its base.

use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::messages::{Consistency, Numbering, Terms};
use skyschedule_common::share::{Share, ShareUnion};

use crate::observe::Mode;

/// What a membership was told, and how long it may trust that.
#[derive(Debug)]
pub(crate) struct Holding {
    pub(crate) membership: Membership,
    pub(crate) terms: Terms,
    pub(crate) epoch: Epoch,
    pub(crate) share: Share,
    /// Available groups: what to fall back to when every server is gone (C8).
    pub(crate) base: ShareUnion,
    /// Whether the whole group had taken this numbering when it was last heard of.
    pub(crate) settled: bool,
    /// `None` before the first answered heartbeat.
    lease_end: Option<Instant>,
    /// Whether the end of the present exclusive lease was noted.
    lapse_noted: bool,
    /// C8 is in force until then, unless the driver, while it runs, prolongs it.
    pub(super) autonomous_until: Option<Instant>,
    /// The one total of all rows that may be worked on outside the share; `None`: several.
    pub(super) recalled_total: Option<u32>,
}

impl Holding {
    pub(super) fn new(membership: Membership, epoch: Epoch, share: Share, terms: Terms) -> Self {
        Self {
            membership,
            terms,
            epoch,
            share,
            base: ShareUnion::NONE,
            settled: false,
            lease_end: None,
            lapse_noted: false,
            autonomous_until: None,
            recalled_total: None,
        }
    }

    /// Takes a newer share; `all_inside`: no row outside the old one is worked on.
    pub(super) fn take(&mut self, epoch: Epoch, share: Share, all_inside: bool) {
        if self.terms.consistency == Consistency::Available && !broken(Rule::C8) {
            self.base.add(&self.share);
        }
        if all_inside {
            self.recalled_total = Some(self.share.total());
        } else if self.recalled_total != Some(self.share.total()) {
            self.recalled_total = None;
        }
        self.epoch = epoch;
        self.share = share;
        self.settled = false;
    }

    /// C2: a lease counts from when the answered heartbeat was sent.
    pub(super) fn renew(&mut self, sent: Instant, lease: Duration, now: Instant) {
        let from = if broken(Rule::C2) { now } else { sent };
        self.lease_end = self.lease_end.max(Some(from + lease));
        if self.is_leased(now) {
            self.lapse_noted = false;
        }
    }

    /// C8, second half.
    pub(super) fn settle(&mut self, settled: Option<Epoch>) {
        self.settled = settled == Some(self.epoch);
        if self.settled && self.terms.consistency == Consistency::Available {
            self.base = self.share.clone().into();
        }
    }

    /// Whether an exclusive lease is found over for the first time.
    pub(super) fn note_lapse(&mut self, now: Instant) -> bool {
        let first = self.terms.consistency == Consistency::Exclusive
            && self.lease_end.is_some()
            && !self.is_leased(now)
            && !self.lapse_noted;
        self.lapse_noted |= first;
        first
    }

    fn is_leased(&self, now: Instant) -> bool {
        self.lease_end.is_some_and(|end| now < end)
    }

    /// How far the share may be trusted now.
    pub(crate) fn mode(&self, now: Instant) -> Mode {
        if self.is_leased(now) {
            Mode::Leased
        } else if self.autonomous_until.is_some_and(|until| now < until) {
            Mode::Autonomous
        } else {
            Mode::Asking
        }
    }

    /// End of the lease, where it lies ahead.
    pub(crate) fn lease_end(&self) -> Option<Instant> {
        self.lease_end
    }

    pub(super) fn lease_left(&self, now: Instant) -> Duration {
        self.lease_end
            .map_or(Duration::ZERO, |end| end.saturating_duration_since(now))
    }

    /// All that the client may still own when nobody answers.
    pub(crate) fn widest(&self) -> ShareUnion {
        let mut rows = self.base.clone();
        rows.add(&self.share);
        rows
    }

    /// `(total, number)` in a modulo group where the member has one number.
    pub(crate) fn node(&self) -> Option<(u32, u32)> {
        let single = self.terms.numbering == Numbering::Modulo && self.share.numbers().len() == 1;
        let number = self.share.numbers().first().filter(|_| single)?;
        Some((self.share.total(), number))
    }
}
