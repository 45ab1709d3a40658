//! How a client becomes and stays a member: which servers it talks to, which one serves it, what it says.
//!
//! A pure state machine: it is told what happened and what time it is, changes the [`Permit`], and answers
//! with [`Action`]s. It owns no socket and no clock. [`Core::event`] takes in what a connection brought (`heard.rs`);
//! [`Core::tick`] does whatever is due (`due.rs`), and [`Core::next_tick`] says when the next is due.

mod due;
mod heard;
mod outage;
mod patience;
mod relay;
mod report;
mod server;
mod servers;

use std::net::SocketAddr;
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Incarnation;
use skyschedule_common::protocol::messages::{
    ClientMessage, Code, Millis, Refusal, ServerMessage, Serving,
};
use skyschedule_common::share::Share;
use tracing::{debug, info};

use crate::config::Config;
use crate::error::ConnectError;
use crate::permit::Permit;
use patience::Patience;
use server::{Phase, Server, Session};

/// The lease to reckon with before a server told another.
const DEFAULT_LEASE: Duration = Duration::from_secs(6);

/// First delay of anything that is tried again.
const FIRST_DELAY: Duration = Duration::from_millis(100);

/// Delay after a refusal that time alone does not heal: someone may put it right.
const REFUSED_DELAY: Duration = Duration::from_secs(10);

/// Most requests without an answer on one connection.
const MAX_UNANSWERED: usize = 64;

/// Most servers known by hints only.
const MAX_LEARNED: usize = 4;

/// One connection to one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnectionId {
    pub(crate) server: usize,
    pub(crate) attempt: u64,
}

/// What a connection brought.
#[derive(Debug)]
pub(crate) enum Event {
    /// The handshake is done.
    Ready {
        ends: Option<(SocketAddr, SocketAddr)>,
        /// Bits of optional features that both ends know.
        features: u64,
    },
    /// The server said something.
    Message(ServerMessage),
    /// It is over.
    Closed(End),
}

/// How a connection, or the attempt at one, ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// The server said why.
    Refused(Refusal),
    /// Client and server are not set up for each other.
    Unfit(String),
    /// Anything else.
    Failed(String),
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    /// Connect.
    Dial {
        connection: ConnectionId,
        address: String,
        /// Have that server carry the connection on to the one that leads.
        relay: bool,
    },
    /// Send.
    Send {
        connection: ConnectionId,
        message: ClientMessage,
    },
    /// Send what is queued, then end with a FIN: only after `Goodbye` (F3).
    Finish { connection: ConnectionId },
    /// End with a reset.
    Close { connection: ConnectionId },
}

/// What randomness decides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chance {
    /// A duration a little shorter than the given one.
    pub(crate) jitter: fn(Duration) -> Duration,
    /// A new identity.
    pub(crate) incarnation: fn() -> Incarnation,
}

/// What the user changed since the client was built; `None`: nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(crate) weight: Option<u32>,
    pub(crate) drain: Option<Drain>,
}

/// Whether the share shall move away. Each call is a wish of its own: an operator may have drained the client since
/// the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Drain {
    pub(crate) away: bool,
    /// Counts the calls.
    pub(crate) call: u64,
}

/// The one connection over which the client is served, or asks to be (C7).
#[derive(Debug)]
struct Attachment {
    server: usize,
    /// When it was sent `Attach`, or said that it leads and was asked before.
    asked: Instant,
    welcomed: bool,
    heartbeat_at: Instant,
    /// The last release said here.
    released: Option<(Epoch, Share)>,
    /// What of the user's wishes was said here.
    said: Wishes,
    /// The last `seq` before it was.
    said_after: u64,
}

impl Attachment {
    fn new(server: usize, lease: Duration, now: Instant) -> Self {
        Self {
            server,
            asked: now,
            welcomed: false,
            heartbeat_at: now + lease,
            released: None,
            said: Wishes::default(),
            said_after: 0,
        }
    }
}

/// Queries of the present share: numbers of those asked for, sent, answered.
#[derive(Debug, Default)]
struct Pulls {
    wanted: u64,
    sent: u64,
    answered: u64,
}

/// How a client that closes has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Farewell {
    /// A goodbye is on its way, or there was no membership to end.
    Said,
    /// No server was there to hear it.
    Unheard,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Core {
    config: Config,
    chance: Chance,
    servers: Vec<Server>,
    attachment: Option<Attachment>,
    incarnation: Incarnation,
    /// The last membership is over, but rows of it are still worked on (C5).
    parting: bool,
    joined_once: bool,
    lease: Duration,
    last_seq: u64,
    no_quorum_since: Option<Instant>,
    /// Since when no connection of its own to a server that leads answers.
    direct_lost: Option<Instant>,
    /// When a server that serves by quorum answered last.
    quorum_answered: Option<Instant>,
    patience: Patience,
    wishes: Wishes,
    /// The call that took a drain back and was heard: saying it again would undo an operator's drain.
    taken_back: u64,
    pulls: Pulls,
    /// The last refusal since the client was a member, and whose.
    refusal: Option<(usize, Refusal)>,
    /// A server said just now that the group promises something else than this client relies on.
    mismatch: Option<ConnectError>,
    /// Why a client that was a member can never be one again.
    expelled: Option<ConnectError>,
    /// When a client that closes and has its rows back gives up to say goodbye.
    goodbye_until: Option<Instant>,
    farewell: Option<Farewell>,
    /// When the next tick was due.
    planned: Option<Instant>,
    /// No connection is taken for dead before then: the process did not run, and its answers may be waiting.
    lenient_until: Option<Instant>,
    actions: Vec<Action>,
}

