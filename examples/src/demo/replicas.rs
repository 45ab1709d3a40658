//! The servers, as their parent sees them: three replicas, each a process, so that a kill is a real one.

use std::io;
use std::path::PathBuf;

use skyschedule_common::env::Instant;
use skyschedule_common::env::net::TcpListener;
use tokio::sync::mpsc;

use super::crew::Process;
use super::folder::Folder;
use super::happening::Happening;
use super::options::ReplicaOptions;

/// One may go, and the two others are a majority.
const REPLICAS: u16 = 3;

/// The replicas.
#[derive(Debug)]
pub(super) struct Replicas {
    program: PathBuf,
    all: Vec<Replica>,
    tell: mpsc::Sender<Happening>,
}

#[derive(Debug)]
struct Replica {
    options: ReplicaOptions,
    /// None once it has ended.
    process: Option<Process>,
    /// Since when it is dead by our hand.
    killed: Option<Instant>,
}

impl Replicas {
    /// Starts them at free ports of the loopback interface, for a group of so many slots, or one that is numbered by
    /// its members.
    pub(super) async fn start(
        program: PathBuf,
        folder: &Folder,
        slots: Option<u32>,
        tell: mpsc::Sender<Happening>,
    ) -> io::Result<Self> {
        let peers = free_addresses().await?;
        let options = (1..=REPLICAS).map(|id| ReplicaOptions {
            id,
            peers: peers.clone(),
            folder: folder.path().to_owned(),
            data: folder.replica(id),
            slots,
        });
        let all = options.map(|options| Replica {
            options,
            process: None,
            killed: None,
        });
        let mut replicas = Self {
            program,
            all: all.collect(),
            tell,
        };
        for id in 1..=REPLICAS {
            replicas.launch(id)?;
        }
        Ok(replicas)
    }

    /// Where clients find them.
    pub(super) fn addresses(&self) -> Vec<String> {
        let peers = self
            .all
            .first()
            .map(|replica| replica.options.peers.clone());
        peers.unwrap_or_default()
    }

    /// Starts one that does not run.
    pub(super) fn launch(&mut self, id: u16) -> io::Result<()> {
        let (program, tell) = (self.program.clone(), self.tell.clone());
        let Some(replica) = self.of(id) else {
            return Ok(());
        };
        let arguments = replica.options.arguments();
        replica.process = Some(Process::start(&program, &name(id), arguments, tell)?);
        replica.killed = None;
        Ok(())
    }

    /// Kills one at once, as `kill -9` does.
    pub(super) fn kill(&mut self, id: u16, now: Instant) {
        if let Some(replica) = self.of(id)
            && let Some(process) = &replica.process
        {
            process.kill();
            replica.killed = Some(now);
        }
    }

    /// Kills all: nobody is left whom they could tell anything.
    pub(super) fn kill_all(&mut self, now: Instant) {
        for id in 1..=REPLICAS {
            self.kill(id, now);
        }
    }

    /// The process of this name has ended; whether it is one of these, and was to end.
    pub(super) fn ended(&mut self, ended: &str) -> Option<bool> {
        let mut all = self.all.iter_mut();
        let replica = all.find(|replica| name(replica.options.id) == ended)?;
        replica.process = None;
        Some(replica.killed.is_some())
    }

    /// Whether any runs.
    pub(super) fn any(&self) -> bool {
        self.all.iter().any(|replica| replica.process.is_some())
    }

    /// Those that have ended, with the time since when they were to.
    pub(super) fn killed(&self) -> impl Iterator<Item = (u16, Instant)> + '_ {
        let ended = self.all.iter().filter(|replica| replica.process.is_none());
        ended.filter_map(|replica| Some((replica.options.id, replica.killed?)))
    }

    fn of(&mut self, id: u16) -> Option<&mut Replica> {
        self.all.iter_mut().find(|replica| replica.options.id == id)
    }
}

/// As it is called in what the demo tells.
pub(super) fn name(id: u16) -> String {
    format!("server-{id}")
}

/// Ports are free when nobody listens there: the replicas take them a moment later.
async fn free_addresses() -> io::Result<Vec<String>> {
    let mut listeners = Vec::new();
    for _ in 1..=REPLICAS {
        listeners.push(TcpListener::bind(([127, 0, 0, 1], 0).into(), 1).await?);
    }
    let addresses = listeners
        .iter()
        .map(|listener| Ok(listener.local_addr()?.to_string()));
    addresses.collect()
}
