//! The servers of a system: one, or three that agree.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use skyschedule_common::env;
use tokio::process::Child;

use crate::common::Result;
use crate::common::process::{Worker, memory};
use crate::replicas::Replicas;
use crate::{etcd, zookeeper};

/// The shortest lease that SkySchedule allows, in milliseconds.
const LEASE: u64 = 2_000;
/// The group of SkySchedule's members.
pub(crate) const GROUP: &str = "compared";

/// Longest wait for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Who coordinates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum System {
    SkySchedule,
    Etcd { acknowledged: bool },
    ZooKeeper { acknowledged: bool },
}

impl System {
    /// The role of its members' processes.
    pub(crate) fn role(self) -> &'static str {
        match self {
            Self::SkySchedule => "members",
            Self::Etcd { .. } => "etcd",
            Self::ZooKeeper { .. } => "zookeeper",
        }
    }

    pub(crate) fn is_acknowledged(self) -> bool {
        matches!(
            self,
            Self::Etcd { acknowledged: true } | Self::ZooKeeper { acknowledged: true }
        )
    }
}

/// How many servers a system has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Number {
    One,
    Three,
}

/// Running servers; they end with this.
pub(crate) enum Servers {
    Embedded { process: Worker, address: String },
    Replicas(Replicas),
    Etcd(etcd::Servers),
    ZooKeeper { process: Child, address: String },
}

impl Servers {
    /// Starts them, and waits until they serve. Slots are those of SkySchedule's group, 0 for modulo.
    pub(crate) async fn start(
        system: System,
        number: Number,
        slots: u32,
        folder: &Path,
    ) -> Result<Self> {
        Ok(match (system, number) {
            (System::SkySchedule, Number::One) => {
                let path = folder.display().to_string();
                let mut process = Worker::start("server", &[&path])?;
                let address = process.ask("address").await?;
                let command = format!("found {GROUP} {slots} {LEASE}");
                process.ask::<()>(&command).await?;
                Self::Embedded { process, address }
            }
            (System::SkySchedule, Number::Three) => {
                let replicas = Replicas::start(folder).await?;
                let mut settings = json!({ "lease_ms": LEASE, "drain_timeout_ms": LEASE / 2 });
                if slots > 0 {
                    settings["numbering"] = json!("slots");
                    settings["slots"] = json!(slots);
                }
                let admin = replicas.admin(0);
                admin.configure(GROUP, &settings).await;
                Self::Replicas(replicas)
            }
            (System::Etcd { .. }, Number::One) => {
                Self::Etcd(etcd::Servers::start::<1>(folder).await?)
            }
            (System::Etcd { .. }, Number::Three) => {
                Self::Etcd(etcd::Servers::start::<3>(folder).await?)
            }
            (System::ZooKeeper { .. }, Number::One) => {
                let [port] = free_ports()?;
                let (process, address) = zookeeper::serve(folder, port)?;
                accepts(&address).await?;
                Self::ZooKeeper { process, address }
            }
            (System::ZooKeeper { .. }, Number::Three) => {
                return Err("one ZooKeeper server at most".into());
            }
        })
    }

    /// What clients are told: the addresses of all, with commas between.
    pub(crate) fn addresses(&self) -> String {
        match self {
            Self::Embedded { address, .. } | Self::ZooKeeper { address, .. } => address.clone(),
            Self::Replicas(replicas) => replicas.addresses(),
            Self::Etcd(servers) => servers.addresses(),
        }
    }

    /// Where SkySchedule's leader is at present.
    pub(crate) async fn leader(&self) -> Result<SocketAddr> {
        match self {
            Self::Replicas(replicas) => Ok(replicas.address(replicas.leader().await?)),
            _ => Ok(self.addresses().parse()?),
        }
    }

    /// Memory in use, in bytes: of the leader, and of all followers together.
    pub(crate) async fn memory(&self) -> Result<(u64, u64)> {
        let (leader, pids) = match self {
            Self::Embedded { process, .. } => (0, vec![process.pid()?]),
            Self::Replicas(replicas) => (replicas.leader().await?, pids(&replicas.processes)?),
            Self::Etcd(servers) => (servers.leader().await?, pids(&servers.processes)?),
            Self::ZooKeeper { process, .. } => (0, pids(std::slice::from_ref(process))?),
        };
        let used = pids.into_iter().map(memory).collect::<Result<Vec<u64>>>()?;
        Ok((used[leader], used.iter().sum::<u64>() - used[leader]))
    }
}

fn pids(processes: &[Child]) -> Result<Vec<u32>> {
    let pid = |process: &Child| Ok(process.id().ok_or("a server has ended")?);
    processes.iter().map(pid).collect()
}

/// Ports that nobody uses at present.
pub(crate) fn free_ports<const N: usize>() -> Result<[u16; N]> {
    // All are open at once, so that no two are the same.
    let open = (0..N)
        .map(|_| Ok(TcpListener::bind("127.0.0.1:0")?))
        .collect::<Result<Vec<_>>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&open) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// Waits until somebody listens there.
pub(crate) async fn accepts(address: &str) -> Result<()> {
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
