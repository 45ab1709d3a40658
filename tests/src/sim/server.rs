//! The server's process, and the disk that outlives it.

use skyschedule_common::env::{self, sim as env_sim};
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_server::Server;
use skyschedule_server::config::{Config, User};
use skyschedule_server::consensus::{Consensus, MemoryDisk, Options, Storage};
use skyschedule_server::metrics::Metrics;
use skyschedule_server::state::{Change, Command, Joining, Settings};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

use super::network::PORT;
use super::worker::GROUP;

/// What the driver sees of a server's process.
#[derive(Debug)]
pub struct Seen {
    /// Its memory.
    pub consensus: Consensus,
    /// What it counts.
    pub metrics: Metrics,
}

/// One run of the server's process.
#[derive(Debug)]
pub struct Process {
    disk: MemoryDisk,
    settings: Settings,
    seen: Mutex<Option<Arc<Seen>>>,
    stop: Notify,
    stopped: Mutex<bool>,
}

impl Process {
    /// A process that has not run yet.
    pub fn new(disk: MemoryDisk, settings: Settings) -> Arc<Self> {
        Arc::new(Self {
            disk,
            settings,
            seen: Mutex::default(),
            stop: Notify::new(),
            stopped: Mutex::default(),
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

    /// Whether it has stopped in good order.
    pub fn has_stopped(&self) -> bool {
        *self.stopped.lock().unwrap()
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
    let mut config = Config::embedded("never used");
    config.listen = ([0, 0, 0, 0], PORT).into();
    config.users.push(User::new("moon", "walker")?);
    let memory = Options {
        // Often, so that restarts begin from snapshots, too.
        snapshot_every: 20,
        ..Options::new(Storage::Memory(process.disk.clone()))
    };
    let mut server = Server::start_with(config, memory).await?;
    let consensus = server.consensus().clone();
    let group = GroupName::new(GROUP)?;
    let settings =
        consensus.read(|state| state.group(&group).map(|known| known.settings().clone()));
    *process.seen.lock().unwrap() = Some(Arc::new(Seen {
        consensus,
        metrics: server.metrics().clone(),
    }));
    if settings.as_ref() != Some(&process.settings) {
        // What the operator does first.
        let configured = server
            .handle()
            .configure(group, process.settings.clone())
            .await;
        configured?;
    }
    tokio::select! {
        biased;
        () = process.stop.notified() => {}
        failed = server.failed() => failed?,
    }
    server.shutdown().await?;
    *process.stopped.lock().unwrap() = true;
    env::sleep(std::time::Duration::from_secs(3_600)).await;
    Ok(())
}
