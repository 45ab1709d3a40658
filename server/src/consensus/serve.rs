//! What other replicas ask about consensus, and whether this one may take part in it.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::WatchReceiver as _;
use openraft::raft::{AppendEntriesResponse, TransferLeaderRequest};
use skyschedule_common::env::{self, Instant};
use skyschedule_common::protocol::codec;

use super::identity::{ClusterId, Identity, Standing};
use super::lineage::Seen;
use super::log::Log;
use super::members::Members;
use super::network::MAX_MESSAGE;
use super::raft::{LogId, Raft, Snapshot, Vote, seeded};
use super::split::{self, Alarm, Claim};
use super::store::Change;
use super::wire::{Envelope, Reply, Request, Status};
use super::writer::Writer;
use crate::peers::{Answering, Handler};

/// The identity of this replica, on disk and in memory. A clone is the same.
#[derive(Clone)]
pub(super) struct Membership {
    identity: Arc<Mutex<Identity>>,
    writer: Writer,
}

impl std::fmt::Debug for Membership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.identity().fmt(f)
    }
}

impl Membership {
    pub(super) fn new(identity: Identity, writer: Writer) -> Self {
        Self {
            identity: Arc::new(Mutex::new(identity)),
            writer,
        }
    }

    pub(super) fn identity(&self) -> Identity {
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what this replica is; durable before it counts.
    pub(super) async fn set(&self, cluster: ClusterId, standing: Standing) -> io::Result<()> {
        let identity = Identity {
            cluster: Some(cluster),
            standing,
            ..self.identity()
        };
        self.writer.write(Change::Identity(identity)).await?;
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = identity;
        tracing::info!(%cluster, ?standing, "this replica's standing in the cluster");
        Ok(())
    }
}

/// The answer of a replica that has found itself in another history than others.
const STOPS: &str = "it has decided something else, and stops";

/// A leader that is there was heard not longer ago.
const LATELY: Duration = Duration::from_secs(1);

/// When this replica followed a leader last, as that one asked it to. A clone is the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Contact(Arc<Mutex<Option<Instant>>>);

impl Contact {
    fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(env::now());
    }

