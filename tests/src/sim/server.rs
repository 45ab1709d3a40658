//! A server's process, and the disk that outlives it.

use skyschedule_common::env::{self, sim as env_sim};
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_server::config::{Config, Timing, User};
use skyschedule_server::consensus::{Consensus, ConsensusError, MemoryDisk, Options, Storage};
use skyschedule_server::metrics::Metrics;
use skyschedule_server::state::{Change, Command, Joining, Settings};
use skyschedule_server::{RunError, Server, StartError};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

use super::network::PORT;
use super::operator::{self, Wishes};
use super::worker::{GROUP, server_name};

/// What the driver sees of a server's process.
#[derive(Debug)]
pub struct Seen {
    /// Its memory.
    pub consensus: Consensus,
    /// What it counts.
    pub metrics: Metrics,
}

/// How a server's process is set up.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Which of the servers.
    pub at: usize,
    /// The servers of its configuration, itself included.
    pub peers: BTreeSet<usize>,
    /// How long they wait for each other.
    pub timing: Timing,
    /// How long they wait before they number clients without a quorum.
    pub degraded_after: Duration,
    /// Its disk.
    pub disk: MemoryDisk,
    /// What the operator wants.
    pub wishes: Arc<Mutex<Wishes>>,
}

/// One run of a server's process.
#[derive(Debug)]
pub struct Process {
    /// How it is set up.
    pub setup: Setup,
    seen: Mutex<Option<Arc<Seen>>>,
    stop: Notify,
    stopped: Mutex<bool>,
    /// The operator wants other settings.
    pub configure: Notify,
    /// The operator wants other servers, or another leader.
    pub change: Notify,
}

impl Process {
    /// A process that has not run yet.
    pub fn new(setup: Setup) -> Arc<Self> {
        Arc::new(Self {
            setup,
            seen: Mutex::default(),
            stop: Notify::new(),
            stopped: Mutex::default(),
            configure: Notify::new(),
            change: Notify::new(),
        })
    }

    /// What it shows, once it runs.
    pub fn seen(&self) -> Option<Arc<Seen>> {
        self.seen.lock().unwrap().clone()
    }

    /// Asks it to stop in good order.
    pub fn stop(&self) {
        self.stop.notify_one();
    }

    /// The operator wants something.
    pub fn wish(&self) {
        self.configure.notify_one();
        self.change.notify_one();
    }

    /// Whether it has stopped in good order.
    pub fn has_stopped(&self) -> bool {
        *self.stopped.lock().unwrap()
    }

    /// Whether the operator wants it in the cluster.
    fn is_wanted(&self) -> bool {
        let wishes = self.setup.wishes.lock().unwrap();
        wishes.servers.contains(&self.setup.at)
    }

    /// It has ended by itself, since the cluster goes on without it.
    async fn removed(&self) -> turmoil::Result {
        self.bury();
        *self.stopped.lock().unwrap() = true;
        std::future::pending().await
    }

    /// The process is dead.
    pub fn bury(&self) {
        self.seen.lock().unwrap().take();
    }
}

/// A disk of a server that has served the group before: a client joined, and left. (One without any memory gives
/// out no rows of an exclusive group for a lease.)
pub fn used_disk(settings: &Settings) -> MemoryDisk {
    let disk = MemoryDisk::new();
    let mut sim = turmoil::Builder::new().rng_seed(0).build();
    let host = env_sim::World::new(0).host_with_drift("once", 0);
    let (kept, settings) = (disk.clone(), settings.clone());
    sim.client(
        "once",
        host.run(async move {
            let (consensus, mut decided) =
                Consensus::open(Options::new(Storage::Memory(kept))).await?;
            let group = GroupName::new(GROUP)?;
            let joining = Joining {
                client: ClientId::new("once")?,
                incarnation: Incarnation(1),
                weight: 1,
                consistency: None,
            };
            let lease = settings.base_lease();
            let changes = [
                Change::Configure {
                    settings,
                    start: true,
                },
                Change::LeaseLength(lease),
                Change::Join {
                    members: vec![joining],
                    start: true,
                },
                Change::Leave {
                    members: vec![1],
                    start: true,
                },
            ];
            let commands = changes.map(|change| Command::Group {
                group: group.clone(),
                change,
            });
            consensus.propose(&commands)?;
            for _ in 0..2 {
                decided.recv().await;
            }
            consensus.shutdown().await;
            Ok(())
        }),
    );
    sim.run().unwrap();
    disk
}

/// Runs the process.
///
/// # Errors
/// When the server does not start, or ends by itself.
pub async fn run(process: Arc<Process>) -> turmoil::Result {
    let Setup {
        at,
        ref peers,
        timing,
        degraded_after,
        ref disk,
        ..
    } = process.setup;
    let mut config = Config::embedded("never used");
    config.listen = ([0, 0, 0, 0], PORT).into();
    config.users.push(User::new("moon", "walker")?);
    config.timing = timing;
    config.degraded_after = degraded_after;
    config.replica_id = replica_id(at);
    if peers.len() > 1 {
        let peers = peers.iter();
        config.peers = peers.map(|at| (replica_id(*at), address(*at))).collect();
        config.cluster_secret = Some("a secret of the simulation".into());
    }
    let memory = Options {
        // Often, so that restarts begin from snapshots, too.
        snapshot_every: 20,
        ..Options::new(Storage::Memory(disk.clone()))
    };
    let mut server = match Server::start_with(config, memory).await {
        Err(StartError::Consensus(ConsensusError::Removed { .. })) if !process.is_wanted() => {
            return process.removed().await;
        }
        started => started?,
    };
    let handle = server.handle().clone();
    let consensus = server.consensus().clone();
    *process.seen.lock().unwrap() = Some(Arc::new(Seen {
        consensus: consensus.clone(),
        metrics: server.metrics().clone(),
    }));
    tokio::select! {
        biased;
        () = process.stop.notified() => {}
        failed = server.failed() => match failed {
            Err(RunError::Consensus(ConsensusError::Removed { .. })) if !process.is_wanted() => {
                return process.removed().await;
            }
            other => other?,
        },
        failed = operator::configure(&process, &consensus, &handle) => match failed? {},
        never = operator::change_servers(&process, &consensus) => match never {},
    }
    drop(consensus);
    server.shutdown().await?;
    *process.stopped.lock().unwrap() = true;
    env::sleep(Duration::from_secs(3_600)).await;
    Ok(())
}

/// The number that a server has for its cluster.
pub fn replica_id(at: usize) -> u16 {
    u16::try_from(at + 1).unwrap_or(u16::MAX)
}

/// Where the other servers find it.
pub fn address(at: usize) -> String {
    format!("{}:{PORT}", server_name(at))
}
