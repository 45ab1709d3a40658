//! The end: no more trouble, and all must come right.

use skyschedule_client::Mode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Later, World};
use crate::sim::network::{Link, Place, Way};
use crate::sim::oracle::Violation;
use crate::sim::worker::{self, server_name};

/// How long a server of several keeps a connection on which nothing comes: one of another server; or one of a client that
/// died while it connected, which is waited for, and then told so.
const HALF_OPEN: Duration = Duration::from_secs(20);

/// The same of a client of a group that the server did not know of when it logged in: rare, and so waited for only then.
const HALF_OPEN_STRANGER: Duration = Duration::from_secs(31);

/// How long it may take until all clients have turned to a server that serves without a quorum, and are numbered.
const ATTACHING: Duration = Duration::from_secs(3);

impl World {
    /// No more trouble: what was broken is whole, what stood still goes on.
    pub(super) fn heal(&mut self) {
        self.note("no more trouble");
        self.calm.store(true, Ordering::Relaxed);
        self.later.clear();
        self.ambush = None;
        for between in self.network.all() {
            self.network.set(&self.sim, between, Link::Clear);
        }
        for at in 0..self.machines.len() {
            let machine = &mut self.machines[at];
            machine.host.resume();
            machine.went_on = self.sim.elapsed();
            machine.is_draining = false;
            machine.weight = machine.weight.max(1);
            if machine.is_up {
                self.tell_wishes(at);
            } else if self.dice.percent(50) || at == 0 {
                self.start(at);
            }
        }
        let now = self.now();
        for at in 0..self.servers.len() {
            let server = &mut self.servers[at];
            server.host.resume();
            server.up_since = server.up_since.map(|_| now);
            let stopping = server.up_since.is_some();
            self.start_server(at);
            if stopping {
                // It may have been asked to stop just before.
                self.schedule(Duration::from_millis(400), Later::StartServer(at));
            }
        }
        self.last_event = self.now();
    }

    /// Waits until all is settled, and has been for a while.
    pub(super) fn settle(&mut self, when: &str, limit: Duration) -> Result<(), Violation> {
        let start = self.now();
        let mut calm_since = None;
        let mut missing = String::new();
        while calm_since.is_none_or(|since| self.now() < since + Duration::from_millis(700)) {
            self.step()?;
            if self.now() > start + limit {
                return Err(Violation::new(
                    "not settled",
                    format!("{limit:?} {when}: {missing}"),
                ));
            }
            let views = self.views();
            match self.oracle.settled(&views).and_then(|()| self.all_heard()) {
                Ok(()) => {
                    calm_since.get_or_insert(self.now());
                }
                Err(what) => {
                    calm_since = None;
                    missing = what;
                }
            }
        }
        let took = self.now() - start;
        self.note(&format!("settled {when} within {took:?}"));
        Ok(())
    }

    /// In an available group every client knows that its share is all that it may fall back to.
    pub(super) fn all_heard(&self) -> Result<(), String> {
        if self.service.is_none() {
            return Err("no server leads".to_owned());
        }
        if let Some(at) = self.servers.iter().position(|server| server.is_blank) {
            return Err(format!("{} is not brought up", server_name(at)));
        }
        if let Some((at, ..)) = self.service.filter(|(at, ..)| !self.is_as_wanted(*at)) {
            let wanted = self.members();
            let voters = self.voters(at);
            return Err(format!(
                "servers {wanted:?} are wanted, and there are {voters:?}"
            ));
        }
        for (at, machine) in self.machines.iter().enumerate() {
            let client = machine.process.as_ref().filter(|_| machine.is_up);
            let Some(client) = client.and_then(|process| process.client()) else {
                continue;
            };
            if machine
                .process
                .as_ref()
                .is_some_and(|process| process.is_closing())
            {
                return Err(format!("host {at} is leaving"));
            }
            let status = client.shares().borrow().clone();
            if status.epoch.is_some() && !status.settled {
                return Err(format!("host {at} does not know that all is settled"));
            }
        }
        Ok(())
    }

    /// Every client that has rows works on them.
    pub(super) fn works(&mut self) -> Result<(), Violation> {
        let count = |world: &Self| -> Vec<(usize, u64, bool)> {
            let views = world.views();
            views
                .iter()
                .map(|view| {
                    let process = world.machines[view.host].process.as_ref();
                    let has_rows = worker::KEYS
                        .clone()
                        .any(|key| view.inside.rows.contains(key.into()));
                    (
                        view.host,
                        process.map_or(0, |process| process.count()),
                        has_rows,
                    )
                })
                .collect()
        };
        let before = count(self);
        self.run_for(Duration::from_millis(600))?;
        for ((host, earlier, has_rows), (_, later, _)) in before.iter().zip(count(self)) {
            let process = self.machines[*host].process.as_ref();
            let busy = process.is_some_and(|process| !process.running().is_empty());
            if *has_rows && *earlier == later && !busy {
                return Err(Violation::new(
                    "idle",
                    format!("host {host} has rows and begins none"),
                ));
            }
        }
        Ok(())
    }

