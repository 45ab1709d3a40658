//! The task that makes proposals durable, applies them, and hands back what follows.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use skyschedule_common::env;
use skyschedule_common::fault::{Rule, broken};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::error::ConsensusError;
use super::store::Store;
use super::{Decided, MAX_BATCH};
use crate::state::{Command, State};

/// What the task is asked.
pub(super) enum Message {
    /// To decide.
    Propose(Batch),
    /// To write what it has, and to end.
    Stop(oneshot::Sender<()>),
}

/// Commands that are decided together.
pub(super) struct Batch {
    pub(super) commands: Vec<Command>,
    /// The same commands, encoded.
    pub(super) entries: Vec<Bytes>,
    /// The place of the answer, reserved, so that the task never waits for a reader; none once it is answered.
    pub(super) answer: Option<mpsc::OwnedPermit<Decided>>,
    /// Its part of the memory that waiting commands may take, given back with it.
    pub(super) _memory: OwnedSemaphorePermit,
}

impl Batch {
    fn bytes(&self) -> usize {
        self.entries.iter().map(Bytes::len).sum()
    }

    /// Applies the commands and hands back what follows, once.
    fn decide(&mut self, state: &RwLock<State>) {
        let Some(answer) = self.answer.take() else {
            return;
        };
        let effects = {
            let mut state = state.write().unwrap_or_else(PoisonError::into_inner);
            let numbered = self.commands.iter().enumerate();
            numbered
                .flat_map(|(at, command)| {
                    let effects = state.apply(command).into_iter();
                    effects.map(move |effect| (at, effect))
                })
                .collect()
        };
        answer.send(Decided::Applied {
            commands: self.commands.len(),
            effects,
        });
    }
}

/// The replica as the task has it.
pub(super) struct Replica {
    pub(super) store: Store,
    pub(super) state: Arc<RwLock<State>>,
    pub(super) term: u64,
    /// How long each commit takes on a simulated disk, beside the work itself.
    pub(super) latency: Duration,
}

impl Replica {
    /// Serves until it is told to stop, all handles are gone, or the store fails.
    pub(super) async fn run(
        self,
        mut queue: mpsc::Receiver<Message>,
        failure: mpsc::OwnedPermit<Decided>,
    ) {
        let ended = self.serve(&mut queue).await;
        // From here on nothing is confirmed or taken.
        drop(queue);
        match ended {
            Ok(Some(stop)) => {
                // Whoever asked may have gone.
                let _ = stop.send(());
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "the store has failed");
                failure.send(Decided::Failed(error));
            }
        }
    }

    async fn serve(
        mut self,
        queue: &mut mpsc::Receiver<Message>,
    ) -> Result<Option<oneshot::Sender<()>>, ConsensusError> {
        let place = self.store.place().to_owned();
        loop {
            let (mut batches, ends) = next(queue).await;
            if broken(Rule::L2) {
                for batch in &mut batches {
                    batch.decide(&self.state);
                }
            }
            if !self.latency.is_zero() {
                env::sleep(self.latency).await;
            }
            self = blocking(&place, move || self.commit(batches)).await?;
            if let Some(stop) = ends {
                blocking(&place, move || self.store.close()).await?;
                return Ok(stop);
            }
        }
    }

    /// Writes all batches in one transaction, then answers them, then compacts where that is due.
    fn commit(mut self, mut batches: Vec<Batch>) -> Result<Self, ConsensusError> {
        let entries: Vec<Bytes> = batches
            .iter()
            .flat_map(|batch| batch.entries.iter().cloned())
            .collect();
        self.store.append(&entries)?;
        for batch in &mut batches {
            batch.decide(&self.state);
        }
        drop(batches);
        if self.store.wants_snapshot() {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            self.store.snapshot(self.term, &state)?;
        }
        Ok(self)
    }
}

/// Runs work that blocks; a panic of it is an error like others.
pub(super) async fn blocking<T: Send + 'static>(
    place: &str,
    work: impl FnOnce() -> Result<T, ConsensusError> + Send + 'static,
) -> Result<T, ConsensusError> {
    env::blocking(work).await.unwrap_or_else(|panicked| {
        Err(ConsensusError::Panicked {
            place: place.to_owned(),
            reason: panicked.to_string(),
        })
    })
}

/// The next batches, those that wait together; and whether they are the last, and who wants to know.
async fn next(
    queue: &mut mpsc::Receiver<Message>,
) -> (Vec<Batch>, Option<Option<oneshot::Sender<()>>>) {
    let mut batches = Vec::new();
    let mut bytes = 0;
    let mut message = queue.recv().await;
    loop {
        match message {
            None => return (batches, Some(None)),
            Some(Message::Stop(stop)) => return (batches, Some(Some(stop))),
            Some(Message::Propose(batch)) => {
                bytes += batch.bytes();
                batches.push(batch);
            }
        }
        if bytes >= MAX_BATCH {
            return (batches, None);
        }
        match queue.try_recv() {
            Ok(waiting) => message = Some(waiting),
            Err(_) => return (batches, None),
        }
    }
}
