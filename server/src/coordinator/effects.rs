//! What was decided becomes messages, timers, metrics and events.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::messages::{
    Code, Consistency, Millis, Numbering, Refusal, ServerMessage,
};

use super::timers::Timer;
use super::track::{GroupTrack, MemberTrack, server_lease};
use super::{Coordinator, DeleteError};
use crate::state::{Effect, Event, JoinRefusal, Parting, Unowned};
use crate::view::ServerEvent;

/// One second of lease for so many clients.
const CLIENTS_PER_SECOND: usize = 2_500;

/// What one batch of decisions changed in a group.
#[derive(Debug, Default)]
struct Changes {
    welcome: BTreeSet<u64>,
    tell: BTreeSet<u64>,
}

impl Coordinator {
    /// Carries out what a batch of commands decided.
    pub(super) fn carry_out(&mut self, commands: usize, effects: Vec<(usize, Effect)>) {
        let now = env::now();
        let own = self.consensus.leadership().own;
        let is_own = |leader: u64| own == Some(leader);
        let begins = effects
            .iter()
            .any(|(_, effect)| matches!(effect, Effect::Ready { leader } if is_own(*leader)));
        // What an earlier leadership proposed is part of the state, and no more.
        if !begins && !self.may_act() {
            return;
        }
        if let Some(proposed) = self.deciding.take() {
            self.metrics
                .commit(commands as u64, now.saturating_duration_since(proposed));
        }
        let mut changes: BTreeMap<GroupName, Changes> = BTreeMap::new();
        for (_, effect) in effects {
            match effect {
                Effect::Ready { leader } if is_own(leader) => self.become_ready(leader, now),
                Effect::Ready { .. } => {}
                Effect::Group { group, event } => {
                    let changed = match changes.get_mut(&group) {
                        Some(changed) => changed,
                        None => changes.entry(group.clone()).or_default(),
                    };
                    self.carry_out_event(&group, event, now, changed);
                }
            }
        }
        // A member is told once, whatever happened to its share within the batch.
        for (group, changed) in &changes {
            self.tell_changed(group, changed, now);
            for number in &changed.welcome {
                self.welcome(group, *number);
            }
        }
        for group in changes.keys() {
            self.follow_up(group, now);
        }
        self.answer_drains();
        for (id, membership) in std::mem::take(&mut self.lost) {
            self.not_a_member(id, membership, skyschedule_common::epoch::Epoch::ZERO);
        }
    }

