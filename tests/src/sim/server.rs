//! A server's process, and the disk that outlives it.

use skyschedule_common::env::{self, sim as env_sim};
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_server::Server;
use skyschedule_server::config::{Config, Timing, User};
use skyschedule_server::consensus::{Consensus, MemoryDisk, Options, Storage};
use skyschedule_server::coordinator::{ConfigureError, Handle};
use skyschedule_server::metrics::Metrics;
use skyschedule_server::state::{Change, Command, Joining, Settings};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

use super::network::PORT;
use super::profile::DEGRADED_AFTER;
use super::worker::{GROUP, server_name};

/// Pause before the operator tries again.
const RETRY: Duration = Duration::from_millis(50);

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
    /// How many servers there are.
    pub servers: usize,
    /// How long they wait for each other.
    pub timing: Timing,
    /// Its disk.
    pub disk: MemoryDisk,
    /// What the operator wants of the group.
    pub settings: Arc<Mutex<Settings>>,
}

/// One run of a server's process.
#[derive(Debug)]
pub struct Process {
    setup: Setup,
    seen: Mutex<Option<Arc<Seen>>>,
    stop: Notify,
    stopped: Mutex<bool>,
    configure: Notify,
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

    /// The operator wants other settings.
    pub fn configure(&self) {
        self.configure.notify_one();
    }

    /// Whether it has stopped in good order.
    pub fn has_stopped(&self) -> bool {
        *self.stopped.lock().unwrap()
    }

    /// The process is dead.
    pub fn bury(&self) {
        self.seen.lock().unwrap().take();
    }

    fn wanted(&self) -> Settings {
        self.setup.settings.lock().unwrap().clone()
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
        servers,
        timing,
        ref disk,
        ..
    } = process.setup;
    let mut config = Config::embedded("never used");
    config.listen = ([0, 0, 0, 0], PORT).into();
    config.users.push(User::new("moon", "walker")?);
    config.timing = timing;
    config.degraded_after = DEGRADED_AFTER;
    config.replica_id = replica_id(at);
    if servers > 1 {
        let address = |at| format!("{}:{PORT}", server_name(at));
        config.peers = (0..servers)
            .map(|at| (replica_id(at), address(at)))
            .collect();
        config.cluster_secret = Some("a secret of the simulation".into());
    }
    let memory = Options {
        // Often, so that restarts begin from snapshots, too.
        snapshot_every: 20,
        ..Options::new(Storage::Memory(disk.clone()))
    };
    let mut server = Server::start_with(config, memory).await?;
    let handle = server.handle().clone();
    let consensus = server.consensus().clone();
    *process.seen.lock().unwrap() = Some(Arc::new(Seen {
        consensus: consensus.clone(),
        metrics: server.metrics().clone(),
    }));
    tokio::select! {
        biased;
        () = process.stop.notified() => {}
        failed = server.failed() => failed?,
        failed = operate(&process, &consensus, &handle) => match failed? {},
    }
    drop(consensus);
    server.shutdown().await?;
    *process.stopped.lock().unwrap() = true;
    env::sleep(Duration::from_secs(3_600)).await;
    Ok(())
}

/// The operator sees to it that the group has the settings that he wants, at whichever server leads.
async fn operate(
    process: &Process,
    consensus: &Consensus,
    handle: &Handle,
) -> Result<Infallible, ConfigureError> {
    let group = GroupName::new(GROUP).unwrap();
    let mut leadership = consensus.watch_leadership();
    loop {
        let wanted = process.wanted();
        let is = consensus.read(|state| state.group(&group).map(|known| known.settings().clone()));
        let may = process.setup.servers == 1 || leadership.borrow_and_update().own.is_some();
        if is.as_ref() != Some(&wanted) && may {
            match handle.configure(group.clone(), wanted).await {
                Ok(_) => {}
                Err(ConfigureError::Ask(_)) => env::sleep(RETRY).await,
                Err(error) => return Err(error),
            }
            continue;
        }
        tokio::select! {
            biased;
            () = process.configure.notified() => {}
            Ok(()) = leadership.changed() => {}
        }
    }
}

/// The number that a server has for its cluster.
fn replica_id(at: usize) -> u16 {
    u16::try_from(at + 1).unwrap_or(u16::MAX)
}
