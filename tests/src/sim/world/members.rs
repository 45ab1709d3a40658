//! Which servers there are: the operator adds some, removes some, and has another one lead.

use skyschedule_server::consensus::MemoryDisk;
use std::collections::BTreeSet;
use std::time::Duration;

use super::World;
use super::servers::{Role, Sky};
use crate::sim::server::replica_id;
use crate::sim::worker::server_name;

/// Fewer servers than this are never wanted.
const FEWEST: usize = 2;

impl Sky {
    /// A server with an empty disk begins to belong to the cluster.
    pub(super) fn take_in(&mut self, peers: BTreeSet<usize>) {
        self.role = Role::Member;
        self.peers = peers;
        self.emptied_at = None;
    }
}

impl World {
    /// Whether there are servers that agree among themselves.
    pub(super) fn are_several(&self) -> bool {
        self.profile.servers > 1
    }

    /// The servers that the operator wants.
    pub(super) fn members(&self) -> Vec<usize> {
        let wishes = self.wishes.lock().unwrap();
        wishes.servers.iter().copied().collect()
    }

    /// The servers of which there is anything.
    pub(super) fn present_servers(&self) -> Vec<usize> {
        let servers = self.servers.iter().enumerate();
        let present = servers.filter(|(_, server)| server.role != Role::Spare);
        present.map(|(at, _)| at).collect()
    }

    /// The voters as this server knows them, those of before and after a change; and whether one is under way.
    pub(super) fn voters(&self, at: usize) -> (Vec<usize>, bool) {
        if self.profile.spares == 0 {
            return (self.members(), false);
        }
        let Some(seen) = self.servers[at].seen() else {
            return (Vec::new(), false);
        };
        let replicas = seen.consensus.replicas();
        let votes = |at: &usize| {
            let replica = replicas.get(&replica_id(*at));
            replica.is_some_and(|replica| replica.voter)
        };
        let voters = (0..self.servers.len()).filter(votes).collect();
        (voters, seen.consensus.changes_voters())
    }

    /// Whether the servers, as this one knows them, are those that the operator wants.
    pub(super) fn is_as_wanted(&self, at: usize) -> bool {
        if self.profile.spares == 0 {
            return true;
        }
        let wanted = self.members();
        let known = self.servers[at].seen();
        let count = known.map_or(0, |seen| seen.consensus.replicas().len());
        self.voters(at) == (wanted.clone(), false) && count == wanted.len()
    }

    /// Whether another server than this one has no memory, or few know what was decided: servers are being replaced.
    pub(super) fn someone_is_new(&self, at: usize) -> bool {
        let mut servers = self.servers.iter().enumerate();
        let is_new = |(other, server): (usize, &Sky)| {
            let is_going = matches!(server.role, Role::Leaving | Role::Lost);
            (other != at && server.is_blank) || is_going
        };
        servers.any(is_new) || self.members().len() < 3
    }

    /// The operator has another server lead: this one, or any.
    pub(super) fn transfer(&mut self, to: Option<usize>) {
        let name = to.map_or("another one".to_owned(), server_name);
        self.note(&format!("the operator wants {name} to lead"));
        self.wishes.lock().unwrap().leader = Some(to);
        self.tell_the_operator();
    }

    /// False: there is no machine for it.
    pub(super) fn add_server(&mut self) -> bool {
        let spares = (0..self.servers.len()).filter(|at| self.servers[*at].role == Role::Spare);
        let spares: Vec<usize> = spares.collect();
        if spares.is_empty() {
            return false;
        }
        let at = self.dice.pick(&spares);
        self.add(at);
        true
    }

    fn add(&mut self, at: usize) {
        let peers = {
            let mut wishes = self.wishes.lock().unwrap();
            wishes.servers.insert(at);
            wishes.servers.clone()
        };
        self.note(&format!("the operator adds {}", server_name(at)));
        let server = &mut self.servers[at];
        server.disk = MemoryDisk::new().with_latency(Duration::from_millis(3));
        server.is_blank = true;
        server.take_in(peers);
        self.start_server(at);
        self.tell_the_operator();
    }

    /// False: it cannot be missed.
    pub(super) fn remove_server(&mut self, at: usize) -> bool {
        if !self.can_be_missed(at) {
            return false;
        }
        self.note(&format!("the operator removes {}", server_name(at)));
        self.unwish(at, Role::Leaving);
        true
    }

    /// A server loses its disk for good. False: it cannot be missed.
    pub(super) fn replace_server(&mut self, at: usize) -> bool {
        if !self.can_be_missed(at) {
            return false;
        }
        let name = server_name(at);
        self.note(&format!(
            "{name}: killed, has lost its disk, and is replaced"
        ));
        self.server_dies(at, true);
        self.unwish(at, Role::Lost);
        true
    }

    fn can_be_missed(&self, at: usize) -> bool {
        let is_member = self.servers[at].role == Role::Member;
        let rest = self.members().into_iter().filter(|other| *other != at);
        let whole = rest.filter(|other| !self.servers[*other].is_blank);
        is_member && whole.count() >= FEWEST && !self.someone_is_new(at)
    }

    fn unwish(&mut self, at: usize, role: Role) {
        {
            let mut wishes = self.wishes.lock().unwrap();
            wishes.servers.remove(&at);
            wishes.leaving.insert(at);
        }
        self.servers[at].role = role;
        self.tell_the_operator();
    }

    /// Machines whose servers are no members any more are emptied, a little later.
    pub(super) fn decommission(&mut self) {
        let now = self.now();
        for at in 0..self.servers.len() {
            let role = self.servers[at].role;
            if !matches!(role, Role::Leaving | Role::Lost) {
                continue;
            }
            match self.servers[at].emptied_at {
                None if !self.wishes.lock().unwrap().leaving.contains(&at) => {
                    let later = self.dice.millis(0, 2_000);
                    self.servers[at].emptied_at = Some(now + later);
                }
                Some(due) if due <= now => {
                    self.note(&format!("{}: is no server any more", server_name(at)));
                    if self.servers[at].up_since.is_some() {
                        self.server_dies(at, true);
                    }
                    let server = &mut self.servers[at];
                    server.host.resume();
                    server.role = Role::Spare;
                    server.is_blank = false;
                    if role == Role::Lost {
                        self.add(at);
                    }
                }
                _ => {}
            }
        }
    }
}