    fn carry_out_event(
        &mut self,
        group: &GroupName,
        event: Event,
        now: Instant,
        changes: &mut Changes,
    ) {
        match event {
            Event::Joined {
                member,
                client,
                incarnation,
            } => {
                let lease = self.lease_of(group);
                let track = self.groups.entry(group.clone()).or_default();
                let mut joined = MemberTrack::new(now, lease);
                joined.joined = Some(now);
                track.members.insert(member, joined);
                track.unseen.insert(member);
                self.timers.set(
                    now + server_lease(lease),
                    Timer::Lease(group.clone(), member),
                );
                self.handle.publish(ServerEvent::Joined {
                    group: group.to_string(),
                    client_id: client.to_string(),
                });
                tracing::info!(%group, %client, member, "joined");
                self.rush_goes_on(group, now);
                let Some(joining) = self.joining.remove(&(group.clone(), client)) else {
                    return;
                };
                if joining.incarnation != incarnation {
                    return;
                }
                match (joining.ended, self.connections.get_mut(&joining.connection)) {
                    (None, Some(connection)) => {
                        connection.membership = Some(Membership::quorum(member));
                        if let Some(member) = self.member_mut(group, member) {
                            member.attached = Some(joining.connection);
                        }
                        changes.welcome.insert(member);
                    }
                    (ended, _) => {
                        if let Some(end) = ended {
                            self.connection_ended(group, member, end);
                        }
                    }
                }
            }
            Event::JoinRefused {
                client,
                incarnation,
                why,
            } => {
                let Some(joining) = self.joining.remove(&(group.clone(), client)) else {
                    return;
                };
                if joining.incarnation == incarnation {
                    self.turn_down(joining.connection, join_refusal(why));
                }
            }
            Event::Told { member, .. } => {
                changes.tell.insert(member);
            }
            Event::Parted {
                member,
                client,
                how,
                vacant,
            } => self.parted(group, member, &client, how, vacant, now),
            Event::Overtaken { member, held } => {
                let client_id = self.client_of(group, member);
                tracing::warn!(%group, client = client_id, held = %held.numbers(), "a member did not release in time and was overtaken: its unfinished rows may run twice; look for handlers that take longer than drain_timeout_ms");
                self.metrics.overtaken(group);
                self.handle.publish(ServerEvent::Overtaken {
                    group: group.to_string(),
                    client_id,
                });
            }
            Event::Fenced { member } => {
                let client = self.client_of(group, member);
                tracing::warn!(%group, client, "a member did not release within max_drain_ms and is fenced; look for handlers that hang");
                self.metrics.fenced(group);
                let attached = self
                    .member_mut(group, member)
                    .and_then(|member| member.attached);
                if let Some(id) = attached {
                    self.send(
                        id,
                        ServerMessage::Fenced {
                            membership: Membership::quorum(member),
                        },
                    );
                }
            }
            Event::Vacated { client } => {
                tracing::info!(%group, %client, "a client did not come back for its share");
            }
            Event::HandoverStarted => {
                self.groups.entry(group.clone()).or_default().begins(now);
            }
            Event::HandoverEnded => self.handover_ended(group, now),
            Event::Configured(settings) => {
                tracing::info!(%group, %settings, "configured");
                self.handle.publish(ServerEvent::Configured {
                    group: group.to_string(),
                });
                self.answer_configure(group, Ok(()));
                // The members learn their new terms.
                let track = self.groups.get(group);
                let members = track.into_iter().flat_map(|track| track.members.keys());
                changes.welcome.extend(members);
            }
            Event::ConfigureRefused(error) => self.answer_configure(group, Err(error)),
            Event::LeaseLength(lease) => {
                tracing::info!(%group, lease_ms = lease.0, "leases have a new length");
                self.groups.entry(group.clone()).or_default().told_lease = Some(lease);
                self.lengthen_idle_limits(group, lease);
            }
            Event::Updated { member } => self.updated(group, member),
            Event::Recovered => {}
            Event::WeightRefused { member } => self.weight_refused(group, member),
            Event::Deleted => {
                tracing::info!(%group, "deleted");
                self.groups.remove(group);
                self.metrics.forget(group);
                self.handle.publish(ServerEvent::Deleted {
                    group: group.to_string(),
                });
                self.answer_deletes(group, &Ok(()));
            }
            Event::DeleteRefused { members } => {
                let outcome = Err(DeleteError::Members {
                    group: group.clone(),
                    members,
                });
                self.answer_deletes(group, &outcome);
            }
        }
    }

    /// Tells members their shares, and notes who of them has rows to release first. Whoever is welcomed hears its share
    /// so.
    fn tell_changed(&mut self, group: &GroupName, changed: &Changes, now: Instant) {
        self.metrics.told(changed.tell.len() as u64);
        let told: Vec<_> = self.consensus.read(|state| {
            let members = state.group(group).map(|group| group.members());
            let told = |number: &u64| {
                let member = members?.get(number)?;
                let released = member.has_released();
                Some((*number, released, member.epoch, member.told.clone()))
            };
            changed.tell.iter().filter_map(told).collect()
        });
        let Some(track) = self.groups.get_mut(group) else {
            return;
        };
        let mut messages = Vec::new();
        for (number, released, epoch, share) in told {
            track.unseen.insert(number);
            track.releases.remove(&number);
            if released {
                track.awaiting.remove(&number);
            } else {
                track.awaiting.insert(number);
            }
            let Some(tracked) = track.members.get_mut(&number) else {
                continue;
            };
            tracked.asked = (!released).then_some(now);
            tracked.overdue = false;
            if let Some(id) = tracked
                .attached
                .filter(|_| !changed.welcome.contains(&number))
            {
                let membership = Membership::quorum(number);
                let told = ServerMessage::Told {
                    membership,
                    epoch,
                    share,
                };
                messages.push((id, told));
            }
        }
        for (id, told) in messages {
            self.send(id, told);
        }
    }

    /// A member joined: others may follow.
    fn rush_goes_on(&mut self, group: &GroupName, now: Instant) {
        let settle = self.consensus.read(|state| {
            let group = state.group(group);
            group.map_or(Millis(0), |group| group.settings().settle)
        });
        let track = self.groups.entry(group.clone()).or_default();
        track.joined(settle.duration(), now);
    }

