//! Heartbeats renew leases; a lease that is over, or a proven death, ends a membership.

use std::time::Duration;

use skyschedule_common::env::net::Ending;
use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::messages::{Consistency, Millis, Numbering, ServerMessage};

use super::Coordinator;
use super::connections::MAX_LOST;
use super::timers::Timer;
use super::track::{MemberTrack, server_lease};
use crate::consensus::ConfirmError;
use crate::session::ConnectionId;

/// Rounds begin so long after one another at least: where there are many members, one round is for many heartbeats.
const BETWEEN_ROUNDS: Duration = Duration::from_millis(2);

/// A heartbeat that waits for a quorum to confirm this leader.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heartbeat {
    pub(super) connection: ConnectionId,
    pub(super) membership: Membership,
    pub(super) seq: u64,
    pub(super) epoch: Epoch,
    pub(super) read_at: Instant,
}

/// How a connection ended, and what that proves.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub(super) ending: Ending,
    pub(super) direct: bool,
    pub(super) attached: bool,
}

impl Coordinator {
    /// Rule L3: as from a new leader, every member gets a full lease to be heard.
    pub(super) fn full_leases(&mut self, now: Instant) {
        if broken(Rule::L3) {
            return;
        }
        for (name, track) in &mut self.groups {
            let lease = self
                .consensus
                .read(|state| state.group(name).map_or(Millis(0), |group| group.lease()));
            for member in track.members.values_mut() {
                member.deadline = member.deadline.max(now + server_lease(lease));
                member.heard = member.heard.max(now);
            }
        }
    }

    /// Rule L4: heartbeats are answered behind a quorum round that began after they were read. So are the
    /// ends of leases: a leader that nobody follows any more declares nobody dead.
    pub(super) fn confirm_heartbeats(&mut self) {
        let nothing = self.heartbeats.is_empty() && self.suspects.is_empty();
        if self.confirming.is_some() || (nothing && !self.wants_pulse()) {
            return;
        }
        let now = env::now();
        if now < self.next_round {
            self.timers.set(self.next_round, Timer::Round);
            return;
        }
        self.next_round = now + BETWEEN_ROUNDS;
        self.quorum.round_begins(now);
        let consensus = self.consensus.clone();
        let round = Box::pin(async move {
            if broken(Rule::L4) {
                return Ok(());
            }
            consensus.confirm().await
        });
        self.confirming = Some((round, std::mem::take(&mut self.heartbeats)));
    }

    pub(super) fn round_is_over(&mut self, confirmed: Result<(), ConfirmError>) {
        let Some((_, heartbeats)) = self.confirming.take() else {
            return;
        };
        self.metrics.heartbeats(heartbeats.len() as u64);
        match confirmed {
            Ok(()) => {
                self.quorum_confirmed();
                if std::mem::take(&mut self.unconfirmed) {
                    tracing::warn!(
                        "a quorum answers again; every member gets a full lease to be heard"
                    );
                    self.full_leases(env::now());
                }
                for heartbeat in &heartbeats {
                    self.answer_heartbeat(heartbeat);
                }
                for (group, number) in std::mem::take(&mut self.suspects) {
                    self.judge(&group, number);
                }
            }
            // They are not answered: whoever leads by now, or the next round, answers the next.
            Err(ConfirmError::NoQuorum) => self.unconfirmed = true,
            Err(ConfirmError::NotLeader) => {
                for heartbeat in heartbeats {
                    let hint = self.hint.clone();
                    self.send(heartbeat.connection, ServerMessage::NotLeader { hint });
                }
            }
        }
    }

    fn answer_heartbeat(&mut self, heartbeat: &Heartbeat) {
        let Some(group) = self
            .connections
            .get(&heartbeat.connection)
            .map(|connection| connection.login.group.clone())
        else {
            return;
        };
        let membership = heartbeat.membership;
        let known = self.consensus.read(|state| {
            let group = state.group(&group)?;
            let member = group.members().get(&membership.number)?;
            let gapless = group
                .vacancies()
                .values()
                .all(|vacancy| vacancy.target.is_empty());
            let quiet = !group.in_handover() && !group.wants_handover() && gapless;
            Some((member.epoch, member.fenced, group.lease(), quiet))
        });
        let track = self.groups.get_mut(&group);
        let unchecked = broken(Rule::L4);
        let Some((told, fenced, lease, quiet)) = known else {
            if unchecked {
                let lease = Millis(6_000);
                self.send(
                    heartbeat.connection,
                    ServerMessage::Alive {
                        membership,
                        seq: heartbeat.seq,
                        lease,
                        settled: None,
                    },
                );
            } else {
                self.not_a_member(heartbeat.connection, membership, heartbeat.epoch);
            }
            return;
        };
        let Some((track, number)) = track.map(|track| (track, membership.number)) else {
            return;
        };
        let Some(member) = track.members.get_mut(&number) else {
            return;
        };
        if fenced && !unchecked {
            self.send(heartbeat.connection, ServerMessage::Fenced { membership });
            return;
        }
        // Rule L5: what is condemned is never renewed again.
        if member.condemned && !broken(Rule::L5) && !unchecked {
            return;
        }
        member.deadline = member.deadline.max(heartbeat.read_at + server_lease(lease));
        member.heard = member.heard.max(heartbeat.read_at);
        member.last_heartbeat = Some(heartbeat.read_at);
        member.seen = Some(heartbeat.epoch);
        // Rule L15: it knows a share that this state does not. It works on that one no longer than its lease lasts, which
        // is renewed once it has been told another.
        if heartbeat.epoch > told && heartbeat.epoch.quorum <= MAX_LOST && !broken(Rule::L15) {
            let batch = self.batch.group(&group);
            batch.reissue.push((number, heartbeat.epoch));
            if !broken(Rule::L15Renewal) {
                self.heartbeats.push(*heartbeat);
                return;
            }
        }
        if heartbeat.epoch == told {
            track.unseen.remove(&number);
        }
        // Rule L17: settled once every member has taken its share, and the shares leave no gap.
        let settled = ((quiet && track.unseen.is_empty()) || broken(Rule::L17)).then_some(told);
        let lease = track.told_lease.unwrap_or(lease);
        if heartbeat.epoch < told {
            // Before the renewal: a renewed lease must not be spent on rows that have moved.
            self.tell(&group, number, heartbeat.connection);
        }
        self.send(
            heartbeat.connection,
            ServerMessage::Alive {
                membership,
                seq: heartbeat.seq,
                lease,
                settled,
            },
        );
    }

