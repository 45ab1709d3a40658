//! A running server: its parts, started in order and stopped in order.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use skyschedule_common::auth::{AuthError, ClusterKey};
use skyschedule_common::env::net::TcpListener;
use skyschedule_common::env::{self, JoinHandle};
use tokio::sync::{mpsc, watch};

use crate::admin::Admin;
use crate::config::{Config, ConfigError};
use crate::consensus::{Cluster, Consensus, ConsensusError, Options, Storage};
use crate::coordinator::{Coordinator, Handle, Identity};
use crate::metrics::Metrics;
use crate::session::{BACKLOG, Limits, Listener, Relays, Users};

/// Events that wait for the coordinator; sessions stop reading when there are more.
const EVENTS: usize = 8_192;

/// One in so many connections may be one that is carried on to the leader.
const RELAYS: usize = 4;

/// How long clients may take to read the last messages when the server stops.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is impossible or unsafe.
    #[error("the configuration cannot be used: {}", list(.0))]
    Config(Vec<ConfigError>),
    /// The address cannot be listened at.
    #[error(
        "cannot listen at {address}: {source}; choose another address or port, or stop what uses it"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// The keys of a user cannot be made.
    #[error("a user cannot be set up: {0}")]
    User(#[from] AuthError),
    /// The memory cannot be used.
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
    /// A task of the start was lost.
    #[error("the server could not be set up: {0}; start it again")]
    Setup(#[from] env::JoinError),
}

fn list(errors: &[ConfigError]) -> String {
    errors
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

/// Why a running server ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its memory failed.
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
    /// A task panicked: a fault of the server.
    #[error(
        "a part of the server ended unexpectedly ({0}); please report this with the log, and start it again"
    )]
    Task(#[from] env::JoinError),
}

/// The admin interface while it runs.
#[derive(Debug)]
struct AdminTask {
    address: SocketAddr,
    task: JoinHandle<()>,
}

/// A running server.
///
/// ```no_run
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use skyschedule_server::{Server, config::Config};
/// let server = Server::start(Config::embedded("./data")).await?;
/// println!("clients connect to {}", server.local_addr());
/// server.shutdown().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    handle: Handle,
    metrics: Metrics,
    stop: watch::Sender<bool>,
    coordinator: JoinHandle<Result<(), ConsensusError>>,
    listener: JoinHandle<()>,
    admin: Option<AdminTask>,
    consensus: Consensus,
}

