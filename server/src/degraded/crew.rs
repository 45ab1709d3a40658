//! The clients of one group that are attached to a replica without a quorum.

use std::collections::BTreeMap;
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{ClientId, GroupName, Incarnation, Membership};
use skyschedule_common::protocol::messages::{Millis, Numbering, Terms};
use skyschedule_common::share::{MAX_TOTAL, Share};

use super::memory::believed;
use super::{Answer, Attaching, Notice, Numbered};
use crate::coordinator::server_lease;
use crate::session::ConnectionId;
use crate::state::{self, Settings};
use crate::view::{GroupView, MemberState, MemberView};

/// A group is numbered anew when nothing has changed for so long. Clients that lost their leader come at
/// about the same time, and each numbering of only some of them would be wasted work.
const QUIET: Duration = Duration::from_millis(150);

/// But not later than this after the first change.
const LONGEST: Duration = Duration::from_millis(500);

/// What the replica's own state says of a group, and of the client that attaches.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) settings: Settings,
    pub(crate) lease: Millis,
    /// Newest epoch of the group.
    pub(crate) epoch: Epoch,
    /// The client's share, and whether it drains, where its membership is known.
    pub(crate) member: Option<(Share, bool)>,
    /// The member that has the client's id, and its incarnation, unless it is known to have ended.
    pub(crate) owner: Option<(u64, Incarnation)>,
}

impl Known {
    /// Whether the client's id is that of another one, as far as this replica knows. A later membership shows that the
    /// other one's is over.
    fn keeps_id_from(&self, attaching: &Attaching<'_>) -> bool {
        let is_later = |number: u64| {
            let membership = attaching.membership;
            membership.is_some_and(|it| it.replica == 0 && it.number > number)
        };
        self.owner.is_some_and(|(number, incarnation)| {
            incarnation != attaching.login.incarnation && !is_later(number)
        })
    }
}

/// What became of a client that attaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attached {
    /// It is welcomed with the next numbering.
    Taken,
    /// Another incarnation of its client id is attached, or may be on its way, for so long at least.
    IdInUse(Duration),
    /// The weights add up to too much, or there are too many groups.
    Full,
}

#[derive(Debug)]
pub(super) struct Crew {
    settings: Settings,
    lease: Millis,
    /// Newest epoch that this replica's state, or any client that was here, knows.
    known: Epoch,
    /// Until then the members of this replica's state may come.
    members_until: Instant,
    seats: BTreeMap<Membership, Seat>,
    /// Its numbering is to be made anew: times of the first and the last change.
    changed: Option<(Instant, Instant)>,
}

/// One client.
#[derive(Debug)]
struct Seat {
    client: ClientId,
    incarnation: Incarnation,
    weight: u32,
    draining: bool,
    /// None: it has ended, or the client has turned elsewhere.
    connection: Option<ConnectionId>,
    address: String,
    /// It is dropped then, unless it is heard.
    deadline: Instant,
    heard: Option<Instant>,
    /// Newest epoch that the client knows.
    knows: Epoch,
    /// What it has by the newest numbering; the epoch comes with the first.
    share: Share,
    epoch: Option<Epoch>,
    /// What it was told of that.
    told: Option<(Epoch, Share)>,
    /// Whether this connection was told that it is served.
    welcomed: bool,
}

/// When a client that was heard then is given up (rule D4).
fn lease_from(heard: Instant, lease: Millis) -> Instant {
    let leases = if broken(Rule::D4) { 100 } else { 1 };
    heard + server_lease(lease) * leases
}

impl Crew {
    pub(super) fn new(known: &Known, since: Instant) -> Self {
        Self {
            settings: known.settings.clone(),
            lease: known.lease,
            known: known.epoch,
            members_until: since + server_lease(known.lease),
            seats: BTreeMap::new(),
            changed: None,
        }
    }

