//! Numbering without a quorum (rules D1 to D4): one surviving replica is enough to go on.
//!
//! A replica that has had no quorum for a while numbers the clients of available groups that attach to it,
//! and no others. It needs nobody's word for it, so that two such replicas may number the same rows; that is
//! what available groups put up with. Its epochs lie above all that its clients know, and below the next that
//! a quorum gives, so that a quorum that returns is believed at once.
//!
//! [`Degraded`] is pure: no clock, no socket, no disk. It is told what clients say and what time it is.
//! Whenever [`Degraded::renumber`] has something new to give out, its [`Memory`] goes to the disk first;
//! [`Degraded::written`] then says what to tell whom.
//!
//! | file | one idea |
//! |---|---|
//! | `memory` | what was given out, and is never given out again |
//! | `crew` | the clients of one group that are attached here |

mod crew;
mod memory;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::messages::{Login, Millis, Terms};
use skyschedule_common::share::Share;

pub(crate) use self::crew::{Attached, Known};
pub(crate) use self::memory::Memory;

use self::crew::Crew;
use crate::session::ConnectionId;
use crate::state::MAX_GROUPS;
use crate::view::GroupView;

/// The numbering of those that are attached to this replica.
#[derive(Debug)]
pub(crate) struct Degraded {
    replica: u16,
    /// Since when it numbers by itself.
    since: Instant,
    memory: Memory,
    crews: BTreeMap<GroupName, Crew>,
    /// Groups of which the newest numbering is on its way to the disk.
    writing: Option<BTreeSet<GroupName>>,
}

/// What a renumbering needs next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing is new.
    Nothing,
    /// This goes to the disk, then [`Degraded::written`] is called.
    Write(Memory),
    /// [`Degraded::written`] can be called at once.
    Publish,
}

/// What a client is told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) connection: ConnectionId,
    pub(crate) membership: Membership,
    pub(crate) epoch: Epoch,
    pub(crate) share: Share,
    /// It is served here from now on, under these terms and with this lease; none: it was before.
    pub(crate) welcome: Option<(Terms, Millis)>,
}

/// The answer to a heartbeat.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) lease: Millis,
    /// The client's epoch, once all that are attached have taken the present numbering (rule D3).
    pub(crate) settled: Option<Epoch>,
    /// What the client has missed.
    pub(crate) tell: Option<(Epoch, Share)>,
}

/// A group was numbered anew.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Numbered {
    pub(crate) group: GroupName,
    pub(crate) members: usize,
    pub(crate) total: u32,
    pub(crate) epoch: Epoch,
}

/// Who asks to be served, and how.
#[derive(Debug)]
pub(crate) struct Attaching<'a> {
    pub(crate) login: &'a Login,
    pub(crate) connection: ConnectionId,
    /// Where the connection comes from, to be shown.
    pub(crate) address: String,
    pub(crate) membership: Option<Membership>,
    pub(crate) epoch: Epoch,
}

impl Degraded {
    /// Nobody is attached yet.
    pub(crate) fn new(replica: u16, memory: Memory, now: Instant) -> Self {
        Self {
            replica,
            since: now,
            memory,
            crews: BTreeMap::new(),
            writing: None,
        }
    }

    /// What it has given out, for the next time.
    pub(crate) fn into_memory(self) -> Memory {
        self.memory
    }

    /// A client asks to be served. `known` is what this replica's own state says of its group.
    pub(crate) fn attach(
        &mut self,
        attaching: &Attaching<'_>,
        known: Known,
        now: Instant,
    ) -> Attached {
        let group = &attaching.login.group;
        if !self.memory.has_room_for(group) || self.crews.len() >= MAX_GROUPS {
            return Attached::Full;
        }
        if !self.crews.contains_key(group) {
            self.crews
                .insert(group.clone(), Crew::new(&known, self.since));
        }
        let crew = self.crews.get_mut(group);
        let mint = || self.memory.mint(self.replica);
        crew.map_or(Attached::Full, |crew| {
            crew.attach(attaching, known, now, mint)
        })
    }