    pub(super) fn last(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers other replicas.
#[derive(Clone)]
pub(super) struct Answers {
    pub(super) contact: Contact,
    pub(super) raft: Raft,
    pub(super) log: Log,
    pub(super) membership: Membership,
    pub(super) members: Members,
    pub(super) advertise: String,
    pub(super) alarm: Alarm,
}

impl Answers {
    /// As a handler of requests.
    pub(super) fn handler(self) -> Handler {
        Arc::new(move |from, body| -> Answering {
            let answers = self.clone();
            Box::pin(seeded(async move { answers.answer(from, &body).await }))
        })
    }

    async fn answer(&self, from: u16, body: &[u8]) -> Result<Bytes, String> {
        let envelope: Envelope =
            codec::decode(body, MAX_MESSAGE).map_err(|error| error.to_string())?;
        let reply = self.reply(from, envelope).await?;
        codec::encode(&reply, MAX_MESSAGE).map_err(|error| error.to_string())
    }

    async fn reply(
        &self,
        from: u16,
        Envelope { cluster, request }: Envelope,
    ) -> Result<Reply, String> {
        let fatal = |error: &dyn std::fmt::Display| error.to_string();
        let identity = self.membership.identity();
        let same_cluster = cluster.is_some() && cluster == identity.cluster;
        match request {
            Request::Status => Ok(Reply::Status(self.status())),
            Request::Form { cluster, replicas } => self.form(cluster, &replicas).await,
            Request::Join { cluster, term } => self.join(cluster, term).await,
            _ if self.alarm.is_raised() => Err(STOPS.into()),
            _ if !same_cluster => Err("it is in another cluster, or in none yet".into()),
            Request::Split { other, why } => {
                split::heard(from, other, &why);
                Ok(Reply::Done)
            }
            Request::Append { request, seen } => {
                self.may_follow(identity, &request.vote)?;
                if self.is_split_from(&Claim::of_entries(&request, &seen)) {
                    // Another leader of the same term learns it, too.
                    let own = self.log.vote();
                    let rival = own.filter(|own| split::rivals(own, &request.vote).is_some());
                    let answer = rival.map(AppendEntriesResponse::HigherVote);
                    return answer.map(Reply::Append).ok_or_else(|| STOPS.to_owned());
                }
                let (vote, committed) = (request.vote, request.leader_commit);
                let last = request.entries.last().map(|entry| entry.log_id);
                let last = last.or(request.prev_log_id);
                let answer = self.raft.append_entries(request).await;
                let answer = answer.map_err(|error| fatal(&error))?;
                if !matches!(answer, AppendEntriesResponse::HigherVote(_)) {
                    self.contact.note();
                }
                if matches!(answer, AppendEntriesResponse::Success) {
                    self.brought_up(identity, &vote, last, committed).await?;
                }
                Ok(Reply::Append(answer))
            }
            Request::Snapshot {
                vote,
                meta,
                seen,
                state,
            } => {
                self.may_follow(identity, &vote)?;
                if self.is_split_from(&Claim::of_snapshot(&vote, &meta, &seen)) {
                    return Err(STOPS.into());
                }
                self.adopt(&vote, meta.last_log_id, &seen).await?;
                let snapshot = Snapshot {
                    meta,
                    snapshot: state,
                };
                let answer = self.raft.install_full_snapshot(vote, snapshot).await;
                Ok(Reply::Snapshot(answer.map_err(|error| fatal(&error))?))
            }
            _ if identity.standing != Standing::Full => {
                Err("it lost its disk, and does not vote before it is brought up".into())
            }
            Request::PreVote(request) => {
                let answer = self.raft.pre_vote(request).await;
                Ok(Reply::Vote(answer.map_err(|error| fatal(&error))?))
            }
            Request::Vote(request) => {
                let answer = self.raft.vote(request).await;
                Ok(Reply::Vote(answer.map_err(|error| fatal(&error))?))
            }
            Request::Transfer { vote, to, last } => {
                let request = TransferLeaderRequest::new(vote, to, last);
                let answer = self.raft.handle_transfer_leader(request).await;
                answer
                    .map_err(|error| fatal(&error))?
                    .map_err(|error| fatal(&error))?;
                Ok(Reply::Done)
            }
        }
    }

    /// How this replica is.
    pub(super) fn status(&self) -> Status {
        let Identity {
            cluster, standing, ..
        } = self.membership.identity();
        let known = self
            .raft
            .server_metrics()
            .borrow_watched()
            .vote
            .leader_id
            .term;
        let durable = self.log.vote().map_or(0, |vote| vote.leader_id.term);
        Status {
            cluster,
            standing,
            empty: self.log.last().is_none(),
            term: known.max(durable),
            follows: self.follows(),
            advertise: self.advertise.clone(),
            replicas: self.members.configured().keys().copied().collect(),
            known: self.members.decided().or_else(|| self.members.effective()),
        }
    }

    fn follows(&self) -> Option<u16> {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        let leader = metrics.current_leader?;
        let heard = self.contact.last().is_some_and(|at| at.elapsed() < LATELY);
        (leader == metrics.id || heard).then(|| u16::try_from(leader).ok())?
    }

    async fn form(&self, cluster: ClusterId, replicas: &BTreeSet<u16>) -> Result<Reply, String> {
        if self.log.last().is_some() {
            return Err("it has decisions of a cluster on its disk".into());
        }
        if !replicas.iter().eq(self.members.configured().keys()) {
            return Err(format!(
                "its peers are {:?}, and here they are {replicas:?}; give all replicas the same peers",
                self.members.configured().keys()
            ));
        }
        let formed = self.membership.set(cluster, Standing::Full).await;
        formed.map_err(|error| error.to_string())?;
        self.raft.runtime_config().elect(true);
        Ok(Reply::Done)
    }

    /// A leader is about to make this replica a member. It has forgotten nothing: it never knew anything.
    async fn join(&self, cluster: ClusterId, term: u64) -> Result<Reply, String> {
        if self.log.last().is_some() {
            return Err("it has decisions of a cluster on its disk; empty its data folder".into());
        }
        self.raft.runtime_config().elect(false);
        let joined = self
            .membership
            .set(cluster, Standing::Returning { term })
            .await;
        joined.map_err(|error| error.to_string())?;
        Ok(Reply::Done)
    }

    /// Whether what a leader says shows that this replica and that one have decided different things.
    fn is_split_from(&self, claim: &Claim<'_>) -> bool {
        let why = self.log.contradicts(claim);
        let is_split = why.is_some();
        if let Some(why) = why {
            self.alarm.raise(claim.vote.leader_id.voted_for, why);
        }
        is_split
    }

    /// Takes over what the leader knows of the time that its snapshot covers, if this replica is about to take that.
    async fn adopt(&self, vote: &Vote, covers: Option<LogId>, seen: &Seen) -> Result<(), String> {
        let newer = |vote: &Vote| {
            vote.leader_id.term >= self.log.vote().map_or(0, |own| own.leader_id.term)
        };
        match covers {
            Some(covers) if newer(vote) && self.log.decided() < Some(covers) => {
                let adopted = self.log.adopt(seen, covers).await;
                adopted.map_err(|error| error.to_string())
            }
            _ => Ok(()),
        }
    }

    fn may_follow(&self, identity: Identity, vote: &Vote) -> Result<(), String> {
        match identity.standing {
            Standing::Full => Ok(()),
            Standing::Returning { term } if vote.leader_id.term >= term => Ok(()),
            Standing::Returning { .. } => {
                Err("it lost its disk, and follows only a newer leader".into())
            }
            Standing::Blank => Err("it lost its disk, and has not heard all others yet".into()),
            Standing::Removed => Err("it was removed from the cluster".into()),
        }
    }

    /// A replica that lost its disk is as good as any once it has all that a leader had committed, which has
    /// committed an entry of its own, so that it knows of all earlier ones. One that is new must also know that
    /// it was made a member.
    async fn brought_up(
        &self,
        identity: Identity,
        leader: &Vote,
        last: Option<LogId>,
        committed: Option<LogId>,
    ) -> Result<(), String> {
        let (Standing::Returning { .. }, Some(cluster)) = (identity.standing, identity.cluster)
        else {
            return Ok(());
        };
        let own = committed.filter(|committed| committed.leader_id.term == leader.leader_id.term);
        let is_member = self.members.is_decided(identity.replica);
        if is_member && own.is_some_and(|committed| last >= Some(committed)) {
            let set = self.membership.set(cluster, Standing::Full).await;
            set.map_err(|error| error.to_string())?;
            self.raft.runtime_config().elect(true);
        }
        Ok(())
    }
}
