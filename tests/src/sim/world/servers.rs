//! How it is done to servers: they start, stop, crash, lose their disks, and lead.

use skyschedule_common::env::sim::Host;
use skyschedule_common::protocol::messages::{Millis, Numbering};
use skyschedule_server::consensus::MemoryDisk;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use turmoil::Sim;

use super::deeds::kill;
use super::{Later, SHORT_ELECTION, SHORT_OUTAGE, World};
use crate::sim::network::{Between, Link, Place};
use crate::sim::oracle::{Applied, Violation};
use crate::sim::profile::{LEASE, LONGER_LEASE};
use crate::sim::server::{self, replica_id};
use crate::sim::worker::server_name;

/// How long several servers may take to become a cluster, where nothing is wrong.
const FORMING: Duration = Duration::from_secs(5);

/// Servers that were in trouble have found each other again within this time.
const RECOVERY: Duration = Duration::from_millis(1_500);

/// What was told before so long has arrived, or is lost.
const LONG: Duration = Duration::from_secs(2);

/// What a server's machine is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Its server belongs to the cluster, or is being added.
    Member,
    /// Its server is being removed.
    Leaving,
    /// Its server has lost its disk, and is being removed before it is added anew.
    Lost,
    /// Nothing yet.
    Spare,
}

/// A server's machine.
pub(super) struct Sky {
    pub(super) host: Arc<Host>,
    pub(super) ip: IpAddr,
    pub(super) disk: MemoryDisk,
    /// A copy of the disk, and whether it was lost then.
    pub(super) backup: Option<(MemoryDisk, bool)>,
    slot: Arc<Mutex<Option<Arc<server::Process>>>>,
    pub(super) process: Option<Arc<server::Process>>,
    lives: u64,
    pub(super) up_since: Option<Duration>,
    down_since: Duration,
    /// The disk was lost, and the others may not have brought it up yet.
    pub(super) is_blank: bool,
    pub(super) role: Role,
    /// The servers of its configuration.
    pub(super) peers: BTreeSet<usize>,
    /// It is known to be no member any more: when its machine is emptied.
    pub(super) emptied_at: Option<Duration>,
    /// Where its state was when it was last looked at.
    applied: Option<u64>,
}

impl Sky {
    /// A machine on which nothing runs yet.
    pub(super) fn new(sim: &mut Sim<'static>, host: Arc<Host>, disk: MemoryDisk) -> Self {
        let slot: Arc<Mutex<Option<Arc<server::Process>>>> = Arc::default();
        let name = host.name().to_owned();
        sim.host(name.as_str(), {
            let (host, slot) = (Arc::clone(&host), Arc::clone(&slot));
            move || {
                let (host, process) = (Arc::clone(&host), slot.lock().unwrap().clone());
                async move {
                    match process {
                        Some(process) => host.run(server::run(process)).await,
                        None => Ok(()),
                    }
                }
            }
        });
        Self {
            ip: sim.lookup(name.as_str()),
            host,
            disk,
            backup: None,
            slot,
            process: None,
            lives: 0,
            up_since: None,
            down_since: Duration::ZERO,
            is_blank: false,
            role: Role::Spare,
            peers: BTreeSet::new(),
            emptied_at: None,
            applied: None,
        }
    }

    /// Whether it runs, and is not stopped.
    pub(super) fn runs(&self) -> bool {
        self.up_since.is_some() && !self.host.is_stopped()
    }

    pub(super) fn seen(&self) -> Option<Arc<server::Seen>> {
        self.process.as_ref().and_then(|process| process.seen())
    }
}

impl World {
    /// Waits until the servers have become a cluster, and the operator has configured the group.
    pub(super) fn form(&mut self) -> Result<(), Violation> {
        let limit = self.now() + FORMING;
        let mut formed = false;
        while !formed {
            self.step()?;
            if self.now() > limit {
                let text = format!("the servers are no cluster after {FORMING:?}");
                return Err(Violation::new("not formed", text));
            }
            let group = self.oracle.state();
            formed = group.is_some_and(|group| *group.settings() == self.profile.settings);
        }
        self.note("the servers are a cluster");
        Ok(())
    }

