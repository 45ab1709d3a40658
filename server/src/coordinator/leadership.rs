//! A leader begins when its own first entry is applied, and stops at once when it leads no more.

use skyschedule_common::env::{self, Instant};
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::protocol::bounded::BoundedString;
use skyschedule_common::protocol::messages::{ServerMessage, Serving};

use super::timers::Timer;
use super::track::MemberTrack;
use super::{AskError, Batch, ConfigureError, Coordinator, DeleteError};
use crate::view::ServerEvent;

/// Where a client finds the leader.
pub(super) type Hint = BoundedString<256>;

impl Coordinator {
    /// Whether this replica leads, and may do what only a leader can.
    pub(super) fn may_act(&self) -> bool {
        self.ready.is_some()
    }

    /// Whether what is asked of a leader may wait here: a replica alone leads soon after its start.
    pub(super) fn will_lead(&self) -> bool {
        self.ready.is_some() || self.consensus.peers().is_none()
    }

    /// How this replica serves at present.
    pub(super) fn serving(&self) -> ServerMessage {
        ServerMessage::Serving {
            mode: match (self.ready, &self.degraded) {
                (Some(_), _) => Serving::Quorum,
                (None, Some(_)) => Serving::Degraded,
                (None, None) => Serving::None,
            },
            hint: self.hint.clone(),
        }
    }

    /// Who leads may have changed.
    pub(super) fn follow_leadership(&mut self) {
        let now = *self.leadership.borrow_and_update();
        let resigns = self.ready.is_some() && self.ready != now.own;
        if resigns {
            self.resign();
        }
        if let Some(own) = now
            .own
            .filter(|own| self.ready != Some(*own) && broken(Rule::L1))
        {
            self.become_ready(own, env::now());
        }
        self.reports.leader_is(now.leader);
        let hint = self.leader_address();
        if let Some(leader) = now.leader
            && self.followed != Some((now.term, leader))
        {
            self.followed = Some((now.term, leader));
            if leader != self.consensus.id() {
                tracing::info!(leader, term = now.term, "another replica leads");
            }
        }
        if self.ready.is_none() && (resigns || hint != self.hint) {
            self.hint = hint;
            self.announce();
        }
    }

    /// Where the leader is, if that is another replica.
    pub(super) fn leader_address(&self) -> Option<Hint> {
        let leader = self.leadership.borrow().leader;
        leader
            .filter(|leader| *leader != self.consensus.id())
            .and_then(|leader| self.consensus.address_of(leader))
            .map(|address| Hint::truncated(&address))
    }

    /// No quorum follows this leader, which serves nobody until one does.
    pub(super) fn step_aside(&mut self) {
        self.resign();
        self.announce();
    }

    /// Nothing of a leadership that is over is acted on: whoever leads now knows all that was decided, and
    /// asks for the rest.
    fn resign(&mut self) {
        tracing::warn!(replica = self.identity.replica_id, "leads no more");
        self.ready = None;
        self.unconfirmed = false;
        self.metrics.leader(false);
        self.timers.clear();
        self.groups.clear();
        self.joining.clear();
        self.lost.clear();
        self.suspects.clear();
        self.batch = Batch::default();
        self.deciding = None;
        // They are asked again, at the new leader.
        self.heartbeats.clear();
        self.confirming = None;
        for (_, answer) in self.configuring.drain(..) {
            // Whoever asked may have gone.
            let _ = answer.send(Err(ConfigureError::Ask(AskError::NotLeader)));
        }
        self.draining.clear();
        for (_, answer) in self.deleting.drain(..) {
            let _ = answer.send(Err(DeleteError::Ask(AskError::NotLeader)));
        }
    }

    /// Tells all clients how this replica serves.
    pub(super) fn announce(&mut self) {
        let ids: Vec<_> = self.connections.keys().copied().collect();
        for id in ids {
            self.send(id, self.serving());
        }
    }

    /// Another replica leads before this one ends, and the clients are told.
    pub(super) async fn say_goodbye(&mut self) {
        self.consensus.hand_over().await;
        self.follow_leadership();
        self.ready = None;
        for (_, connection) in std::mem::take(&mut self.connections) {
            // Dropping the outbox closes the connection once the message is out.
            let _ = connection.outbox.send(ServerMessage::Serving {
                mode: Serving::None,
                hint: self.hint.clone(),
            });
        }
        for (_, answer) in self.configuring.drain(..) {
            let _ = answer.send(Err(ConfigureError::Ask(AskError::Stopped)));
        }
        // Whoever waits without an answer learns that the server stops.
        self.draining.clear();
        self.deleting.clear();
    }

    /// Rule L1: this leadership's own entry is applied. Rule L3: every member gets a full lease.
    pub(super) fn become_ready(&mut self, leadership: u64, now: Instant) {
        self.forget_degraded();
        self.quorum.seen(now);
        self.ready = Some(leadership);
        self.hint = None;
        self.metrics.leader(true);
        self.timers.clear();
        self.groups.clear();
        let (members, waiting, vacancies) = self.consensus.read(|state| {
            let mut members = Vec::new();
            let mut vacancies = Vec::new();
            let mut waiting = Vec::new();
            for (name, group) in state.groups() {
                waiting.push((name.clone(), group.in_handover()));
                for (number, member) in group.members() {
                    members.push((name.clone(), *number, group.lease(), member.has_released()));
                }
                for (client, vacancy) in group.vacancies() {
                    vacancies.push((
                        name.clone(),
                        client.clone(),
                        vacancy.member,
                        group.settings().rejoin_grace,
                    ));
                }
            }
            (members, waiting, vacancies)
        });
        self.ready_at = now;
        for (name, number, lease, released) in members {
            let track = self.groups.entry(name.clone()).or_default();
            let mut member = MemberTrack::new(now, lease);
            if broken(Rule::L3) {
                member.deadline = now;
            }
            if !released {
                member.asked = Some(now);
                track.awaiting.insert(number);
            }
            self.timers.set(member.deadline, Timer::Lease(name, number));
            track.unseen.insert(number);
            track.members.insert(number, member);
        }
        for (name, client, member, grace) in vacancies {
            self.timers
                .set(now + grace.duration(), Timer::Vacate(name, client, member));
        }
        for (name, in_handover) in waiting {
            if in_handover {
                self.groups.entry(name.clone()).or_default().handover_began = Some(now);
            }
            self.follow_up(&name, now);
        }
        let ids: Vec<_> = self.connections.keys().copied().collect();
        for id in ids {
            self.greet(id);
        }
        for report in self.reports.kept() {
            self.act_on(&report);
        }
        self.handle.publish(ServerEvent::Leader {
            replica_id: self.identity.replica_id,
        });
        tracing::info!(
            replica = self.identity.replica_id,
            "leads, and serves clients"
        );
    }
}
