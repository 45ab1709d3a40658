//! What this client may work on at this instant: one value, shared by the user's threads and the driver.
//!
//! Nothing here reads a clock or knows a socket. The driver changes it as messages arrive; `begin` and
//! `acquire` ask it with the present time. The rules are named as in the protocol: C1 to C5, C8.

mod guards;
mod holding;

use std::collections::BTreeMap;
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::messages::{Consistency, Numbering, Terms};
use skyschedule_common::share::{RowKey, Share, ShareUnion};

use crate::observe::{Inspection, Mode};

pub(crate) use guards::GuardId;
use guards::Guards;
pub(crate) use holding::Holding;

/// How far the client has come towards its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Rows may be begun.
    Open,
    /// No new rows; those that run may finish.
    Closing,
    /// Everything is over.
    Closed,
}

/// Names a tenure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TenureId(u64);

/// What a living `Work` may still begin: rows that left never come back to it, because another owner
/// may have worked on them meanwhile.
#[derive(Debug)]
struct Tenure {
    rows: ShareUnion,
    shrunk: bool,
}

impl Tenure {
    fn retain(&mut self, share: &Share) {
        let before = self.rows.clone();
        self.rows.retain(share);
        self.shrunk |= self.rows != before;
    }
}

/// A tenure that was given out.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) tenure: TenureId,
    pub(crate) rows: ShareUnion,
    pub(crate) epoch: Epoch,
    pub(crate) revocation: u64,
}

/// A row that was begun.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) guard: GuardId,
    pub(crate) epoch: Epoch,
    pub(crate) revocation: u64,
}

/// What a `Welcome` made of the membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Welcomed {
    /// A membership that this client did not have before.
    New,
    /// The one it had.
    Resumed,
    /// The one it had, but the server goes by another share under the same epoch.
    Contradicted,
}

/// A server gave this client a second membership beside the one it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the server made this client member {new} although it is member {present}: it breaks the protocol"
)]
pub(crate) struct OtherMembership {
    new: Membership,
    present: Membership,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Permit {
    stage: Stage,
    holding: Option<Holding>,
    guards: Guards,
    tenures: BTreeMap<TenureId, Tenure>,
    last_tenure: u64,
    /// Counts what ended all rows given out before: the end of a membership, of an exclusive lease, of the client.
    revocation: u64,
}

impl Permit {
    pub(crate) fn new() -> Self {
        Self {
            stage: Stage::Open,
            holding: None,
            guards: Guards::default(),
            tenures: BTreeMap::new(),
            last_tenure: 0,
            revocation: 0,
        }
    }

    // What users ask.

    /// Rows that may be begun now, as a new tenure; `None` while there are none.
    pub(crate) fn acquire(&mut self, now: Instant) -> Option<Granted> {
        self.observe(now);
        let rows = self.rows(now);
        let epoch = self.holding.as_ref()?.epoch;
        if rows.is_empty() || self.stage > Stage::Open {
            return None;
        }
        self.last_tenure += 1;
        let tenure = TenureId(self.last_tenure);
        self.tenures.insert(
            tenure,
            Tenure {
                rows: rows.clone(),
                shrunk: false,
            },
        );
        Some(Granted {
            tenure,
            rows,
            epoch,
            revocation: self.revocation,
        })
    }

    /// Begins a row, if its tenure still has it and it may be begun now (C1).
    pub(crate) fn begin(&mut self, tenure: TenureId, key: RowKey, now: Instant) -> Option<Begun> {
        self.observe(now);
        if !self.tenures.get(&tenure)?.rows.contains(key) || !self.may_begin(key, now) {
            return None;
        }
        let holding = self.holding.as_mut()?;
        let inside = holding.share.contains(key);
        if !inside {
            holding.recalled_total = None;
        }
        let guard = self.guards.insert(key, inside);
        Some(Begun {
            guard,
            epoch: holding.epoch,
            revocation: self.revocation,
        })
    }

    /// Whether the row may be begun now, by a tenure that begins now.
    pub(crate) fn may_begin(&self, key: RowKey, now: Instant) -> bool {
        let Some(holding) = self.holding.as_ref().filter(|_| self.stage == Stage::Open) else {
            return false;
        };
        match holding.mode(now) {
            Mode::Leased => holding.share.contains(key),
            Mode::Autonomous => holding.share.contains(key) || holding.base.contains(key),
            Mode::Asking | Mode::Outside => false,
        }
    }

