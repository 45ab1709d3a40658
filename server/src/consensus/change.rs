//! Replicas are added to the cluster and removed from it while it works.
//!
//! Both are the leader's to do, one at a time. A new replica is a learner first, which counts for nothing; once it has
//! all entries, joint consensus makes it a voter. Removal is joint consensus, too. What a leader began and did not
//! end, because it went, the next one ends (`finish`).

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use openraft::ChangeMembers;
use openraft::errors::{ClientWriteError, RaftError};
use skyschedule_common::env::{self, Instant};
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::identity::Standing;
use super::members::Members;
use super::raft::{Place, Raft, TypeConfig, seeded};
use super::wire::{Known, Reply, Request, Status};
use super::{Consensus, MAX_REPLICAS};

/// How long a new replica may take to answer.
const ARRIVAL: Duration = Duration::from_secs(3);
/// How long the answer to one question may take.
const LIMIT: Duration = Duration::from_millis(500);
/// How often is looked whether a new replica has arrived, or caught up.
const LOOK: Duration = Duration::from_millis(20);
/// How long a call may take in all; what takes longer goes on, and can be asked for again.
const PATIENCE: Duration = Duration::from_secs(7);
/// Entries that a new voter may lack.
const NEAR: u64 = 64;

/// A change of the replicas is not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// Another replica leads, or none.
    #[error("this replica does not lead; ask again, or ask the leader")]
    NotLeader,
    /// It is no member itself.
    #[error(
        "this replica is not in the cluster yet, and its log says what it waits for; ask one that is (--admin)"
    )]
    NotMember,
    /// It has no others.
    #[error(
        "this replica is alone: it was started without --peers. Start it with --peers that list it and the new replicas, \
         and a --cluster-secret-file, then add them"
    )]
    Alone,
    /// There is no such replica.
    #[error("there is no replica {0} in this cluster")]
    Unknown(u16),
    /// It does not go with what is there.
    #[error("{0}")]
    Conflict(String),
    /// Not now.
    #[error("{0}")]
    Unavailable(String),
}

/// What became of a replica that is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Added {
    /// It votes.
    Voter,
    /// It is a learner, and catches up: ask again.
    CatchesUp,
}

/// What became of a replica that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removed {
    /// It is no member any more.
    Done,
    /// It led, and this one leads now: ask it.
    LeadBy(u16),
}

type Change = ChangeMembers<u64, Place>;

/// One change at a time. A clone is the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Changes(Arc<Mutex<()>>);

impl Changes {
    fn begin(&self) -> Result<OwnedMutexGuard<()>, ChangeError> {
        Arc::clone(&self.0).try_lock_owned().map_err(|_| {
            ChangeError::Conflict("another change of the replicas is under way; ask again".into())
        })
    }

    /// Ends a change of voters that another leader began.
    pub(super) fn finish(&self, raft: &Raft, members: &Members) {
        if !raft.is_leader() || !members.is_joint() {
            return;
        }
        if let Ok(change) = self.begin() {
            let raft = raft.clone();
            env::spawn(seeded(async move {
                let nothing = Change::AddVoterIds(BTreeSet::new());
                // Not decided yet, or not the leader any more: it is tried again, here or there.
                if raft.change_membership(nothing, false).await.is_ok() {
                    tracing::info!("ended a change of the replicas that another leader began");
                }
                drop(change);
            }));
        }
    }
}

impl Consensus {
    /// The replicas, if this one leads them.
    pub(super) fn leads(&self) -> Result<Known, ChangeError> {
        let known = self.members.effective().ok_or(ChangeError::NotMember)?;
        let own = self.leadership().own;
        own.map(|_| known).ok_or(ChangeError::NotLeader)
    }

