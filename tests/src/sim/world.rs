//! One simulation: machines, processes, disk, network, and what happens to them.

use skyschedule_common::env::sim::{self as env_sim, Host, RATE_BOUND_PPM};
use skyschedule_common::ids::GroupName;
use skyschedule_common::protocol::messages::Consistency;
use skyschedule_server::consensus::MemoryDisk;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use turmoil::Sim;

use super::dice::Dice;
use super::network::{self, Kept, Link, Way};
use super::oracle::{Oracle, View, Violation, World as Known};
use super::profile::{Event, Profile};
use super::server;
use super::trace::Trace;
use super::worker::{self, GROUP, Process, SERVER, Setup};

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
        let disk =
            disk.with_latency(Duration::from_millis(dice.pick(&profile.disk_ms)));
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
        let views = self.views();
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
                inside: client.inspect_at(machine.host.clock_at(now)),
                running: process.running(),
                begun: process.take_begun(),
            });
        }
        views
    }

    // What happens.

    fn something_happens(&mut self) {
        let weights: Vec<u32> = self
            .profile
            .events
            .iter()
            .map(|(_, weight)| *weight)
            .collect();
        for _ in 0..10 {
            let Some(drawn) = self.dice.weighted(&weights) else {
                return;
            };
            if self.happens(self.profile.events[drawn].0) {
                return;
            }
        }
    }

    /// False: it cannot happen now.
    fn happens(&mut self, event: Event) -> bool {
        let up: Vec<usize> = self.machines_that(|machine| machine.is_up);
        let down = self.machines_that(|machine| !machine.is_up);
        let runs = self.machines_that(|machine| machine.is_up && !machine.host.is_stopped());
        let clear = self.machines_that(|machine| machine.is_up && machine.link == Link::Clear);
        let from = match event {
            Event::Start | Event::JoinThenAway | Event::TwoStarts => down.clone(),
            Event::Close
            | Event::Reset
            | Event::Pause
            | Event::Suspend
            | Event::NearLapse
            | Event::Weight
            | Event::Drain => runs,
            Event::Stall | Event::Cut | Event::LateAnswers | Event::LateFin => clear,
            Event::Kill | Event::PowerLoss | Event::Restart => up,
            _ => Vec::new(),
        };
        let server_runs = self.sky.up_since.is_some() && !self.sky.host.is_stopped();
        if from.is_empty() && !is_of_server(event) || is_of_server(event) && !server_runs {
            return false;
        }
        let at = if from.is_empty() {
            0
        } else {
            self.dice.pick(&from)
        };
        self.last_event = self.now();
        match event {
            Event::Start => self.start(at),
            Event::Close => self.close(at),
            Event::Kill => {
                self.note(&format!("host {at}: killed"));
                self.kill(at);
            }
            Event::PowerLoss => self.lose_power(at),
            Event::Restart => {
                self.note(&format!("host {at}: killed, and started again"));
                self.kill(at);
                let after = self.dice.millis(0, 300);
                self.schedule(after, Later::Start(at));
            }
            Event::Reset => {
                self.note(&format!("host {at}: its connections break"));
                self.machines[at].host.reset_connections();
            }
            Event::Pause | Event::Suspend => {
                let spell = self.spell();
                self.pause(at, spell, event == Event::Suspend);
            }
            Event::NearLapse => return self.near_lapse(at),
            Event::Stall => {
                let (way, kept) = (self.way(), self.kept(at));
                let spell = self.spell();
                self.link(at, Link::Stalled(way, kept), spell);
            }
            Event::Cut => {
                let (way, spell) = (self.way(), self.spell());
                self.link(at, Link::Cut(way), spell);
            }
            Event::LateAnswers => {
                let answers = self.dice.millis(300, 1_900);
                self.link(at, Link::Stalled(Way::ToClient, Kept::All), answers);
                let links = self.machines[at].links;
                let words = Link::Stalled(Way::ToServer, Kept::All);
                let spell = self.spell();
                self.schedule(answers, Later::Link(at, links, words, spell));
            }
            Event::LateFin => {
                let spell = self.dice.millis(100, 5_500);
                self.link(at, Link::Stalled(Way::Both, Kept::Ends), spell);
                self.note(&format!("host {at}: killed, and started again"));
                self.kill(at);
                let after = self.dice.millis(0, 300);
                self.schedule(after, Later::Start(at));
            }
            Event::Weight => self.set_weight(at),
            Event::Drain => {
                let machine = &mut self.machines[at];
                machine.is_draining = !machine.is_draining;
                let away = machine.is_draining;
                self.note(&format!("host {at}: drains: {away}"));
                self.tell_wishes(at);
            }
            Event::ServerKill => {
                let away = self.outage();
                self.kill_server(away);
            }
            Event::ServerPowerLoss => {
                let away = self.outage();
                self.server_loses_power(away);
            }
            Event::ServerRestart => self.stop_server(),
            Event::ServerPause => {
                let spell = self.spell();
                self.note(&format!("server: stopped for {spell:?}"));
                if self.dice.percent(30) {
                    self.sky.host.suspend();
                } else {
                    self.sky.host.pause();
                }
                self.schedule(spell, Later::ResumeServer);
            }
            Event::JoinThenAway => {
                if !server_runs {
                    return false;
                }
                self.start(at);
                let away = self.dice.millis(3_500, 6_500);
                let soon = self.dice.millis(1, 500);
                self.schedule(soon, Later::KillServer(away));
                self.quiet_until = self.now() + soon + away;
            }
            Event::CrashAtCommit => {
                if let Some(at) = down.first().copied().filter(|_| self.dice.percent(70)) {
                    self.start(at);
                } else if let Some(at) = self.machines.iter().position(|machine| machine.is_up) {
                    self.note(&format!("host {at}: killed"));
                    self.kill(at);
                }
                let soon = self.dice.millis(1, 60);
                self.schedule(soon, Later::LosePower);
            }
            Event::TwoStarts => {
                for at in down.into_iter().take(2) {
                    let soon = self.dice.millis(0, 20);
                    self.schedule(soon, Later::Start(at));
                }
            }
            Event::Backup => {
                self.note("server: a backup is made");
                self.sky.backup = Some(self.sky.disk.copy());
            }
            Event::Restore => {
                let Some(backup) = &self.sky.backup else {
                    return false;
                };
                let disk = backup.copy();
                self.replace_disk(disk, "an older copy");
            }
            Event::DiskLoss => {
                let disk = MemoryDisk::new().with_latency(Duration::from_millis(3));
                self.replace_disk(disk, "nothing");
            }
        }
        true
    }

    fn machines_that(&self, fit: impl Fn(&Machine) -> bool) -> Vec<usize> {
        let numbered = self.machines.iter().enumerate();
        numbered
            .filter(|(_, machine)| fit(machine))
            .map(|(at, _)| at)
            .collect()
    }

    /// How long something lasts: often close to a lease.
    fn spell(&mut self) -> Duration {
        match self.dice.below(4) {
            0 => self.dice.millis(1, 200),
            1 => self.dice.millis(200, 1_500),
            2 => self.dice.millis(1_800, 2_300),
            _ => self.dice.millis(2_300, 5_500),
        }
    }

    fn outage(&mut self) -> Duration {
        if self.profile.name == "orderly" {
            return self.dice.millis(1, 200);
        }
        match self.dice.below(4) {
            0 | 1 => self.dice.millis(1, 300),
            2 => self.dice.millis(300, 2_500),
            _ => self.dice.millis(2_500, 6_000),
        }
    }

    fn way(&mut self) -> Way {
        self.dice.pick(&[Way::ToServer, Way::ToClient, Way::Both])
    }

    fn kept(&mut self, at: usize) -> Kept {
        match self.dice.below(4) {
            0 => Kept::Ends,
            1 => Kept::Old(self.machines[at].port),
            _ => Kept::All,
        }
    }

    // Clients.

    fn start(&mut self, at: usize) {
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

    fn close(&mut self, at: usize) {
        self.note(&format!("host {at}: closes"));
        if let Some(process) = &self.machines[at].process {
            process.close();
        }
    }

    /// The process ends; its kernel says so.
    fn kill(&mut self, at: usize) {
        let machine = &mut self.machines[at];
        machine.pauses += 1;
        env_sim::kill(&mut self.sim, &machine.host);
        if let Some(process) = &machine.process {
            process.bury();
        }
        machine.is_up = false;
    }

    fn lose_power(&mut self, at: usize) {
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

    fn pause(&mut self, at: usize, spell: Duration, suspend: bool) {
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
    fn near_lapse(&mut self, at: usize) -> bool {
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

    fn link(&mut self, at: usize, link: Link, spell: Duration) {
        self.note(&format!("host {at}: network {link:?} for {spell:?}"));
        let (ip, server) = (self.machines[at].ip, self.sky.ip);
        network::set(&self.sim, &mut self.machines[at].link, link, ip, server);
        let machine = &mut self.machines[at];
        machine.links += 1;
        let links = machine.links;
        self.schedule(spell, Later::Clear(at, links));
    }

    fn set_weight(&mut self, at: usize) {
        let weight = u32::try_from(self.dice.below(4)).unwrap_or(1);
        self.machines[at].weight = weight;
        self.note(&format!("host {at}: weight {weight}"));
        self.tell_wishes(at);
    }

    fn tell_wishes(&self, at: usize) {
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

    fn start_server(&mut self) {
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

    fn server_dies(&mut self, written_survives: bool) {
        let dice = &mut self.dice;
        if written_survives {
            self.sky.disk.crash(|| true);
        } else {
            let kept = dice.pick(&[0, 50, 90, 100]);
            self.sky.disk.crash(|| dice.percent(kept));
        }
        env_sim::kill(&mut self.sim, &self.sky.host);
        if let Some(process) = self.sky.process.take() {
            process.bury();
        }
        self.sky.up_since = None;
        self.sky.down_since = self.now();
    }

    fn kill_server(&mut self, away: Duration) {
        self.note(&format!("server: killed, away for {away:?}"));
        self.server_dies(true);
        self.schedule(away, Later::StartServer);
    }

    fn server_loses_power(&mut self, away: Duration) {
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

    fn stop_server(&mut self) {
        self.note("server: asked to stop");
        if let Some(process) = &self.sky.process {
            process.stop();
        }
        let away = self.outage() + Duration::from_millis(250);
        self.schedule(away, Later::StartServer);
    }

    fn replace_disk(&mut self, disk: MemoryDisk, by: &str) {
        let away = self.outage();
        self.note(&format!(
            "server: killed, comes back with {by} on its disk in {away:?}"
        ));
        self.server_dies(true);
        self.sky.disk = disk;
        self.oracle.lose_history(self.sim.elapsed() + away);
        self.schedule(away, Later::StartServer);
    }

    fn do_later(&mut self, what: Later) {
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

    // The end.

    /// No more trouble: what was broken is whole, what stood still goes on.
    fn heal(&mut self) {
        self.note("no more trouble");
        self.calm.store(true, Ordering::Relaxed);
        self.later.clear();
        let server = self.sky.ip;
        for at in 0..self.machines.len() {
            let machine = &mut self.machines[at];
            network::set(
                &self.sim,
                &mut machine.link,
                Link::Clear,
                machine.ip,
                server,
            );
            machine.host.resume();
            machine.is_draining = false;
            machine.weight = machine.weight.max(1);
            if machine.is_up {
                self.tell_wishes(at);
            } else if self.dice.percent(50) || at == 0 {
                self.start(at);
            }
        }
        self.sky.host.resume();
        self.sky.up_since = self.sky.up_since.map(|_| self.now());
        let stopping = self.sky.up_since.is_some();
        self.start_server();
        if stopping {
            // It may have been asked to stop just before.
            self.schedule(Duration::from_millis(400), Later::StartServer);
        }
        self.last_event = self.now();
    }

    /// Waits until all is settled, and has been for a while.
    fn settle(&mut self, when: &str, limit: Duration) -> Result<(), Violation> {
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
            let views = self.views_again();
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

    /// The views once more within the same step, without what was begun.
    fn views_again(&self) -> Vec<View> {
        self.views()
    }

    /// In an available group every client knows that its share is all that it may fall back to.
    fn all_heard(&self) -> Result<(), String> {
        if self.sky.up_since.is_none() {
            return Err("the server is away".to_owned());
        }
        for (at, machine) in self.machines.iter().enumerate() {
            let client = machine.process.as_ref().filter(|_| machine.is_up);
            let Some(client) = client.and_then(|process| process.client()) else {
                continue;
            };
            let status = client.shares().borrow().clone();
            if status.epoch.is_some() && !status.settled {
                return Err(format!("host {at} does not know that all is settled"));
            }
        }
        Ok(())
    }

    /// Every client that has rows works on them.
    fn works(&mut self) -> Result<(), Violation> {
        let count = |world: &Self| -> Vec<(usize, u64, bool)> {
            let views = world.views();
            views
                .iter()
                .map(|view| {
                    let process = world.machines[view.host].process.as_ref();
                    let has_rows = worker::KEYS.any_in(&view.inside.rows);
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

    /// Promise 6: a server that is away for a while and comes back moves no share.
    fn restart_quietly(&mut self) -> Result<(), Violation> {
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
        match self.dice.below(3) {
            0 => self.kill_server(away),
            1 => self.server_loses_power(away),
            _ => self.stop_server(),
        }
        self.run_for(away)?;
        self.settle("after a restart of the server", Duration::from_secs(12))?;
        let after = shares(self);
        if before != after {
            return Err(Violation::new(
                "shares moved",
                format!("the server restarted, and {before:?} became {after:?}"),
            ));
        }
        Ok(())
    }

    /// Everyone says goodbye; nothing is left behind.
    fn all_leave(&mut self) -> Result<(), Violation> {
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
        // Half-open connections of the trouble end at the idle limit.
        self.run_for(self.profile.longest_lease() * 3 + Duration::from_millis(500))?;
        let members = self.oracle.state().map_or(0, |group| group.members().len());
        let seen = self.sky.process.as_ref().and_then(|process| process.seen());
        let metrics = seen.map(|seen| seen.metrics.encode()).unwrap_or_default();
        let open = metrics
            .lines()
            .find(|line| line.starts_with("skyschedule_connections "))
            .unwrap_or("no metric of connections")
            .to_owned();
        if members > 0 || !open.ends_with(" 0") {
            return Err(Violation::new(
                "left behind",
                format!("all have left, and there are {members} members, and {open}"),
            ));
        }
        Ok(())
    }
}

/// Whether some key is among rows.
trait AnyIn {
    fn any_in(&self, rows: &skyschedule_common::share::ShareUnion) -> bool;
}

impl AnyIn for std::ops::RangeInclusive<i64> {
    fn any_in(&self, rows: &skyschedule_common::share::ShareUnion) -> bool {
        self.clone().any(|key| rows.contains(key.into()))
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

fn is_of_server(event: Event) -> bool {
    matches!(
        event,
        Event::ServerKill
            | Event::ServerPowerLoss
            | Event::ServerRestart
            | Event::ServerPause
            | Event::CrashAtCommit
            | Event::Backup
            | Event::Restore
            | Event::DiskLoss
    )
}
