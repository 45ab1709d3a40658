//! What is due: done in [`Core::tick`], in the order in which it stands there.

use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::features;
use skyschedule_common::protocol::messages::{ClientMessage, Consistency, Login, Serving};
use tracing::{info, warn};

use super::patience::LOOK;
use super::server::{Phase, Server, Session};
use super::{Action, Attachment, ConnectionId, Core, End, Farewell, MAX_UNANSWERED};
use crate::observe::Mode;
use crate::permit::{Permit, Stage};

/// Shortest time for connecting and logging in to a server.
const MIN_DIAL: Duration = Duration::from_secs(2);

/// A tick that comes later than this after it was due: the process did not run.
const LATE: Duration = Duration::from_millis(500);

/// Longest time between two ticks.
const MAX_WAIT: Duration = Duration::from_secs(1);

impl Core {
    /// Does what is due.
    pub(crate) fn tick(&mut self, permit: &mut Permit, now: Instant) {
        permit.observe(now);
        self.notice_pause(now);
        if self.farewell.is_none() {
            self.close_dead(now);
            self.heed_mismatch(permit, now);
            self.look_for_relay(permit, now);
            self.dial(now);
            self.return_after_parting(permit, now);
            self.log_in(permit, now);
            self.choose_server(permit, now);
            if self.patience.look(permit, now)
                && let Some(attachment) = &mut self.attachment
            {
                attachment.heartbeat_at = now;
            }
            self.release(permit);
            self.heartbeat(permit, now);
            self.ping(now);
            self.tell_wishes(permit, now);
            self.say_goodbye(permit, now);
        }
        self.planned = Some(self.deadline(permit, now));
    }

    /// When to tick next, if nothing happens before. What was due by now is done, or waits for an event.
    fn deadline(&self, permit: &Permit, now: Instant) -> Instant {
        let looks = self.patience.is_asking().then(|| now + LOOK);
        let lease_end = permit.holding().and_then(|holding| holding.lease_end());
        let degraded = self
            .no_quorum_since
            .map(|since| since + self.config.degraded_after);
        let attached = self.attachment.iter();
        let attached = attached
            .flat_map(|attachment| [attachment.heartbeat_at, attachment.asked + self.silence()]);
        let servers = self.servers.iter().flat_map(|server| match &server.phase {
            Phase::Down { retry_at } => [Some(*retry_at), None, None, None, None],
            Phase::Open(session) => {
                let waiting = session.waiting_since();
                let (silent, dead) = (
                    waiting.map(|since| since + self.silence()),
                    waiting.map(|since| since + self.dead_after()),
                );
                [
                    Some(session.ping_at),
                    session.login_due,
                    Some(session.attach_at),
                    silent,
                    dead,
                ]
            }
            Phase::Dialing { since } => {
                let limit = *since + self.dial_limit(server);
                [Some(limit), None, None, None, None]
            }
            Phase::Double { .. } | Phase::Forgotten => [None; 5],
        });
        let relay = self.relay_due().map(|(due, _)| due);
        let instants = [looks, lease_end, degraded, relay, self.goodbye_until]
            .into_iter()
            .flatten();
        let instants = instants.chain(attached).chain(servers.flatten());
        instants
            .filter(|instant| *instant > now)
            .min()
            .map_or(now + MAX_WAIT, |next| next.min(now + MAX_WAIT))
    }

    /// When the next tick is due, as the last one found.
    pub(crate) fn next_tick(&self) -> Option<Instant> {
        self.planned
    }

    fn notice_pause(&mut self, now: Instant) {
        if self.planned.is_some_and(|planned| now > planned + LATE) {
            self.lenient_until = Some(now + MAX_WAIT);
        }
    }

    /// No answer for half a lease: the connection is dead, whatever the system says. The other half is for
    /// another connection, which keeps the membership.
    fn close_dead(&mut self, now: Instant) {
        if self.lenient_until.is_some_and(|until| now < until) {
            return;
        }
        for index in 0..self.servers.len() {
            let server = &self.servers[index];
            let (since, limit) = match &server.phase {
                Phase::Dialing { since } => (Some(*since), self.dial_limit(server)),
                Phase::Open(session) => (self.waiting_since(index, session), self.dead_after()),
                Phase::Down { .. } | Phase::Double { .. } | Phase::Forgotten => (None, self.lease),
            };
            if since.is_some_and(|since| now.saturating_duration_since(since) > limit) {
                self.close(
                    index,
                    End::Failed(format!("no answer within {limit:?}")),
                    now,
                );
            }
        }
    }

