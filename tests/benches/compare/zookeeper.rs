//! ZooKeeper: a server, and a connection to it.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use skyschedule_common::env;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use zookeeper_client::{Acls, AddWatchMode, Client, CreateMode, Error, EventType};

use crate::common::Result;
use crate::store::{Change, Store};

/// The usual tick of the server; its shortest session has two.
const TICK: Duration = Duration::from_secs(2);

/// Where Debian's package puts it.
const CLASSES: &str = "/etc/zookeeper/conf_example:/usr/share/java/*";

/// Starts a server.
pub(crate) fn serve(folder: &Path, port: u16) -> Result<(Child, String)> {
    let settings = folder.join("zoo.cfg");
    let text = format!(
        "tickTime={}\ndataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n\
         admin.enableServer=false\n",
        TICK.as_millis(),
        folder.display()
    );
    std::fs::write(&settings, text)?;
    let child = Command::new("java")
        .args(["-Dzookeeper.root.logger=ERROR,CONSOLE", "-cp", CLASSES])
        .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
        .arg(&settings)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| {
            format!("cannot start ZooKeeper ({error}): install Debian's package zookeeper")
        })?;
    Ok((child, format!("127.0.0.1:{port}")))
}

/// A session.
#[derive(Clone)]
pub(crate) struct ZooKeeper(Client);

impl Store for ZooKeeper {
    async fn connect(server: &str) -> Result<Self> {
        let connector = Client::connector().with_session_timeout(TICK * 2);
        Ok(Self(connector.connect(server).await?))
    }

    async fn folder(&self, path: &str) -> Result<()> {
        let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
        match self.0.create(path, b"", &options).await {
            Ok(_) | Err(Error::NodeExists) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    async fn create(&self, path: &str, own: bool) -> Result<()> {
        let mode = if own {
            CreateMode::Ephemeral
        } else {
            CreateMode::Persistent
        };
        let options = mode.with_acls(Acls::anyone_all());
        self.0.create(path, b"", &options).await?;
        Ok(())
    }

    async fn remove(&self, path: &str) -> Result<()> {
        Ok(self.0.delete(path, None).await?)
    }

    async fn list(&self, folder: &str) -> Result<Vec<String>> {
        Ok(self.0.list_children(folder).await?)
    }

    async fn watch(&self, folder: &str) -> Result<mpsc::UnboundedReceiver<Change>> {
        let prefix = format!("{folder}/");
        let mode = AddWatchMode::PersistentRecursive;
        let mut watcher = self.0.watch(folder, mode).await?;
        let (changes, changed) = mpsc::unbounded_channel();
        env::spawn(async move {
            loop {
                let event = watcher.changed().await;
                let name = event.path.strip_prefix(&prefix).map(str::to_owned);
                let change = match (event.event_type, name) {
                    (EventType::NodeCreated, Some(name)) => Change::Created(name),
                    (EventType::NodeDeleted, Some(name)) => Change::Removed(name),
                    (EventType::Session, _) if event.session_state.is_terminated() => return,
                    _ => continue,
                };
                if changes.send(change).is_err() {
                    return;
                }
            }
        });
        Ok(changed)
    }
}