    pub(super) fn start_server(&mut self, at: usize) {
        let may_run = matches!(self.servers[at].role, Role::Member | Role::Leaving);
        if self.servers[at].up_since.is_some() || !may_run {
            return;
        }
        let name = server_name(at);
        self.note(&format!("{name}: starts"));
        let now = self.now();
        let (timing, degraded_after) = (self.timing, self.profile.degraded_after);
        let server = &mut self.servers[at];
        let process = server::Process::new(server::Setup {
            at,
            peers: server.peers.clone(),
            timing,
            degraded_after,
            disk: server.disk.clone(),
            wishes: Arc::clone(&self.wishes),
        });
        *server.slot.lock().unwrap() = Some(Arc::clone(&process));
        server.process = Some(process);
        server.up_since = Some(now);
        server.lives += 1;
        server.applied = None;
        self.sim.bounce(name);
    }

    pub(super) fn server_dies(&mut self, at: usize, written_survives: bool) {
        let (dice, server) = (&mut self.dice, &mut self.servers[at]);
        if written_survives {
            server.disk.crash(|| true);
        } else {
            let kept = dice.pick(&[0, 50, 90, 100]);
            server.disk.crash(|| dice.percent(kept));
        }
        let clear = self.network.clear_of(Place::Server(at));
        kill(&mut self.sim, &server.host, &clear);
        if let Some(process) = server.process.take() {
            process.bury();
        }
        server.up_since = None;
        server.down_since = self.sim.elapsed();
    }

    pub(super) fn kill_server(&mut self, at: usize, away: Duration) {
        self.note(&format!("{}: killed, away for {away:?}", server_name(at)));
        self.server_dies(at, true);
        self.schedule(away, Later::StartServer(at));
    }

    pub(super) fn server_loses_power(&mut self, at: usize, away: Duration) {
        let name = server_name(at);
        self.note(&format!("{name}: loses power, away for {away:?}"));
        let links = self.unplug(Place::Server(at));
        self.server_dies(at, false);
        for (between, link) in links {
            self.network.set(&self.sim, between, link);
        }
        self.schedule(away, Later::StartServer(at));
    }

    /// In good order; one of several is started again when it has stopped.
    pub(super) fn stop_server(&mut self, at: usize) {
        self.note(&format!("{}: asked to stop", server_name(at)));
        if let Some(process) = &self.servers[at].process {
            process.stop();
        }
        if !self.are_several() {
            let away = self.outage() + Duration::from_millis(250);
            self.schedule(away, Later::StartServer(at));
        }
    }

    /// Servers that have stopped in good order.
    pub(super) fn reap_servers(&mut self) {
        for at in 0..self.servers.len() {
            let server = &self.servers[at];
            let process = server.process.as_ref();
            let stopped = process.is_some_and(|process| process.has_stopped());
            if !stopped || server.up_since.is_none() {
                continue;
            }
            self.note(&format!("{}: stopped", server_name(at)));
            self.server_dies(at, true);
            if self.are_several() && self.servers[at].role == Role::Member {
                let away = self.outage();
                self.schedule(away, Later::StartServer(at));
            }
        }
    }

    pub(super) fn pause_server(&mut self, at: usize, spell: Duration, suspend: bool) {
        self.note(&format!("{}: stopped for {spell:?}", server_name(at)));
        let host = &self.servers[at].host;
        if suspend {
            host.suspend();
        } else {
            host.pause();
        }
        self.schedule(spell, Later::ResumeServer(at));
    }

    pub(super) fn resume_server(&mut self, at: usize) {
        self.note(&format!("{}: goes on", server_name(at)));
        let now = self.now();
        let server = &mut self.servers[at];
        server.host.resume();
        server.up_since = server.up_since.map(|_| now);
    }

    pub(super) fn back_up(&mut self) {
        self.note("the servers' disks are copied");
        for server in &mut self.servers {
            server.backup = Some((server.disk.copy(), server.is_blank));
        }
    }

