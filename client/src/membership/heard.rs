//! What a server says, and what that changes.

use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::messages::{Millis, Refusal, ServerMessage, Serving, Terms};
use skyschedule_common::share::Share;
use tracing::{debug, info, warn};

use super::server::Server;
use super::{Attachment, Core, End, FIRST_DELAY, Wishes};
use crate::permit::{Permit, Welcomed};

impl Core {
    pub(super) fn message(
        &mut self,
        from: usize,
        message: ServerMessage,
        permit: &mut Permit,
        now: Instant,
    ) {
        match message {
            ServerMessage::Serving { mode, hint } => self.serving(from, mode, hint.as_deref(), now),
            ServerMessage::Welcome {
                membership,
                epoch,
                share,
                terms,
                lease,
            } => {
                self.welcome(from, membership, (epoch, share, terms), lease, permit, now);
            }
            ServerMessage::Told {
                membership,
                epoch,
                share,
            } => {
                let own = permit
                    .holding()
                    .is_some_and(|holding| holding.membership == membership);
                let attached = self.attachment.as_ref();
                if own && attached.is_some_and(|attachment| attachment.server == from) {
                    self.pulls.answered = self.pulls.sent;
                }
                // The release that answers it says what was taken; the lease needs no heartbeat for it.
                permit.told(membership, epoch, share);
            }
            ServerMessage::Alive {
                membership,
                seq,
                lease,
                settled,
            } => {
                let session = self.servers.get_mut(from).and_then(Server::session_mut);
                let sent = session.and_then(|session| session.answered(seq));
                if let Some(sent) = sent
                    && permit.renew(membership, sent, lease.duration(), settled, now)
                {
                    self.take_lease(lease);
                    self.patience.answered();
                    self.quorum_answered(from, now);
                    self.wishes_heard(from, seq);
                }
            }
            ServerMessage::Pong { seq } => {
                if let Some(session) = self.servers.get_mut(from).and_then(Server::session_mut) {
                    session.answered(seq);
                }
            }
            ServerMessage::Wait(refusal) => self.wait(from, refusal, now),
            ServerMessage::Refused(refusal) => self.close(from, End::Refused(refusal), now),
            ServerMessage::NotLeader { hint } => self.not_leader(from, hint.as_deref(), now),
            ServerMessage::Gone { membership } => self.membership_over(membership, "gone", permit),
            ServerMessage::Fenced { membership } => {
                self.membership_over(membership, "fenced", permit);
            }
            ServerMessage::Servers { addresses } => self.servers_are(from, &addresses, now),
            ServerMessage::Hello(_)
            | ServerMessage::AuthChallenge { .. }
            | ServerMessage::AuthDone { .. }
            | ServerMessage::Relaying => {
                let text = "it began the login anew: it breaks the protocol".to_owned();
                self.close(from, End::Failed(text), now);
            }
        }
    }

    fn serving(&mut self, from: usize, mode: Serving, hint: Option<&str>, now: Instant) {
        let Some(server) = self.servers.get_mut(from) else {
            return;
        };
        server.trouble = None;
        server.outage.over(&server.address);
        let Some(session) = server.session_mut() else {
            return;
        };
        if session.login_sent.take().is_some() {
            session.accepted = true;
            session.logged_in_once = true;
        }
        let asked = std::mem::take(&mut session.asked_with_login);
        let leader = hint.filter(|_| mode != Serving::Quorum);
        if session.leader.as_ref().map(|(leader, _)| leader.as_str()) != leader {
            session.leader = leader.map(|leader| (leader.to_owned(), now));
        }
        let changed = session.serving != mode;
        if changed {
            if session.serving == Serving::Quorum {
                // It may have noticed late: nothing proves that it led after it answered last.
                let since = self.quorum_answered.take().unwrap_or(session.since);
                self.no_quorum_since.get_or_insert(since);
            }
            session.serving = mode;
            session.announced = now;
            session.attach_at = now;
            session.attach_backoff = FIRST_DELAY;
            debug!(server = from, ?mode, "server says how it serves");
        }
        match &mut self.attachment {
            Some(attachment) if changed && attachment.server == from => {
                // What it was asked as the serving one needs no answer any more.
                session.unanswered.clear();
                self.detached();
            }
            // Two leaders: the present one answers at once, or is deposed.
            Some(attachment) if changed && mode == Serving::Quorum && attachment.welcomed => {
                attachment.heartbeat_at = now;
            }
            None if asked && mode == Serving::Quorum && !self.parting => {
                self.attachment = Some(Attachment::new(from, self.lease, now));
            }
            _ => {}
        }
        if mode != Serving::Quorum {
            self.follow(hint, now);
        }
        self.check_relay(from, now);
    }