    /// Whether the client holds the row: it may begin it, or works on it, under a lease that is not over.
    pub(crate) fn holds(&self, key: RowKey, now: Instant) -> bool {
        let trusted = matches!(self.mode(now), Mode::Leased | Mode::Autonomous);
        trusted && (self.may_begin(key, now) || self.guards.has(key))
    }

    /// All rows that may be begun now, but for a client that closes.
    fn rows(&self, now: Instant) -> ShareUnion {
        let Some(holding) = &self.holding else {
            return ShareUnion::NONE;
        };
        match holding.mode(now) {
            Mode::Leased => holding.share.clone().into(),
            Mode::Autonomous => holding.widest(),
            Mode::Asking | Mode::Outside => ShareUnion::NONE,
        }
    }

    /// A row's guard is back. Whether a release may be due by this.
    pub(crate) fn finish_row(&mut self, guard: GuardId) -> bool {
        let share = self.holding.as_ref().map(|holding| &holding.share);
        let outside = self.guards.remove(guard, share.unwrap_or(&Share::NONE));
        outside || (self.stage > Stage::Open && self.guards.is_empty())
    }

    /// A tenure is over.
    pub(crate) fn end_tenure(&mut self, tenure: TenureId) {
        self.tenures.remove(&tenure);
    }

    /// Whether what was given out at `revocation` must stop.
    pub(crate) fn is_revoked(&mut self, revocation: u64, now: Instant) -> bool {
        self.observe(now);
        self.revocation != revocation
    }

    /// Whether some rows of the tenure have left it.
    pub(crate) fn is_recalled(&mut self, tenure: TenureId, now: Instant) -> bool {
        self.observe(now);
        self.stage > Stage::Open || self.tenures.get(&tenure).is_none_or(|tenure| tenure.shrunk)
    }

    // What the driver tells.

    /// A server made the client a member, or goes on with its membership.
    pub(crate) fn welcome(
        &mut self,
        membership: Membership,
        epoch: Epoch,
        share: Share,
        terms: Terms,
    ) -> Result<Welcomed, OtherMembership> {
        let Some(holding) = &mut self.holding else {
            self.guards.recount(&share);
            self.holding = Some(Holding::new(membership, epoch, share, terms));
            return Ok(Welcomed::New);
        };
        let present = holding.membership;
        // A membership that a degraded replica minted is none to a leader: it gives another in its place.
        if membership != present && present.replica == 0 {
            return Err(OtherMembership {
                new: membership,
                present,
            });
        }
        holding.membership = membership;
        holding.terms = terms;
        let is_present = membership == present;
        let is_known = is_present && epoch == holding.epoch && !broken(Rule::C3);
        let contradicts = is_known && share != holding.share;
        self.stop_autonomy();
        if contradicts {
            // The servers have lost what they told this client, and give its epochs out again. It keeps nothing, and asks for
            // an epoch that nobody has seen: they answer one above what they know by such a one (L15).
            let beyond = Epoch {
                quorum: epoch.quorum.saturating_add(1),
                ..epoch
            };
            self.told(membership, beyond, Share::none_of(share.total()));
            return Ok(Welcomed::Contradicted);
        }
        self.told(membership, epoch, share);
        Ok(if is_present {
            Welcomed::Resumed
        } else {
            Welcomed::New
        })
    }

    /// C3 and, for available groups, the first half of C8. Whether the share was taken.
    pub(crate) fn told(&mut self, membership: Membership, epoch: Epoch, share: Share) -> bool {
        let Some(holding) = self
            .holding
            .as_mut()
            .filter(|holding| holding.membership == membership)
        else {
            return false;
        };
        if epoch <= holding.epoch && !broken(Rule::C3) {
            return false;
        }
        let all_inside = self.guards.outside() == 0;
        holding.take(epoch, share, all_inside);
        for tenure in self.tenures.values_mut() {
            tenure.retain(&holding.share);
        }
        self.guards.recount(&holding.share);
        true
    }

