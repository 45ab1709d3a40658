//! Clients log in on every connection, and attach to be served on one.

use std::net::SocketAddr;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::messages::{
    ClientMessage, Code, Consistency, Login, Millis, Refusal, ServerMessage, Terms,
};

use super::leases::Heartbeat;
use super::track::server_lease;
use super::{Coordinator, PendingJoin};
use crate::session::{ConnectionId, LoggedIn, Outbox};
use crate::state::{Joining, Settings, Update};
use crate::view::ServerEvent;

/// A client whose id is in use asks again at least this often.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(1);
pub(super) const SHORTEST_WAIT: Duration = Duration::from_millis(100);

/// A silent connection is closed after this many leases; standby connections speak every four thirds of one.
pub(super) const IDLE_LEASES: u32 = 3;

/// What a client may claim to know beyond this state. It leaves room for all that is given out afterwards,
/// so that no client can use the numbers up.
pub(super) const MAX_LOST: u64 = 1 << 62;

/// A logged-in connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) login: Login,
    /// Bits of optional features that both ends know.
    pub(super) features: u64,
    pub(super) peer: SocketAddr,
    pub(super) direct: bool,
    /// The membership that it carries.
    pub(super) membership: Option<Membership>,
    /// What a replica without a quorum gave its client, as that one said when it attached here.
    minted: Option<Membership>,
    pub(super) outbox: Outbox,
}

/// How a membership that a client names stands with the applied state.
enum Standing {
    /// It lives.
    Member { told: Epoch, fenced: bool },
    /// It was given out, and is over.
    Over,
    /// It was never given out here: this state was lost.
    Unknown,
}

impl Coordinator {
    pub(super) fn logged_in(&mut self, logged_in: LoggedIn) {
        let LoggedIn {
            connection: id,
            login,
            features,
            peer,
            direct,
            outbox,
        } = logged_in;
        // Another replica may not know the group's newest settings; the leader looks again.
        let mismatch = || self.consistency_mismatch(&login);
        if let Some(refusal) = self.ready.and_then(|_| mismatch()) {
            // Dropping the outbox closes the connection once the message is out.
            let _ = outbox.send(ServerMessage::Refused(refusal));
            return;
        }
        let connection = Connection {
            login,
            features,
            peer,
            direct,
            membership: None,
            minted: None,
            outbox,
        };
        self.connections.insert(id, connection);
        self.greet(id);
    }

    fn consistency_mismatch(&self, login: &Login) -> Option<Refusal> {
        let wanted = login.consistency?;
        let is = self
            .consensus
            .read(|state| state.group(&login.group)?.promise())?;
        let text = format!(
            "group {} is {is}, and the client relies on {wanted}; change the client, or use another group",
            login.group
        );
        (is != wanted).then(|| Refusal::new(Code::CONSISTENCY, &text, None))
    }

