//! The state as openraft sees it: decided batches are applied in order.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bytes::Bytes;
use futures_util::{Stream, TryStreamExt as _};
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use serde::{Deserialize, Serialize};
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::protocol::codec;
use tokio::sync::{Notify, watch};

use super::error::ConsensusError;
use super::raft::{
    Batch, BatchError, Entry, LogId, Outcome, Snapshot, SnapshotMeta, StoredMembership, TypeConfig,
};
use super::store::{Change, MAX_SNAPSHOT, StoredSnapshot};
use super::writer::Writer;
use crate::state::{Command, Effect, State};

/// A snapshot is due, whatever the number of commands, when they outgrow this.
const MAX_LOG_BYTES: usize = 16 << 20;

/// Replicated beside the state, and part of snapshots.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Covered {
    applied: Option<LogId>,
    membership: StoredMembership,
}

/// Decides when a snapshot is due. The log is not counted by entries: these may be of any size.
#[derive(Debug)]
pub(super) struct Compaction {
    /// Commands after which the log is replaced by a snapshot.
    pub(super) every: u64,
    /// Notified when one is due.
    pub(super) due: Arc<Notify>,
}

/// The state and what it covers.
pub(super) struct Machine {
    state: Arc<RwLock<State>>,
    covered: Covered,
    /// Index of the last applied entry, for those who look at the state.
    index: Arc<AtomicU64>,
    /// The decided membership, for those who look at it.
    membership: watch::Sender<StoredMembership>,
    current: Arc<Mutex<Option<StoredSnapshot>>>,
    writer: Writer,
    compaction: Compaction,
    /// Applied since the last snapshot.
    commands: u64,
    bytes: usize,
}

impl Machine {
    /// From the last snapshot, if any. The state is shared with those who read it.
    pub(super) fn new(
        state: Arc<RwLock<State>>,
        snapshot: Option<StoredSnapshot>,
        writer: Writer,
        compaction: Compaction,
    ) -> io::Result<Self> {
        let mut machine = Self {
            state,
            covered: Covered::default(),
            index: Arc::default(),
            membership: watch::Sender::default(),
            current: Arc::default(),
            writer,
            compaction,
            commands: 0,
            bytes: 0,
        };
        if let Some(snapshot) = snapshot {
            machine.restore(&snapshot.meta, &snapshot.state)?;
            *machine.current() = Some(snapshot);
        }
        Ok(machine)
    }

    fn restore(&mut self, meta: &SnapshotMeta, state: &[u8]) -> io::Result<()> {
        let state: State = codec::decode(state, MAX_SNAPSHOT).map_err(io::Error::other)?;
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = state;
        self.covered = Covered {
            applied: meta.last_log_id,
            membership: meta.last_membership.clone(),
        };
        self.membership.send_replace(meta.last_membership.clone());
        self.show_index();
        Ok(())
    }

    /// Follows who the replicas are, as decided.
    pub(super) fn membership(&self) -> watch::Receiver<StoredMembership> {
        self.membership.subscribe()
    }

    /// Index of the last applied entry.
    pub(super) fn index(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.index)
    }

    fn show_index(&self) {
        let index = self.covered.applied.map_or(0, |applied| applied.index);
        self.index.store(index, Ordering::Relaxed);
    }

    fn current(&self) -> MutexGuard<'_, Option<StoredSnapshot>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn apply_batch(&mut self, batch: &Batch) -> io::Result<Vec<(usize, Effect)>> {
        let commands = batch.commands().map_err(io::Error::other)?;
        self.commands += commands.len() as u64;
        self.bytes += batch.len();
        if self.commands >= self.compaction.every || self.bytes >= MAX_LOG_BYTES {
            self.compaction.due.notify_one();
        }
        Ok(apply(&self.state, &commands))
    }
}

/// Whether an entry of the disk can be applied.
pub(super) fn verify(entry: &Entry, place: &str) -> Result<(), ConsensusError> {
    let EntryPayload::Normal(batch) = &entry.payload else {
        return Ok(());
    };
    let place = place.to_owned();
    match batch.commands() {
        Ok(_) => Ok(()),
        Err(BatchError::Newer { found, known }) => Err(ConsensusError::Newer {
            place,
            found: u64::from(found),
            known: u64::from(known),
        }),
        Err(error) => Err(ConsensusError::Damaged {
            place,
            reason: format!("entry {}: {error}", entry.log_id.index),
        }),
    }
}

/// Applies commands, and says what follows, each with the index of its command.
pub(super) fn apply(state: &RwLock<State>, commands: &[Command]) -> Vec<(usize, Effect)> {
    let mut state = state.write().unwrap_or_else(PoisonError::into_inner);
    let numbered = commands.iter().enumerate();
    numbered
        .flat_map(|(at, command)| {
            let effects = state.apply(command).into_iter();
            effects.map(move |effect| (at, effect))
        })
        .collect()
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotData = Bytes;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        Ok((self.covered.applied, self.covered.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<TypeConfig>>> + Unpin + OptionalSend,
    {
        while let Some((entry, responder)) = entries.try_next().await? {
            let mut outcome = Outcome::default();
            match &entry.payload {
                EntryPayload::Blank => {}
                // Rule L2, when it is broken on purpose, has applied the batch already.
                EntryPayload::Normal(_) if responder.is_some() && broken(Rule::L2) => {}
                EntryPayload::Normal(batch) => outcome.effects = self.apply_batch(batch)?,
                EntryPayload::Membership(membership) => {
                    self.covered.membership =
                        StoredMembership::new(Some(entry.log_id), membership.clone());
                    self.membership
                        .send_replace(self.covered.membership.clone());
                }
            }
            self.covered.applied = Some(entry.log_id);
            self.show_index();
            if let Some(responder) = responder {
                responder.send(outcome);
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        self.commands = 0;
        self.bytes = 0;
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        Builder {
            state: state.clone(),
            covered: self.covered.clone(),
            current: Arc::clone(&self.current),
            writer: self.writer.clone(),
        }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, state: Bytes) -> io::Result<()> {
        let snapshot = StoredSnapshot {
            meta: meta.clone(),
            state,
        };
        self.writer
            .write(Change::Snapshot(snapshot.clone()))
            .await?;
        self.restore(meta, &snapshot.state)?;
        *self.current() = Some(snapshot);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        Ok(self.current().clone().map(snapshot))
    }
}

fn snapshot(stored: StoredSnapshot) -> Snapshot {
    Snapshot {
        meta: stored.meta,
        snapshot: stored.state,
    }
}

/// Makes a snapshot of the state as it was.
pub(super) struct Builder {
    state: State,
    covered: Covered,
    current: Arc<Mutex<Option<StoredSnapshot>>>,
    writer: Writer,
}

impl RaftSnapshotBuilder<TypeConfig> for Builder {
    type SnapshotData = Bytes;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let state = codec::encode(&self.state, MAX_SNAPSHOT).map_err(io::Error::other)?;
        let stored = StoredSnapshot {
            meta: SnapshotMeta {
                last_log_id: self.covered.applied,
                last_membership: self.covered.membership.clone(),
            },
            state,
        };
        self.writer.write(Change::Snapshot(stored.clone())).await?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(stored.clone());
        Ok(snapshot(stored))
    }
}
