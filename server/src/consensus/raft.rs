//! openraft's types, with ours filled in.

use std::fmt;

use bytes::Bytes;
use openraft::RaftTypeConfig;
use openraft::raft::responder::Responder;
use openraft::type_config::alias;
use serde::{Deserialize, Serialize};
use skyschedule_common::protocol::codec::{self, CodecError};

use super::machine::Machine;
use super::{MAX_BATCH, ProposeError};
use crate::state::{Command, Effect};

/// Our choice of openraft's types.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TypeConfig;

impl RaftTypeConfig for TypeConfig {
    type D = Batch;
    type R = Outcome;
    type NodeId = u64;
    type Node = Place;
    type Term = u64;
    type LeaderId = openraft::impls::leader_id_std::LeaderId<u64, u64>;
    type Vote = openraft::impls::Vote<Self::LeaderId>;
    type Payload = openraft::EntryPayload<Batch, u64, Place>;
    type Entry = openraft::impls::Entry<CommittedLeaderId, Self::Payload>;
    type AsyncRuntime = Runtime;
    type Responder<T>
        = Answer<T>
    where
        T: Send + 'static;
    type Batch<T>
        = openraft::impls::InlineBatch<T>
    where
        T: Send + 'static;
    type ErrorSource = openraft::impls::BoxedErrorSource;
}

/// Where a replica is. Decided together with who the replicas are, so that a change reaches all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// `host:port` for other replicas.
    pub(super) address: String,
    /// `host:port` for clients.
    pub(super) advertise: String,
    /// It was added while the cluster ran: lists of peers may not know of it, or say where another one was before it.
    pub(super) added: bool,
}

pub(super) type Raft = openraft::Raft<TypeConfig, Machine>;
pub(super) type CommittedLeaderId = alias::CommittedLeaderIdOf<TypeConfig>;
pub(super) type Entry = alias::EntryOf<TypeConfig>;
pub(super) type LogId = alias::LogIdOf<TypeConfig>;
pub(super) type Vote = alias::VoteOf<TypeConfig>;
pub(super) type StoredMembership = alias::StoredMembershipOf<TypeConfig>;
pub(super) type SnapshotMeta = alias::SnapshotMetaOf<TypeConfig>;
pub(super) type Snapshot = alias::SnapshotOf<TypeConfig, Bytes>;

#[cfg(not(sim))]
pub(super) type Runtime = openraft::impls::TokioRuntime;

/// The same, with randomness that follows from a seed.
#[cfg(sim)]
pub(super) type Runtime =
    openraft::rt::deterministic_rng::DeterministicRng<openraft::impls::TokioRuntime>;

/// Runs what calls openraft; its tasks are spawned from within.
#[cfg(not(sim))]
pub(super) async fn seeded<F: Future>(future: F) -> F::Output {
    future.await
}

/// Runs what calls openraft, with randomness of the present host's.
#[cfg(sim)]
pub(super) async fn seeded<F: Future>(future: F) -> F::Output {
    Runtime::scope(skyschedule_common::env::rng::u64(), future).await
}

/// First byte of a batch. A later form gets the next number, and this one stays readable.
const VERSION: u8 = 1;

/// Commands that are decided together, as they are kept and sent.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Batch(Bytes);

impl Batch {
    pub(super) fn new(commands: &[Command]) -> Result<Self, ProposeError> {
        let bytes = codec::encode(&commands, MAX_BATCH)
            .map_err(|_| ProposeError::TooLarge { limit: MAX_BATCH })?;
        Ok(Self([&[VERSION], bytes.as_ref()].concat().into()))
    }

    /// The commands.
    pub(super) fn commands(&self) -> Result<Vec<Command>, BatchError> {
        match self.0.split_first() {
            Some((&VERSION, commands)) => Ok(codec::decode(commands, MAX_BATCH)?),
            Some((&found, _)) if found > VERSION => Err(BatchError::Newer {
                found,
                known: VERSION,
            }),
            _ => Err(BatchError::NoVersion),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Bytes are no batch.
#[derive(Debug, thiserror::Error)]
pub(super) enum BatchError {
    #[error("an entry has form {found}, and this version reads up to {known}")]
    Newer { found: u8, known: u8 },
    #[error("an entry has no version")]
    NoVersion,
    #[error(transparent)]
    Codec(#[from] CodecError),
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batch({} bytes)", self.len())
    }
}

impl fmt::Display for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of commands", self.len())
    }
}

/// What follows from a batch, each with the index of its command. It stays within the process.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Outcome {
    #[serde(skip)]
    pub(super) effects: Vec<(usize, Effect)>,
}

/// Takes the answer to a proposal.
pub(super) struct Answer<T>(pub(super) Box<dyn FnOnce(T) + Send>);

impl<T: Send + 'static> Responder<TypeConfig, T> for Answer<T> {
    fn on_complete(self, result: T) {
        (self.0)(result);
    }
}