    /// A heartbeat, read from this connection. None: it is not served here.
    pub(crate) fn heartbeat(
        &mut self,
        group: &GroupName,
        connection: ConnectionId,
        membership: Membership,
        epoch: Epoch,
        read_at: Instant,
    ) -> Option<Answer> {
        let writing = self.is_writing(group);
        let crew = self.crews.get_mut(group)?;
        crew.heartbeat(connection, membership, epoch, read_at, writing)
    }

    /// What the client was told last. None: it is not served here.
    pub(crate) fn told(
        &self,
        group: &GroupName,
        connection: ConnectionId,
        membership: Membership,
    ) -> Option<(Epoch, Share)> {
        self.crews.get(group)?.told(connection, membership)
    }

    /// A member changes what it said at its login.
    pub(crate) fn update(
        &mut self,
        group: &GroupName,
        membership: Membership,
        (weight, drain): (Option<u32>, Option<bool>),
        now: Instant,
    ) {
        if let Some(crew) = self.crews.get_mut(group) {
            crew.update(membership, weight, drain, now);
        }
    }

    /// A member said goodbye.
    pub(crate) fn leave(&mut self, group: &GroupName, membership: Membership, now: Instant) {
        if let Some(crew) = self.crews.get_mut(group) {
            crew.leave(membership, now);
        }
    }

    /// A connection ended, or its client turned elsewhere. Proven: the client's process is dead.
    pub(crate) fn ended(
        &mut self,
        group: &GroupName,
        connection: ConnectionId,
        proven: bool,
        now: Instant,
    ) {
        if let Some(crew) = self.crews.get_mut(group) {
            crew.ended(connection, proven, now);
        }
    }

    /// When there may be something to do; none, while a numbering is on its way to the disk.
    pub(crate) fn next(&self) -> Option<Instant> {
        if self.writing.is_some() {
            return None;
        }
        self.crews.values().filter_map(Crew::next).min()
    }

    /// Numbers anew where that is due.
    pub(crate) fn renumber(&mut self, now: Instant) -> Step {
        if self.writing.is_some() {
            return Step::Nothing;
        }
        let before = self.memory.clone();
        let mut numbered = BTreeSet::new();
        for (name, crew) in &mut self.crews {
            let next_epoch = |known| self.memory.next_epoch(name, known, self.replica);
            if crew.renumber(now, next_epoch) {
                numbered.insert(name.clone());
            }
        }
        self.crews.retain(|_, crew| !crew.is_over());
        if numbered.is_empty() {
            return Step::Nothing;
        }
        self.writing = Some(numbered);
        if self.memory == before {
            Step::Publish
        } else {
            Step::Write(self.memory.clone())
        }
    }

    /// What was given out is on the disk: whom to tell what, and which groups have a new numbering.
    pub(crate) fn written(&mut self) -> (Vec<Notice>, Vec<Numbered>) {
        let mut notices = Vec::new();
        let mut groups = Vec::new();
        for name in self.writing.take().unwrap_or_default() {
            let Some(crew) = self.crews.get_mut(&name) else {
                continue;
            };
            let before = notices.len();
            crew.publish(&mut notices);
            if notices.len() > before {
                groups.push(crew.numbered(name));
            }
        }
        (notices, groups)
    }

    /// The groups that have a numbering here.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &GroupName> {
        self.crews.keys()
    }

    /// A group as it is numbered here.
    pub(crate) fn view(&self, group: &GroupName, now: Instant) -> Option<GroupView> {
        let crew = self.crews.get(group)?;
        Some(crew.view(group, self.is_writing(group), now))
    }

    fn is_writing(&self, group: &GroupName) -> bool {
        let writing = self.writing.as_ref();
        writing.is_some_and(|groups| groups.contains(group))
    }
}
