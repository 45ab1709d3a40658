//! The way around: a client that cannot reach the server that leads, but one that follows it, is carried on by that one.
//!
//! It is a connection like any other, to the server that leads, with a place of its own among the servers; only how it is
//! made differs. There is at most one. It is looked for once no connection of the client's own to a server that leads has
//! answered for a while, and given up as soon as one of its own serves again.

use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::protocol::messages::Serving;
use tracing::{info, warn};

use super::server::{Phase, Server, Session};
use super::{Action, ConnectionId, Core, End, FIRST_DELAY};
use crate::permit::{Permit, Stage};

/// Shortest time for a server to carry the client on, and for the login at the other end.
const MIN_DIAL: Duration = Duration::from_millis(500);

/// Longest pause before a server that failed to carry this client is asked again, in the longest delays of a reconnect:
/// where the leader itself is slow, many clients ask.
const LONGEST_PAUSE: u32 = 8;

/// A connection to the server that leads that another one carries.
#[derive(Debug)]
pub(super) struct Through {
    /// Address of the one that carries it.
    pub(super) address: String,
    /// Address of the one that leads, as that one says.
    leader: String,
}

impl Core {
    /// Opens a way around where one is needed, and gives up one that does not answer.
    pub(super) fn look_for_relay(&mut self, permit: &Permit, now: Instant) {
        self.watch_direct(now);
        if self.lenient_until.is_some_and(|until| now < until) {
            return;
        }
        if let Some(relay) = self.relay() {
            let session = self.servers.get(relay).and_then(Server::session);
            let waiting = session.and_then(|session| self.waiting_since(relay, session));
            if waiting.is_some_and(|since| since + self.relay_patience() <= now) {
                self.close(relay, End::Failed("no answer".to_owned()), now);
            }
        }
        if self.parting || (permit.holding().is_none() && permit.stage() > Stage::Open) {
            return;
        }
        let due = self.relay_due().filter(|(due, _)| *due <= now);
        if let Some((_, through)) = due {
            self.open_relay(through, now);
        }
    }

    /// When to open one, and through which server; `None`: none is needed, or no server would do.
    pub(super) fn relay_due(&self) -> Option<(Instant, usize)> {
        let lost = self.direct_lost?;
        if self.relay().is_some() {
            return None;
        }
        let servers = self.servers.iter().enumerate();
        let due = servers.filter_map(|(index, server)| {
            let since = lost.max(self.follows(server)?);
            // Clients choose differently, so that no server carries all of them.
            let count = u128::try_from(self.servers.len()).unwrap_or(1);
            let rank = (u128::try_from(index).unwrap_or(0) + self.incarnation.0 % count) % count;
            let due = (since + self.relay_patience()).max(server.relay_at);
            Some((due, rank, index))
        });
        due.min().map(|(due, _, index)| (due, index))
    }

    /// Since when this server has said that another one leads, which the client does not reach itself.
    fn follows(&self, server: &Server) -> Option<Instant> {
        let session = server.session().filter(|session| session.accepted)?;
        let (leader, since) = session.leader.as_ref()?;
        let follows = session.serving == Serving::None && !server.is_relay();
        (follows && !self.answers(leader)).then_some(*since)
    }

    /// Whether the server at this address is connected, or has refused this client itself.
    fn answers(&self, address: &str) -> bool {
        let is_live = |server: &&Server| !server.is_forgotten();
        let mut live = self.servers.iter().filter(is_live);
        let known = live.find(|server| server.address == address);
        known.is_some_and(|server| match &server.phase {
            // One that is silent says of itself that it leads.
            Phase::Open(session) => session.serving != Serving::Quorum,
            Phase::Double { of } => self.servers.get(*of).is_some_and(|server| {
                server
                    .session()
                    .is_some_and(|session| session.serving != Serving::Quorum)
            }),
            Phase::Down { .. } => matches!(server.trouble, Some(End::Refused(_) | End::Unfit(_))),
            Phase::Dialing { .. } | Phase::Forgotten => false,
        })
    }

