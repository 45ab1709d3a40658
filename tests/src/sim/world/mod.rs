//! One simulation: machines, processes, disk and network, and the steps of time.
//!
//! | file | one idea |
//! |---|---|
//! | `trouble`, `last`, `restore` | what happens; to the last server that is left; when servers are restored from a backup |
//! | `deeds`, `servers`, `members` | how it is done: to clients, to servers, to which servers there are |
//! | `quiet` | the end, in which all must come right |

use skyschedule_common::env::sim::{self as env_sim, Host, RATE_BOUND_PPM};
use skyschedule_common::ids::GroupName;
use skyschedule_server::config::Timing;
use skyschedule_server::consensus::MemoryDisk;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use turmoil::Sim;

mod deeds;
mod last;
mod members;
mod quiet;
mod restore;
mod servers;
mod trouble;

use self::servers::Sky;
use super::dice::Dice;
use super::network::{Between, Link, Network, Place};
use super::operator::Wishes;
use super::oracle::{Oracle, View, Violation, World as Known};
use super::profile::{Event, Profile};
use super::server;
use super::trace::Trace;
use super::worker::{self, GROUP, Process, server_name};

const MS: Duration = Duration::from_millis(1);

/// A server that is back within this time is no trouble to anybody.
const SHORT_OUTAGE: Duration = Duration::from_millis(300);
/// Nor is it trouble to be without a leader for so long, where there are several servers.
const SHORT_ELECTION: Duration = Duration::from_millis(1_200);

/// A client's machine.
struct Machine {
    host: Arc<Host>,
    client_id: String,
    /// The process that runs, or the last one.
    process: Option<Arc<Process>>,
    /// What the machine runs when it is started next.
    slot: Arc<Mutex<Option<Arc<Process>>>>,
    processes: u64,
    is_up: bool,
    weight: u32,
    is_draining: bool,
    pauses: u64,
    /// When it was stopped last, and went on.
    went_on: Duration,
}

/// What is done later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Later {
    Start(usize),
    Resume(usize, u64),
    Clear(Between, u64),
    Link(Between, u64, Link, Duration),
    StartServer(usize),
    ResumeServer(usize),
    LosePower(usize),
    KillServer(usize, Duration),
    Transfer,
    Weight(usize),
    Deaf(usize, Duration),
    PowerLoss(usize),
    Close(usize),
    /// Not before rows are at rest, or then.
    Restore(Duration),
}

impl Later {
    /// Whether a server is in trouble until then, or from then on.
    fn is_of_server(self) -> bool {
        matches!(
            self,
            Self::StartServer(_)
                | Self::ResumeServer(_)
                | Self::LosePower(_)
                | Self::KillServer(..)
                | Self::Restore(_)
        )
    }
}

/// One simulation.
pub struct World {
    sim: Sim<'static>,
    profile: Profile,
    dice: Dice,
    machines: Vec<Machine>,
    servers: Vec<Sky>,
    network: Network,
    /// What the operator wants.
    wishes: Arc<Mutex<Wishes>>,
    timing: Timing,
    /// Who serves clients, in which term, and since when.
    service: Option<(usize, u64, Duration)>,
    unserved_since: Duration,
    /// Since when no server is in trouble.
    well_since: Option<Duration>,
    later: BTreeMap<(Duration, u64), Later>,
    scheduled: u64,
    last_event: Duration,
    /// Nothing new happens before.
    quiet_until: Duration,
    /// No server may be started before.
    restored_at: Duration,
    /// What befalls the servers when this client is a member.
    ambush: Option<(usize, Event)>,
    calm: Arc<AtomicBool>,
    group: GroupName,
    oracle: Oracle,
    /// What happened.
    pub trace: Trace,
}

