//! How it is done: to clients' machines and processes, and to the network.

use skyschedule_common::env::sim::{self as env_sim, Host};
use skyschedule_common::protocol::messages::Consistency;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use turmoil::Sim;

use super::{Later, World};
use crate::sim::network::{Between, Kept, Link, Place, Way};
use crate::sim::worker::{Process, Setup, server_name};

impl World {
    pub(super) fn start(&mut self, at: usize) {
        let servers = self.members();
        let machine = &mut self.machines[at];
        if machine.is_up {
            return;
        }
        machine.processes += 1;
        machine.is_up = true;
        machine.is_draining = false;
        machine.weight = match self.dice.below(10) {
            0 => 2,
            1 => 3,
            _ => 1,
        };
        let settings = &self.profile.settings;
        let drain = match settings.consistency {
            Consistency::Available => settings.drain_timeout,
            Consistency::Exclusive => settings.max_drain,
        };
        let setup = Setup {
            client_id: machine.client_id.clone(),
            weight: machine.weight,
            servers,
            consistency: self.dice.percent(50).then_some(settings.consistency),
            handlers: self.profile.handlers,
            drain: drain.duration(),
            degraded_after: self.profile.degraded_after,
            calm: Arc::clone(&self.calm),
        };
        let process = Process::new(setup);
        *machine.slot.lock().unwrap() = Some(Arc::clone(&process));
        machine.process = Some(process);
        let line = format!(
            "host {at}: starts {}.{} with weight {}",
            machine.client_id, machine.processes, machine.weight
        );
        let name = machine.host.name().to_owned();
        self.sim.bounce(name);
        self.note(&line);
    }

    pub(super) fn close(&mut self, at: usize) {
        self.note(&format!("host {at}: closes"));
        if let Some(process) = &self.machines[at].process {
            process.close();
        }
    }

    /// The process ends; its kernel says so.
    pub(super) fn kill(&mut self, at: usize) {
        let clear = self.network.clear_of(Place::Client(at));
        let machine = &mut self.machines[at];
        machine.pauses += 1;
        kill(&mut self.sim, &machine.host, &clear);
        if let Some(process) = &machine.process {
            process.bury();
        }
        machine.is_up = false;
    }

    pub(super) fn lose_power(&mut self, at: usize) {
        self.note(&format!("host {at}: loses power"));
        let links = self.unplug(Place::Client(at));
        self.kill(at);
        for (between, link) in links {
            // What the network kept is lost with the machine; otherwise it is as it was.
            let link = if matches!(link, Link::Cut(_)) {
                link
            } else {
                Link::Clear
            };
            self.network.set(&self.sim, between, link);
        }
    }

    /// Nothing that the machine sends arrives. What its links did before.
    pub(super) fn unplug(&mut self, place: Place) -> Vec<(Between, Link)> {
        let links = self.network.of(place).into_iter();
        let links: Vec<_> = links.map(|at| (at, self.network.link(at))).collect();
        for (between, _) in &links {
            self.network.set(&self.sim, *between, Link::Cut(Way::Both));
        }
        links
    }

    pub(super) fn pause(&mut self, at: usize, spell: Duration, suspend: bool) {
        let machine = &mut self.machines[at];
        machine.pauses += 1;
        let pauses = machine.pauses;
        if suspend {
            machine.host.suspend();
        } else {
            machine.host.pause();
        }
        self.note(&format!(
            "host {at}: {} for {spell:?}",
            if suspend { "suspended" } else { "stopped" }
        ));
        self.schedule(spell, Later::Resume(at, pauses));
    }