    /// Notes since when no connection of the client's own to a server that leads answers.
    fn watch_direct(&mut self, now: Instant) {
        let direct = |server: &Server| !server.is_relay();
        let servers = self.servers.iter().enumerate();
        let leading = servers.filter_map(|(index, server)| {
            let session = server.session().filter(|_| direct(server))?;
            let leads = session.serving == Serving::Quorum;
            leads.then(|| self.waiting_since(index, session))
        });
        let waiting: Vec<Option<Instant>> = leading.collect();
        self.direct_lost = if waiting.is_empty() {
            self.direct_lost.or(Some(now))
        } else if waiting.contains(&None) {
            None
        } else {
            waiting.into_iter().flatten().max()
        };
    }

    /// How long to wait for a server that leads before another way is tried. Together with what passes between two
    /// heartbeats it leaves a good part of the lease for that.
    fn relay_patience(&self) -> Duration {
        self.lease / 4
    }

    /// How long that may take.
    pub(super) fn relay_limit(&self) -> Duration {
        self.longest_delay().max(MIN_DIAL)
    }

    /// The place of the connection that another server carries.
    fn relay(&self) -> Option<usize> {
        let is_it = |server: &Server| server.is_relay() && !server.is_forgotten();
        self.servers.iter().position(is_it)
    }

    fn open_relay(&mut self, through: usize, now: Instant) {
        let Some(server) = self.servers.get(through) else {
            return;
        };
        let leader = server.session().and_then(|session| session.leader.clone());
        let address = server.address.clone();
        let leader = leader.map_or_else(String::new, |(leader, _)| leader);
        info!(
            server = address,
            leader,
            "the leader is not reached directly: asks another server to carry this client on to it"
        );
        let relay = Server {
            through: Some(Through {
                address: address.clone(),
                leader,
            }),
            ..Server::new(format!("the leader, through {address}"), false, now)
        };
        self.place(relay);
    }

    /// The server of this place serves the client now: the way around begins to be used, or is needed no more.
    pub(super) fn served_by(&mut self, from: usize, now: Instant) {
        let Some(relay) = self.relay() else { return };
        let Some(through) = self
            .servers
            .get(relay)
            .and_then(|server| server.through.as_ref())
        else {
            return;
        };
        if from != relay {
            info!(
                leader = through.leader,
                "the leader is reached directly again"
            );
            self.drop_relay(relay);
            return;
        }
        warn!(
            server = through.address,
            "the leader cannot be reached directly: this client works through another server; check the network between \
             this client and {}",
            through.leader
        );
        // When one of these answers again it says anew that it leads, and is returned to.
        let leads = |session: &Session| session.serving == Serving::Quorum;
        for index in 0..self.servers.len() {
            let session = self.servers[index].session();
            if index != relay && session.is_some_and(leads) {
                let end = End::Failed("it leads, and does not answer".to_owned());
                self.close(index, end, now);
            }
        }
    }

    /// Another server than the one that leads is of no use at the end of a way around.
    pub(super) fn check_relay(&mut self, from: usize, now: Instant) {
        let no_use = self.servers.get(from).is_some_and(|server| {
            let session = server.session();
            server.is_relay() && session.is_some_and(|session| session.serving != Serving::Quorum)
        });
        if no_use {
            let end = End::Failed("the server at its end does not lead any more".to_owned());
            self.close(from, end, now);
        }
    }

    fn drop_relay(&mut self, relay: usize) {
        if let Some(server) = self.servers.get_mut(relay) {
            server.phase = Phase::Forgotten;
            let connection = ConnectionId {
                server: relay,
                attempt: server.attempt,
            };
            self.actions.push(Action::Close { connection });
        }
    }

    /// It has ended. Another server is asked at once, the same one only after a while.
    pub(super) fn relay_ended(&mut self, relay: usize, lived: bool, delay: Duration, now: Instant) {
        let longest = self.longest_delay();
        let Some(server) = self.servers.get_mut(relay) else {
            return;
        };
        server.phase = Phase::Forgotten;
        let Some(through) = &server.through else {
            return;
        };
        let address = through.address.clone();
        let mut servers = self.servers.iter_mut();
        if let Some(server) =
            servers.find(|server| server.address == address && !server.is_forgotten())
        {
            let backoff = &mut server.relay_backoff;
            let pause = if lived {
                FIRST_DELAY
            } else {
                longest.max(*backoff)
            };
            *backoff = (pause * 2).min(longest * LONGEST_PAUSE);
            server.relay_at = now + (self.chance.jitter)(pause).max(delay);
        }
    }
}