impl Server {
    /// Starts a server whose memory is in the data folder of the configuration.
    ///
    /// # Errors
    /// When the configuration, the address or the memory cannot be used.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let storage = Storage::Folder(config.data_dir.clone());
        Self::start_with(config, Options::new(storage)).await
    }

    /// Starts a server with a memory of its own kind.
    ///
    /// # Errors
    /// When the configuration, the address or the memory cannot be used.
    pub async fn start_with(config: Config, memory: Options) -> Result<Self, StartError> {
        let wrong = config.check();
        if !wrong.is_empty() {
            return Err(StartError::Config(wrong));
        }
        let users = config.users.clone();
        let derive = move || {
            Users::derive(
                users
                    .iter()
                    .map(|user| (user.name.as_str(), &user.password, user.groups.as_deref())),
            )
        };
        let users = env::blocking(derive).await??;
        let listen = config.listen;
        let cannot_listen = |address| move |source| StartError::Listen { address, source };
        let socket = TcpListener::bind(listen, BACKLOG)
            .await
            .map_err(cannot_listen(listen))?;
        let address = socket.local_addr().map_err(cannot_listen(listen))?;
        let admin = match &config.admin {
            Some(admin) => Some(
                Admin::bind(admin)
                    .await
                    .map_err(cannot_listen(admin.listen))?,
            ),
            None => None,
        };
        let advertise = config
            .advertise
            .clone()
            .or_else(|| config.peers.get(&config.replica_id).cloned())
            .unwrap_or_else(|| address.to_string());
        let memory = Options {
            replica_id: config.replica_id,
            advertise,
            cluster: cluster(&config).await?,
            timing: config.timing,
            ..memory
        };
        let (consensus, decided) = Consensus::open(memory).await?;

        let metrics = Metrics::new();
        let (events, inbox) = mpsc::channel(EVENTS);
        let (stop, stopped) = watch::channel(false);
        let identity = Identity {
            replica_id: config.replica_id,
            degraded_after: config.degraded_after,
        };
        let (coordinator, handle) =
            Coordinator::new(identity, consensus.clone(), decided, inbox, metrics.clone());
        let limits = Limits {
            total: config.limits.max_connections,
            per_address: config.limits.max_connections_per_address,
            relays: config.limits.max_connections.div_ceil(RELAYS),
        };
        let peers = consensus.peers().cloned();
        let relays = Relays::new(consensus.clone(), stopped.clone());
        let bounds = (limits, config.limits.login_timeout);
        let listener = Listener::new(
            socket,
            bounds,
            users,
            events,
            metrics.clone(),
            peers,
            relays,
        );
        tracing::info!(%address, replica = config.replica_id, "listens for clients and replicas");
        let coordinator = env::spawn(coordinator.run(stopped.clone()));
        let listener = env::spawn(listener.run(stopped.clone()));
        let admin = admin.map(|admin| {
            let tasks = vec![coordinator.abort_handle(), listener.abort_handle()];
            AdminTask {
                address: admin.local_addr(),
                task: env::spawn(admin.run(handle.clone(), metrics.clone(), tasks, stopped)),
            }
        });
        Ok(Self {
            address,
            handle,
            metrics,
            coordinator,
            listener,
            admin,
            stop,
            consensus,
        })
    }

    /// Where clients connect.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Where its admin interface answers, if it has one.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(|admin| admin.address)
    }

    /// How to ask it what it knows.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its memory: to look at what is decided.
    pub fn consensus(&self) -> &Consensus {
        &self.consensus
    }

    /// What it counts.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Whether all its tasks live.
    pub fn is_healthy(&self) -> bool {
        let admin = self
            .admin
            .as_ref()
            .is_none_or(|admin| !admin.task.is_finished());
        admin && !self.coordinator.is_finished() && !self.listener.is_finished()
    }

    /// Resolves only when the server ends by itself.
    ///
    /// # Errors
    /// Why it ended.
    pub async fn failed(&mut self) -> Result<(), RunError> {
        let admin = async {
            match &mut self.admin {
                Some(admin) => (&mut admin.task).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = &mut self.coordinator => Ok(ended??),
            ended = &mut self.listener => Ok(ended?),
            ended = admin => Ok(ended?),
        }
    }

    /// Hands the leadership over, tells the clients, and stops. No share moves: another replica serves the
    /// members, and without one they go on by themselves until a server is back.
    ///
    /// # Errors
    /// When a part of the server had failed before.
    pub async fn shutdown(self) -> Result<(), RunError> {
        // Nobody may listen any more.
        let _ = self.stop.send(true);
        if !self.coordinator.is_finished() {
            self.coordinator.await??;
        }
        if !self.listener.is_finished() {
            self.listener.await?;
        }
        if let Some(AdminTask { task, .. }) = self.admin
            && !task.is_finished()
        {
            task.await?;
        }
        env::sleep(LAST_WORDS).await;
        self.consensus.shutdown().await;
        tracing::info!("stopped");
        Ok(())
    }
}

/// The replicas of the configuration; none, if this one is alone.
async fn cluster(config: &Config) -> Result<Option<Cluster>, StartError> {
    if config.peers.len() < 2 {
        return Ok(None);
    }
    let key = match config.cluster_secret.clone() {
        Some(secret) => env::blocking(move || ClusterKey::derive(&secret)).await?,
        None => ClusterKey::open(),
    };
    Ok(Some(Cluster {
        replicas: config.peers.clone(),
        key,
    }))
}