    pub(super) fn attach(
        &mut self,
        attaching: &Attaching<'_>,
        known: Known,
        now: Instant,
        mint: impl FnOnce() -> Membership,
    ) -> Attached {
        let login = attaching.login;
        let present = self.seats.iter().find(|(_, s)| s.client == login.client);
        let present = present.map(|(membership, seat)| (*membership, seat));
        let same = match present {
            Some((membership, seat)) if seat.incarnation == login.incarnation => Some(membership),
            Some((_, seat)) if seat.connection.is_some() => {
                return Attached::IdInUse(seat.deadline.saturating_duration_since(now));
            }
            Some((other, _)) => {
                self.seats.remove(&other);
                None
            }
            None => None,
        };
        if same.is_none() && known.keeps_id_from(attaching) && now < self.members_until {
            return Attached::IdInUse(self.members_until.saturating_duration_since(now));
        }
        let membership = attaching.membership.or(same);
        if let Some(taken) = membership.and_then(|m| self.seats.get(&m))
            && taken.incarnation != login.incarnation
        {
            // A membership belongs to one incarnation.
            return Attached::IdInUse(taken.deadline.saturating_duration_since(now));
        }
        let others = self.seats.iter().filter(|(other, _)| Some(**other) != same);
        let weights = others.map(|(_, seat)| u64::from(seat.weight));
        let sum = weights.sum::<u64>() + u64::from(login.weight);
        if self.settings.numbering == Numbering::Modulo && sum > u64::from(MAX_TOTAL) {
            return Attached::Full;
        }
        let old = same.and_then(|same| self.seats.remove(&same));
        let membership = membership.unwrap_or_else(mint);
        let (share, draining) = known.member.unwrap_or((Share::NONE, false));
        let knows = believed(attaching.epoch).max(believed(login.epoch));
        self.known = self.known.max(known.epoch).max(knows);
        let mut seat = old.unwrap_or_else(|| Seat {
            client: login.client.clone(),
            incarnation: login.incarnation,
            weight: login.weight,
            draining,
            connection: None,
            address: String::new(),
            deadline: now,
            heard: None,
            knows,
            share,
            epoch: None,
            told: None,
            welcomed: false,
        });
        seat.connection = Some(attaching.connection);
        seat.address.clone_from(&attaching.address);
        seat.deadline = seat.deadline.max(lease_from(now, self.lease));
        seat.knows = seat.knows.max(knows);
        seat.welcomed = false;
        self.seats.insert(membership, seat);
        self.change(now);
        Attached::Taken
    }

    fn change(&mut self, now: Instant) {
        let first = self.changed.map_or(now, |(first, _)| first);
        self.changed = Some((first, now));
    }

    pub(super) fn heartbeat(
        &mut self,
        connection: ConnectionId,
        membership: Membership,
        epoch: Epoch,
        read_at: Instant,
        writing: bool,
    ) -> Option<Answer> {
        let lease = self.lease;
        let seat = self.seats.get_mut(&membership)?;
        let (told, share) = seat
            .told
            .clone()
            .filter(|_| seat.connection == Some(connection) && seat.welcomed)?;
        seat.deadline = seat.deadline.max(lease_from(read_at, lease));
        seat.heard = Some(read_at);
        let knows = believed(epoch);
        seat.knows = seat.knows.max(knows);
        if knows > told {
            // Another replica without a quorum told it since.
            self.known = self.known.max(knows);
            self.change(read_at);
        }
        let quiet = self.changed.is_none() && !writing;
        let mut seats = self.seats.values();
        let settled = broken(Rule::D3) || quiet && seats.all(|seat| seat.epoch == Some(seat.knows));
        Some(Answer {
            lease,
            settled: settled.then_some(told),
            tell: (epoch < told).then_some((told, share)),
        })
    }

    pub(super) fn told(
        &self,
        connection: ConnectionId,
        membership: Membership,
    ) -> Option<(Epoch, Share)> {
        let seat = self.seats.get(&membership)?;
        seat.told
            .clone()
            .filter(|_| seat.connection == Some(connection))
    }

    pub(super) fn update(
        &mut self,
        membership: Membership,
        weight: Option<u32>,
        drain: Option<bool>,
        now: Instant,
    ) {
        let Some(seat) = self.seats.get_mut(&membership) else {
            return;
        };
        let before = (seat.weight, seat.draining);
        seat.weight = weight.unwrap_or(seat.weight);
        seat.draining = drain.unwrap_or(seat.draining);
        if (seat.weight, seat.draining) != before {
            self.change(now);
        }
    }

    pub(super) fn leave(&mut self, membership: Membership, now: Instant) {
        if self.seats.remove(&membership).is_some() {
            self.change(now);
        }
    }

