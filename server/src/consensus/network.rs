//! openraft's requests over the connections between replicas.

use std::time::Duration;

use bytes::Bytes;
use openraft::OptionalSend;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::v2::RaftNetworkV2;
use openraft::network::{RPCOption, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    VoteRequest, VoteResponse,
};
use skyschedule_common::protocol::codec;

use super::acknowledged::{Acknowledged, Sent};
use super::identity::{ClusterId, Standing};
use super::log::Log;
use super::raft::{Place, Snapshot, TypeConfig, Vote};
use super::serve::Membership;
use super::split::{self, Alarm};
use super::store::MAX_SNAPSHOT;
use super::wire::{Envelope, Reply, Request};
use crate::peers::{AskError, Peers, Service};

/// Largest request: a snapshot, and what is around it.
pub(super) const MAX_MESSAGE: usize = MAX_SNAPSHOT + 4_096;

/// How long a snapshot of this size may take: it is sent at 1 MiB/s at least, and then written.
fn snapshot_limit(bytes: usize) -> Duration {
    Duration::from_secs(10 + (bytes >> 20) as u64)
}

/// Asks other replicas about consensus.
#[derive(Clone)]
pub(super) struct Network {
    /// None: this replica is alone.
    pub(super) peers: Option<Peers>,
    pub(super) membership: Membership,
    /// How long an answer about votes and entries may take.
    pub(super) limit: Duration,
    pub(super) acknowledged: Acknowledged,
    pub(super) log: Log,
    pub(super) alarm: Alarm,
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.peers.fmt(f)
    }
}

/// No answer, or a wrong one.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error("an answer that cannot be read: {0}")]
    Codec(#[from] codec::CodecError),
    #[error("an answer to something else")]
    Mismatch,
}

impl From<CallError> for RPCError<TypeConfig> {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Ask(AskError::Unreachable(_) | AskError::Refused(..)) => {
                Self::Unreachable(Unreachable::new(&error))
            }
            _ => Self::Network(NetworkError::new(&error)),
        }
    }
}

impl Network {
    /// Asks the replica `to`.
    pub(super) async fn call(
        &self,
        to: u64,
        request: Request,
        limit: Duration,
    ) -> Result<Reply, CallError> {
        let id = u16::try_from(to).unwrap_or(0);
        let peers = self.peers.as_ref().ok_or(AskError::Unreachable(id))?;
        let cluster: Option<ClusterId> = self.membership.identity().cluster;
        let envelope = Envelope { cluster, request };
        let body = codec::encode(&envelope, MAX_MESSAGE)?;
        let answer = peers.ask(id, Service::Consensus, body, limit).await?;
        Ok(codec::decode(&answer, MAX_MESSAGE)?)
    }
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Client;

    async fn new_client(&mut self, target: u64, _: &Place) -> Client {
        Client {
            network: self.clone(),
            target,
        }
    }
}

/// Asks one other replica.
pub(super) struct Client {
    network: Network,
    target: u64,
}

impl Client {
    async fn call(&self, request: Request) -> Result<Reply, CallError> {
        let limit = self.network.limit;
        self.network.call(self.target, request, limit).await
    }

    /// The replica does not know an entry any more that it had acknowledged. One that lost its whole disk knows that it did,
    /// and does no harm.
    async fn has_forgotten(&self, entry: u64) -> Result<(), CallError> {
        let Reply::Status(status) = self.call(Request::Status).await? else {
            return Err(CallError::Mismatch);
        };
        if status.standing == Standing::Full {
            tracing::error!(
                replica = self.target,
                entry,
                "another replica has forgotten what it had confirmed: its data folder was replaced by an older copy, or its \
                 disk lost writes. It has also forgotten for whom it voted, so that decisions may be lost. Stop it, empty its \
                 data folder, and start it while all others are there: they fill it"
            );
        }
        Ok(())
    }
}

impl RaftNetworkV2<TypeConfig> for Client {
    type SnapshotData = Bytes;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        let (sent, vote) = (Sent::of(&request), request.vote);
        let seen = self.network.log.lineage();
        let Reply::Append(answer) = self.call(Request::Append { request, seen }).await? else {
            return Err(CallError::Mismatch.into());
        };
        if let AppendEntriesResponse::HigherVote(other) = &answer
            && let Some(why) = split::rivals(&vote, other)
        {
            self.network.alarm.raise(other.leader_id.voted_for, why);
        }
        let acknowledged = &self.network.acknowledged;
        if let Some(entry) = acknowledged.take(self.target, sent, &answer) {
            let looked = self.has_forgotten(entry).await;
            // Without an answer it is asked again, about the same entries.
            looked.inspect_err(|_| acknowledged.note(self.target, Some(entry)))?;
        }
        Ok(answer)
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        match self.call(Request::Vote(request)).await? {
            Reply::Vote(answer) => Ok(answer),
            _ => Err(CallError::Mismatch.into()),
        }
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        match self.call(Request::PreVote(request)).await? {
            Reply::Vote(answer) => Ok(answer),
            _ => Err(CallError::Mismatch.into()),
        }
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let limit = snapshot_limit(snapshot.snapshot.len());
        let covered = snapshot.meta.last_log_id.map(|last| last.index);
        let request = Request::Snapshot {
            vote,
            meta: snapshot.meta,
            seen: self.network.log.lineage(),
            state: snapshot.snapshot,
        };
        let reply = tokio::select! {
            biased;
            closed = cancel => return Err(closed.into()),
            reply = self.network.call(self.target, request, limit) => reply,
        };
        match reply.map_err(RPCError::from)? {
            Reply::Snapshot(answer) => {
                if answer.vote == vote {
                    self.network.acknowledged.note(self.target, covered);
                }
                Ok(answer)
            }
            _ => Err(RPCError::from(CallError::Mismatch).into()),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<openraft::raft::TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        let request = Request::Transfer {
            vote: *request.from_leader(),
            to: *request.to_node_id(),
            last: request.last_log_id().copied(),
        };
        match self.call(request).await? {
            Reply::Done => Ok(Ok(())),
            _ => Err(CallError::Mismatch.into()),
        }
    }
}