    /// The group was deleted and made again with another promise, while this client was away. One that is served stays: it
    /// was refused by a leader of yesterday, who knows the group of yesterday.
    fn heed_mismatch(&mut self, permit: &Permit, now: Instant) {
        let Some(mismatch) = self.mismatch.take() else {
            return;
        };
        let mut sessions = self.servers.iter().filter_map(Server::session);
        let is_served = permit.mode(now) == Mode::Leased
            || sessions.any(|session| session.serving == Serving::Quorum);
        if self.joined_once && !is_served && permit.stage() == Stage::Open {
            self.expelled = Some(mismatch);
        }
    }

    /// How long connecting and logging in may take.
    fn dial_limit(&self, server: &Server) -> Duration {
        if server.is_relay() {
            self.relay_limit()
        } else {
            self.lease.max(MIN_DIAL)
        }
    }

    fn dead_after(&self) -> Duration {
        self.lease / 2
    }

    /// Oldest request without an answer on this connection, the one to be served included.
    pub(super) fn waiting_since(&self, index: usize, session: &Session) -> Option<Instant> {
        let attach = self
            .attachment
            .as_ref()
            .filter(|attachment| attachment.server == index && !attachment.welcomed);
        [
            session.waiting_since(),
            attach.map(|attachment| attachment.asked),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn dial(&mut self, now: Instant) {
        for (index, server) in self.servers.iter_mut().enumerate() {
            if matches!(server.phase, Phase::Down { retry_at } if retry_at <= now) {
                server.attempt += 1;
                server.phase = Phase::Dialing { since: now };
                server.last_dial = Some(now);
                let connection = ConnectionId {
                    server: index,
                    attempt: server.attempt,
                };
                let through = server.through.as_ref().map(|through| &through.address);
                self.actions.push(Action::Dial {
                    connection,
                    address: through.unwrap_or(&server.address).clone(),
                    relay: through.is_some(),
                });
            }
        }
    }

    /// C5: all rows of the old membership are back, so another incarnation may come.
    fn return_after_parting(&mut self, permit: &Permit, now: Instant) {
        if !self.parting || permit.guards_out() > 0 || permit.stage() > Stage::Open {
            return;
        }
        self.parting = false;
        self.incarnation = (self.chance.incarnation)();
        for session in self.servers.iter_mut().filter_map(Server::session_mut) {
            session.login_due = Some(now);
        }
    }

    fn log_in(&mut self, permit: &Permit, now: Instant) {
        if self.parting || (permit.holding().is_none() && permit.stage() > Stage::Open) {
            return;
        }
        let (membership, epoch) = present(permit);
        let weight = self.wishes.weight.unwrap_or(self.config.weight);
        // Whoever turns out to lead serves this client, and need not be asked once more.
        let asks = self.attachment.is_none() && self.newest_quorum(now).is_none();
        for (index, server) in self.servers.iter_mut().enumerate() {
            let attempt = server.attempt;
            let asks = asks && !server.is_relay();
            let Some(session) = server.session_mut() else {
                continue;
            };
            if session.login_due.is_none_or(|due| due > now) {
                continue;
            }
            session.login_due = None;
            // Only the first login of a connection is answered; what follows a later one is.
            session.accepted = session.logged_in_once;
            session.login_sent = (!session.logged_in_once).then_some(now);
            session.asked_with_login = asks
                && session.login_sent.is_some()
                && session.features & features::ATTACH_TO_LEADER != 0;
            let login = Login {
                group: self.config.group.clone(),
                client: self.config.client.clone(),
                incarnation: self.incarnation,
                membership,
                epoch,
                consistency: self.config.consistency,
                weight,
                ends: session.ends,
                ring_key: self.config.ring_key.clone(),
                handlers: self.config.handlers.clone(),
            };
            let connection = ConnectionId {
                server: index,
                attempt,
            };
            let mut send = |message| {
                self.actions.push(Action::Send {
                    connection,
                    message,
                });
            };
            send(ClientMessage::Login(Box::new(login)));
            if session.asked_with_login {
                send(ClientMessage::AttachToLeader { membership, epoch });
            }
        }
    }

    /// C7: one server at a time; one that serves by quorum, else after a while a degraded one.
    fn choose_server(&mut self, permit: &Permit, now: Instant) {
        if self
            .servers
            .iter()
            .filter_map(Server::session)
            .any(|session| session.serving == Serving::Quorum)
        {
            self.no_quorum_since = None;
        } else {
            self.no_quorum_since.get_or_insert(now);
        }
        if self.parting || (permit.holding().is_none() && permit.stage() > Stage::Open) {
            return;
        }
        let quorum = self.newest_quorum(now);
        let choice = match &self.attachment {
            None => quorum.or_else(|| self.degraded(permit, now)),
            Some(attachment) => quorum.filter(|other| self.is_better(*other, attachment, now)),
        };
        if let Some(server) = choice {
            self.attach(server, permit, now);
        }
    }

    /// The server that was the last to say that it serves by quorum: the newest leader.
    fn newest_quorum(&self, now: Instant) -> Option<usize> {
        let present = self.attachment.as_ref().map(|attachment| attachment.server);
        let serving = self
            .servers
            .iter()
            .enumerate()
            .filter_map(|(index, server)| {
                let session = server
                    .session()
                    .filter(|session| session.serves(Serving::Quorum, now))?;
                (present != Some(index)).then_some((index, session.announced))
            });
        // The first listed, where several said so at the same time.
        serving
            .reduce(|best, next| if next.1 > best.1 { next } else { best })
            .map(|(index, _)| index)
    }

    fn degraded(&self, permit: &Permit, now: Instant) -> Option<usize> {
        let consistency = permit
            .holding()
            .map(|holding| holding.terms.consistency)
            .or(self.config.consistency);
        let waited = self
            .no_quorum_since
            .is_some_and(|since| since + self.config.degraded_after <= now);
        if consistency == Some(Consistency::Exclusive) || !waited {
            return None;
        }
        self.servers.iter().position(|server| {
            server
                .session()
                .is_some_and(|session| session.serves(Serving::Degraded, now))
        })
    }

    /// Whether to leave the present server for one that serves by quorum: it is degraded, or it is silent
    /// since the other said that it leads, or it is reached only through another one, and the other is not.
    fn is_better(&self, other: usize, attachment: &Attachment, now: Instant) -> bool {
        let session = |index: usize| self.servers.get(index).and_then(Server::session);
        let (Some(present), Some(other)) = (session(attachment.server), session(other)) else {
            return false;
        };
        let waiting = self.waiting_since(attachment.server, present);
        let silent = waiting.is_some_and(|since| since + self.silence() <= now);
        let is_detour = self.servers[attachment.server].is_relay();
        let is_newer = other.announced > attachment.asked;
        present.serving == Serving::Degraded || (is_newer && (silent || is_detour))
    }

    /// After how long without an answer a server is taken for deposed where another one says that it leads.
    fn silence(&self) -> Duration {
        self.lease / 12
    }

    fn attach(&mut self, server: usize, permit: &Permit, now: Instant) {
        let (membership, epoch) = present(permit);
        if let (Some(old), Some(membership)) = (&self.attachment, membership) {
            self.send(old.server, ClientMessage::Detach { membership });
        }
        self.detached();
        self.send(server, ClientMessage::Attach { membership, epoch });
        self.attachment = Some(Attachment::new(server, self.lease, now));
    }

    /// C4: says what is released, on each new attachment and as long as less is kept each time.
    fn release(&mut self, permit: &Permit) {
        let Some(attachment) = self
            .attachment
            .as_mut()
            .filter(|attachment| attachment.welcomed)
        else {
            return;
        };
        let (Some(holding), Some(keeping)) = (permit.holding(), permit.keeping()) else {
            return;
        };
        let epoch = holding.epoch;
        let news = match &attachment.released {
            Some((said, kept)) if *said == epoch => keeping != *kept && keeping.is_within(kept),
            _ => true,
        };
        if !news {
            return;
        }
        attachment.released = Some((epoch, keeping.clone()));
        let (server, membership) = (attachment.server, holding.membership);
        self.send(
            server,
            ClientMessage::Released {
                membership,
                epoch,
                keeping,
            },
        );
    }

    fn heartbeat(&mut self, permit: &Permit, now: Instant) {
        let period = self.longest_delay();
        let due =
            |attachment: &&mut Attachment| attachment.welcomed && attachment.heartbeat_at <= now;
        let Some(attachment) = self.attachment.as_mut().filter(due) else {
            return;
        };
        let Some(holding) = permit.holding() else {
            return;
        };
        attachment.heartbeat_at = now + period;
        let server = attachment.server;
        let Some(seq) = self.next_seq(server, now) else {
            return;
        };
        let (membership, epoch) = (holding.membership, holding.epoch);
        self.send(
            server,
            ClientMessage::Heartbeat {
                membership,
                seq,
                epoch,
                load: None,
            },
        );
    }

    fn ping(&mut self, now: Instant) {
        let period = self.longest_delay() * 4;
        let attached = self.attachment.as_ref().map(|attachment| attachment.server);
        for index in 0..self.servers.len() {
            let Some(session) = self.servers[index].session_mut() else {
                continue;
            };
            // Leases may be shorter than when it was planned.
            session.ping_at = session.ping_at.min(now + period);
            if session.ping_at > now {
                continue;
            }
            session.ping_at = now + period;
            if attached == Some(index) || !session.logged_in_once {
                continue;
            }
            if let Some(seq) = self.next_seq(index, now) {
                self.send(index, ClientMessage::Ping { seq });
            }
        }
    }

    /// Notes a request that is sent now; `None`: the server answers nothing, and the connection is closed.
    fn next_seq(&mut self, server: usize, now: Instant) -> Option<u64> {
        let session = self.servers.get_mut(server)?.session_mut()?;
        if session.unanswered.len() >= MAX_UNANSWERED {
            self.close(
                server,
                End::Failed(format!("no answer to {MAX_UNANSWERED} requests")),
                now,
            );
            return None;
        }
        self.last_seq += 1;
        session.unanswered.insert(self.last_seq, now);
        Some(self.last_seq)
    }

    fn tell_wishes(&mut self, permit: &Permit, now: Instant) {
        let Some(attachment) = self
            .attachment
            .as_mut()
            .filter(|attachment| attachment.welcomed)
        else {
            return;
        };
        let Some(membership) = permit.holding().map(|holding| holding.membership) else {
            return;
        };
        let server = attachment.server;
        let weight = self
            .wishes
            .weight
            .filter(|_| self.wishes.weight != attachment.said.weight);
        let drain = self
            .wishes
            .drain
            .filter(|drain| drain.away || drain.call > self.taken_back)
            .filter(|_| self.wishes.drain != attachment.said.drain);
        attachment.said.weight = weight.or(attachment.said.weight);
        attachment.said.drain = drain.or(attachment.said.drain);
        if weight.is_some() || drain.is_some() {
            attachment.said_after = self.last_seq;
            // Its answer says that this was heard.
            attachment.heartbeat_at = now;
            self.send(
                server,
                ClientMessage::Update {
                    membership,
                    weight,
                    handlers: None,
                    drain: drain.map(|drain| drain.away),
                },
            );
        }
        if self.pulls.sent < self.pulls.wanted {
            self.pulls.sent = self.pulls.wanted;
            self.send(server, ClientMessage::Pull { membership });
        }
    }

    /// The end of a client that closes: once its rows are back and released, its goodbye, then the FIN.
    fn say_goodbye(&mut self, permit: &mut Permit, now: Instant) {
        if permit.stage() != Stage::Closing || permit.guards_out() > 0 {
            return;
        }
        let attached = self
            .attachment
            .as_ref()
            .filter(|attachment| attachment.welcomed);
        let (membership, _) = present(permit);
        let mut finishing = None;
        match (membership, attached.map(|attachment| attachment.server)) {
            (None, _) => self.farewell = Some(Farewell::Said),
            (Some(membership), Some(server)) => {
                self.send(server, ClientMessage::Goodbye { membership });
                finishing = Some(server);
                self.farewell = Some(Farewell::Said);
                info!(group = self.config.group.as_str(), %membership, "goodbye");
            }
            (Some(_), None) => {
                let until = *self.goodbye_until.get_or_insert(now + self.lease);
                if now < until {
                    return;
                }
                warn!(
                    "no server heard the goodbye: the rows of this client are free when its lease is over"
                );
                self.farewell = Some(Farewell::Unheard);
            }
        }
        permit.end();
        for (index, server) in self.servers.iter().enumerate() {
            let connection = ConnectionId {
                server: index,
                attempt: server.attempt,
            };
            self.actions.push(if finishing == Some(index) {
                Action::Finish { connection }
            } else {
                Action::Close { connection }
            });
        }
    }

    fn send(&mut self, server: usize, message: ClientMessage) {
        if let Some(attempt) = self.servers.get(server).map(|server| server.attempt) {
            self.actions.push(Action::Send {
                connection: ConnectionId { server, attempt },
                message,
            });
        }
    }
}

/// The membership and the newest epoch that it was told.
fn present(permit: &Permit) -> (Option<Membership>, Epoch) {
    permit.holding().map_or((None, Epoch::ZERO), |holding| {
        (Some(holding.membership), holding.epoch)
    })
}
