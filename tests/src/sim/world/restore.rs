//! Servers are restored from a backup, by the book: exactly a majority of them get their copies back, all of one moment, and
//! the others begin with empty disks; nothing runs for longer than a lease before.
//!
//! What was decided after the copies is forgotten by the servers, but not by the clients: some know all of it, some less, some
//! nothing, and they come back in any order.

use skyschedule_server::consensus::MemoryDisk;
use std::time::Duration;

use super::{Later, World};
use crate::sim::network::{Link, Place, Way};
use crate::sim::worker::server_name;

const MS: Duration = Duration::from_millis(1);

impl World {
    /// The copies are made now. False: a server has nothing to copy, or there is little to forget.
    pub(super) fn restore_by_the_book(&mut self, running: &[usize], down: &[usize]) -> bool {
        let members = self.members();
        let majority = members.len() / 2 + 1;
        let is_whole = |at: &usize| running.contains(at) && !self.servers[*at].is_blank;
        let clients = self.machines_that(|machine| machine.is_up && !machine.host.is_stopped());
        if !members.iter().all(is_whole) || clients.len() < 2 || !self.is_numbered() {
            return false;
        }
        let mut copied = members;
        while copied.len() > majority {
            copied.swap_remove(self.dice.index(copied.len()));
        }
        for (at, server) in self.servers.iter_mut().enumerate() {
            server.backup = copied
                .contains(&at)
                .then(|| (server.disk.copy(), server.is_blank));
        }
        let names: Vec<String> = copied.iter().map(|at| server_name(*at)).collect();
        self.note(&format!("copied are the disks of {}", names.join(", ")));
        self.more_is_decided(clients, down);
        let lost = self.dice.millis(300, 1_000);
        let most = lost + self.dice.pick(&[0, 2_000, 2_000]) * MS;
        let now = self.now();
        self.schedule(lost, Later::Restore(now + most));
        self.quiet_until = now + most;
        true
    }

    /// Whether there are members that have what they shall have.
    fn is_numbered(&self) -> bool {
        let group = self.oracle.state();
        self.service.is_some()
            && group.is_some_and(|group| group.members().len() > 1 && !group.in_handover())
    }

    /// The servers will forget it.
    fn more_is_decided(&mut self, mut clients: Vec<usize>, down: &[usize]) {
        if clients.len() > 2 && self.dice.percent(70) {
            let leaves = clients.swap_remove(self.dice.index(clients.len()));
            self.schedule(MS, Later::Close(leaves));
        } else if !down.is_empty() {
            let joins = self.dice.pick(down);
            self.schedule(MS, Later::Start(joins));
        }
        if clients.len() > 2 && self.dice.percent(30) {
            let deaf = self.dice.pick(&clients);
            let links = self.network.of(Place::Client(deaf));
            self.link(&links, Link::Cut(Way::Both), 1_500 * MS);
        }
        if self.dice.percent(30) {
            let (soon, client) = (self.dice.millis(1, 300), self.dice.pick(&clients));
            self.schedule(soon, Later::Weight(client));
        }
    }

    /// Not before rows have come to rest again, but then.
    pub(super) fn restore(&mut self, at_the_latest: Duration) {
        if self.now() < at_the_latest && !self.is_numbered() {
            self.schedule(50 * MS, Later::Restore(at_the_latest));
            return;
        }
        // Whatever was to happen to the servers: nobody starts one before all are restored.
        self.later.retain(|_, later| !later.is_of_server());
        let away = self.profile.longest_lease() + self.dice.millis(50, 1_000);
        self.note(&format!(
            "the servers are restored from the copies, and start in {away:?}"
        ));
        for at in self.members() {
            if self.servers[at].up_since.is_some() {
                self.server_dies(at, true);
            }
            let server = &mut self.servers[at];
            server.host.resume();
            (server.disk, server.is_blank) = match &server.backup {
                Some((disk, is_blank)) => (disk.copy(), *is_blank),
                None => (MemoryDisk::new().with_latency(3 * MS), true),
            };
            let soon = self.dice.millis(0, 200);
            self.schedule(away + soon, Later::StartServer(at));
        }
        // In any order; whoever was no member knows nothing, and may be first.
        let some_are_new = self.dice.percent(40);
        for at in 0..self.machines.len() {
            if self.machines[at].is_up {
                if self.dice.percent(40) {
                    let links = self.network.of(Place::Client(at));
                    let late = away + self.dice.millis(300, 2_500);
                    self.link(&links, Link::Cut(Way::Both), late);
                }
            } else if some_are_new {
                let soon = away + self.dice.millis(0, 500);
                self.schedule(soon, Later::Start(at));
            }
        }
        self.restored_at = self.now() + away;
        self.oracle.lose_history(self.restored_at);
        self.quiet_until = self.now() + away + self.dice.millis(500, 3_000);
    }
}
