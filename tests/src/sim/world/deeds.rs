//! How it is done: to clients' machines and processes, to the server's, and to what lies between.

use skyschedule_common::env::sim::{self as env_sim, Host};
use skyschedule_common::protocol::messages::Consistency;
use skyschedule_server::consensus::MemoryDisk;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use turmoil::Sim;

use super::{Later, World};
use crate::sim::network::{self, Kept, Link, Way};
use crate::sim::server;
use crate::sim::worker::{Process, SERVER, Setup};

impl World {
    pub(super) fn start(&mut self, at: usize) {
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
            consistency: self.dice.percent(50).then_some(settings.consistency),
            handlers: self.profile.handlers,
            drain: drain.duration(),
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
        let machine = &mut self.machines[at];
        machine.pauses += 1;
        let clear = (machine.link == Link::Clear).then_some((machine.ip, self.sky.ip));
        kill(&mut self.sim, &machine.host, clear.as_slice());
        if let Some(process) = &machine.process {
            process.bury();
        }
        machine.is_up = false;
    }

    pub(super) fn lose_power(&mut self, at: usize) {
        self.note(&format!("host {at}: loses power"));
        let (ip, server) = (self.machines[at].ip, self.sky.ip);
        let link = self.machines[at].link;
        network::set(
            &self.sim,
            &mut self.machines[at].link,
            Link::Cut(Way::Both),
            ip,
            server,
        );
        self.kill(at);
        // What the network kept is lost with the machine; otherwise it is as it was.
        let link = if matches!(link, Link::Cut(_)) {
            link
        } else {
            Link::Clear
        };
        network::set(&self.sim, &mut self.machines[at].link, link, ip, server);
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
            let links = self.machines[at].links;
            let soon = spell + self.dice.millis(5, 60);
            let lasts = self.spell();
            let deaf = Link::Stalled(Way::ToClient, Kept::All);
            self.schedule(soon, Later::Link(at, links, deaf, lasts));
        }
        true
    }

    pub(super) fn link(&mut self, at: usize, link: Link, spell: Duration) {
        self.note(&format!("host {at}: network {link:?} for {spell:?}"));
        let (ip, server) = (self.machines[at].ip, self.sky.ip);
        network::set(&self.sim, &mut self.machines[at].link, link, ip, server);
        let machine = &mut self.machines[at];
        machine.links += 1;
        let links = machine.links;
        self.schedule(spell, Later::Clear(at, links));
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

    // The server.

    pub(super) fn start_server(&mut self) {
        if self.sky.up_since.is_some() {
            return;
        }
        self.note("server: starts");
        let settings = self.profile.settings.clone();
        let process = server::Process::new(self.sky.disk.clone(), settings);
        *self.sky.slot.lock().unwrap() = Some(Arc::clone(&process));
        self.sky.process = Some(process);
        self.sky.up_since = Some(self.now());
        self.sim.bounce(SERVER);
    }

    pub(super) fn server_dies(&mut self, written_survives: bool) {
        let dice = &mut self.dice;
        if written_survives {
            self.sky.disk.crash(|| true);
        } else {
            let kept = dice.pick(&[0, 50, 90, 100]);
            self.sky.disk.crash(|| dice.percent(kept));
        }
        let server = self.sky.ip;
        let clear = self
            .machines
            .iter()
            .filter(|machine| machine.link == Link::Clear);
        let clear: Vec<_> = clear.map(|machine| (machine.ip, server)).collect();
        kill(&mut self.sim, &self.sky.host, &clear);
        if let Some(process) = self.sky.process.take() {
            process.bury();
        }
        self.sky.up_since = None;
        self.sky.down_since = self.now();
    }

    pub(super) fn kill_server(&mut self, away: Duration) {
        self.note(&format!("server: killed, away for {away:?}"));
        self.server_dies(true);
        self.schedule(away, Later::StartServer);
    }

    pub(super) fn server_loses_power(&mut self, away: Duration) {
        self.note(&format!("server: loses power, away for {away:?}"));
        let server = self.sky.ip;
        let links: Vec<Link> = self.machines.iter().map(|machine| machine.link).collect();
        for machine in &mut self.machines {
            network::set(
                &self.sim,
                &mut machine.link,
                Link::Cut(Way::Both),
                machine.ip,
                server,
            );
        }
        self.server_dies(false);
        for (machine, link) in self.machines.iter_mut().zip(links) {
            network::set(&self.sim, &mut machine.link, link, machine.ip, server);
        }
        self.schedule(away, Later::StartServer);
    }

    pub(super) fn stop_server(&mut self) {
        self.note("server: asked to stop");
        if let Some(process) = &self.sky.process {
            process.stop();
        }
        let away = self.outage() + Duration::from_millis(250);
        self.schedule(away, Later::StartServer);
    }

    pub(super) fn replace_disk(&mut self, disk: MemoryDisk, by: &str) {
        let away = self.outage();
        self.note(&format!(
            "server: killed, comes back with {by} on its disk in {away:?}"
        ));
        self.server_dies(true);
        self.sky.disk = disk;
        self.oracle.lose_history(self.sim.elapsed() + away);
        self.schedule(away, Later::StartServer);
    }

    pub(super) fn do_later(&mut self, what: Later) {
        match what {
            Later::Start(at) => self.start(at),
            Later::Resume(at, pauses) if self.machines[at].pauses == pauses => {
                self.note(&format!("host {at}: goes on"));
                self.machines[at].host.resume();
            }
            Later::Clear(at, links) if self.machines[at].links == links => {
                self.note(&format!("host {at}: network clear"));
                let (ip, server) = (self.machines[at].ip, self.sky.ip);
                network::set(
                    &self.sim,
                    &mut self.machines[at].link,
                    Link::Clear,
                    ip,
                    server,
                );
            }
            Later::Link(at, links, link, spell) if self.machines[at].links == links => {
                self.link(at, link, spell);
            }
            Later::StartServer => self.start_server(),
            Later::ResumeServer if self.sky.host.is_stopped() => {
                self.note("server: goes on");
                self.sky.host.resume();
                self.sky.up_since = self.sky.up_since.map(|_| self.now());
            }
            Later::LosePower if self.sky.up_since.is_some() => {
                let away = self.outage();
                self.server_loses_power(away);
            }
            Later::KillServer(away) if self.sky.up_since.is_some() => self.kill_server(away),
            // Overtaken by events.
            _ => return,
        }
        self.last_event = self.now();
    }
}

/// Kills a process; `clear`: its networks that carry. A dying runtime drops its tasks, and with them its sockets, in an
/// order that other simulations of this process have a part in: no delay may be drawn meanwhile.
fn kill(sim: &mut Sim<'_>, host: &Host, clear: &[(IpAddr, IpAddr)]) {
    clear.iter().for_each(|(a, b)| sim.hold(*a, *b));
    env_sim::kill(sim, host);
    clear.iter().for_each(|(a, b)| sim.release(*a, *b));
}