    /// All servers come back with older copies of their disks, or empty ones. False: there is no copy.
    pub(super) fn replace_disks(&mut self, with_copies: bool) -> bool {
        if with_copies && self.servers.iter().any(|server| server.backup.is_none()) {
            return false;
        }
        let away = self.outage();
        let what = if with_copies {
            "older copies of their disks"
        } else {
            "empty disks"
        };
        self.note(&format!(
            "the servers are killed, and come back with {what} in {away:?}"
        ));
        for at in 0..self.servers.len() {
            if self.servers[at].up_since.is_some() {
                self.server_dies(at, true);
            }
            let server = &mut self.servers[at];
            let copy = server.backup.as_ref().filter(|_| with_copies);
            (server.disk, server.is_blank) = match copy {
                Some((disk, is_blank)) => (disk.copy(), *is_blank),
                None => {
                    let disk = MemoryDisk::new();
                    (disk.with_latency(Duration::from_millis(3)), false)
                }
            };
            self.schedule(away, Later::StartServer(at));
        }
        self.oracle.lose_history(self.sim.elapsed() + away);
        true
    }

    /// One server comes back with an empty disk.
    pub(super) fn lose_disk(&mut self, at: usize) {
        let away = self.outage();
        self.note(&format!(
            "{}: killed, comes back with an empty disk in {away:?}",
            server_name(at)
        ));
        self.server_dies(at, true);
        let disk = MemoryDisk::new().with_latency(Duration::from_millis(3));
        self.servers[at].disk = disk;
        self.servers[at].is_blank = true;
        self.schedule(away, Later::StartServer(at));
    }

    /// The operator wants something else of the group.
    pub(super) fn configure(&mut self) {
        let mut settings = self.wishes.lock().unwrap().settings.clone();
        match self.dice.below(4) {
            0 => {
                settings.numbering = self.dice.pick(&[
                    Numbering::Modulo,
                    Numbering::Slots(16),
                    Numbering::Slots(32),
                ]);
                settings.max_slots = None;
            }
            1 if settings.numbering != Numbering::Modulo => {
                settings.max_slots = self.dice.pick(&[None, Some(4), Some(7)]);
            }
            2 => settings.settle = Millis(self.dice.pick(&[1, 20, 200])),
            _ => {
                let lease = self.dice.pick(&[LEASE, LONGER_LEASE]);
                settings.lease = Some(Millis::from_duration(lease));
            }
        }
        self.note(&format!(
            "the operator wants {:?}, caps {:?}, lease {:?}",
            settings.numbering, settings.max_slots, settings.lease
        ));
        self.wishes.lock().unwrap().settings = settings;
        self.tell_the_operator();
    }

    /// Whoever acts for the operator looks what he wants.
    pub(super) fn tell_the_operator(&self) {
        let processes = self.servers.iter();
        let processes = processes.filter_map(|server| server.process.as_ref());
        processes.for_each(|process| process.wish());
    }

    /// The server that leads, as far as it knows; of two, the newer.
    pub(super) fn leader(&self) -> Option<usize> {
        self.leader_that(|_| true).map(|(at, _)| at)
    }

    /// The leader, and its term.
    fn leader_that(&self, fits: impl Fn(usize) -> bool) -> Option<(usize, u64)> {
        let leads = |at: usize| {
            let leadership = self.servers[at].seen()?.consensus.leadership();
            leadership.own.map(|_| (at, leadership.term))
        };
        let servers = (0..self.servers.len()).filter(|at| self.servers[*at].runs());
        let leaders = servers.filter_map(leads).filter(|(at, _)| fits(*at));
        leaders.max_by_key(|(_, term)| *term)
    }

