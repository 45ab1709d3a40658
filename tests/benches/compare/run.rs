//! The order of things: each system has the same members and the same events.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use skyschedule_common::env::{self, Instant};
use tempfile::TempDir;
use tokio::process::Child;

use crate::common::Result;
use crate::common::members::look;
use crate::common::newcomer::Newcomer;
use crate::common::process::{Worker, memory};
use crate::common::report::{Report, Row, Samples, Yardstick};
use crate::common::server::rest;
use crate::{Options, etcd, zookeeper};

/// Processes that the members are spread over.
const PROCESSES: usize = 2;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);
/// The shortest lease that SkySchedule allows, in milliseconds.
const LEASE: u64 = 2_000;
const GROUP: &str = "compared";

/// At most so many times the plain watch, which promises less.
const WATCH_BAR: f64 = 1.5;
/// At least five times faster than the same promise.
const PROMISE_BAR: f64 = 0.2;
/// At most a fifth of the memory.
const MEMORY_BAR: f64 = 0.2;

/// What happens, in the order of an outcome's times.
const EVENTS: [&str; 4] = [
    "one joins",
    "one leaves",
    "SIGKILL of one",
    "SIGSTOP of one",
];

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq)]
enum System {
    SkySchedule,
    Etcd { acknowledged: bool },
    ZooKeeper { acknowledged: bool },
}

impl System {
    const OTHERS: [(Self, &'static str); 4] = [
        (
            Self::Etcd {
                acknowledged: false,
            },
            "etcd, watch",
        ),
        (Self::Etcd { acknowledged: true }, "etcd, acknowledged"),
        (
            Self::ZooKeeper {
                acknowledged: false,
            },
            "ZooKeeper, watch",
        ),
        (
            Self::ZooKeeper { acknowledged: true },
            "ZooKeeper, acknowledged",
        ),
    ];

    /// The role of its members' processes.
    fn role(self) -> &'static str {
        match self {
            Self::SkySchedule => "members",
            Self::Etcd { .. } => "etcd",
            Self::ZooKeeper { .. } => "zookeeper",
        }
    }

    fn is_acknowledged(self) -> bool {
        matches!(
            self,
            Self::Etcd { acknowledged: true } | Self::ZooKeeper { acknowledged: true }
        )
    }
}

/// What one system showed with one number of members.
struct Outcome {
    /// By event.
    times: [Samples; EVENTS.len()],
    /// Memory of the server a member, in bytes.
    memory: f64,
}

/// Measures everything.
pub(crate) async fn all(options: &Options, report: &mut Report) -> Result<()> {
    for &size in &options.members {
        for (system, name) in System::OTHERS {
            // Next to each of the others, since a shared machine is not always the same.
            let ours = measure(System::SkySchedule, size, options.rounds).await?;
            let theirs = measure(system, size, options.rounds).await?;
            let bar = if system.is_acknowledged() {
                PROMISE_BAR
            } else {
                WATCH_BAR
            };
            for (at, event) in EVENTS.into_iter().enumerate() {
                report.add(row(
                    format!("{size} members: {event}"),
                    "ms",
                    &ours.times[at],
                    name,
                    &theirs.times[at],
                    bar,
                ));
            }
            if !system.is_acknowledged() {
                let [ours, theirs] = [&ours, &theirs].map(|outcome| Samples::one(outcome.memory));
                report.add(row(
                    format!("{size} members: memory a member"),
                    "bytes",
                    &ours,
                    name,
                    &theirs,
                    MEMORY_BAR,
                ));
            }
        }
    }
    Ok(())
}

fn row(
    what: String,
    unit: &'static str,
    ours: &Samples,
    name: &'static str,
    theirs: &Samples,
    bar: f64,
) -> Row {
    Row {
        what,
        unit,
        ours: ours.clone(),
        yardstick: Some(Yardstick {
            name,
            samples: theirs.clone(),
            bar: Some(bar),
        }),
    }
}