    /// A lease may be over.
    pub(super) fn check_lease(&mut self, group: &GroupName, number: u64) {
        let now = env::now();
        let track = self.groups.get(group);
        let Some(member) = track.and_then(|track| track.members.get(&number)) else {
            return;
        };
        if member.deadline > now {
            let lease = Timer::Lease(group.clone(), number);
            self.timers.set(member.deadline, lease);
        } else if !member.condemned {
            self.suspects.insert((group.clone(), number));
        }
    }

    /// A quorum has just confirmed this leader: a lease that is over ends its membership.
    fn judge(&mut self, group: &GroupName, number: u64) {
        let now = env::now();
        let Some(member) = self
            .groups
            .get(group)
            .and_then(|track| track.members.get(&number))
        else {
            return;
        };
        if member.condemned {
            return;
        }
        if member.deadline <= now {
            self.condemn(group, number, "lease");
        } else {
            self.timers
                .set(member.deadline, Timer::Lease(group.clone(), number));
        }
    }

    /// Proposes the death of a member (rule L6 is upheld by those who call).
    pub(super) fn condemn(&mut self, group: &GroupName, number: u64, why: &'static str) {
        let Some(member) = self
            .groups
            .get_mut(group)
            .and_then(|track| track.members.get_mut(&number))
        else {
            return;
        };
        if !std::mem::replace(&mut member.condemned, true) {
            tracing::info!(%group, member = number, why, "a member is dead");
            self.metrics.expired(group, why);
            self.batch.group(group).dead.push(number);
        }
    }

    /// A connection is over: what that proves depends on how, on which, and on the group.
    pub(super) fn ended(&mut self, id: ConnectionId, ending: Ending) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        self.report_end(&connection, ending);
        if !self.may_act() {
            let proven = ending == Ending::Fin && connection.direct;
            self.degraded_ended(id, &connection.login, proven);
            return;
        }
        let group = connection.login.group.clone();
        let key = (group.clone(), connection.login.client.clone());
        let end = End {
            ending,
            direct: connection.direct,
            attached: false,
        };
        if let Some(joining) = self
            .joining
            .get_mut(&key)
            .filter(|joining| joining.connection == id)
        {
            joining.ended = Some(End {
                attached: true,
                ..end
            });
        }
        let member_of_id = || {
            self.consensus.read(|state| {
                Some(Membership::quorum(
                    state.group(&key.0)?.member_of(&key.1)?.0,
                ))
            })
        };
        // Rule F1: the end concerns the membership that this connection carried, never its client id.
        let carried = if broken(Rule::F1) {
            member_of_id()
        } else {
            connection.membership
        };
        let Some(membership) = carried else { return };
        let Some(member) = self
            .groups
            .get_mut(&group)
            .and_then(|track| track.members.get_mut(&membership.number))
        else {
            return;
        };
        let attached = member.attached == Some(id);
        if attached {
            member.attached = None;
        }
        self.connection_ended(&group, membership.number, End { attached, ..end });
    }

    pub(super) fn connection_ended(&mut self, group: &GroupName, number: u64, end: End) {
        let terms = self.consensus.read(|state| {
            let settings = state.group(group)?.settings();
            Some((
                settings.consistency,
                settings.trust_fin,
                settings.reset_grace,
                settings.numbering,
            ))
        });
        let Some((consistency, trust_fin, reset_grace, numbering)) = terms else {
            return;
        };
        let proven = end.ending == Ending::Fin && end.direct;
        let now = env::now();
        match consistency {
            _ if broken(Rule::L6) => self.condemn(group, number, "broken"),
            Consistency::Available if proven => self.condemn(group, number, "fin"),
            Consistency::Exclusive if proven && trust_fin => self.condemn(group, number, "fin"),
            // Who relayed it may have died, not the client: its lease tells.
            Consistency::Available if end.attached && end.ending != Ending::Silence => {
                let decided = now + reset_grace.duration();
                self.timers
                    .set(decided, Timer::ResetGrace(group.clone(), number, now));
                // In a slot group the rest works on undisturbed.
                if numbering == Numbering::Modulo
                    && let Some(track) = self.groups.get_mut(group)
                {
                    track.doubts_until(decided, now);
                }
            }
            _ => {}
        }
    }

    /// The attached connection of an available group's member ended without proof: it is taken for
    /// dead if it was not heard since.
    pub(super) fn check_reset(&mut self, group: &GroupName, number: u64, ended: Instant) {
        let heard = |member: &MemberTrack| member.heard > ended || member.attached.is_some();
        let member = self
            .groups
            .get(group)
            .and_then(|track| track.members.get(&number));
        if member.is_some_and(|member| !heard(member)) {
            self.condemn(group, number, "reset");
        }
    }
}