    /// Notes who serves clients: who runs, and leads, and reaches a quorum.
    pub(super) fn note_service(&mut self) {
        let now = self.now();
        let reaches = |at: usize, other: usize| {
            let link = || self.network.link(Between::servers(at, other));
            at == other || (self.servers[other].runs() && link() == Link::Clear)
        };
        let reaches_quorum = |at: usize| {
            let (voters, changing) = self.voters(at);
            let reached = voters.iter().filter(|other| reaches(at, **other)).count();
            // Those of before must agree, and those of after.
            reached * 2 > voters.len() && (!changing || reached * 2 > voters.len() + 1)
        };
        let serves = match self.servers.as_slice() {
            [alone] => (alone.runs() && alone.seen().is_some()).then_some((0, 0)),
            _ => self.leader_that(reaches_quorum),
        };
        let before = self.service.map(|(at, term, _)| (at, term));
        if serves != before {
            self.unserved_since = now;
            self.service = serves.map(|(at, term)| (at, term, now));
        }
        for server in &mut self.servers {
            let full =
                server.is_blank && server.seen().is_some_and(|seen| seen.consensus.is_full());
            server.is_blank &= !full;
        }
        let all_well = self.servers.iter().all(|server| match server.role {
            Role::Member => server.runs() && !server.is_blank,
            Role::Leaving | Role::Lost => false,
            Role::Spare => true,
        }) && self.service.is_some_and(|(at, ..)| self.is_as_wanted(at))
            && self.network.are_clear(self.peer_links())
            && !self.later.values().any(|later| later.is_of_server());
        self.well_since = all_well.then(|| self.well_since.unwrap_or(now));
    }

    /// Whether this replica has followed a leader for long, and what it told this client since has arrived.
    pub(super) fn follows(&self, replica: usize, client: usize) -> bool {
        let now = self.now();
        let is_long = |since: Duration| now >= since + LONG;
        let Some((leader, _, since)) = self.service else {
            return false;
        };
        let Some(server) = replica.checked_sub(1).filter(|at| *at != leader) else {
            return false;
        };
        let links = [
            Between::servers(server, leader),
            Between::client(client, server),
        ];
        let runs = |at: usize| self.servers[at].up_since.is_some_and(is_long);
        let hears =
            |seen: &server::Seen| seen.consensus.leadership().leader == Some(replica_id(leader));
        is_long(since)
            && is_long(self.machines[client].went_on)
            && runs(server)
            && runs(leader)
            && self.servers[server].runs()
            && self.servers[server].seen().is_some_and(|seen| hears(&seen))
            && links
                .into_iter()
                .all(|link| self.network.clear_since(link).is_some_and(is_long))
    }

    /// Whether all servers are well, and have been for long enough to have found each other.
    pub(super) fn servers_are_well(&self) -> bool {
        self.well_since
            .is_some_and(|since| self.now() >= since + RECOVERY)
    }

    pub(super) fn peer_links(&self) -> impl Iterator<Item = Between> + use<> {
        let servers = self.present_servers();
        let count = servers.len();
        let pairs = (0..count).flat_map(move |one| (0..one).map(move |other| (one, other)));
        pairs.map(move |(one, other)| Between::servers(servers[one], servers[other]))
    }

    /// Whether something is wrong with the servers that may make rows of available groups be held twice.
    pub(super) fn servers_are_troubled(&self, now: Duration) -> bool {
        if let [alone] = self.servers.as_slice() {
            let away = alone.up_since.is_none() && now > alone.down_since + SHORT_OUTAGE;
            return alone.host.is_stopped() || away;
        }
        let unserved = self.service.is_none() && now > self.unserved_since + SHORT_ELECTION;
        let bad = !self.network.are_clear(self.peer_links())
            || self.servers.iter().any(|server| server.host.is_stopped());
        unserved || bad && !self.profile.one_at_a_time
    }

    /// What servers have applied since they were last looked at.
    pub(super) fn applied(&mut self) -> Vec<Applied> {
        let alone = !self.are_several();
        let mut applied = Vec::new();
        for (at, server) in self.servers.iter_mut().enumerate() {
            let Some(seen) = server.seen() else { continue };
            let index = seen.consensus.applied();
            if !alone && server.applied == Some(index) {
                continue;
            }
            server.applied = Some(index);
            let known = self.oracle.state();
            let group = &self.group;
            let looked = seen.consensus.read(|state| {
                let group = state.group(group);
                (!alone || group != known).then(|| (group.cloned(), state.check()))
            });
            if let Some((group, checked)) = looked {
                applied.push(Applied {
                    server: at,
                    life: server.lives,
                    index: (!alone).then_some(index),
                    group,
                    checked,
                });
            }
        }
        applied
    }
}