async fn measure(system: System, size: usize, rounds: usize) -> Result<Outcome> {
    let mut stage = Stage::set(system, size).await?;
    let before = memory(stage.server.pid()?)?;
    stage.gather().await?;
    env::sleep(Duration::from_secs(1)).await;
    let memory = memory(stage.server.pid()?)?.saturating_sub(before) as f64 / size as f64;
    let [mut joins, mut leaves, mut kills, mut stops] = [const { Samples::NONE }; 4];
    for round in 0..rounds {
        let (victim, took) = stage.join(&format!("leaves{round}")).await?;
        joins.push(took);
        leaves.push(stage.leave(victim).await?);
    }
    for (signal, times) in [(Signal::KILL, &mut kills), (Signal::STOP, &mut stops)] {
        for round in 0..rounds.min(3) {
            let name = format!("{signal:?}{round}").replace(['(', ')'], "");
            times.push(stage.lose(&name, signal).await?);
        }
    }
    Ok(Outcome {
        times: [joins, leaves, kills, stops],
        memory,
    })
}

/// A server.
enum Server {
    Ours(Worker),
    Other(Child),
}

impl Server {
    fn pid(&self) -> Result<u32> {
        match self {
            Self::Ours(worker) => worker.pid(),
            Self::Other(child) => Ok(child.id().ok_or("the server has ended")?),
        }
    }
}

/// A member that will leave in good order.
enum Victim {
    ByHand(Newcomer),
    Process(Worker),
}

/// A server with its members.
struct Stage {
    system: System,
    server: Server,
    address: String,
    members: Vec<Worker>,
    size: usize,
    _folder: TempDir,
}