    /// Takes a replica into the cluster, which runs with an empty disk at `address` (`host:port`): first as a learner,
    /// then, when it has caught up, as a voter. Asked again, it goes on where it was.
    ///
    /// # Errors
    /// When this replica does not lead, the new one does not answer, or it does not fit.
    pub async fn add(&self, id: u16, address: &str) -> Result<Added, ChangeError> {
        let deadline = env::now() + PATIENCE;
        let known = self.leads()?;
        if self.peers.is_none() {
            return Err(ChangeError::Alone);
        }
        let change = self.changes.begin()?;
        let same = |place: &&Place| place.address == address;
        let other = known.places.iter().find(|(_, place)| same(place));
        if let Some((other, _)) = other.filter(|(other, _)| **other != id) {
            return Err(ChangeError::Conflict(format!(
                "{address} is the address of replica {other}"
            )));
        }
        match known.places.get(&id) {
            Some(place) if !same(&place) => {
                return Err(ChangeError::Conflict(format!(
                    "replica {id} is in the cluster already, at {}; to replace it, remove it first, or give the new one another id",
                    place.address
                )));
            }
            Some(_) if known.voters.contains(&id) => return Ok(Added::Voter),
            Some(_) => {}
            None if known.places.len() >= MAX_REPLICAS => {
                return Err(ChangeError::Conflict(format!(
                    "a cluster has at most {MAX_REPLICAS} replicas; more only make each decision slower"
                )));
            }
            None => {
                self.members.invite(id, address);
                let welcomed = self.welcome(id, address, deadline).await;
                self.members.uninvite(id);
                welcomed?;
            }
        }
        if !self.has_caught_up(id, deadline).await? {
            return Ok(Added::CatchesUp);
        }
        let voter = Change::AddVoterIds(BTreeSet::from([u64::from(id)]));
        self.decide(voter, change, deadline).await?;
        tracing::info!(replica = id, address, "a replica was added, and votes");
        Ok(Added::Voter)
    }

    /// Makes a replica a learner.
    async fn welcome(&self, id: u16, address: &str, deadline: Instant) -> Result<(), ChangeError> {
        // Whoever does not lead any more must not tell it a term.
        self.confirm()
            .await
            .map_err(|error| ChangeError::Unavailable(error.to_string()))?;
        let status = self.arrived(id, address).await?;
        let conflict = |why: &str| {
            Err(ChangeError::Conflict(format!(
                "replica {id} at {address} {why}"
            )))
        };
        let cluster = self.membership.identity().cluster;
        let Some(cluster) = cluster else {
            return Err(ChangeError::NotLeader);
        };
        if !status.empty && status.cluster != Some(cluster) {
            return conflict("has the disk of another cluster; empty its data folder");
        }
        match status.standing {
            Standing::Full | Standing::Removed if !status.empty => {
                return conflict("was removed from this cluster; empty its data folder");
            }
            Standing::Returning { .. } if !status.empty => {}
            _ => {
                let term = self.term();
                let join = Request::Join { cluster, term };
                let joined = self.network.call(u64::from(id), join, LIMIT).await;
                joined.map_err(|error| ChangeError::Unavailable(error.to_string()))?;
            }
        }
        let place = Place {
            address: address.to_owned(),
            advertise: status.advertise,
            added: true,
        };
        let raft = self.raft.0.clone();
        let adding = async move { raft.add_learner(u64::from(id), place, false).await };
        within(deadline, adding).await?;
        tracing::info!(
            replica = id,
            address,
            "a replica was added as a learner, and catches up"
        );
        Ok(())
    }

    /// Waits until the new replica answers.
    async fn arrived(&self, id: u16, address: &str) -> Result<Status, ChangeError> {
        let until = env::now() + ARRIVAL;
        loop {
            let why = match self
                .network
                .call(u64::from(id), Request::Status, LIMIT)
                .await
            {
                Ok(Reply::Status(status)) => return Ok(status),
                Ok(_) => "it gives a wrong answer".to_owned(),
                Err(error) => error.to_string(),
            };
            if env::now() >= until {
                let trouble = self.peers.as_ref().and_then(|peers| peers.trouble(id));
                let why = trouble.unwrap_or(why);
                return Err(ChangeError::Unavailable(format!(
                    "replica {id} does not answer at {address} ({why}): start it there with --replica-id {id}, an empty data \
                     folder, the cluster's secret, and --peers that list it beside the others; then ask again"
                )));
            }
            env::sleep(LOOK).await;
        }
    }

    async fn has_caught_up(&self, id: u16, deadline: Instant) -> Result<bool, ChangeError> {
        loop {
            // Whoever leads no more does not learn it.
            self.leads()?;
            let near = self.lags().get(&id).is_some_and(|lag| *lag <= NEAR);
            if near
                && let Ok(Reply::Status(status)) = self
                    .network
                    .call(u64::from(id), Request::Status, LIMIT)
                    .await
                && status.standing == Standing::Full
            {
                return Ok(true);
            }
            if env::now() + LIMIT >= deadline {
                return Ok(false);
            }
            env::sleep(LOOK).await;
        }
    }

