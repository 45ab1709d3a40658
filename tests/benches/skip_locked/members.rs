//! The library's consumers: real clients of a server in this process.

use std::time::Duration;

use futures_util::future::try_join_all;
use skyschedule_client::sql::{self, Metrics, Task};
use skyschedule_client::{Client, GroupName};
use skyschedule_common::env::{self, JoinHandle};
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_server::Server;
use skyschedule_server::config::Config;
use skyschedule_server::state::Settings;
use tempfile::TempDir;
use tokio::sync::watch;

use super::Result;
use super::place::{Place, SLOTS};
use super::rounds::{Crew, IN_WORK};

/// How long clients may take to become members.
const PATIENCE: Duration = Duration::from_secs(120);

/// A server, with a group for each turn.
pub(crate) struct Servers {
    server: Server,
    _folder: TempDir,
}

impl Servers {
    pub(crate) async fn start() -> Result<Self> {
        let folder = TempDir::new()?;
        let server = Server::start(Config::embedded(folder.path())).await?;
        Ok(Self {
            server,
            _folder: folder,
        })
    }

    pub(crate) async fn stop(self) -> Result<()> {
        Ok(self.server.shutdown().await?)
    }

    /// Members of a new group, once its numbering has settled.
    pub(crate) async fn join(&self, weights: &[u32], numbering: Numbering) -> Result<Vec<Client>> {
        let group = format!("group-{:x}", env::rng::u64());
        let settings = Settings {
            numbering,
            ..Settings::default()
        };
        self.server
            .handle()
            .configure(GroupName::new(&*group)?, settings)
            .await?;
        let join = |weight: &u32| {
            Client::builder()
                .servers([self.server.local_addr().to_string()])
                .group(&*group)
                .weight(*weight)
                .connect()
        };
        let clients = try_join_all(weights.iter().map(join)).await?;
        env::timeout(PATIENCE, settled(&clients)).await??;
        Ok(clients)
    }
}

/// All know that nothing moves any more, and together they own all rows.
async fn settled(clients: &[Client]) -> Result<()> {
    loop {
        let mut owned = 0.0;
        for client in clients {
            let mut shares = client.shares();
            let status = shares.wait_for(|status| status.settled).await?;
            if let Some(share) = status.rows.single() {
                #[allow(clippy::cast_precision_loss, reason = "small numbers")]
                let part = share.numbers().len() as f64 / f64::from(share.total());
                owned += part;
            }
        }
        if (owned - 1.0).abs() < 1e-6 {
            return Ok(());
        }
        env::sleep(Duration::from_millis(20)).await;
    }
}

/// Consumers that run.
pub(crate) struct Members {
    clients: Vec<Client>,
    metrics: Vec<watch::Receiver<Metrics>>,
    running: Vec<JoinHandle<Metrics>>,
}

impl Members {
    pub(crate) async fn start(
        place: &Place,
        servers: &Servers,
        numbering: Numbering,
        count: usize,
        table: &str,
    ) -> Result<Self> {
        let pools = try_join_all((0..count).map(|_| place.pool())).await?;
        let clients = servers.join(&vec![1; count], numbering).await?;
        let mut consumers = Vec::new();
        for (client, pool) in clients.iter().zip(pools) {
            let consumer = sql::consumer(client, place.table(table))
                .batch(IN_WORK)
                .concurrency(IN_WORK)
                .on_any(pool)
                .await?;
            consumers.push(consumer);
        }
        Ok(Self {
            metrics: consumers
                .iter()
                .map(|consumer| consumer.metrics())
                .collect(),
            running: consumers
                .into_iter()
                .map(|consumer| {
                    env::spawn(consumer.run(|_: Task<(i64, String)>| async { Ok::<_, String>(()) }))
                })
                .collect(),
            clients,
        })
    }
}

/// The numbering of slots.
pub(crate) fn slots() -> Numbering {
    Numbering::Slots(SLOTS)
}

impl Crew for Members {
    fn marked(&self) -> u64 {
        self.metrics.iter().map(|one| one.borrow().done).sum()
    }

    async fn stop(self) -> Result<()> {
        try_join_all(self.clients.iter().map(Client::close)).await?;
        for consumer in self.running {
            let counted = consumer.await?;
            if counted.lost_marks + counted.database_errors + counted.failed > 0 {
                return Err(format!("a consumer had trouble: {counted:?}").into());
            }
        }
        Ok(())
    }
}
