//! The server, embedded in the demo's process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use skyschedule_common::env::{self, JoinHandle};
use skyschedule_common::ids::GroupName;
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_server::Server;
use skyschedule_server::config::{Config, User};
use skyschedule_server::state::Settings;
use skyschedule_server::view::{GroupView, MemberState, ServerEvent};
use tokio::sync::{broadcast, mpsc};

use super::happening::Happening;
use super::{Failure, GROUP, PASSWORD, USER};

/// How long members may take to come back to a server that is back.
const REUNION: Duration = Duration::from_secs(10);

/// How long the server stays away in the restart.
pub(super) struct Restart {
    pub(super) away: Duration,
}

/// The running server.
#[derive(Debug)]
pub(super) struct ServerTask {
    pub(super) address: SocketAddr,
    orders: mpsc::Sender<Restart>,
    task: JoinHandle<()>,
}

struct Keeper {
    server: Server,
    config: Config,
    group: GroupName,
    tell: mpsc::Sender<Happening>,
}

impl ServerTask {
    /// Starts the server at a free port of the loopback interface, with a group of this numbering.
    pub(super) async fn start(
        folder: PathBuf,
        numbering: Numbering,
        tell: mpsc::Sender<Happening>,
    ) -> Result<Self, Failure> {
        let mut config = Config::embedded(folder);
        config.users = vec![User::new(USER, PASSWORD)?];
        let server = Server::start(config.clone()).await?;
        let address = server.local_addr();
        // It comes back where its clients know it.
        config.listen = address;
        let group = GroupName::new(GROUP)?;
        let settings = Settings {
            numbering,
            ..Settings::default()
        };
        server.handle().configure(group.clone(), settings).await?;
        let (orders, inbox) = mpsc::channel(1);
        let keeper = Keeper {
            server,
            config,
            group,
            tell,
        };
        let task = env::spawn(keeper.run(inbox));
        Ok(Self {
            address,
            orders,
            task,
        })
    }

    /// Stops the server, and starts it again after a while.
    pub(super) fn restart(&self, order: Restart) {
        // It may be restarting, or have failed: then that is told.
        let _ = self.orders.try_send(order);
    }

    /// Stops the server for good.
    pub(super) async fn stop(self) {
        drop(self.orders);
        // What went wrong was told.
        let _ = self.task.await;
    }
}

impl Keeper {
    async fn run(mut self, mut orders: mpsc::Receiver<Restart>) {
        let mut events = self.server.handle().events();
        loop {
            let order = tokio::select! {
                biased;
                order = orders.recv() => order,
                event = events.recv() => {
                    match event {
                        Ok(event) => self.say(Happening::Server(event)).await,
                        Err(broadcast::error::RecvError::Lagged(_)) => {}
                        Err(broadcast::error::RecvError::Closed) => return,
                    }
                    continue;
                }
                ended = self.server.failed() => {
                    let text = ended.err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
                    return self.say(Happening::ServerFailed(text)).await;
                }
            };
            let Some(Restart { away }) = order else {
                return drop(self.server.shutdown().await);
            };
            let tell = self.tell.clone();
            match self.restart(away, &mut events).await {
                Ok(keeper) => self = keeper,
                // The director may be gone.
                Err(error) => {
                    return drop(tell.send(Happening::ServerFailed(error.to_string())).await);
                }
            }
        }
    }

    async fn restart(
        self,
        away: Duration,
        events: &mut broadcast::Receiver<ServerEvent>,
    ) -> Result<Self, Failure> {
        let before = self.view().await?;
        let stopped = env::now();
        self.say(Happening::ServerStops).await;
        let Self {
            server,
            config,
            group,
            tell,
        } = self;
        server.shutdown().await?;
        env::sleep(away).await;
        let server = Server::start(config.clone()).await?;
        *events = server.handle().events();
        let away = stopped.elapsed();
        let keeper = Self {
            server,
            config,
            group,
            tell,
        };
        let after = keeper.reunion(before.members.len()).await?;
        keeper
            .say(Happening::ServerIsBack {
                away,
                rows_moved: after.epoch != before.epoch,
            })
            .await;
        Ok(keeper)
    }

    /// Waits until so many members are connected again.
    async fn reunion(&self, members: usize) -> Result<GroupView, Failure> {
        let deadline = env::now() + REUNION;
        loop {
            let view = self.view().await?;
            let here = |state| state != MemberState::Away;
            let active = view.members.iter().filter(|member| here(member.state));
            if active.count() >= members || env::now() > deadline {
                return Ok(view);
            }
            env::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn view(&self) -> Result<GroupView, Failure> {
        let view = self.server.handle().group(self.group.clone()).await?;
        view.ok_or(Failure::GroupIsGone)
    }

    async fn say(&self, happening: Happening) {
        // The director may be gone: then the demo is over.
        let _ = self.tell.send(happening).await;
    }
}