    fn welcome(
        &mut self,
        from: usize,
        membership: Membership,
        (epoch, share, terms): (Epoch, Share, Terms),
        lease: Millis,
        permit: &mut Permit,
        now: Instant,
    ) {
        let Some(attachment) = self
            .attachment
            .as_mut()
            .filter(|attachment| attachment.server == from)
        else {
            return;
        };
        let welcomed = match permit.welcome(membership, epoch, share, terms) {
            Ok(welcomed) => welcomed,
            Err(error) => return self.close(from, End::Failed(error.to_string()), now),
        };
        attachment.welcomed = true;
        attachment.heartbeat_at = now;
        attachment.released = None;
        // Also for a new membership: an earlier login of this incarnation may have made it.
        attachment.said = Wishes::default();
        self.pulls.sent = self.pulls.wanted;
        self.pulls.answered = self.pulls.wanted;
        self.patience.answered();
        self.quorum_answered(from, now);
        self.refusal = None;
        self.joined_once = true;
        for (index, server) in self.servers.iter_mut().enumerate() {
            let Some(session) = server.session_mut() else {
                continue;
            };
            if index == from {
                session.attach_backoff = FIRST_DELAY;
            } else if welcomed == Welcomed::New {
                // The standby connections carry the membership from now on.
                session.login_due = Some(now);
            }
        }
        self.take_lease(lease);
        let server = self.servers.get(from).map_or("", |server| &server.address);
        let group = self.config.group.as_str();
        let welcomed = match welcomed {
            Welcomed::New => "new",
            Welcomed::Resumed => "resumed",
            Welcomed::Contradicted => {
                warn!(
                    group, server, %membership, %epoch,
                    "the servers go by another share than this client was told: they were restored from an older copy. It works \
                     on nothing until they tell it anew"
                );
                "contradicted"
            }
        };
        info!(group, server, %membership, %epoch, welcomed, "this server serves the client");
        self.served_by(from, now);
    }

    fn quorum_answered(&mut self, from: usize, now: Instant) {
        let session = self.servers.get(from).and_then(Server::session);
        if session.is_some_and(|session| session.serving == Serving::Quorum) {
            self.quorum_answered = Some(now);
        }
    }

    /// A heartbeat was answered: what was said before it was heard.
    fn wishes_heard(&mut self, from: usize, seq: u64) {
        let attachment = self.attachment.as_ref();
        let heard = attachment.filter(|at| at.server == from && at.said_after < seq);
        let back = heard
            .and_then(|at| at.said.drain)
            .filter(|drain| !drain.away);
        self.taken_back = back.map_or(self.taken_back, |drain| drain.call);
    }

    fn take_lease(&mut self, lease: Millis) {
        self.lease = lease.duration().max(Duration::from_millis(30));
    }

    fn wait(&mut self, from: usize, refusal: Refusal, now: Instant) {
        let delay = refusal
            .retry_after
            .map_or(self.longest_delay(), Millis::duration)
            .max(FIRST_DELAY);
        let Some(server) = self.servers.get_mut(from) else {
            return;
        };
        let address = &server.address;
        let attached = self.attachment.as_ref();
        if attached.is_some_and(|attached| attached.server == from && attached.welcomed) {
            let code = refusal.code;
            warn!(server = address, %code, "what was asked for is not done, and all stays as it was: {}", refusal.text);
            return;
        }
        warn!(server = address, code = %refusal.code, "the server asks to wait {delay:?}: {}", refusal.text);
        let Some(session) = server.session_mut() else {
            return;
        };
        if session.login_sent.take().is_some() {
            session.login_due = Some(now + delay);
        }
        session.attach_at = now + delay;
        self.detached_from(from);
        self.refusal = Some((from, refusal));
    }

    fn not_leader(&mut self, from: usize, hint: Option<&str>, now: Instant) {
        self.detached_from(from);
        let longest = self.longest_delay();
        let Some(session) = self.servers.get_mut(from).and_then(Server::session_mut) else {
            return;
        };
        session.unanswered.clear();
        session.attach_at = now + (self.chance.jitter)(session.attach_backoff);
        session.attach_backoff = (session.attach_backoff * 2).min(longest);
        self.follow(hint, now);
    }

    fn membership_over(&mut self, membership: Membership, how: &str, permit: &mut Permit) {
        if !permit.end_membership(membership) {
            return;
        }
        let rows = permit.guards_out();
        let group = self.config.group.as_str();
        warn!(
            group, %membership, rows,
            "membership {how}: the servers gave this client up (it was away, or did not release in time); \
             it joins again when the rows that it still works on are finished"
        );
        self.detached();
        self.parting = true;
        for session in self.servers.iter_mut().filter_map(Server::session_mut) {
            session.accepted = false;
            session.login_sent = None;
            session.login_due = None;
        }
    }
}
