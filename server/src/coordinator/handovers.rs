//! Releases are gathered into one command; barriers keep their distance.

use std::time::Duration;

use skyschedule_common::env;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::messages::{Consistency, Numbering};
use skyschedule_common::share::Share;

use super::Coordinator;
use super::timers::Timer;

/// How long the releases of a slot group are gathered before they are acted on.
const GATHER: Duration = Duration::from_millis(5);

impl Coordinator {
    /// A member has released all of what it must give up, except `keeping`.
    pub(super) fn released(
        &mut self,
        group: &GroupName,
        membership: Membership,
        epoch: Epoch,
        keeping: Share,
    ) {
        let number = membership.number;
        let told = self
            .consensus
            .read(|state| Some(state.group(group)?.members().get(&number)?.epoch));
        let Some(track) = self.groups.get_mut(group) else {
            return;
        };
        // Rule L17: whoever answers a share has taken it, as a heartbeat would say later.
        if told == Some(epoch) {
            track.unseen.remove(&number);
        }
        // Rule L10: it answers exactly what is told. The core checks that again.
        if told != Some(epoch) && !broken(Rule::L10) {
            return;
        }
        let done = keeping.is_empty();
        if let Some(member) = track.members.get_mut(&number).filter(|_| done) {
            // Also of one that was overtaken.
            member.asked = None;
        }
        if !track.awaiting.contains(&number) {
            return;
        }
        if done {
            track.awaiting.remove(&number);
        }
        track.releases.insert(number, (epoch, keeping));
        if track.gathering_since.is_none() {
            let now = env::now();
            track.gathering_since = Some(now);
            self.timers.set(now + GATHER, Timer::Gather(group.clone()));
        }
        self.act_on_releases(group, false);
    }

    /// Proposes the gathered releases: in a modulo group nothing can be granted before the last, in a
    /// slot group something can after each, so that there they wait only a little.
    pub(super) fn act_on_releases(&mut self, group: &GroupName, gathered: bool) {
        let Some(track) = self.groups.get(group) else {
            return;
        };
        if track.releases.is_empty() {
            return;
        }
        let slots = || {
            self.consensus.read(|state| {
                let group = state.group(group);
                group.is_some_and(|group| group.settings().numbering != Numbering::Modulo)
            })
        };
        if track.awaiting.is_empty() || (gathered && slots()) {
            self.propose_releases(group);
        }
    }

    fn propose_releases(&mut self, group: &GroupName) {
        let Some(track) = self.groups.get_mut(group) else {
            return;
        };
        track.gathering_since = None;
        let releases = std::mem::take(&mut track.releases);
        let releases = releases
            .into_iter()
            .map(|(number, (epoch, keeping))| (number, epoch, keeping));
        self.batch.group(group).release.extend(releases);
    }

    /// Members may have taken too long: in an available group the others go on without them, in an
    /// exclusive group they are fenced.
    pub(super) fn check_drains(&mut self, group: &GroupName) {
        let terms = self.consensus.read(|state| {
            let settings = state.group(group)?.settings();
            Some((
                settings.consistency,
                settings.drain_timeout,
                settings.max_drain,
            ))
        });
        let Some((consistency, drain_timeout, max_drain)) = terms else {
            return;
        };
        let patience = match consistency {
            Consistency::Available => drain_timeout.duration(),
            Consistency::Exclusive => max_drain.duration(),
        };
        let now = env::now();
        let Some(track) = self.groups.get_mut(group) else {
            return;
        };
        let mut late = Vec::new();
        let mut next = None;
        for number in &track.awaiting {
            let Some(member) = track.members.get_mut(number) else {
                continue;
            };
            let Some(asked) = member
                .asked
                .filter(|_| !member.condemned && !member.overdue)
            else {
                continue;
            };
            let due = asked + patience;
            if due <= now {
                member.overdue = true;
                late.push(*number);
            } else {
                next = Some(next.map_or(due, |next: env::Instant| next.min(due)));
            }
        }
        if let Some(next) = next {
            self.timers.set(next, Timer::Drain(group.clone()));
        }
        if late.is_empty() {
            return;
        }
        match consistency {
            Consistency::Available => {
                let epochs: Vec<(u64, Epoch)> = self.consensus.read(|state| {
                    let members = state.group(group).map(|group| group.members());
                    let epoch = |number: &u64| Some((*number, members?.get(number)?.epoch));
                    late.iter().filter_map(epoch).collect()
                });
                for number in &late {
                    track.awaiting.remove(number);
                    track.releases.remove(number);
                }
                self.batch.group(group).overtake.extend(epochs);
                self.propose_releases(group);
            }
            Consistency::Exclusive => self.batch.group(group).fence.extend(late),
        }
    }

    /// The next handover may begin.
    pub(super) fn check_start(&mut self, group: &GroupName) {
        let wanted = self.consensus.read(|state| {
            state
                .group(group)
                .is_some_and(|group| group.wants_handover())
        });
        let Some(track) = self.groups.get(group).filter(|_| wanted) else {
            return;
        };
        let now = env::now();
        match track.next_start().filter(|at| *at > now) {
            Some(at) => self.timers.set(at, Timer::Start(group.clone())),
            None => self.batch.group(group).start = true,
        }
    }
}