    /// C2: the heartbeat sent at `sent` was answered. Whether it was this membership's.
    pub(crate) fn renew(
        &mut self,
        membership: Membership,
        sent: Instant,
        lease: Duration,
        settled: Option<Epoch>,
        now: Instant,
    ) -> bool {
        self.observe(now);
        let Some(holding) = self
            .holding
            .as_mut()
            .filter(|holding| holding.membership == membership)
        else {
            return false;
        };
        holding.renew(sent, lease, now);
        holding.settle(settled);
        self.stop_autonomy();
        true
    }

    /// C5: the membership is over, by `Gone` or `Fenced`. Whether it was this client's.
    pub(crate) fn end_membership(&mut self, membership: Membership) -> bool {
        let own = self
            .holding
            .as_ref()
            .is_some_and(|holding| holding.membership == membership);
        if own {
            self.holding = None;
            self.guards.recount(&Share::NONE);
            self.revoke();
        }
        own
    }

    /// C8: nobody answers, and for the time being the client works on with all it may still own.
    pub(crate) fn grant_autonomy(&mut self, until: Instant) {
        if let Some(holding) = &mut self.holding
            && holding.terms.consistency == Consistency::Available
        {
            holding.autonomous_until = Some(until);
        }
    }

    /// Servers answer again, or it must be asked anew: rows beyond the present share leave all tenures.
    pub(crate) fn stop_autonomy(&mut self) {
        if let Some(holding) = &mut self.holding
            && holding.autonomous_until.take().is_some()
        {
            for tenure in self.tenures.values_mut() {
                tenure.retain(&holding.share);
            }
        }
    }

    /// Notes that an exclusive lease is over: all that was given out under it is revoked, for good.
    pub(crate) fn observe(&mut self, now: Instant) {
        if self
            .holding
            .as_mut()
            .is_some_and(|holding| holding.note_lapse(now))
        {
            self.revoke();
        }
    }

    fn revoke(&mut self) {
        self.revocation += 1;
        self.tenures.clear();
    }

    /// No new rows from now on.
    pub(crate) fn begin_closing(&mut self) {
        self.stage = self.stage.max(Stage::Closing);
    }

    /// The client is over: nothing is given any more, and all that was given is revoked.
    pub(crate) fn end(&mut self) {
        if self.stage < Stage::Closed {
            self.stage = Stage::Closed;
            self.holding = None;
            self.guards.recount(&Share::NONE);
            self.revoke();
        }
    }

    /// C4: what a release could say that it keeps, empty when nothing; `None` while it cannot be said.
    pub(crate) fn keeping(&self) -> Option<Share> {
        let holding = self.holding.as_ref()?;
        let total = holding.share.total();
        if self.guards.outside() == 0 || broken(Rule::C4) {
            return Some(Share::none_of(total));
        }
        // Rows of one and the same division into slots can go one slot at a time.
        let slots = holding.terms.numbering == Numbering::Slots(total)
            && holding.recalled_total == Some(total);
        if !slots {
            return None;
        }
        Share::new(total, self.guards.numbers_outside(&holding.share)).ok()
    }

    // What the driver and observers look at.

    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    pub(crate) fn holding(&self) -> Option<&Holding> {
        self.holding.as_ref()
    }

    pub(crate) fn guards_out(&self) -> usize {
        self.guards.len()
    }

    pub(crate) fn mode(&self, now: Instant) -> Mode {
        self.holding
            .as_ref()
            .map_or(Mode::Outside, |holding| holding.mode(now))
    }

    pub(crate) fn inspect(&self, now: Instant) -> Inspection {
        let holding = self.holding.as_ref();
        Inspection {
            membership: holding.map(|holding| holding.membership),
            epoch: holding.map(|holding| holding.epoch),
            mode: self.mode(now),
            share: holding.map_or(Share::NONE, |holding| holding.share.clone()),
            base: holding.map_or(ShareUnion::NONE, |holding| holding.base.clone()),
            rows: if self.stage == Stage::Open {
                self.rows(now)
            } else {
                ShareUnion::NONE
            },
            lease_left: holding.map_or(Duration::ZERO, |holding| holding.lease_left(now)),
            running: self.guards.keys().collect(),
            running_outside: self.guards.outside(),
        }
    }
}

#[cfg(test)]
mod tests;
