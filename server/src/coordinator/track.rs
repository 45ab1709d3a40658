//! What the leader keeps in memory of a group: nothing that a new leader could not do without.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::protocol::messages::Millis;
use skyschedule_common::share::Share;

use super::flapping::{Deaths, ShortLives};
use crate::session::ConnectionId;

/// How far the rates of two clocks may be apart, in thousandths.
const DRIFT_PERMILLE: u32 = 1;
/// Granularity of timers.
const GRANULARITY: Duration = Duration::from_millis(10);

/// How long the server waits before a lease that it gave is certainly over: the client counts from
/// before, by a clock that may be slower.
pub(crate) fn server_lease(lease: Millis) -> Duration {
    lease.duration() * (1_000 + DRIFT_PERMILLE) / (1_000 - DRIFT_PERMILLE) + GRANULARITY
}

/// How long logins that follow one another put off the next handover: it would move rows that the one after it moves
/// again, and a barrier would stop all for the sake of a few.
const LONGEST_RUSH: Duration = Duration::from_secs(2);

/// A gap among such logins ends them when it is longer than `settle`, and than this part of the time that they have come:
/// a busy machine pauses now and then in the middle of a storm.
const RUSH_PER_GAP: u32 = 8;

/// Logins, each soon after the one before.
#[derive(Debug, Clone, Copy)]
struct Rush {
    /// When the first came.
    began: Instant,
    /// The same, or when the last handover was planned.
    since: Instant,
    /// When the next must have come.
    until: Instant,
}

/// A group, as its leader follows it.
#[derive(Debug, Default)]
pub(super) struct GroupTrack {
    pub(super) members: BTreeMap<u64, MemberTrack>,
    /// Members that were asked for a release and have not given all of it.
    pub(super) awaiting: BTreeSet<u64>,
    /// Members of which no heartbeat has carried the told epoch yet.
    pub(super) unseen: BTreeSet<u64>,
    /// Releases that wait for those of the others.
    pub(super) releases: BTreeMap<u64, (Epoch, Share)>,
    /// When the first of them came.
    pub(super) gathering_since: Option<Instant>,
    pub(super) handover_began: Option<Instant>,
    /// The next barrier does not begin before.
    pub(super) not_before: Option<Instant>,
    /// Until when it is open whether a member lives whose connection was reset. A barrier that began before
    /// would stop all others while it waits for that member.
    pub(super) doubt: Option<Instant>,
    rush: Option<Rush>,
    /// Members came, went or changed since the last plan that is known of.
    pub(super) changed: bool,
    pub(super) deaths: Deaths,
    pub(super) short_lives: ShortLives,
    /// Length of leases that members are told; never above the one in force.
    pub(super) told_lease: Option<Millis>,
    /// That rows have no owner was told.
    pub(super) unowned: bool,
}

/// A member, as its leader follows it.
#[derive(Debug)]
pub(super) struct MemberTrack {
    /// It is dead after this, unless a heartbeat comes.
    pub(super) deadline: Instant,
    /// When it joined; `None`: before this leader came.
    pub(super) joined: Option<Instant>,
    /// Newest epoch seen in a heartbeat.
    pub(super) seen: Option<Epoch>,
    /// Its end is proposed: it is never renewed again.
    pub(super) condemned: bool,
    /// The connection over which it is served.
    pub(super) attached: Option<ConnectionId>,
    /// When a login or a heartbeat of it was read last.
    pub(super) heard: Instant,
    pub(super) last_heartbeat: Option<Instant>,
    /// Since when a release is awaited.
    pub(super) asked: Option<Instant>,
    /// Told that it took too long, so that it is told and counted once.
    pub(super) overdue: bool,
}

impl MemberTrack {
    pub(super) fn new(now: Instant, lease: Millis) -> Self {
        Self {
            deadline: now + server_lease(lease),
            joined: None,
            seen: None,
            condemned: false,
            attached: None,
            heard: now,
            last_heartbeat: None,
            asked: None,
            overdue: false,
        }
    }
}

impl GroupTrack {
    /// Whether a handover that waits for no logins may begin.
    pub(super) fn may_plan(&self, now: Instant) -> bool {
        self.next_plan().is_none_or(|at| now >= at)
    }

    /// Whether pacing allows a handover to begin.
    pub(super) fn may_start(&self, now: Instant) -> bool {
        self.next_start().is_none_or(|at| now >= at)
    }

    /// Whether a member lives is open until then. Resets that follow do not put the next handover off further.
    pub(super) fn doubts_until(&mut self, decided: Instant, now: Instant) {
        if self.doubt.is_none_or(|at| at <= now) {
            self.doubt = Some(decided);
        }
    }

    /// When pacing allows the next handover; `None`: at once.
    pub(super) fn next_start(&self) -> Option<Instant> {
        let rush = self
            .rush
            .map(|rush| rush.until.min(rush.since + LONGEST_RUSH));
        self.next_plan().max(rush)
    }

    fn next_plan(&self) -> Option<Instant> {
        self.not_before.max(self.doubt)
    }

    /// A login was decided: the next handover waits for others that follow within `settle`. The first waits for nobody.
    pub(super) fn joined(&mut self, settle: Duration, now: Instant) {
        self.changed = true;
        let (began, since) = match self.rush {
            Some(rush) if now <= rush.until => (rush.began, rush.since),
            _ => (now, now),
        };
        let length = now.saturating_duration_since(began).min(LONGEST_RUSH);
        self.rush = Some(Rush {
            began,
            since,
            until: now + settle.max(length / RUSH_PER_GAP),
        });
    }

    /// Nothing is left to be planned.
    pub(super) fn planned(&mut self, now: Instant) {
        if std::mem::take(&mut self.changed)
            && let Some(rush) = &mut self.rush
        {
            rush.since = now;
        }
    }

    /// A handover begins.
    pub(super) fn begins(&mut self, now: Instant) {
        self.handover_began.get_or_insert(now);
        self.doubt = None;
    }
}