    fn parted(
        &mut self,
        group: &GroupName,
        number: u64,
        client: &skyschedule_common::ids::ClientId,
        how: Parting,
        vacant: bool,
        now: Instant,
    ) {
        let membership = Membership::quorum(number);
        let track = self.groups.entry(group.clone()).or_default();
        track.changed = true;
        track.awaiting.remove(&number);
        track.unseen.remove(&number);
        track.releases.remove(&number);
        let tracked = track.members.remove(&number);
        let joined = tracked.as_ref().and_then(|member| member.joined);
        let attached = tracked.and_then(|member| member.attached);
        if how == Parting::Dead {
            track.deaths.count(client, now);
            track.short_lives.count(joined, now);
        }
        if vacant {
            let grace = self.consensus.read(|state| {
                state
                    .group(group)
                    .map_or(Millis(0), |group| group.settings().rejoin_grace)
            });
            self.timers.set(
                now + grace.duration(),
                Timer::Vacate(group.clone(), client.clone(), number),
            );
        }
        // Standby connections learn of it when they are used.
        if let Some(id) = attached {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.membership = None;
            }
            if how == Parting::Dead {
                self.send(id, ServerMessage::Gone { membership });
            }
        }
        let (group_text, client_id) = (group.to_string(), client.to_string());
        tracing::info!(%group, %client, member = number, %how, vacant, "parted");
        self.handle.publish(match how {
            Parting::Dead => ServerEvent::Expired {
                group: group_text,
                client_id,
                why: "died".to_owned(),
            },
            Parting::Left => ServerEvent::Left {
                group: group_text,
                client_id,
            },
        });
    }

    fn updated(&mut self, group: &GroupName, number: u64) {
        let shown = self.consensus.read(|state| {
            let member = state.group(group)?.members().get(&number)?;
            Some((member.client.to_string(), member.weight, member.draining))
        });
        let Some((client_id, weight, draining)) = shown else {
            return;
        };
        tracing::info!(%group, client = client_id, weight, draining, "a member changed");
        self.handle.publish(ServerEvent::Updated {
            group: group.to_string(),
            client_id,
            weight,
            draining,
        });
    }

    /// The client learns that its wish is not granted.
    fn weight_refused(&mut self, group: &GroupName, number: u64) {
        let client = self.client_of(group, number);
        let why = JoinRefusal::TotalTooLarge;
        tracing::warn!(%group, client, %why, "a member's new weight is not taken");
        let attached = self
            .member_mut(group, number)
            .and_then(|member| member.attached);
        if let Some(id) = attached {
            self.send(id, join_refusal(why));
        }
    }

    /// Rows that nobody should have are told when that begins, and when it is over.
    fn look_for_owners(&mut self, group: &GroupName, unowned: Option<Unowned>) {
        self.metrics
            .unowned(group, unowned.map_or(0.0, |it| it.ratio()));
        let track = self.groups.entry(group.clone()).or_default();
        let was = std::mem::replace(&mut track.unowned, unowned.is_some());
        match unowned {
            Some(unowned) if !was => {
                tracing::warn!(%group, "rows have no owner: {unowned}");
            }
            None if was => tracing::info!(%group, "all rows have an owner again"),
            _ => {}
        }
    }

    fn handover_ended(&mut self, group: &GroupName, now: Instant) {
        let shown = self.consensus.read(|state| {
            let group = state.group(group)?;
            let total = group
                .members()
                .values()
                .next()
                .map_or(0, |member| member.told.total());
            let settings = group.settings();
            // Only barriers keep their distance: in a slot group the rest works on undisturbed.
            let settle = (settings.numbering == Numbering::Modulo).then_some(settings.settle);
            Some((total, group.epoch(), settle))
        });
        let Some((total, epoch, settle)) = shown else {
            return;
        };
        let track = self.groups.entry(group.clone()).or_default();
        let took = track
            .handover_began
            .take()
            .map_or(Duration::ZERO, |began| now.saturating_duration_since(began));
        let distance = track.short_lives.distance(took, now);
        // A dead member's rows, given out meanwhile, do not bring the next barrier nearer.
        track.not_before = settle
            .map(|settle| now + settle.duration().max(distance))
            .map(|at| track.not_before.map_or(at, |before| before.max(at)));
        tracing::info!(%group, total, %epoch, took_ms = took.as_millis(), "renumbered");
        self.metrics.handover(group, took);
        self.handle.publish(ServerEvent::Renumbered {
            group: group.to_string(),
            total,
            epoch: epoch.to_string(),
            took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        });
    }

    /// What a changed group needs next.
    pub(super) fn follow_up(&mut self, group: &GroupName, now: Instant) {
        let shown = self.consensus.read(|state| {
            let group = state.group(group).filter(|group| group.exists())?;
            let settings = group.settings();
            let patience = match settings.consistency {
                Consistency::Available => settings.drain_timeout,
                Consistency::Exclusive => settings.max_drain,
            };
            let barriers = settings.numbering == Numbering::Modulo;
            let wants_start = group.wants_handover() && !(barriers && group.in_handover());
            let lease = match settings.lease {
                Some(lease) => lease,
                None => stretched(settings.base_lease(), state.member_count()),
            };
            Some((
                patience,
                (group.is_outdated(), wants_start),
                (group.lease(), lease),
                group.members().len(),
                group.unowned(),
            ))
        });
        let Some((patience, (outdated, wants_start), (in_force, wanted), members, unowned)) = shown
        else {
            return;
        };
        self.metrics.members(group, members);
        self.look_for_owners(group, unowned);
        let track: &mut GroupTrack = self.groups.entry(group.clone()).or_default();
        if !track.awaiting.is_empty() {
            self.timers
                .set(now + patience.duration(), Timer::Drain(group.clone()));
        }
        if wants_start {
            let at = track.next_start().unwrap_or(now).max(now);
            self.timers.set(at, Timer::Start(group.clone()));
        } else if !outdated {
            track.planned(now);
        }
        if wanted > in_force {
            self.batch.group(group).lease = Some(wanted);
        } else if wanted < in_force && track.told_lease != Some(wanted) {
            // Rule L3: members are told the shorter lease now; it is in force when the longer ones are over.
            track.told_lease = Some(wanted);
            self.timers
                .set(now + server_lease(in_force), Timer::Shorten(group.clone()));
        }
        self.act_on_releases(group, false);
    }

    pub(super) fn fire_timers(&mut self) {
        let now = env::now();
        while let Some(timer) = self.timers.due(now) {
            match timer {
                Timer::Lease(group, number) => self.check_lease(&group, number),
                Timer::ResetGrace(group, number, ended) => self.check_reset(&group, number, ended),
                Timer::Drain(group) => self.check_drains(&group),
                Timer::Gather(group) => self.act_on_releases(&group, true),
                // Whatever wakes the coordinator begins the round.
                Timer::Round => {}
                Timer::Start(group) => self.check_start(&group),
                Timer::Vacate(group, client, member) => {
                    let vacant = self.consensus.read(|state| {
                        let vacancy = state
                            .group(&group)
                            .and_then(|group| group.vacancies().get(&client));
                        vacancy.is_some_and(|vacancy| vacancy.member == member)
                    });
                    if vacant {
                        self.batch.group(&group).vacate.push(client);
                    }
                }
                Timer::Shorten(group) => {
                    let told = self.groups.get(&group).and_then(|track| track.told_lease);
                    let in_force = self.lease_of(&group);
                    if let Some(told) = told.filter(|told| *told < in_force) {
                        self.batch.group(&group).lease = Some(told);
                    }
                }
            }
        }
    }

    pub(super) fn lease_of(&self, group: &GroupName) -> Millis {
        self.consensus
            .read(|state| state.group(group).map_or(Millis(0), |group| group.lease()))
    }

    fn member_mut(&mut self, group: &GroupName, number: u64) -> Option<&mut MemberTrack> {
        self.groups.get_mut(group)?.members.get_mut(&number)
    }

    fn client_of(&self, group: &GroupName, number: u64) -> String {
        self.consensus.read(|state| {
            let member = state
                .group(group)
                .and_then(|group| group.members().get(&number));
            member.map_or_else(String::new, |member| member.client.to_string())
        })
    }
}

/// Leases grow with the number of clients, so that heartbeats do not.
fn stretched(base: Millis, clients: usize) -> Millis {
    let seconds = u32::try_from(clients / CLIENTS_PER_SECOND).unwrap_or(u32::MAX);
    base.max(Millis(seconds.saturating_mul(1_000)))
}

fn join_refusal(why: JoinRefusal) -> ServerMessage {
    let text = why.to_string();
    match why {
        JoinRefusal::IdInUse => ServerMessage::Wait(Refusal::new(
            Code::ID_IN_USE,
            &text,
            Some(Duration::from_millis(100)),
        )),
        JoinRefusal::TotalTooLarge => ServerMessage::Wait(Refusal::new(
            Code::LIMIT,
            &text,
            Some(Duration::from_secs(5)),
        )),
        JoinRefusal::TooManyGroups => {
            ServerMessage::Refused(Refusal::new(Code::LIMIT, &text, None))
        }
        JoinRefusal::Consistency { .. } => {
            ServerMessage::Refused(Refusal::new(Code::CONSISTENCY, &text, None))
        }
    }
}