impl World {
    /// Machines with nothing on them but a server.
    pub fn new(seed: u64, profile: &Profile, prints: bool) -> Self {
        let mut dice = Dice::new(seed);
        let latency = dice.pick(&profile.network_ms);
        let mut sim = turmoil::Builder::new()
            .rng_seed(seed)
            .tick_duration(MS)
            .simulation_duration(Duration::from_secs(3600))
            .tcp_capacity(1024)
            .min_message_latency(MS)
            .max_message_latency(Duration::from_millis(latency))
            .enable_random_order()
            .build();
        let world = env_sim::World::new(seed);
        let disk = if profile.servers == 1 && profile.is_exclusive() {
            server::used_disk(&profile.settings)
        } else {
            MemoryDisk::new()
        };
        let disk_ms = dice.pick(&profile.disk_ms);
        let disk = disk.with_latency(Duration::from_millis(disk_ms));
        let mut network = Network::default();
        let mut servers = Vec::new();
        for at in 0..profile.servers + profile.spares {
            let host = world.host_with_drift(&server_name(at), drift(&mut dice));
            // Its own, not a clone.
            let disk = disk.copy();
            servers.push(Sky::new(&mut sim, host, disk));
            for other in 0..at {
                let (one, other_ip) = (servers[at].ip, servers[other].ip);
                network.add(Between::servers(at, other), one, other_ip);
            }
        }
        let count = dice
            .millis(profile.clients.0, profile.clients.1)
            .as_millis();
        let mut machines = Vec::new();
        for number in 0..count {
            let name = format!("c{number}");
            let twin = number > 0 && dice.percent(profile.twins_percent);
            let client_id = if twin { "c0".to_owned() } else { name.clone() };
            let host = world.host_with_drift(&name, drift(&mut dice));
            let slot: Arc<Mutex<Option<Arc<Process>>>> = Arc::default();
            sim.host(name.as_str(), {
                let (host, slot) = (Arc::clone(&host), Arc::clone(&slot));
                move || {
                    let (host, process) = (Arc::clone(&host), slot.lock().unwrap().clone());
                    async move {
                        match process {
                            Some(process) => host.run(worker::run(process)).await,
                            None => Ok(()),
                        }
                    }
                }
            });
            let ip = sim.lookup(name.as_str());
            for (at, server) in servers.iter().enumerate() {
                let between = Between::client(machines.len(), at);
                network.add(between, ip, server.ip);
            }
            machines.push(Machine {
                host,
                client_id,
                process: None,
                slot,
                processes: 0,
                is_up: false,
                weight: 1,
                is_draining: false,
                pauses: 0,
                went_on: Duration::ZERO,
            });
        }
        let mut world = Self {
            sim,
            oracle: Oracle::new(profile),
            profile: profile.clone(),
            dice,
            machines,
            servers,
            network,
            wishes: Arc::new(Mutex::new(Wishes {
                settings: profile.settings.clone(),
                servers: (0..profile.servers).collect(),
                leaving: BTreeSet::new(),
                leader: None,
            })),
            timing: timing(latency),
            service: None,
            unserved_since: Duration::ZERO,
            well_since: None,
            later: BTreeMap::new(),
            scheduled: 0,
            last_event: Duration::ZERO,
            quiet_until: Duration::ZERO,
            restored_at: Duration::ZERO,
            ambush: None,
            calm: Arc::default(),
            group: GroupName::new(GROUP).unwrap(),
            trace: Trace::new(prints),
        };
        world.note(&format!(
            "{}: {} servers, network up to {latency} ms, disk {disk_ms} ms, {:?}",
            profile.name, profile.servers, profile.settings
        ));
        for at in 0..profile.servers {
            world.servers[at].take_in((0..profile.servers).collect());
        }
        world.start_server(0);
        for at in 1..profile.servers {
            let after = world.dice.millis(0, 200);
            world.schedule(after, Later::StartServer(at));
        }
        world
    }

    /// Trouble, then quiet, in which all must come right.
    ///
    /// # Errors
    /// What must not be.
    pub fn run(&mut self) -> Result<(), Violation> {
        self.run_for(50 * MS)?;
        if self.are_several() {
            self.form()?;
        }
        for machine in 0..self.machines.len() {
            if machine == 0 || self.dice.percent(60) {
                let after = self.dice.millis(0, 400);
                self.schedule(after, Later::Start(machine));
            }
        }
        let end = {
            let (least, most) = self.profile.trouble_ms;
            self.now() + self.dice.millis(least, most)
        };
        let every = self.dice.pick(&self.profile.every_ms);
        let mut next = self.now() + self.dice.millis(100, 600);
        while self.now() < end.max(self.restored_at) {
            if self.now() >= next.max(self.quiet_until) {
                next = self.now() + self.dice.millis(1, 2 * every);
                self.something_happens();
            }
            self.step()?;
        }
        self.heal();
        self.settle("after the trouble", Duration::from_secs(45))?;
        self.works()?;
        if self.dice.percent(50) {
            self.restart_quietly()?;
        }
        // Of two processes with one id, one stays outside.
        let ids: BTreeSet<&str> = self
            .machines
            .iter()
            .map(|it| it.client_id.as_str())
            .collect();
        let plain = ids.len() == self.machines.len() && self.profile.goes_without_quorum();
        if self.are_several() && plain && self.dice.percent(50) {
            self.one_is_enough()?;
        }
        if self.dice.percent(25) {
            self.all_leave()?;
        }
        Ok(())
    }