    /// Promise 6: servers that are away for a while and come back, or lead no more, move no share.
    pub(super) fn restart_quietly(&mut self) -> Result<(), Violation> {
        let shares = |world: &Self| {
            world.oracle.state().map(|group| {
                let members = group.members().iter();
                members
                    .map(|(number, member)| (*number, member.epoch, member.told.clone()))
                    .collect::<Vec<_>>()
            })
        };
        let before = shares(self);
        let away = match self.dice.below(3) {
            0 => self.dice.millis(1, 300),
            1 => self.dice.millis(300, 2_500),
            _ => self.dice.millis(2_500, 4_500),
        };
        self.last_event = self.now();
        let at = self.leader().unwrap_or(0);
        let kinds = match (self.are_several(), self.profile.spares) {
            (false, _) => 3,
            (true, 0) => 7,
            (true, _) => 9,
        };
        match self.dice.below(kinds) {
            0 => self.kill_server(at, away),
            1 => self.server_loses_power(at, away),
            2 => self.stop_server(at),
            3 => self.pause_server(at, away, false),
            4 => {
                let mut links = self.network.of(Place::Server(at));
                links.retain(|between| matches!(between.from, Place::Server(_)));
                self.link(&links, Link::Cut(Way::Both), away);
            }
            5 => self.restart_all()?,
            6 => self.transfer(None),
            7 => drop(self.add_server()),
            _ => drop(self.remove_server(at)),
        }
        self.run_for(away)?;
        self.settle("after a restart of servers", Duration::from_secs(12))?;
        let after = shares(self);
        if before != after {
            return Err(Violation::new(
                "shares moved",
                format!("servers restarted, and {before:?} became {after:?}"),
            ));
        }
        Ok(())
    }

    /// Promise 3: one surviving server is enough, also for those who join meanwhile; and when the others are back, all
    /// is as before.
    pub(super) fn one_is_enough(&mut self) -> Result<(), Violation> {
        let members = self.members();
        let survivor = self.dice.pick(&members);
        let away = self.dice.millis(10_000, 11_000);
        let back = self.now() + away;
        self.note(&format!("only {} is left", server_name(survivor)));
        for at in members.into_iter().filter(|at| *at != survivor) {
            self.kill_server(at, away);
        }
        if let Some(at) = self.machines.iter().position(|machine| !machine.is_up) {
            self.start(at);
        }
        self.last_event = self.now();
        let start = self.now();
        let limit = start + self.profile.degraded_after + ATTACHING;
        while let Err(missing) = self.is_divided() {
            self.step()?;
            if self.now() > limit {
                let what = format!("not divided with one server left: {missing}");
                return Err(Violation::new("one is not enough", what));
            }
        }
        let took = self.now() - start;
        self.note(&format!("one server is enough, after {took:?}"));
        self.run_for(back.saturating_sub(self.now()))?;
        self.last_event = self.now();
        self.settle("after one server was left", Duration::from_secs(12))
    }

    /// Whether a server without a quorum has divided all rows among all clients.
    fn is_divided(&self) -> Result<(), String> {
        let views = self.views();
        for view in &views {
            let degraded = view.inside.epoch.is_some_and(|epoch| epoch.degraded > 0);
            if !degraded || view.inside.mode != Mode::Leased || view.inside.rows.single().is_none()
            {
                return Err(format!("host {} is not numbered", view.host));
            }
        }
        for key in worker::KEYS {
            let holders = views
                .iter()
                .filter(|view| view.inside.rows.contains(key.into()));
            let count = holders.count();
            if count != 1 {
                return Err(format!("row {key} is held by {count}"));
            }
        }
        Ok(())
    }

    /// One after the other, in good order, as an update does.
    fn restart_all(&mut self) -> Result<(), Violation> {
        for at in self.members() {
            self.stop_server(at);
            let limit = self.now() + Duration::from_secs(15);
            let mut was_away = false;
            while !(was_away && self.servers_are_well()) {
                self.step()?;
                was_away |= self.servers[at].up_since.is_none();
                if self.now() > limit {
                    let what = format!("{} was asked to, 15 s ago", server_name(at));
                    return Err(Violation::new("does not restart", what));
                }
            }
        }
        Ok(())
    }

    /// Everyone says goodbye; nothing is left behind.
    pub(super) fn all_leave(&mut self) -> Result<(), Violation> {
        for at in self.machines_that(|machine| machine.is_up) {
            self.close(at);
        }
        self.last_event = self.now();
        let limit = self.now() + Duration::from_secs(10);
        while self.machines.iter().any(|machine| machine.is_up) {
            self.step()?;
            if self.now() > limit {
                let late = self.machines_that(|machine| machine.is_up);
                return Err(Violation::new(
                    "does not close",
                    format!("hosts {late:?} are not closed after 10 s"),
                ));
            }
        }
        // Half-open connections of the trouble end at the idle limit, or at one of their own.
        let idle = self.profile.longest_lease() * 3;
        let idle = if self.are_several() {
            idle.max(HALF_OPEN)
        } else {
            idle
        };
        self.run_for(idle + Duration::from_millis(500))?;
        let members = self.oracle.state().map_or(0, |group| group.members().len());
        if members > 0 {
            let what = format!("all have left, and there are {members} members");
            return Err(Violation::new("left behind", what));
        }
        if self.connections_end().is_err() && self.are_several() {
            self.run_for(HALF_OPEN_STRANGER.saturating_sub(idle))?;
        }
        self.connections_end()
    }

    /// All connections of clients have ended.
    fn connections_end(&self) -> Result<(), Violation> {
        // The other servers have one each.
        let expected = format!(" {}", self.members().len() - 1);
        for at in self.members() {
            let Some(server) = self.servers[at].seen() else {
                continue;
            };
            let metrics = server.metrics.encode();
            let open = metrics
                .lines()
                .find(|line| line.starts_with("skyschedule_connections "))
                .unwrap_or("no metric of connections");
            if !open.ends_with(&expected) {
                let name = server_name(at);
                let what = format!("all have left, and {name} has {open}");
                return Err(Violation::new("left behind", what));
            }
        }
        Ok(())
    }
}