impl Stage {
    async fn set(system: System, size: usize) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (server, address) = match system {
            System::SkySchedule => {
                let path = folder.path().display().to_string();
                let mut server = Worker::start("server", &[&path])?;
                let address = server.ask("address").await?;
                server
                    .ask::<()>(&format!("found {GROUP} 0 {LEASE}"))
                    .await?;
                (Server::Ours(server), address)
            }
            System::Etcd { .. } => {
                let (server, address) = etcd::serve(folder.path(), free_ports()?)?;
                (Server::Other(server), address)
            }
            System::ZooKeeper { .. } => {
                let [port, _] = free_ports()?;
                let (server, address) = zookeeper::serve(folder.path(), port)?;
                (Server::Other(server), address)
            }
        };
        let start = |_| Worker::start(system.role(), &[&address]);
        let mut members = (0..PROCESSES).map(start).collect::<Result<Vec<_>>>()?;
        if let Server::Other(_) = server {
            accepts(address.trim_start_matches("http://")).await?;
            members[0].ask::<()>("found").await?;
        }
        Ok(Self {
            system,
            server,
            address,
            members,
            size,
            _folder: folder,
        })
    }

    async fn gather(&mut self) -> Result<()> {
        let Self { system, size, .. } = *self;
        let ask = self.members.iter_mut().enumerate();
        let ask = ask.map(|(at, worker)| async move {
            let count = (size + at) / PROCESSES;
            enter(system, worker, &format!("m{at}"), count).await
        });
        futures_util::future::try_join_all(ask).await?;
        self.numbered(size).await?;
        if self.system.is_acknowledged() {
            for worker in &mut self.members {
                worker.ask::<()>("acknowledge").await?;
            }
        }
        Ok(())
    }

    /// Waits until all members know that `total` are there; since when they do.
    async fn numbered(&mut self, total: usize) -> Result<Instant> {
        let (total, size) = (u32::try_from(total)?, self.size);
        let right = [(total, (size, size as u64))].into();
        let deadline = env::now() + PATIENCE;
        loop {
            let tally = look(&mut self.members).await?;
            if tally.shares == right {
                return Ok(Instant::from_nanos(tally.last));
            }
            if env::now() > deadline {
                return Err(format!(
                    "{:?}: not {total} within {PATIENCE:?}: {tally:?}",
                    self.system
                )
                .into());
            }
            env::sleep(Duration::from_millis(3)).await;
        }
    }

    /// One joins; how long it took until all knew.
    async fn join(&mut self, name: &str) -> Result<(Victim, Duration)> {
        let total = self.size + 1;
        let (mut victim, began, served) = match self.system {
            System::SkySchedule => {
                let address = self.address.parse()?;
                let newcomer =
                    Newcomer::join(address, GROUP, name, u32::try_from(total)?, 1).await?;
                let (began, served) = (newcomer.began, newcomer.served);
                (Victim::ByHand(newcomer), began, served)
            }
            _ => {
                let (mut worker, began) = self.start(name).await?;
                let served = loop {
                    let tally = look(std::slice::from_mut(&mut worker)).await?;
                    if tally.shares.contains_key(&u32::try_from(total)?) {
                        break Instant::from_nanos(tally.last);
                    }
                    env::sleep(Duration::from_millis(3)).await;
                };
                (Victim::Process(worker), began, served)
            }
        };
        let last = self.numbered(total).await?.max(served);
        let took = last.saturating_duration_since(began);
        match &mut victim {
            Victim::ByHand(newcomer) => newcomer.rest(took).await,
            Victim::Process(_) => self.rest(took).await,
        }
        Ok((victim, took))
    }

    /// A member in a process of its own; when it joined.
    async fn start(&mut self, name: &str) -> Result<(Worker, Instant)> {
        let mut worker = Worker::start(self.system.role(), &[&self.address])?;
        if self.system.is_acknowledged() {
            worker.ask::<()>("acknowledge").await?;
        }
        let began = enter(self.system, &mut worker, name, 1).await?;
        Ok((worker, began))
    }

    /// Waits until the next change is a change of its own. A signal's time is mostly that of a lease; what
    /// counts here is that of the renumbering.
    async fn rest(&self, took: Duration) {
        match self.system {
            System::SkySchedule => rest(took.min(Duration::from_millis(250))).await,
            _ => env::sleep(Duration::from_millis(200)).await,
        }
    }

    async fn leave(&mut self, victim: Victim) -> Result<Duration> {
        let (began, took) = match victim {
            Victim::ByHand(newcomer) => {
                let (began, peer) = newcomer.leave().await;
                let end = self.numbered(self.size).await?;
                drop(peer);
                (began, end)
            }
            Victim::Process(mut worker) => {
                let began = Instant::from_nanos(worker.ask("leave").await?);
                let end = self.numbered(self.size).await?;
                worker.end().await?;
                (began, end)
            }
        };
        let took = took.saturating_duration_since(began);
        self.rest(took).await;
        Ok(took)
    }

    /// One joins, and gets a signal.
    async fn lose(&mut self, name: &str, signal: Signal) -> Result<Duration> {
        let (worker, joined) = self.start(name).await?;
        let end = self.numbered(self.size + 1).await?;
        self.rest(end.saturating_duration_since(joined)).await;
        let pid = Pid::from_raw(i32::try_from(worker.pid()?)?).ok_or("a process without an id")?;
        let began = env::now();
        kill_process(pid, signal)?;
        let took = self
            .numbered(self.size)
            .await?
            .saturating_duration_since(began);
        worker.kill().await?;
        self.rest(took).await;
        Ok(took)
    }
}

/// Lets members of a process in; when they joined.
async fn enter(system: System, worker: &mut Worker, name: &str, count: usize) -> Result<Instant> {
    if system == System::SkySchedule {
        let command = format!("connect {GROUP} {name} {count}");
        return Ok(Instant::from_nanos(worker.ask(&command).await?));
    }
    worker.ask::<()>(&format!("connect {name} {count}")).await?;
    Ok(Instant::from_nanos(worker.ask("join").await?))
}

/// Two ports that nobody uses at present.
fn free_ports() -> Result<[u16; 2]> {
    let port = || std::net::TcpListener::bind("127.0.0.1:0")?.local_addr();
    Ok([port()?.port(), port()?.port()])
}

/// Waits until somebody listens there.
async fn accepts(address: &str) -> Result<()> {
    let address = address.parse()?;
    let deadline = env::now() + PATIENCE;
    while env::net::Stream::connect(address).await.is_err() {
        if env::now() > deadline {
            return Err(format!("nobody listens at {address}").into());
        }
        env::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
