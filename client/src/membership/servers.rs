//! Which servers there are: those that the user named, and those of which the others tell.

use skyschedule_common::env::Instant;
use skyschedule_common::protocol::bounded::BoundedString;
use tracing::info;

use super::server::{Phase, Server};
use super::{Action, ConnectionId, Core, End, FIRST_DELAY, MAX_LEARNED};
use crate::config::{MAX_SERVERS, is_address};

impl Core {
    /// The server that serves this client tells where all servers are. Those that the user named stay, whatever it says;
    /// what another server says counts for nothing, since it may have been removed long ago.
    pub(super) fn servers_are(
        &mut self,
        from: usize,
        addresses: &[BoundedString<256>],
        now: Instant,
    ) {
        let serves = self
            .attachment
            .as_ref()
            .is_some_and(|attachment| attachment.welcomed && attachment.server == from);
        let told = addresses.iter().map(|address| address.as_str());
        let told: Vec<&str> = told.filter(|address| is_address(address)).collect();
        if !serves || told.is_empty() {
            return;
        }
        for index in 0..self.servers.len() {
            let server = &mut self.servers[index];
            server.listed = told.contains(&server.address.as_str());
            let is_gone = server.learned && !server.listed && index != from;
            if is_gone && !server.is_forgotten() {
                self.forget(index, now);
            }
        }
        for address in told {
            let is_live = |server: &&Server| !server.is_forgotten();
            let mut live = self.servers.iter().filter(is_live);
            if live.any(|server| server.address == address) {
                continue;
            }
            if self.servers.iter().filter(is_live).count() >= MAX_SERVERS {
                break;
            }
            info!(server = address, "there is another server");
            self.put(address, now);
            if let Some(new) = self
                .servers
                .iter_mut()
                .find(|server| server.address == address && !server.is_forgotten())
            {
                new.listed = true;
            }
        }
    }

    /// Servers of which only hints told.
    pub(super) fn hints(&self) -> usize {
        let hints = self.servers.iter();
        hints
            .filter(|server| server.learned && !server.listed && !server.is_forgotten())
            .count()
    }

    /// Adds a server that the user did not name.
    pub(super) fn put(&mut self, address: &str, now: Instant) {
        self.place(Server::new(address.to_owned(), true, now));
    }

    pub(super) fn place(&mut self, new: Server) {
        match self.servers.iter_mut().find(|server| server.is_forgotten()) {
            // What its connections still say must not be taken for the new one's.
            Some(free) => {
                *free = Server {
                    attempt: free.attempt,
                    ..new
                }
            }
            None => self.servers.push(new),
        }
    }

    fn forget(&mut self, index: usize, now: Instant) {
        let Some(server) = self.servers.get_mut(index) else {
            return;
        };
        info!(server = server.address, "this one is no server any more");
        let connection = ConnectionId {
            server: index,
            attempt: server.attempt,
        };
        self.actions.push(Action::Close { connection });
        server.phase = Phase::Forgotten;
        self.revive_doubles(index, now);
    }

    /// A connection has ended: others that led to the same server may lead elsewhere by now, and are tried.
    pub(super) fn revive_doubles(&mut self, ended: usize, retry_at: Instant) {
        for server in &mut self.servers {
            if matches!(server.phase, Phase::Double { of } if of == ended) {
                server.phase = Phase::Down { retry_at };
            }
        }
    }

    /// A server told where one is that serves by quorum: connect to it soon.
    pub(super) fn follow(&mut self, hint: Option<&str>, now: Instant) {
        let Some(hint) = hint.filter(|hint| is_address(hint)) else {
            return;
        };
        if let Some(known) = self
            .servers
            .iter_mut()
            .find(|server| server.address == hint && !server.is_forgotten())
        {
            if let Phase::Down { retry_at } = &mut known.phase
                && !known.trouble.as_ref().is_some_and(End::is_final)
            {
                let soon = known
                    .last_dial
                    .map_or(now, |dial| now.max(dial + FIRST_DELAY));
                *retry_at = soon.min(*retry_at);
            }
        } else if self.hints() < MAX_LEARNED {
            info!(server = hint, "another server tells of this one");
            self.put(hint, now);
        }
    }

    /// A learned server that turns out to be one that is connected already needs no second connection.
    pub(super) fn drop_double(&mut self, index: usize) {
        let peer = |server: &Server| {
            server
                .session()
                .and_then(|session| session.ends)
                .map(|ends| ends.1)
        };
        let Some(new) = self.servers.get(index).filter(|server| server.learned) else {
            return;
        };
        let Some(address) = peer(new) else { return };
        let double =
            |(other, server): (usize, &Server)| other != index && peer(server) == Some(address);
        if let Some(of) = self.servers.iter().enumerate().position(double) {
            let connection = ConnectionId {
                server: index,
                attempt: new.attempt,
            };
            self.actions.push(Action::Close { connection });
            self.servers[index].phase = Phase::Double { of };
        }
    }
}
