//! How the rest of the server asks the coordinator.

use skyschedule_common::ids::{ClientId, GroupName};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::reports::Report;
use crate::consensus::Consensus;
use crate::state::{Settings, SettingsError};
use crate::view::{ClusterView, GroupView, MemberView, ServerEvent};

/// Requests that wait for the coordinator; more are refused.
const QUEUE: usize = 256;

/// A cheap handle on the coordinator.
#[derive(Debug, Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    events: broadcast::Sender<ServerEvent>,
    consensus: Consensus,
}

/// What can be asked.
#[derive(Debug)]
pub(super) enum Request {
    Cluster(oneshot::Sender<ClusterView>),
    Groups(oneshot::Sender<Vec<GroupView>>),
    Group(GroupName, oneshot::Sender<Option<GroupView>>),
    Configure(
        GroupName,
        Box<Settings>,
        oneshot::Sender<Result<GroupView, ConfigureError>>,
    ),
    /// Whether its share shall move away.
    Drain(
        GroupName,
        ClientId,
        bool,
        oneshot::Sender<Option<MemberView>>,
    ),
    Delete(GroupName, oneshot::Sender<Result<(), DeleteError>>),
    Reports(Vec<Report>, oneshot::Sender<bool>),
}

/// The coordinator does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Too many requests wait.
    #[error("the server is too busy to answer; try again in a moment")]
    Busy,
    /// Another replica leads, or none.
    #[error("this replica does not lead; ask again, or ask the leader")]
    NotLeader,
    /// It has stopped.
    #[error("the server stops; ask again when it is back")]
    Stopped,
}

/// Settings could not be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigureError {
    /// They are impossible.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The coordinator does not answer.
    #[error(transparent)]
    Ask(#[from] AskError),
}

/// A group could not be deleted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeleteError {
    /// There is none of this name.
    #[error("there is no group {0}")]
    Unknown(GroupName),
    /// Clients work in it.
    #[error(
        "group {group} has members ({members}) and stays; stop its clients first: skyschedule members {group} shows them"
    )]
    Members {
        /// The group.
        group: GroupName,
        /// How many.
        members: usize,
    },
    /// The coordinator does not answer.
    #[error(transparent)]
    Ask(#[from] AskError),
}

impl Handle {
    /// A handle, and the end at which its requests arrive.
    pub(super) fn new(consensus: Consensus) -> (Self, mpsc::Receiver<Request>) {
        let (requests, inbox) = mpsc::channel(QUEUE);
        let (events, _) = broadcast::channel(1_024);
        let handle = Self {
            requests,
            events,
            consensus,
        };
        (handle, inbox)
    }

    /// What happens from now on. A receiver that is too slow misses the oldest events.
    pub fn events(&self) -> broadcast::Receiver<ServerEvent> {
        self.events.subscribe()
    }

    /// Tells those who watch.
    pub(super) fn publish(&self, event: ServerEvent) {
        // Nobody may be watching.
        let _ = self.events.send(event);
    }

    /// The replicas.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn cluster(&self) -> Result<ClusterView, AskError> {
        self.ask(Request::Cluster).await
    }

    /// All groups.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn groups(&self) -> Result<Vec<GroupView>, AskError> {
        self.ask(Request::Groups).await
    }

    /// One group, if it exists.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn group(&self, name: GroupName) -> Result<Option<GroupView>, AskError> {
        self.ask(|answer| Request::Group(name, answer)).await
    }

    /// Gives a group new settings, whether it exists or not.
    ///
    /// # Errors
    /// When the settings are impossible, or the coordinator does not answer.
    pub async fn configure(
        &self,
        name: GroupName,
        settings: Settings,
    ) -> Result<GroupView, ConfigureError> {
        self.ask(|answer| Request::Configure(name, Box::new(settings), answer))
            .await?
    }

    /// Moves a member's share away while it stays connected. The answer, once that is decided, shows the member,
    /// which holds its share until it has released it; `None` when there is no such member.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn drain(
        &self,
        group: GroupName,
        client: ClientId,
    ) -> Result<Option<MemberView>, AskError> {
        self.ask(|answer| Request::Drain(group, client, true, answer))
            .await
    }

    /// Takes back that a member's share moves away; the numbering that follows gives it one again. The answer, once that
    /// is decided, shows the member; `None` when there is no such member.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn undrain(
        &self,
        group: GroupName,
        client: ClientId,
    ) -> Result<Option<MemberView>, AskError> {
        self.ask(|answer| Request::Drain(group, client, false, answer))
            .await
    }

    /// Deletes a group without members. One that is made again under its name goes on above all epochs that this one had,
    /// and an available one stays so.
    ///
    /// # Errors
    /// When there is none, or it has members, or the coordinator does not answer.
    pub async fn delete(&self, group: GroupName) -> Result<(), DeleteError> {
        self.ask(|answer| Request::Delete(group, answer)).await?
    }

    /// What the replicas agree on, for those who ask other replicas.
    pub(crate) fn consensus(&self) -> &Consensus {
        &self.consensus
    }

    /// Hands over what another replica saw; false when this one does not lead.
    pub(super) async fn report(&self, reports: Vec<Report>) -> Result<bool, AskError> {
        self.ask(|answer| Request::Reports(reports, answer)).await
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, AskError> {
        let (answer, answered) = oneshot::channel();
        self.requests
            .try_send(request(answer))
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => AskError::Busy,
                mpsc::error::TrySendError::Closed(_) => AskError::Stopped,
            })?;
        answered.await.map_err(|_| AskError::Stopped)
    }
}