impl Core {
    pub(crate) fn new(config: Config, chance: Chance, now: Instant) -> Self {
        let servers = config
            .servers
            .iter()
            .map(|address| Server::new(address.clone(), false, now))
            .collect();
        Self {
            servers,
            config,
            attachment: None,
            incarnation: (chance.incarnation)(),
            chance,
            parting: false,
            joined_once: false,
            lease: DEFAULT_LEASE,
            last_seq: 0,
            no_quorum_since: Some(now),
            direct_lost: None,
            quorum_answered: None,
            patience: Patience::default(),
            wishes: Wishes::default(),
            taken_back: 0,
            pulls: Pulls::default(),
            refusal: None,
            mismatch: None,
            expelled: None,
            goodbye_until: None,
            farewell: None,
            planned: None,
            lenient_until: None,
            actions: Vec::new(),
        }
    }

    /// What is to be done, in this order.
    pub(crate) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// The user changed something.
    pub(crate) fn wish(&mut self, wishes: Wishes, pulls: u64) {
        self.wishes = wishes;
        self.pulls.wanted = pulls;
    }

    /// How many of the queries asked for are answered.
    pub(crate) fn pulls_answered(&self) -> u64 {
        self.pulls.answered
    }

    /// Something came from a connection; what an older one to the same server says is not heard any more.
    pub(crate) fn event(
        &mut self,
        from: ConnectionId,
        event: Event,
        permit: &mut Permit,
        now: Instant,
    ) {
        let Some(server) = self.servers.get_mut(from.server) else {
            return;
        };
        if server.attempt != from.attempt
            || !matches!(server.phase, Phase::Dialing { .. } | Phase::Open(_))
        {
            return;
        }
        match event {
            Event::Ready { ends, features } => {
                debug!(server = server.address, "connected");
                server.phase = Phase::Open(Box::new(Session::new(ends, features, now)));
                self.drop_double(from.server);
            }
            Event::Message(message) => self.message(from.server, message, permit, now),
            Event::Closed(end) => self.closed(from.server, end, now),
        }
    }

    fn detached(&mut self) {
        self.attachment = None;
        self.pulls.sent = self.pulls.answered;
    }

    /// That server serves this client no more, if it was the one.
    fn detached_from(&mut self, server: usize) {
        let attachment = self.attachment.as_ref();
        if attachment.is_some_and(|attachment| attachment.server == server) {
            self.detached();
        }
    }

    /// Ends a connection from this side, by a reset.
    fn close(&mut self, server: usize, end: End, now: Instant) {
        if let Some(attempt) = self.servers.get(server).map(|server| server.attempt) {
            self.actions.push(Action::Close {
                connection: ConnectionId { server, attempt },
            });
            self.closed(server, end, now);
        }
    }

    fn closed(&mut self, from: usize, end: End, now: Instant) {
        self.detached_from(from);
        let longest = self.longest_delay();
        let Some(server) = self.servers.get_mut(from) else {
            return;
        };
        if let Some(session) = server.session().filter(|it| it.serving == Serving::Quorum) {
            let since = self.quorum_answered.take().unwrap_or(session.since);
            self.no_quorum_since.get_or_insert(since);
        }
        let lived = server
            .session()
            .filter(|session| session.logged_in_once)
            .map(|session| session.since);
        if lived.is_some_and(|since| now.saturating_duration_since(since) >= longest) {
            server.backoff = FIRST_DELAY;
        }
        let mut delay = (self.chance.jitter)(server.backoff);
        server.backoff = (server.backoff * 2).min(longest);
        let address = server.address.as_str();
        match &end {
            End::Refused(refusal) => {
                let healing = if end.is_final() {
                    REFUSED_DELAY
                } else {
                    Duration::ZERO
                };
                delay = delay.max(refusal.retry_after.map_or(healing, Millis::duration));
                let text = format!(
                    "it refuses this client ({}): {}",
                    refusal.code, refusal.text
                );
                server.outage.refused(address, &text);
                if refusal.code == Code::CONSISTENCY {
                    self.mismatch = Some(ConnectError::refused(address, refusal));
                }
                self.refusal = Some((from, refusal.clone()));
            }
            End::Unfit(reason) => {
                delay = delay.max(REFUSED_DELAY);
                let text = format!("no login: {reason}");
                server.outage.refused(address, &text);
            }
            End::Failed(reason) => {
                if lived.is_some() {
                    info!(server = address, "connection lost: {reason}");
                }
                server.outage.failed(address, reason, now);
            }
        }
        server.trouble = Some(end);
        if server.is_relay() {
            return self.relay_ended(from, lived.is_some(), delay, now);
        }
        let retry_at = now + delay;
        server.phase = Phase::Down { retry_at };
        self.revive_doubles(from, retry_at);
    }

    /// The longest delay before anything is tried again: a third of the lease.
    fn longest_delay(&self) -> Duration {
        (self.lease / 3).max(Duration::from_millis(10))
    }
}

#[cfg(test)]
mod tests;
