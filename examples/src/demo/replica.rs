//! A replica of the demo: the embedded server, and beside it a pipe to its parent.

use std::collections::BTreeMap;
use std::net::{AddrParseError, SocketAddr};
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use skyschedule_common::auth::AuthError;
use skyschedule_common::env;
use skyschedule_common::ids::{GroupName, InvalidName};
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_server::config::{Config, User};
use skyschedule_server::coordinator::{AskError, ConfigureError, Handle};
use skyschedule_server::state::Settings;
use skyschedule_server::stderr::Stderr;
use skyschedule_server::view::{MemberState, ServerEvent};
use skyschedule_server::{RunError, Server, StartError};
use tokio::sync::broadcast::error::RecvError;

use super::options::ReplicaOptions;
use super::pipe;
use super::report::Report;
use super::{GROUP, PASSWORD, USER};

/// How long members may take to come to a new leader.
const REUNION: Duration = Duration::from_secs(10);

/// How often is looked whether something has come about.
const LOOK: Duration = Duration::from_millis(10);

/// Why a replica fails.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the server does not start: {0}")]
    Start(#[from] StartError),
    #[error("the server has failed: {0}")]
    Run(#[from] RunError),
    #[error("the server does not answer: {0}")]
    Ask(#[from] AskError),
    #[error("the group cannot be set up: {0}")]
    Configure(#[from] ConfigureError),
    #[error(transparent)]
    User(#[from] AuthError),
    #[error(transparent)]
    Name(#[from] InvalidName),
    #[error("no address: {0}")]
    Address(#[from] AddrParseError),
    #[error("the parent cannot be told: {0}")]
    Parent(#[from] std::io::Error),
}

/// What a new leader does first.
type Leading = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

pub(super) async fn run(options: ReplicaOptions, stderr: &Stderr) -> ExitCode {
    pipe::log(stderr);
    let stop = pipe::obey_parent(options.folder.clone());
    let served = async {
        let server = start(&options).await?;
        serve(server, options.slots).await
    };
    let ended = tokio::select! {
        biased;
        // It is asked only when the demo is over: there is nobody left to whom it could hand anything over.
        _ = stop => Ok(()),
        ended = served => ended,
    };
    pipe::exit_code(ended, stderr)
}

async fn start(options: &ReplicaOptions) -> Result<Server, Failure> {
    let mut config = Config::embedded(&options.data);
    config.replica_id = options.id;
    config.peers = (1..)
        .zip(options.peers.iter().cloned())
        .collect::<BTreeMap<u16, _>>();
    if let Some(own) = config.peers.get(&options.id) {
        config.listen = own.parse::<SocketAddr>()?;
    }
    config.users = vec![User::new(USER, PASSWORD)?];
    Ok(Server::start(config).await?)
}

/// Tells what happens, until the server fails.
async fn serve(mut server: Server, slots: Option<u32>) -> Result<(), Failure> {
    let group = GroupName::new(GROUP)?;
    let mut events = server.handle().events();
    while server.handle().cluster().await?.leader.is_none() {
        env::sleep(LOOK).await;
    }
    pipe::say(&Report::Ready)?;
    let mut leading: Leading = Box::pin(std::future::pending());
    loop {
        let event = tokio::select! {
            biased;
            event = events.recv() => match event {
                Ok(event) => event,
                Err(RecvError::Lagged(_)) => continue,
                Err(RecvError::Closed) => return Ok(()),
            },
            led = &mut leading => {
                led?;
                leading = Box::pin(std::future::pending());
                continue;
            }
            ended = server.failed() => return Ok(ended?),
        };
        if matches!(event, ServerEvent::Leader { .. }) {
            leading = Box::pin(lead(server.handle().clone(), group.clone(), slots));
        }
        pipe::say(&Report::Server { event })?;
    }
}

/// Sets the group up where there is none yet, and tells when all members have come.
async fn lead(handle: Handle, group: GroupName, slots: Option<u32>) -> Result<(), Failure> {
    let deadline = env::now() + REUNION;
    loop {
        let shown = match handle.group(group.clone()).await {
            // Another one leads by now, and does all this.
            Err(AskError::NotLeader) => return Ok(()),
            shown => shown?,
        };
        let Some(shown) = shown else {
            let settings = Settings {
                numbering: slots.map_or(Numbering::Modulo, Numbering::Slots),
                ..Settings::default()
            };
            handle.configure(group.clone(), settings).await?;
            continue;
        };
        let mut members = shown.members.iter();
        let all = members.all(|member| member.state != MemberState::Away);
        if all || env::now() > deadline {
            let epoch = shown.epoch.to_string();
            return Ok(pipe::say(&Report::Reunited { epoch })?);
        }
        env::sleep(LOOK).await;
    }
}
