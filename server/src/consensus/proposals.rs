//! Commands on their way into the log, and what became of them.

use std::sync::{Arc, RwLock};

use skyschedule_common::fault::{Rule, broken};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::error::ProposeError;
use super::machine;
use super::raft::{Answer, Batch, Raft, TypeConfig};
use super::{Decided, QUEUE};
use crate::state::{Command, State};

/// Most bytes of all proposals that wait, in KiB.
const MAX_WAITING_KIB: usize = 64 << 10;

/// What the task is asked.
pub(super) enum Message {
    /// To decide.
    Propose(Proposal),
    /// To end, once all that was proposed before is answered.
    Stop(oneshot::Sender<()>),
}

/// Commands that are decided together.
pub(super) struct Proposal {
    batch: Batch,
    commands: usize,
    /// The place of the answer, reserved, so that nobody waits for a reader.
    answer: mpsc::OwnedPermit<Decided>,
    /// Its part of the memory that waiting commands may take, given back with it.
    memory: OwnedSemaphorePermit,
}

/// Takes proposals. A clone takes them into the same queue.
#[derive(Debug, Clone)]
pub(super) struct Proposer {
    queue: mpsc::WeakSender<Message>,
    /// Weak: the receiver learns that all has ended.
    decided: mpsc::WeakSender<Decided>,
    memory: Arc<Semaphore>,
}

impl Proposer {
    /// The queue is open as long as the sender lives.
    pub(super) fn new(
        decided: &mpsc::Sender<Decided>,
    ) -> (Self, mpsc::Sender<Message>, mpsc::Receiver<Message>) {
        let (queue, proposals) = mpsc::channel(QUEUE);
        let proposer = Self {
            queue: queue.downgrade(),
            decided: decided.downgrade(),
            memory: Arc::new(Semaphore::new(MAX_WAITING_KIB)),
        };
        (proposer, queue, proposals)
    }

    pub(super) fn propose(&self, commands: Vec<Command>) -> Result<(), ProposeError> {
        let batch = Batch::new(&commands)?;
        let kib = u32::try_from(batch.len().div_ceil(1_024)).unwrap_or(u32::MAX);
        let queue = self.queue.upgrade().ok_or(ProposeError::Stopped)?;
        let memory = Arc::clone(&self.memory)
            .try_acquire_many_owned(kib)
            .map_err(|_| ProposeError::Busy)?;
        let decided = self.decided.upgrade().ok_or(ProposeError::Stopped)?;
        let answer = decided.try_reserve_owned().map_err(refused)?;
        let proposal = Proposal {
            batch,
            commands: commands.len(),
            answer,
            memory,
        };
        queue.try_send(Message::Propose(proposal)).map_err(refused)
    }
}

fn refused<T>(error: TrySendError<T>) -> ProposeError {
    match error {
        TrySendError::Full(_) => ProposeError::Busy,
        TrySendError::Closed(_) => ProposeError::Stopped,
    }
}

/// Hands proposals to openraft, in order, until it is told to stop or nobody can propose any more.
pub(super) async fn run(
    raft: Raft,
    state: Arc<RwLock<State>>,
    mut queue: mpsc::Receiver<Message>,
    lost: watch::Sender<u64>,
) -> Option<oneshot::Sender<()>> {
    // Each proposal holds one end; when all are gone, all are answered.
    let (unanswered, mut answered) = mpsc::channel::<()>(1);
    let stop = loop {
        let proposal = match queue.recv().await {
            None => break None,
            Some(Message::Stop(stop)) => break Some(stop),
            Some(Message::Propose(proposal)) => proposal,
        };
        let Proposal {
            batch,
            commands,
            answer,
            memory,
        } = proposal;
        let held = unanswered.clone();
        let lost = lost.clone();
        let mut answer = Some(answer);
        if broken(Rule::L2) {
            let effects = batch.commands().map(|commands| machine::apply(&state, &commands));
            if let (Ok(effects), Some(answer)) = (effects, answer.take()) {
                answer.send(Decided::Applied { commands, effects });
            }
        }
        let tell = Answer(Box::new(
            move |result: openraft::raft::ClientWriteResult<TypeConfig>| {
                let _held = (held, memory);
                let Some(answer) = answer else { return };
                answer.send(match result {
                    Ok(written) => Decided::Applied {
                        commands,
                        effects: written.data.effects,
                    },
                    Err(_) => {
                        lost.send_modify(|count| *count += 1);
                        Decided::Lost { commands }
                    }
                });
            },
        ));
        if raft.client_write_ff(batch, Some(tell)).await.is_err() {
            break None;
        }
    };
    queue.close();
    drop(unanswered);
    let _ = answered.recv().await;
    stop
}