    /// After a login, or when this replica begins to lead: the client learns how it is served here, the
    /// connection carries the membership that it names, if that lives, and its client is told what it missed
    /// (rule L13). Replicas that do not lead cannot know whether it lives, and keep what it names for the
    /// leader to judge.
    pub(super) fn greet(&mut self, id: ConnectionId) {
        self.send(id, self.serving());
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let group = connection.login.group.clone();
        let known = connection.login.epoch;
        // A login may have been sent before the client heard of its membership.
        let named = connection.login.membership.or(connection.membership);
        connection.membership = None;
        let lease = self
            .consensus
            .read(|state| state.group(&group).map(|group| group.lease()));
        let _ = lease.map(|lease| connection.outbox.idle_limit(lease.duration() * IDLE_LEASES));
        let Some(membership) = named else {
            return;
        };
        if self.ready.is_none() {
            connection.membership = Some(membership);
            return;
        }
        if let Standing::Member { told, .. } = self.standing(&group, membership, id) {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.membership = Some(membership);
            }
            if let Some(member) = self
                .groups
                .get_mut(&group)
                .and_then(|track| track.members.get_mut(&membership.number))
            {
                member.heard = member.heard.max(env::now());
            }
            if told > known {
                self.tell(&group, membership.number, id);
            }
        }
    }

    /// How the membership stands, as far as the client of this connection may have it.
    fn standing(&self, group: &GroupName, membership: Membership, id: ConnectionId) -> Standing {
        let login = self
            .connections
            .get(&id)
            .map(|connection| &connection.login);
        self.consensus.read(|state| {
            let Some(group) = state.group(group) else {
                return Standing::Unknown;
            };
            if membership.number >= group.next_membership() {
                return Standing::Unknown;
            }
            match group.members().get(&membership.number) {
                Some(member)
                    if login.is_some_and(|login| login.incarnation == member.incarnation) =>
                {
                    Standing::Member {
                        told: member.epoch,
                        fenced: member.fenced,
                    }
                }
                _ => Standing::Over,
            }
        })
    }

    pub(super) fn take_message(
        &mut self,
        id: ConnectionId,
        read_at: Instant,
        message: ClientMessage,
    ) {
        let elsewhere = !self.may_act()
            && (self.degraded_message(id, read_at, &message) || self.turn_away(id, &message));
        if elsewhere {
            return;
        }
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let group = connection.login.group.clone();
        let carries = connection.membership;
        match message {
            ClientMessage::Login(login) => {
                if login.group != group || login.client != connection.login.client {
                    self.refuse(id, Code::PROTOCOL, "a connection belongs to one client of one group");
                    return;
                }
                connection.login = *login;
                self.greet(id);
            }
            ClientMessage::Attach { membership, epoch } | ClientMessage::AttachToLeader { membership, epoch } => {
                self.attach(id, membership, epoch);
            }
            ClientMessage::Heartbeat { membership, seq, epoch, .. } => {
                if carries == Some(membership) || self.is_unknown_to(id, membership) {
                    self.heartbeats.push(Heartbeat { connection: id, membership, seq, epoch, read_at });
                } else {
                    self.send(id, ServerMessage::Gone { membership });
                }
            }
            ClientMessage::Pull { membership } if carries == Some(membership) => self.tell(&group, membership.number, id),
            ClientMessage::Pull { membership } => self.send(id, ServerMessage::Gone { membership }),
            ClientMessage::Released { membership, epoch, keeping } if carries == Some(membership) => {
                self.released(&group, membership, epoch, keeping);
            }
            ClientMessage::Detach { membership } if carries == Some(membership) => {
                let member = self.groups.get_mut(&group).and_then(|track| track.members.get_mut(&membership.number));
                if let Some(member) = member.filter(|member| member.attached == Some(id)) {
                    member.attached = None;
                }
            }
            ClientMessage::Update { membership, weight, drain, .. } if carries == Some(membership) => {
                self.batch.group(&group).update.push(Update { member: membership.number, weight, drain });
            }
            ClientMessage::Goodbye { membership } if carries == Some(membership) => {
                self.report_goodbye(id, membership);
                self.leave(&group, membership.number);
            }
            // Late words of a membership that is over, or of another's.
            ClientMessage::Released { .. }
            | ClientMessage::Detach { .. }
            | ClientMessage::Update { .. }
            | ClientMessage::Goodbye { .. }
            // The session answers or refuses these itself.
            | ClientMessage::Ping { .. }
            | ClientMessage::Hello(_)
            | ClientMessage::AuthFirst { .. }
            | ClientMessage::AuthProof { .. }
            | ClientMessage::Peer(_)
            | ClientMessage::Relay
            | ClientMessage::Relayed { .. } => {}
        }
    }

    /// Whether the client of this connection knows a membership that this state has lost.
    fn is_unknown_to(&self, id: ConnectionId, membership: Membership) -> bool {
        let group = self
            .connections
            .get(&id)
            .map(|connection| connection.login.group.clone());
        group
            .is_some_and(|group| matches!(self.standing(&group, membership, id), Standing::Unknown))
    }

    /// Without leading, what only a leader can do is answered so; true when nothing is left to do.
    fn turn_away(&mut self, id: ConnectionId, message: &ClientMessage) -> bool {
        match message {
            ClientMessage::Attach { .. }
            | ClientMessage::Heartbeat { .. }
            | ClientMessage::Pull { .. } => {
                let hint = self.hint.clone();
                self.send(id, ServerMessage::NotLeader { hint });
                true
            }
            ClientMessage::Goodbye { membership } => {
                self.report_goodbye(id, *membership);
                true
            }
            ClientMessage::Login(_) => false,
            // They are said again on the next attachment, or were for a leader only.
            _ => true,
        }
    }

    pub(super) fn leave(&mut self, group: &GroupName, number: u64) {
        let Some(member) = self
            .groups
            .get_mut(group)
            .and_then(|track| track.members.get_mut(&number))
        else {
            return;
        };
        if !std::mem::replace(&mut member.condemned, true) {
            self.batch.group(group).leave.push(number);
        }
    }

    /// A client asks to be served here.
    fn attach(&mut self, id: ConnectionId, membership: Option<Membership>, epoch: Epoch) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let group = connection.login.group.clone();
        connection.minted = membership.filter(|membership| membership.replica != 0);
        // What a degraded replica minted is none here.
        let Some(membership) = membership.filter(|membership| membership.replica == 0) else {
            self.join(id, &group);
            return;
        };
        match self.standing(&group, membership, id) {
            Standing::Member { fenced: true, .. } => {
                self.send(id, ServerMessage::Fenced { membership });
            }
            Standing::Member {
                told,
                fenced: false,
            } => self.resume(id, &group, membership, told, epoch),
            Standing::Over if broken(Rule::L7) => self.join(id, &group),
            Standing::Over | Standing::Unknown => self.not_a_member(id, membership, epoch),
        }
    }

    /// The client goes on with its membership, served over this connection.
    fn resume(
        &mut self,
        id: ConnectionId,
        group: &GroupName,
        membership: Membership,
        told: Epoch,
        epoch: Epoch,
    ) {
        let number = membership.number;
        let now = env::now();
        let member = self
            .groups
            .get_mut(group)
            .and_then(|track| track.members.get_mut(&number));
        // Condemned: its end is being decided, and then it is told that it is gone.
        let Some(member) = member.filter(|member| !member.condemned) else {
            return;
        };
        member.attached = Some(id);
        member.heard = member.heard.max(now);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.membership = Some(membership);
        }
        self.welcome(group, number);
        if epoch > told && epoch.quorum <= MAX_LOST && !broken(Rule::L15) {
            self.batch.group(group).reissue.push((number, epoch));
        }
    }

    /// Rule L7: a client id has at most one member.
    fn join(&mut self, id: ConnectionId, group: &GroupName) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let login = connection.login.clone();
        let now = env::now();
        let present = self.consensus.read(|state| {
            let (number, member) = state.group(group)?.member_of(&login.client)?;
            Some((number, member.incarnation, member.epoch))
        });
        if let Some((number, incarnation, told)) = present.filter(|_| !broken(Rule::L7)) {
            let member = self
                .groups
                .get(group)
                .and_then(|track| track.members.get(&number));
            let condemned = member.is_some_and(|member| member.condemned);
            if incarnation == login.incarnation {
                self.resume(id, group, Membership::quorum(number), told, login.epoch);
                return;
            }
            if !condemned {
                let left = member.map_or(LONGEST_WAIT, |member| {
                    member.deadline.saturating_duration_since(now)
                });
                self.wait_for_id(id, left.clamp(SHORTEST_WAIT, LONGEST_WAIT));
                return;
            }
        }
        if let Some(delay) = self
            .groups
            .get(group)
            .and_then(|track| track.deaths.delay(&login.client, now))
        {
            self.put_off(id, group, &login, delay);
            return;
        }
        if let Some(wait) = self.wait_for_the_forgotten(group, login.consistency, now) {
            let text = "the server started without any member of this exclusive group in its memory, and waits for one \
                        lease before it gives out rows, since members that it has forgotten may work";
            let refusal = Refusal::new(Code::BACK_OFF, text, Some(wait));
            self.turn_down(id, ServerMessage::Wait(refusal));
            return;
        }
        let key = (group.clone(), login.client.clone());
        let pending = PendingJoin {
            incarnation: login.incarnation,
            connection: id,
            ended: None,
        };
        if let Some(other) = self.joining.get_mut(&key) {
            if other.incarnation == login.incarnation {
                *other = pending;
                return;
            }
            self.wait_for_id(id, SHORTEST_WAIT);
            return;
        }
        self.joining.insert(key, pending);
        let Login {
            client,
            incarnation,
            weight,
            consistency,
            ..
        } = login;
        self.batch.group(group).join.push(Joining {
            client,
            incarnation,
            weight,
            consistency,
        });
    }

    /// Rule L16: memory that was lost may have been filled again by settings, or by what other clients knew, and the
    /// server may have been restarted since. Only members, who waited themselves, show that nobody else has a lease.
    fn wait_for_the_forgotten(
        &self,
        group: &GroupName,
        wanted: Option<Consistency>,
        now: Instant,
    ) -> Option<Duration> {
        let (consistency, lease, is_empty) = self.consensus.read(|state| {
            let known = state.group(group).filter(|group| group.exists());
            known.map_or((wanted, Settings::default().base_lease(), true), |group| {
                let consistency = Some(group.settings().consistency);
                (consistency, group.lease(), group.members().is_empty())
            })
        });
        let left = (self.ready_at + server_lease(lease)).saturating_duration_since(now);
        let waits = consistency == Some(Consistency::Exclusive) && is_empty && !left.is_zero();
        waits.then_some(left)
    }

    /// A client does not become a member, now or at all. It must not work on meanwhile under what a replica without a
    /// quorum gave it: by the leader's numbering its rows are others'.
    pub(super) fn turn_down(&mut self, id: ConnectionId, message: ServerMessage) {
        let connection = self.connections.get_mut(&id);
        let minted = connection.and_then(|connection| connection.minted.take());
        if let Some(membership) = minted.filter(|_| self.may_act()) {
            self.send(id, ServerMessage::Gone { membership });
        }
        self.send(id, message);
    }

    pub(super) fn wait_for_id(&mut self, id: ConnectionId, retry_after: Duration) {
        let text = "a client with this id is a member of the group; it is asked for again until that one has left or its \
                    lease is over. If two processes were given one id, give each its own";
        self.turn_down(
            id,
            ServerMessage::Wait(Refusal::new(Code::ID_IN_USE, text, Some(retry_after))),
        );
    }

    fn put_off(&mut self, id: ConnectionId, group: &GroupName, login: &Login, delay: Duration) {
        let client = &login.client;
        tracing::warn!(%group, %client, delay_ms = delay.as_millis(), "a client that died several times within a minute is let in only after a delay; look why it dies");
        self.metrics.delayed_join(group);
        self.handle.publish(ServerEvent::Delayed {
            group: group.to_string(),
            client_id: client.to_string(),
            retry_after_ms: u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
        });
        let text = format!(
            "this client died several times within a minute and is let in again in {:.1} s; look why it dies",
            delay.as_secs_f64()
        );
        self.turn_down(
            id,
            ServerMessage::Wait(Refusal::new(Code::BACK_OFF, &text, Some(delay))),
        );
    }

    /// Rule L8: a membership that was given out and is not there is over; one that was never given out
    /// proves that this state was lost.
    pub(super) fn not_a_member(&mut self, id: ConnectionId, membership: Membership, epoch: Epoch) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let group = connection.login.group.clone();
        let Login { client, .. } = &connection.login;
        let (next, newest) = self.consensus.read(|state| {
            state.group(&group).map_or((1, Epoch::ZERO), |group| {
                (group.next_membership(), group.epoch())
            })
        });
        // Another client may have been first to show that the state was lost, and have known less.
        let is_known = membership.number < next && epoch.quorum <= newest.quorum;
        if is_known || broken(Rule::L8) {
            connection.membership = None;
            self.send(id, ServerMessage::Gone { membership });
            return;
        }
        if membership.number > MAX_LOST || epoch.quorum > MAX_LOST {
            self.refuse(
                id,
                Code::PROTOCOL,
                "a membership or an epoch that no server gave",
            );
            return;
        }
        tracing::error!(
            %group, %client, membership = membership.number, %epoch,
            "a client knows a membership or an epoch that this server never gave: its data directory was lost or replaced by an older \
             one. Numbering goes on above what the client knows; if a newer copy of the data exists, stop and restore it"
        );
        self.lost.push((id, membership));
        let batch = self.batch.group(&group);
        let (number, known) = batch.recover.unwrap_or((membership.number, epoch));
        batch.recover = Some((number.max(membership.number), known.max(epoch)));
    }

    /// Tells a member over its attached connection that it is one.
    pub(super) fn welcome(&mut self, group: &GroupName, number: u64) {
        let told_lease = self.groups.get(group).and_then(|track| track.told_lease);
        let attached = self
            .groups
            .get(group)
            .and_then(|track| track.members.get(&number)?.attached);
        let Some(id) = attached else { return };
        let welcome = self.consensus.read(|state| {
            let group = state.group(group)?;
            let member = group.members().get(&number)?;
            let settings = group.settings();
            let terms = Terms {
                consistency: settings.consistency,
                numbering: settings.numbering,
                drain_timeout: settings.drain_timeout,
            };
            let (epoch, share) = (member.epoch, member.told.clone());
            let lease = told_lease.unwrap_or_else(|| group.lease());
            Some(ServerMessage::Welcome {
                membership: Membership::quorum(number),
                epoch,
                share,
                terms,
                lease,
            })
        });
        let Some(welcome) = welcome else { return };
        if let ServerMessage::Welcome { lease, .. } = &welcome {
            let limit = lease.duration() * IDLE_LEASES;
            if let Some(connection) = self.connections.get(&id) {
                // A full queue is noticed by the message that follows.
                let _ = connection.outbox.idle_limit(limit);
            }
        }
        self.send(id, welcome);
        self.tell_servers(id);
    }

    /// Heartbeats and pings come in proportion to the lease.
    pub(super) fn lengthen_idle_limits(&mut self, group: &GroupName, lease: Millis) {
        for connection in self
            .connections
            .values()
            .filter(|connection| &connection.login.group == group)
        {
            // A full queue is noticed by the next message.
            let _ = connection.outbox.idle_limit(lease.duration() * IDLE_LEASES);
        }
    }

    /// Tells a member its present share over this connection.
    pub(super) fn tell(&mut self, group: &GroupName, number: u64, id: ConnectionId) {
        let told = self.consensus.read(|state| {
            let member = state.group(group)?.members().get(&number)?;
            Some((member.epoch, member.told.clone()))
        });
        if let Some((epoch, share)) = told {
            self.send(
                id,
                ServerMessage::Told {
                    membership: Membership::quorum(number),
                    epoch,
                    share,
                },
            );
        }
    }

    fn refuse(&mut self, id: ConnectionId, code: Code, text: &str) {
        self.metrics.protocol_error();
        self.send(id, ServerMessage::Refused(Refusal::new(code, text, None)));
        self.drop_connection(id);
    }

    /// Queues a message; a client that does not read is dropped.
    pub(super) fn send(&mut self, id: ConnectionId, message: ServerMessage) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        if connection.outbox.send(message).is_err() {
            let Login { group, client, .. } = &connection.login;
            tracing::warn!(%group, %client, peer = %connection.peer, "dropped a client that does not read what it is sent");
            self.metrics.slow_reader();
            self.drop_connection(id);
        }
    }

    /// Closes a connection from this side, which proves nothing about the client.
    fn drop_connection(&mut self, id: ConnectionId) {
        self.ended(id, env::net::Ending::Reset);
    }
}
