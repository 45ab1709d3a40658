//! Clients learn where all servers are, so that they find those that were added since they were started.
//!
//! Only whoever serves a member tells it, and only its list is believed: it knows what is decided.

use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::features;
use skyschedule_common::protocol::messages::ServerMessage;

use super::Coordinator;
use crate::session::ConnectionId;

impl Coordinator {
    /// Tells a client where all servers are, if it understands that.
    pub(super) fn tell_servers(&mut self, id: ConnectionId) {
        let connection = self.connections.get(&id);
        if connection.is_none_or(|connection| connection.features & features::SERVERS == 0) {
            return;
        }
        let addresses: Vec<BoundedString<256>> = {
            let servers = self.servers.borrow_and_update();
            let fitting = servers
                .iter()
                .map(|address| BoundedString::try_from(address.clone()));
            fitting.filter_map(Result::ok).collect()
        };
        // A replica alone has nothing to tell.
        if addresses.is_empty() {
            return;
        }
        if let Ok(addresses) = BoundedVec::try_from(addresses) {
            self.send(id, ServerMessage::Servers { addresses });
        }
    }

    /// Servers were added or removed: the members are told.
    pub(super) fn servers_changed(&mut self) {
        if self.ready.is_none() {
            return;
        }
        let members = self.connections.iter();
        let members = members.filter(|(_, connection)| connection.membership.is_some());
        let ids: Vec<ConnectionId> = members.map(|(id, _)| *id).collect();
        for id in ids {
            self.tell_servers(id);
        }
    }
}