    /// Stops a client until about the instant at which the server gives it up.
    pub(super) fn near_lapse(&mut self, at: usize) -> bool {
        let now = self.sim.elapsed();
        let machine = &self.machines[at];
        let client = machine
            .process
            .as_ref()
            .and_then(|process| process.client());
        let left = client.map(|client| client.inspect_at(machine.host.clock_at(now)).lease_left);
        let Some(left) = left.filter(|left| !left.is_zero()) else {
            return false;
        };
        let spell = left + self.dice.millis(0, 60);
        self.pause(at, spell, false);
        if self.dice.percent(50) {
            let soon = spell + self.dice.millis(5, 60);
            let lasts = self.spell();
            let deaf = Link::Stalled(Way::Back, Kept::All);
            for between in self.network.of(Place::Client(at)) {
                let changes = self.network.changes(between);
                self.schedule(soon, Later::Link(between, changes, deaf, lasts));
            }
        }
        true
    }

    pub(super) fn link(&mut self, links: &[Between], link: Link, spell: Duration) {
        for between in links {
            self.note(&format!("{}: {link:?} for {spell:?}", name(*between)));
            let changes = self.network.change(&self.sim, *between, link);
            self.schedule(spell, Later::Clear(*between, changes));
        }
    }

    pub(super) fn set_weight(&mut self, at: usize) {
        let weight = u32::try_from(self.dice.below(4)).unwrap_or(1);
        self.machines[at].weight = weight;
        self.note(&format!("host {at}: weight {weight}"));
        self.tell_wishes(at);
    }

    pub(super) fn tell_wishes(&self, at: usize) {
        let machine = &self.machines[at];
        if let Some(client) = machine
            .process
            .as_ref()
            .and_then(|process| process.client())
        {
            client.update_weight(machine.weight).unwrap();
            client.drain(machine.is_draining);
        }
    }

    pub(super) fn do_later(&mut self, what: Later) {
        match what {
            Later::Start(at) => self.start(at),
            Later::Resume(at, pauses) if self.machines[at].pauses == pauses => {
                self.note(&format!("host {at}: goes on"));
                let now = self.now();
                self.machines[at].host.resume();
                self.machines[at].went_on = now;
            }
            Later::Clear(between, changes) if self.network.changes(between) == changes => {
                self.note(&format!("{}: clear", name(between)));
                self.network.set(&self.sim, between, Link::Clear);
            }
            Later::Link(between, changes, link, spell)
                if self.network.changes(between) == changes =>
            {
                self.link(&[between], link, spell);
            }
            Later::StartServer(at) => self.start_server(at),
            Later::ResumeServer(at) if self.servers[at].host.is_stopped() => {
                self.resume_server(at);
            }
            Later::LosePower(at) if self.servers[at].up_since.is_some() => {
                let away = self.outage();
                self.server_loses_power(at, away);
            }
            Later::KillServer(at, away) if self.servers[at].up_since.is_some() => {
                self.kill_server(at, away);
            }
            Later::Transfer => self.transfer(None),
            Later::Weight(at) if self.machines[at].is_up => self.change_weight(at),
            Later::PowerLoss(at) if self.machines[at].is_up => self.lose_power(at),
            Later::Close(at) if self.machines[at].is_up => self.close(at),
            Later::Restore(at_the_latest) => self.restore(at_the_latest),
            Later::Deaf(at, spell) => self.some_are_deaf(at, spell),
            // Overtaken by events.
            _ => return,
        }
        self.last_event = self.now();
    }
}

/// Kills a process; `clear`: its networks that carry. A dying runtime drops its tasks, and with them its sockets, in an
/// order that other simulations of this process have a part in: no delay may be drawn meanwhile.
pub(super) fn kill(sim: &mut Sim<'_>, host: &Host, clear: &[(IpAddr, IpAddr)]) {
    clear.iter().for_each(|(a, b)| sim.hold(*a, *b));
    env_sim::kill(sim, host);
    clear.iter().for_each(|(a, b)| sim.release(*a, *b));
}

/// A link, for people.
fn name(between: Between) -> String {
    let Between { from, server } = between;
    let server = server_name(server);
    match from {
        Place::Client(at) => format!("network of host {at} and {server}"),
        Place::Server(at) => format!("network of {} and {server}", server_name(at)),
    }
}
