//! Which servers there are: those that the user named, and those of which the others tell.

use skyschedule_common::env::Instant;
use skyschedule_common::protocol::bounded::BoundedString;
use tracing::info;

use super::server::{Phase, Server};
use super::{Action, ConnectionId, Core};
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
}