    pub(super) fn ended(&mut self, connection: ConnectionId, proven: bool, now: Instant) {
        let grace = now + self.settings.reset_grace.duration();
        let mut seats = self.seats.iter_mut();
        let Some((&membership, seat)) = seats.find(|(_, seat)| seat.connection == Some(connection))
        else {
            return;
        };
        seat.connection = None;
        seat.deadline = seat.deadline.min(grace);
        if proven {
            self.leave(membership, now);
        }
    }

    pub(super) fn next(&self) -> Option<Instant> {
        let deadline = self.seats.values().map(|seat| seat.deadline).min();
        [self.due(), deadline].into_iter().flatten().min()
    }

    fn due(&self) -> Option<Instant> {
        self.changed
            .map(|(first, last)| (last + QUIET).min(first + LONGEST))
    }

    /// Nobody is here, and nothing is left to do.
    pub(super) fn is_over(&self) -> bool {
        self.seats.is_empty() && self.changed.is_none()
    }

    /// Whether somebody is to be told something.
    pub(super) fn renumber(
        &mut self,
        now: Instant,
        mut next_epoch: impl FnMut(Epoch) -> Epoch,
    ) -> bool {
        let before = self.seats.len();
        self.seats.retain(|_, seat| seat.deadline > now);
        if self.seats.len() < before {
            self.change(now);
        }
        if self.due().is_none_or(|due| due > now) {
            return false;
        }
        self.changed = None;
        let members: Vec<_> = self
            .seats
            .values()
            .map(|seat| (if seat.draining { 0 } else { seat.weight }, &seat.share))
            .collect();
        let shares = state::divide(&self.settings, &members);
        let mut any = false;
        for (seat, share) in self.seats.values_mut().zip(shares) {
            let stale = seat.epoch.is_none_or(|epoch| epoch < seat.knows);
            if stale || seat.share != share {
                seat.epoch = Some(next_epoch(self.known));
                seat.share = share;
                any = true;
            }
            any |= !seat.welcomed;
        }
        any
    }

    pub(super) fn publish(&mut self, notices: &mut Vec<Notice>) {
        let terms = Terms {
            consistency: self.settings.consistency,
            numbering: self.settings.numbering,
            drain_timeout: self.settings.drain_timeout,
        };
        for (membership, seat) in &mut self.seats {
            // Those that came while this was being written wait for the next.
            let (Some(epoch), Some(connection)) = (seat.epoch, seat.connection) else {
                continue;
            };
            let newest = (epoch, seat.share.clone());
            if seat.welcomed && seat.told.as_ref() == Some(&newest) {
                continue;
            }
            notices.push(Notice {
                connection,
                membership: *membership,
                epoch,
                share: newest.1.clone(),
                welcome: (!seat.welcomed).then_some((terms, self.lease)),
            });
            seat.told = Some(newest);
            seat.welcomed = true;
        }
    }

    pub(super) fn numbered(&self, group: GroupName) -> Numbered {
        Numbered {
            group,
            members: self.seats.len(),
            total: self.total(),
            epoch: self.epoch(),
        }
    }

    fn total(&self) -> u32 {
        let totals = self.seats.values().map(|seat| seat.share.total());
        totals.max().unwrap_or(0)
    }

    fn epoch(&self) -> Epoch {
        let told = self.seats.values().filter_map(|seat| seat.epoch).max();
        told.unwrap_or(self.known)
    }

    pub(super) fn view(&self, group: &GroupName, writing: bool, now: Instant) -> GroupView {
        let age = |since: Instant| {
            let age = now.saturating_duration_since(since).as_millis();
            u64::try_from(age).unwrap_or(u64::MAX)
        };
        let members = self.seats.values().map(|seat| MemberView {
            client_id: seat.client.to_string(),
            held: seat.told.clone().map_or(Share::NONE, |(_, share)| share),
            target: None,
            weight: seat.weight,
            state: match seat.connection {
                _ if seat.draining => MemberState::Draining,
                Some(_) => MemberState::Active,
                None => MemberState::Away,
            },
            address: seat.connection.map(|_| seat.address.clone()),
            heartbeat_age_ms: seat.heard.map(age),
            pending_since_ms: None,
        });
        GroupView {
            name: group.to_string(),
            numbering: self.settings.numbering,
            total: self.total(),
            epoch: self.epoch(),
            consistency: self.settings.consistency,
            degraded: true,
            stale: false,
            settings: self.settings.clone(),
            lease_ms: self.lease.0,
            in_handover: writing || self.changed.is_some(),
            unowned: None,
            members: members.collect(),
        }
    }
}
