//! One server as the client knows it, and the connection to it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::protocol::messages::Serving;

use super::outage::Outage;
use super::relay::Through;
use super::{End, FIRST_DELAY};

/// A server, listed or learned from a hint.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) address: String,
    /// Not named by the user: another server told of it.
    pub(super) learned: bool,
    /// In the list of all servers, as the one that served the client last told it.
    pub(super) listed: bool,
    /// Counts the connections to it, so that what an old one still says is not taken for the new one's.
    pub(super) attempt: u64,
    pub(super) phase: Phase,
    /// Delay before the next attempt but one.
    pub(super) backoff: Duration,
    pub(super) last_dial: Option<Instant>,
    /// How the last attempt or connection ended, until one succeeds.
    pub(super) trouble: Option<End>,
    /// What the log told of its trouble.
    pub(super) outage: Outage,
    /// Not to be asked to carry this client on before then.
    pub(super) relay_at: Instant,
    /// How long not, when it fails to do so again.
    pub(super) relay_backoff: Duration,
    /// Another server carries this connection.
    pub(super) through: Option<Through>,
}

#[derive(Debug)]
pub(super) enum Phase {
    Down {
        retry_at: Instant,
    },
    Dialing {
        since: Instant,
    },
    Open(Box<Session>),
    /// The same server as another one that is connected.
    Double {
        /// Which.
        of: usize,
    },
    /// It is no server any more. Its place is free.
    Forgotten,
}

impl Server {
    pub(super) fn new(address: String, learned: bool, now: Instant) -> Self {
        Self {
            address,
            learned,
            listed: false,
            attempt: 0,
            phase: Phase::Down { retry_at: now },
            backoff: FIRST_DELAY,
            last_dial: None,
            trouble: None,
            outage: Outage::default(),
            relay_at: now,
            relay_backoff: FIRST_DELAY,
            through: None,
        }
    }

    pub(super) fn is_forgotten(&self) -> bool {
        matches!(self.phase, Phase::Forgotten)
    }

    pub(super) fn is_relay(&self) -> bool {
        self.through.is_some()
    }

    pub(super) fn session(&self) -> Option<&Session> {
        if let Phase::Open(session) = &self.phase {
            Some(session)
        } else {
            None
        }
    }

    pub(super) fn session_mut(&mut self) -> Option<&mut Session> {
        if let Phase::Open(session) = &mut self.phase {
            Some(session)
        } else {
            None
        }
    }
}

/// A connection whose handshake is done.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) since: Instant,
    /// Local and peer address.
    pub(super) ends: Option<(SocketAddr, SocketAddr)>,
    /// Bits of optional features that both ends know.
    pub(super) features: u64,
    /// When to log in (again).
    pub(super) login_due: Option<Instant>,
    /// The first login, while it awaits its answer.
    pub(super) login_sent: Option<Instant>,
    /// With it, the server was asked to serve if it leads.
    pub(super) asked_with_login: bool,
    /// Whether the present incarnation is logged in.
    pub(super) accepted: bool,
    /// Whether any was: then the connection is kept alive by pings.
    pub(super) logged_in_once: bool,
    pub(super) serving: Serving,
    /// The address of the one that leads, as it says, and since when.
    pub(super) leader: Option<(String, Instant)>,
    /// When it said how it serves.
    pub(super) announced: Instant,
    /// Sending times of heartbeats and pings without an answer yet.
    pub(super) unanswered: BTreeMap<u64, Instant>,
    pub(super) ping_at: Instant,
    /// Not to be asked to serve before then.
    pub(super) attach_at: Instant,
    pub(super) attach_backoff: Duration,
}

impl Session {
    pub(super) fn new(ends: Option<(SocketAddr, SocketAddr)>, features: u64, now: Instant) -> Self {
        Self {
            since: now,
            ends,
            features,
            login_due: Some(now),
            login_sent: None,
            asked_with_login: false,
            accepted: false,
            logged_in_once: false,
            serving: Serving::None,
            leader: None,
            announced: now,
            unanswered: BTreeMap::new(),
            ping_at: now,
            attach_at: now,
            attach_backoff: FIRST_DELAY,
        }
    }

    /// The sending time of the oldest request without an answer.
    pub(super) fn waiting_since(&self) -> Option<Instant> {
        let oldest = self.unanswered.values().next().copied();
        [oldest, self.login_sent].into_iter().flatten().min()
    }

    /// The request `seq` was answered: when it was sent. Those before it need no answer any more.
    pub(super) fn answered(&mut self, seq: u64) -> Option<Instant> {
        let sent = self.unanswered.remove(&seq)?;
        self.unanswered = self.unanswered.split_off(&seq);
        Some(sent)
    }

    /// Whether it can be asked to serve now.
    pub(super) fn serves(&self, mode: Serving, now: Instant) -> bool {
        self.accepted && self.serving == mode && self.attach_at <= now
    }
}