    /// Removes a replica for good; one that leads hands over first. Refuses what would leave too few voters that can be
    /// reached, unless forced: then nothing is decided any more until enough of the others are back.
    ///
    /// # Errors
    /// When this replica does not lead, there is no such replica, or too few would be left.
    pub async fn remove(&self, id: u16, force: bool) -> Result<Removed, ChangeError> {
        let deadline = env::now() + PATIENCE;
        let known = self.leads()?;
        if !known.places.contains_key(&id) {
            return Err(ChangeError::Unknown(id));
        }
        let node = BTreeSet::from([u64::from(id)]);
        let removal = if known.voters.contains(&id) {
            self.may_go(id, &known, force)?;
            Change::RemoveVoters(node)
        } else {
            Change::RemoveNodes(node)
        };
        if id == self.id {
            return self.transfer(None).await.map(Removed::LeadBy);
        }
        let change = self.changes.begin()?;
        self.decide(removal, change, deadline).await?;
        tracing::info!(replica = id, "a replica was removed");
        Ok(Removed::Done)
    }

    fn may_go(&self, id: u16, known: &Known, force: bool) -> Result<(), ChangeError> {
        let rest: Vec<u16> = known
            .voters
            .iter()
            .copied()
            .filter(|voter| *voter != id)
            .collect();
        if rest.is_empty() {
            return Err(ChangeError::Conflict(format!(
                "replica {id} is the only voter; without it there is no cluster"
            )));
        }
        let away: Vec<u16> = {
            let statuses = self.statuses.lock().unwrap_or_else(PoisonError::into_inner);
            let is_away = |id: &u16| *id != self.id && !statuses.contains_key(id);
            rest.iter().copied().filter(is_away).collect()
        };
        if force || rest.len() - away.len() > rest.len() / 2 {
            return Ok(());
        }
        Err(ChangeError::Conflict(format!(
            "without replica {id}, too few of the voters could be reached to decide anything (away: {away:?}): bring them back or \
             remove them first; --force removes it nevertheless, and then nothing is numbered until enough are back"
        )))
    }

    /// Has a change decided, also when nobody waits for it any more.
    async fn decide(
        &self,
        change: Change,
        one: OwnedMutexGuard<()>,
        deadline: Instant,
    ) -> Result<(), ChangeError> {
        let raft = self.raft.0.clone();
        let deciding = async move {
            let decided = raft.change_membership(change, false).await;
            drop(one);
            decided
        };
        within(deadline, deciding).await
    }
}

/// Waits for what is decided, but not for ever.
async fn within<T: Send + 'static>(
    deadline: Instant,
    deciding: impl Future<Output = Result<T, RaftError<TypeConfig, ClientWriteError<TypeConfig>>>>
    + Send
    + 'static,
) -> Result<(), ChangeError> {
    let left = deadline.saturating_duration_since(env::now());
    let undecided = |why: String| ChangeError::Unavailable(why);
    match env::timeout(left, env::spawn(seeded(deciding))).await {
        Ok(Ok(Ok(_))) => Ok(()),
        Ok(Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_))))) => {
            Err(ChangeError::NotLeader)
        }
        Ok(Ok(Err(RaftError::APIError(ClientWriteError::ChangeMembershipError(error))))) => {
            tracing::info!(%error, "the replicas cannot be changed now");
            Err(ChangeError::Conflict(
                "what was decided before about the replicas is not known to most of them yet; ask again".into(),
            ))
        }
        Ok(Ok(Err(RaftError::APIError(_)))) => Err(undecided(
            "another replica has begun to lead meanwhile: it may be decided or not; ask again"
                .into(),
        )),
        Ok(Ok(Err(RaftError::Fatal(_))) | Err(_)) => Err(undecided(
            "this replica ends, as its log says: it may be decided or not; ask again, another one"
                .into(),
        )),
        Err(_) => Err(undecided(
            "too few replicas answer: it is not decided yet, and will be as soon as enough do"
                .into(),
        )),
    }
}
