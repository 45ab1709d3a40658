//! What happens to the last server that is left, to a leader that the others do without, and to all servers when a client
//! has just become a member: scenes in which rules matter that the usual trouble seldom touches.

use std::time::Duration;

use super::{Later, World};
use crate::sim::network::{Between, Link, Place, Way};
use crate::sim::profile::Event;

const MS: Duration = Duration::from_millis(1);

impl World {
    fn is_member(&self, client: usize) -> bool {
        let machine = &self.machines[client];
        let process = machine.process.as_ref().filter(|_| machine.is_up);
        let client = process.and_then(|process| process.client());
        let clock = machine.host.clock_at(self.sim.elapsed());
        client.is_some_and(|client| client.inspect_at(clock).membership.is_some())
    }

    /// The client that all wait for has become a member.
    pub(super) fn spring_ambush(&mut self) {
        let Some((client, event)) = self.ambush else {
            return;
        };
        if !self.machines[client].is_up {
            self.ambush = None;
            return;
        }
        if !self.is_member(client) {
            return;
        }
        self.ambush = None;
        self.last_event = self.now();
        let stays_away = event == Event::WelcomeThenAway;
        let (soon, away) = if stays_away {
            (self.dice.millis(0, 200), self.dice.millis(8_500, 9_500))
        } else {
            (Duration::ZERO, self.dice.millis(1, 100))
        };
        for at in 0..self.servers.len() {
            if self.servers[at].runs() {
                self.schedule(soon, Later::KillServer(at, away));
            }
        }
        if stays_away {
            self.quiet_until = self.now() + soon + away;
        }
    }

    /// False: nobody leads, or there are no two clients of which one could stay with the leader, and one with the others.
    pub(super) fn leader_apart(&mut self, down: &[usize]) -> bool {
        let mut members = self.machines_that(|machine| machine.is_up && !machine.host.is_stopped());
        members.retain(|at| self.is_member(*at));
        let Some(leader) = self.leader() else {
            return false;
        };
        if members.is_empty() || members.len() + down.len() < 2 {
            return false;
        }
        let mut with_leader = vec![members.swap_remove(self.dice.index(members.len()))];
        members.retain(|_| self.dice.percent(30));
        if members.len() + 1 < self.machines_that(|machine| machine.is_up).len() {
            with_leader.append(&mut members);
        }
        let is_across = |between: &Between| match between.from {
            Place::Server(at) => (at == leader) != (between.server == leader),
            Place::Client(at) => with_leader.contains(&at) != (between.server == leader),
        };
        let links: Vec<Between> = self.network.all().into_iter().filter(is_across).collect();
        let apart = self.dice.millis(4_500, 6_000);
        self.link(&links, Link::Cut(Way::Both), apart);
        if !down.is_empty() {
            let client = self.dice.pick(down);
            let later = self.dice.millis(100, 1_500);
            self.schedule(later, Later::Start(client));
        }
        self.quiet_until = self.now() + apart;
        true
    }

    /// All servers but this one are killed.
    fn leave_only(&mut self, at: usize, running: &[usize], away: Duration) {
        for &other in running.iter().filter(|other| **other != at) {
            self.kill_server(other, away);
        }
        self.quiet_until = self.now() + away;
    }

    /// After so long those that are up have been numbered by the one that is left.
    fn numbered_after(&self) -> Duration {
        2 * self.profile.degraded_after + 1_000 * MS
    }

    /// Others are clients afterwards, who know of nothing that was given out before.
    pub(super) fn last_one_restarts(&mut self, at: usize, running: &[usize]) {
        let (numbered, shortly) = (self.numbered_after(), self.dice.millis(1, 200));
        self.leave_only(at, running, 2 * numbered + 4_000 * MS);
        self.schedule(numbered, Later::KillServer(at, shortly));
        for client in 0..self.machines.len() {
            let later = numbered + self.dice.millis(300, 1_000);
            if self.machines[client].is_up && self.dice.percent(70) {
                continue;
            }
            self.schedule(numbered, Later::PowerLoss(client));
            self.schedule(later, Later::Start(client));
        }
    }

    pub(super) fn last_one_dies(&mut self, at: usize, running: &[usize]) {
        let numbered = self.numbered_after();
        let away = self.dice.millis(9_500, 10_500);
        self.leave_only(at, running, numbered + away);
        self.schedule(numbered, Later::Deaf(at, 900 * MS));
        let soon = numbered + self.dice.millis(350, 650);
        self.schedule(soon, Later::KillServer(at, away));
    }

    /// The client that dies has rows that were another one's. False: there are no two, or rows are moving.
    pub(super) fn last_one_is_not_told(&mut self, at: usize, running: &[usize]) -> bool {
        let clients = self.machines_that(|machine| machine.is_up);
        if clients.len() < 2 || self.oracle.settled(&self.views()).is_err() {
            return false;
        }
        let numbered = self.numbered_after();
        self.leave_only(at, running, numbered + 11_000 * MS);
        let one = self.dice.pick(&clients);
        self.schedule(numbered, Later::Weight(one));
        self.schedule(numbered + 1_500 * MS, Later::PowerLoss(one));
        true
    }

    pub(super) fn last_one_follows(&mut self, at: usize, running: &[usize]) {
        let numbered = self.numbered_after();
        self.leave_only(at, running, numbered);
        let cut_off = 6_000 * MS;
        for client in 0..self.machines.len() {
            for &other in running.iter().filter(|other| **other != at) {
                let between = Between::client(client, other);
                let changes = self.network.changes(between);
                let cut = Link::Cut(Way::Both);
                self.schedule(numbered, Later::Link(between, changes, cut, cut_off));
            }
            let within = cut_off - self.dice.millis(500, 2_000);
            self.schedule(numbered + within, Later::Weight(client));
        }
        self.quiet_until = self.now() + numbered + cut_off;
    }

    /// One client does not hear for so long what this server tells, which is something new.
    pub(super) fn some_are_deaf(&mut self, at: usize, spell: Duration) {
        let up = self.machines_that(|machine| machine.is_up);
        if up.len() < 2 {
            return;
        }
        let deaf = self.dice.pick(&up);
        self.link(&[Between::client(deaf, at)], Link::Cut(Way::Back), spell);
        let others: Vec<usize> = up.into_iter().filter(|other| *other != deaf).collect();
        let other = self.dice.pick(&others);
        self.change_weight(other);
    }

    /// To another one, above zero.
    pub(super) fn change_weight(&mut self, at: usize) {
        let weight = self.machines[at].weight % 3 + 1;
        self.machines[at].weight = weight;
        self.note(&format!("host {at}: weight {weight}"));
        self.tell_wishes(at);
    }
}
