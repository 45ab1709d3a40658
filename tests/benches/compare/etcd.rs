//! etcd: servers, and a connection to it.

use std::path::Path;
use std::time::Duration;

use etcd_client::{Client, EventType, GetOptions, PutOptions, ResponseHeader, WatchOptions};
use skyschedule_common::env;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use crate::common::Result;
use crate::servers::{PATIENCE, accepts, free_ports};
use crate::store::{Change, Store};

/// The shortest lease that the server grants with its usual election time-out.
const LEASE_SECONDS: i64 = 2;

/// Running servers of one cluster.
pub(crate) struct Servers {
    pub(crate) processes: Vec<Child>,
    addresses: Vec<String>,
}

impl Servers {
    /// Starts so many, and waits until they have a leader.
    pub(crate) async fn start<const N: usize>(folder: &Path) -> Result<Self> {
        let url = |port| format!("http://127.0.0.1:{port}");
        let (addresses, peers) = (free_ports::<N>()?.map(url), free_ports::<N>()?.map(url));
        let cluster: Vec<String> = (0..N).map(|at| format!("m{at}={}", peers[at])).collect();
        let start = |at: usize| {
            let (client, peer) = (&addresses[at], &peers[at]);
            Command::new("etcd")
                .args(["--name", &format!("m{at}")])
                .arg("--data-dir")
                .arg(folder.join(at.to_string()))
                .args(["--listen-client-urls", client])
                .args(["--advertise-client-urls", client])
                .args(["--listen-peer-urls", peer])
                .args(["--initial-advertise-peer-urls", peer])
                .args(["--initial-cluster", &cluster.join(",")])
                .args(["--logger", "zap", "--log-level", "error"])
                .kill_on_drop(true)
                .spawn()
                .map_err(|error| {
                    format!("cannot start etcd ({error}): install Debian's package etcd-server")
                })
        };
        let servers = Self {
            processes: (0..N).map(start).collect::<std::result::Result<_, _>>()?,
            addresses: addresses.to_vec(),
        };
        for address in &servers.addresses {
            accepts(address.trim_start_matches("http://")).await?;
        }
        servers.leader().await?;
        Ok(servers)
    }

    pub(crate) fn addresses(&self) -> String {
        self.addresses.join(",")
    }

    pub(crate) fn address(&self, at: usize) -> &str {
        &self.addresses[at]
    }

    /// The place of the leader; waits until there is one.
    pub(crate) async fn leader(&self) -> Result<usize> {
        let deadline = env::now() + PATIENCE;
        while env::now() < deadline {
            for (at, address) in self.addresses.iter().enumerate() {
                let client = Client::connect([address], None).await?;
                let status = client.maintenance_client().status().await?;
                let own = status.header().map(ResponseHeader::member_id);
                if status.leader() > 0 && own == Some(status.leader()) {
                    return Ok(at);
                }
            }
            env::sleep(Duration::from_millis(50)).await;
        }
        Err("etcd has no leader".into())
    }
}

/// A connection with a lease.
#[derive(Clone)]
pub(crate) struct Etcd {
    client: Client,
    lease: i64,
}

impl Store for Etcd {
    async fn connect(servers: &str) -> Result<Self> {
        let servers: Vec<&str> = servers.split(',').collect();
        let mut client = Client::connect(servers, None).await?;
        let lease = client.lease_grant(LEASE_SECONDS, None).await?.id();
        let (mut keeper, mut kept) = client.lease_keep_alive(lease).await?;
        env::spawn(async move {
            while keeper.keep_alive().await.is_ok() && kept.message().await.is_ok() {
                env::sleep(Duration::from_millis(600)).await;
            }
        });
        Ok(Self { client, lease })
    }

    async fn folder(&self, _path: &str) -> Result<()> {
        Ok(())
    }

    async fn create(&self, path: &str, own: bool) -> Result<()> {
        let options = own.then(|| PutOptions::new().with_lease(self.lease));
        self.client.kv_client().put(path, "", options).await?;
        Ok(())
    }

    async fn remove(&self, path: &str) -> Result<()> {
        self.client.kv_client().delete(path, None).await?;
        Ok(())
    }

    async fn list(&self, folder: &str) -> Result<Vec<String>> {
        let prefix = format!("{folder}/");
        let options = GetOptions::new().with_prefix().with_keys_only();
        let mut kv = self.client.kv_client();
        let answer = kv.get(prefix.as_str(), Some(options)).await?;
        let names = answer.kvs().iter().filter_map(|kv| {
            let path = kv.key_str().ok()?;
            Some(path.strip_prefix(&prefix)?.to_owned())
        });
        Ok(names.collect())
    }

    async fn watch(&self, folder: &str) -> Result<mpsc::UnboundedReceiver<Change>> {
        let prefix = format!("{folder}/");
        let options = WatchOptions::new().with_prefix();
        let mut watch = self.client.watch_client();
        let mut stream = watch.watch(prefix.as_str(), Some(options)).await?;
        // The first answer says that the watch is there.
        stream.message().await?;
        let (changes, changed) = mpsc::unbounded_channel();
        env::spawn(async move {
            while let Ok(Some(news)) = stream.message().await {
                for event in news.events() {
                    let path = event.kv().and_then(|kv| kv.key_str().ok());
                    let Some(name) = path.and_then(|path| path.strip_prefix(&prefix)) else {
                        continue;
                    };
                    let change = match event.event_type() {
                        EventType::Put => Change::Created(name.to_owned()),
                        EventType::Delete => Change::Removed(name.to_owned()),
                    };
                    if changes.send(change).is_err() {
                        return;
                    }
                }
            }
        });
        Ok(changed)
    }
}