    fn now(&self) -> Duration {
        self.sim.elapsed()
    }

    fn note(&mut self, what: &str) {
        self.trace.at(self.sim.elapsed());
        self.trace.note(what);
    }

    fn schedule(&mut self, after: Duration, what: Later) {
        self.scheduled += 1;
        self.later
            .insert((self.now() + after, self.scheduled), what);
    }

    fn run_for(&mut self, duration: Duration) -> Result<(), Violation> {
        let end = self.now() + duration;
        while self.now() < end {
            self.step()?;
        }
        Ok(())
    }

    /// One millisecond.
    fn step(&mut self) -> Result<(), Violation> {
        while let Some(entry) = self.later.first_entry() {
            if entry.key().0 > self.sim.elapsed() {
                break;
            }
            let what = entry.remove();
            self.do_later(what);
        }
        self.network.carry(&self.sim);
        if let Err(error) = self.sim.step() {
            return Err(Violation::new("a process failed", error.to_string()));
        }
        self.reap();
        self.spring_ambush();
        self.observe()
    }

    /// Processes that have ended in good order.
    fn reap(&mut self) {
        for at in 0..self.machines.len() {
            let machine = &self.machines[at];
            if machine.is_up
                && machine
                    .process
                    .as_ref()
                    .is_some_and(|process| process.has_closed())
            {
                self.note(&format!("host {at}: closed"));
                self.kill(at);
            }
        }
        self.reap_servers();
        self.decommission();
    }

    fn observe(&mut self) -> Result<(), Violation> {
        let now = self.sim.elapsed();
        let mut views = self.views();
        for view in &mut views {
            let process = self.machines[view.host].process.as_ref();
            view.begun = process.map_or_else(Vec::new, |process| process.take_begun());
        }
        self.note_service();
        let applied = self.applied();
        let is_troubled = self.machines.iter().enumerate().any(|(at, machine)| {
            !self.network.is_clear(Place::Client(at))
                || (machine.is_up && machine.host.is_stopped())
        }) || self.servers_are_troubled(now);
        let reaches = |server: usize| {
            let up = self.machines_that(|machine| machine.is_up).into_iter();
            let links = up.map(|at| Between::client(at, server));
            self.network.are_clear(links)
        };
        let known = Known {
            now,
            is_troubled,
            is_reachable: self.service.is_some_and(|(server, ..)| reaches(server)),
            last_event: self.last_event,
            served_since: self.service.map(|(.., since)| since),
        };
        self.trace.at(now);
        self.oracle
            .observe(&known, &views, applied, &mut self.trace)
    }

    fn views(&self) -> Vec<View> {
        let now = self.sim.elapsed();
        let mut views = Vec::with_capacity(self.machines.len());
        for (host, machine) in self.machines.iter().enumerate() {
            let Some(process) = machine.process.as_ref().filter(|_| machine.is_up) else {
                continue;
            };
            let Some(client) = process.client() else {
                continue;
            };
            let willing = !machine.host.is_stopped()
                && !process.is_closing()
                && machine.weight > 0
                && !machine.is_draining;
            let inside = client.inspect_at(machine.host.clock_at(now));
            let numbered_by = inside.epoch.filter(|epoch| epoch.degraded > 0);
            views.push(View {
                host,
                process: machine.processes,
                client_id: machine.client_id.clone(),
                is_leaving: process.is_closing(),
                willing,
                weight: machine.weight,
                drains: machine.is_draining,
                by_follower: numbered_by
                    .is_some_and(|epoch| self.follows(usize::from(epoch.replica), host)),
                inside,
                running: process.running(),
                begun: Vec::new(),
            });
        }
        views
    }
}

/// Servers wait longer for each other where the network is slow.
fn timing(latency_ms: u64) -> Timing {
    let heartbeat = if latency_ms > 20 { 100 } else { 50 };
    Timing {
        heartbeat: Duration::from_millis(heartbeat),
        election_min: Duration::from_millis(3 * heartbeat),
        election_max: Duration::from_millis(6 * heartbeat),
    }
}

/// A rate error within the bound, often at its edge.
fn drift(dice: &mut Dice) -> i32 {
    match dice.below(3) {
        0 => -RATE_BOUND_PPM,
        1 => RATE_BOUND_PPM,
        _ => i32::try_from(dice.below(2_001)).unwrap_or(0) - RATE_BOUND_PPM,
    }
}
