//! What is shown and set through the admin interface.

use std::collections::BTreeSet;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_common::share::Share;

use super::Coordinator;
use super::handle::{AskError, ConfigureError, DeleteError, Request};
use crate::state::{Group, Member, SettingsError, State, Update};
use crate::view::{ClusterView, GroupView, MemberState, MemberView, ReplicaView};

impl Coordinator {
    /// Whoever asked may have gone: answers are sent without looking back.
    pub(super) fn answer(&mut self, request: Request) {
        match request {
            Request::Cluster(answer) => {
                let _ = answer.send(self.cluster_view());
            }
            Request::Groups(answer) => {
                let mut names: BTreeSet<GroupName> = self
                    .consensus
                    .read(|state| state.groups().keys().cloned().collect());
                names.extend(self.degraded.iter().flat_map(|it| it.groups().cloned()));
                let _ = answer.send(
                    names
                        .iter()
                        .filter_map(|name| self.group_view(name))
                        .collect(),
                );
            }
            Request::Group(name, answer) => {
                let _ = answer.send(self.group_view(&name));
            }
            Request::Reports(reports, answer) => {
                let _ = answer.send(self.take_reports(&reports));
            }
            Request::Configure(_, _, answer) if !self.will_lead() => {
                let _ = answer.send(Err(ConfigureError::Ask(AskError::NotLeader)));
            }
            Request::Configure(name, settings, answer) => {
                if let Err(error) = settings.validate() {
                    Self::refuse_configure(answer, error);
                    return;
                }
                self.batch.group(&name).configure.push(*settings);
                self.configuring.push((name, answer));
            }
            // Without an answer, whoever asked learns that there is none here.
            Request::Drain(..) if !self.will_lead() => {}
            Request::Drain(group, client, away, answer) => {
                let number = self
                    .consensus
                    .read(|state| Some(state.group(&group)?.member_of(&client)?.0));
                let Some(member) = number else {
                    let _ = answer.send(None);
                    return;
                };
                self.batch.group(&group).update.push(Update {
                    member,
                    weight: None,
                    drain: Some(away),
                });
                self.draining.push((group, member, away, answer));
            }
            Request::Delete(_, answer) if !self.will_lead() => {
                let _ = answer.send(Err(DeleteError::Ask(AskError::NotLeader)));
            }
            Request::Delete(group, answer) => {
                let exists = |state: &State| state.group(&group).is_some_and(Group::exists);
                if self.consensus.read(exists) {
                    self.batch.group(&group).delete = true;
                    self.deleting.push((group, answer));
                } else {
                    let _ = answer.send(Err(DeleteError::Unknown(group)));
                }
            }
        }
    }

    /// Answers the oldest request for settings of this group.
    pub(super) fn answer_configure(
        &mut self,
        group: &GroupName,
        outcome: Result<(), SettingsError>,
    ) {
        let Some(at) = self.configuring.iter().position(|(name, _)| name == group) else {
            return;
        };
        let (name, answer) = self.configuring.remove(at);
        match outcome {
            Ok(()) => {
                if let Some(view) = self.group_view(&name) {
                    let _ = answer.send(Ok(view));
                }
            }
            Err(error) => Self::refuse_configure(answer, error),
        }
    }

    /// Answers those who want the group deleted.
    pub(super) fn answer_deletes(&mut self, group: &GroupName, outcome: &Result<(), DeleteError>) {
        for (name, answer) in std::mem::take(&mut self.deleting) {
            if &name == group {
                let _ = answer.send(outcome.clone());
            } else {
                self.deleting.push((name, answer));
            }
        }
    }

    /// Answers the requests for drains, and for the end of drains, that are decided; or the member is gone.
    pub(super) fn answer_drains(&mut self) {
        let now = env::now();
        for (group, number, away, answer) in std::mem::take(&mut self.draining) {
            let shown = self.consensus.read(|state| {
                let member = state.group(&group)?.members().get(&number)?;
                Some(self.member_view(&group, number, member, now))
            });
            let undecided = shown
                .as_ref()
                .is_some_and(|shown| (shown.state == MemberState::Draining) != away);
            if undecided && !answer.is_closed() {
                self.draining.push((group, number, away, answer));
            } else {
                let _ = answer.send(shown);
            }
        }
    }

    fn cluster_view(&self) -> ClusterView {
        let id = self.identity.replica_id;
        let replicas = self.consensus.replicas();
        let leadership = self.consensus.leadership();
        let serves = |leader: &u16| match *leader == id {
            true => self.ready.is_some() && !self.unconfirmed,
            false => replicas.get(leader).is_some_and(|leader| leader.reachable),
        };
        ClusterView {
            replica_id: id,
            leader: leadership.leader.filter(serves),
            term: leadership.term,
            degraded: self.degraded.is_some(),
            formed: self.consensus.is_formed(),
            replicas: replicas
                .iter()
                .map(|(&id, replica)| ReplicaView {
                    id,
                    address: replica.address.clone(),
                    voter: replica.voter,
                    reachable: replica.reachable,
                    lag: replica.lag,
                })
                .collect(),
        }
    }

    fn group_view(&self, name: &GroupName) -> Option<GroupView> {
        let now = env::now();
        if let Some(view) = self.degraded.as_ref().and_then(|it| it.view(name, now)) {
            return Some(view);
        }
        self.consensus.read(|state| {
            let group = state.group(name).filter(|group| group.exists())?;
            let members: Vec<MemberView> = group
                .members()
                .iter()
                .map(|(number, member)| self.member_view(name, *number, member, now))
                .collect();
            Some(GroupView {
                name: name.to_string(),
                numbering: group.settings().numbering,
                total: total(group),
                epoch: group.epoch(),
                consistency: group.settings().consistency,
                degraded: false,
                stale: self.ready.is_none(),
                settings: group.settings().clone(),
                lease_ms: group.lease().0,
                in_handover: group.in_handover(),
                unowned: group.unowned(),
                members,
            })
        })
    }

    fn member_view(
        &self,
        group: &GroupName,
        number: u64,
        member: &Member,
        now: Instant,
    ) -> MemberView {
        let track = self
            .groups
            .get(group)
            .and_then(|track| track.members.get(&number));
        let connection = track
            .and_then(|track| track.attached)
            .and_then(|id| self.connections.get(&id));
        let connection = connection
            .filter(|connection| connection.membership == Some(Membership::quorum(number)));
        let age = |since: Instant| {
            u64::try_from(now.saturating_duration_since(since).as_millis()).unwrap_or(u64::MAX)
        };
        MemberView {
            client_id: member.client.to_string(),
            held: member.held.clone(),
            target: (member.target != member.held).then(|| member.target.clone()),
            weight: member.weight,
            state: match connection {
                _ if member.draining => MemberState::Draining,
                Some(_) => MemberState::Active,
                None => MemberState::Away,
            },
            address: connection.map(|connection| connection.peer.to_string()),
            heartbeat_age_ms: track.and_then(|track| track.last_heartbeat).map(age),
            pending_since_ms: track.and_then(|track| track.asked).map(age),
        }
    }
}

fn total(group: &Group) -> u32 {
    let targets = group
        .members()
        .values()
        .map(|member: &Member| &member.target);
    let of_members = targets.map(Share::total).max();
    of_members.unwrap_or(match group.settings().numbering {
        Numbering::Modulo => 0,
        Numbering::Slots(slots) => slots,
    })
}
