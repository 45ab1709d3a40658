//! One simulation: machines, processes, disk and network, and the steps of time.
//!
//! | file | one idea |
//! |---|---|
//! | `trouble` | what happens |
//! | `deeds` | how it is done |
//! | `quiet` | the end, in which all must come right |

use skyschedule_common::env::sim::{self as env_sim, Host, RATE_BOUND_PPM};
use skyschedule_common::ids::GroupName;
use skyschedule_server::consensus::MemoryDisk;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use turmoil::Sim;

mod deeds;
mod quiet;
mod trouble;

use super::dice::Dice;
use super::network::{self, Link};
use super::oracle::{Oracle, View, Violation, World as Known};
use super::profile::Profile;
use super::server;
use super::trace::Trace;
use super::worker::{self, GROUP, Process, SERVER};

const MS: Duration = Duration::from_millis(1);

/// A server that is back within this time is no trouble to anybody.
const SHORT_OUTAGE: Duration = Duration::from_millis(300);

/// A client's machine.
struct Machine {
    host: Arc<Host>,
    ip: IpAddr,
    client_id: String,
    link: Link,
    /// The newest port that a connection of it had.
    port: u16,
    /// The process that runs, or the last one.
    process: Option<Arc<Process>>,
    /// What the machine runs when it is started next.
    slot: Arc<Mutex<Option<Arc<Process>>>>,
    processes: u64,
    is_up: bool,
    weight: u32,
    is_draining: bool,
    pauses: u64,
    links: u64,
}

/// The server's machine.
struct Sky {
    host: Arc<Host>,
    ip: IpAddr,
    disk: MemoryDisk,
    backup: Option<MemoryDisk>,
    slot: Arc<Mutex<Option<Arc<server::Process>>>>,
    process: Option<Arc<server::Process>>,
    up_since: Option<Duration>,
    down_since: Duration,
}

/// What is done later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Later {
    Start(usize),
    Resume(usize, u64),
    Clear(usize, u64),
    Link(usize, u64, Link, Duration),
    StartServer,
    ResumeServer,
    LosePower,
    KillServer(Duration),
}

/// One simulation.
pub struct World {
    sim: Sim<'static>,
    profile: Profile,
    dice: Dice,
    machines: Vec<Machine>,
    sky: Sky,
    later: BTreeMap<(Duration, u64), Later>,
    scheduled: u64,
    last_event: Duration,
    /// Nothing new happens before.
    quiet_until: Duration,
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
        let disk = if profile.is_exclusive() {
            server::used_disk(&profile.settings)
        } else {
            MemoryDisk::new()
        };
        let disk = disk.with_latency(Duration::from_millis(dice.pick(&profile.disk_ms)));
        let slot: Arc<Mutex<Option<Arc<server::Process>>>> = Arc::default();
        let host = world.host_with_drift(SERVER, drift(&mut dice));
        sim.host(SERVER, {
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
        let ip = sim.lookup(SERVER);
        let sky = Sky {
            host,
            ip,
            disk,
            backup: None,
            slot,
            process: None,
            up_since: None,
            down_since: Duration::ZERO,
        };
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
            machines.push(Machine {
                ip: sim.lookup(name.as_str()),
                host,
                client_id,
                link: Link::Clear,
                port: 0,
                process: None,
                slot,
                processes: 0,
                is_up: false,
                weight: 1,
                is_draining: false,
                pauses: 0,
                links: 0,
            });
        }
        let mut world = Self {
            sim,
            oracle: Oracle::new(profile),
            profile: profile.clone(),
            dice,
            machines,
            sky,
            later: BTreeMap::new(),
            scheduled: 0,
            last_event: Duration::ZERO,
            quiet_until: Duration::ZERO,
            calm: Arc::default(),
            group: GroupName::new(GROUP).unwrap(),
            trace: Trace::new(prints),
        };
        world.note(&format!(
            "{}: network up to {latency} ms, {:?}",
            profile.name, profile.settings
        ));
        world.start_server();
        world
    }

    /// Trouble, then quiet, in which all must come right.
    ///
    /// # Errors
    /// What must not be.
    pub fn run(&mut self) -> Result<(), Violation> {
        self.run_for(50 * MS)?;
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
        while self.now() < end {
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
        self.carry();
        if let Err(error) = self.sim.step() {
            return Err(Violation::new("a process failed", error.to_string()));
        }
        self.reap();
        self.observe()
    }

    fn carry(&mut self) {
        let mut links: Vec<(IpAddr, Link, u16)> = self
            .machines
            .iter()
            .map(|machine| (machine.ip, machine.link, machine.port))
            .collect();
        network::carry(&self.sim, &mut links);
        for (machine, (.., port)) in self.machines.iter_mut().zip(links) {
            machine.port = port;
        }
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
        let stopped = self
            .sky
            .process
            .as_ref()
            .is_some_and(|process| process.has_stopped());
        if stopped && self.sky.up_since.is_some() {
            self.note("server: stopped");
            self.server_dies(true);
        }
    }

    fn observe(&mut self) -> Result<(), Violation> {
        let now = self.sim.elapsed();
        let mut views = self.views();
        for view in &mut views {
            let process = self.machines[view.host].process.as_ref();
            view.begun = process.map_or_else(Vec::new, |process| process.take_begun());
        }
        let group = &self.group;
        let known = self.oracle.state();
        let state = self.sky.process.as_ref().and_then(|process| process.seen());
        // `None`: unchanged, or nobody there to ask.
        let state = state.and_then(|seen| {
            seen.consensus.read(|state| {
                let group = state.group(group);
                (group != known).then(|| (group.cloned(), state.check()))
            })
        });
        let is_troubled = self.machines.iter().any(|machine| {
            machine.link != Link::Clear || (machine.is_up && machine.host.is_stopped())
        }) || self.sky.host.is_stopped()
            || (self.sky.up_since.is_none() && now > self.sky.down_since + SHORT_OUTAGE);
        let server_since = self
            .sky
            .up_since
            .filter(|_| !self.sky.host.is_stopped())
            .filter(|_| {
                self.sky
                    .process
                    .as_ref()
                    .is_some_and(|process| process.seen().is_some())
            });
        let carries = |machine: &Machine| !machine.is_up || machine.link == Link::Clear;
        let known = Known {
            now,
            is_troubled,
            is_reachable: server_since.is_some() && self.machines.iter().all(carries),
            last_event: self.last_event,
            server_since,
        };
        self.trace.at(now);
        self.oracle.observe(&known, &views, state, &mut self.trace)
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
            views.push(View {
                host,
                process: machine.processes,
                client_id: machine.client_id.clone(),
                willing,
                weight: machine.weight,
                drains: machine.is_draining,
                inside: client.inspect_at(machine.host.clock_at(now)),
                running: process.running(),
                begun: Vec::new(),
            });
        }
        views
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
