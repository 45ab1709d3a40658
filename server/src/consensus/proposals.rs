//! Commands on their way into the log, and what became of them.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use openraft::async_runtime::WatchReceiver as _;
use openraft::errors::ClientWriteError;
use openraft::raft::ClientWriteResult;
use skyschedule_common::env;
use skyschedule_common::fault::{Rule, broken};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::error::ProposeError;
use super::leadership::Leadership;
use super::machine;
use super::raft::{Answer, Batch, Raft, TypeConfig};
use super::{Decided, QUEUE};
use crate::state::{Command, State};

/// Most bytes of all proposals that wait, in KiB.
const MAX_WAITING_KIB: usize = 64 << 10;

/// Pause before a proposal is tried again that found no quorum.
const RETRY: Duration = Duration::from_millis(10);

/// How long what was proposed may take to be answered once the task is told to end.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// What the task is asked.
pub(super) enum Message {
    /// To decide.
    Propose(Proposal),
    /// To end, once all that was proposed before is answered, or will not be soon.
    Stop(oneshot::Sender<()>),
}

/// Commands that are decided together.
pub(super) struct Proposal {
    batch: Batch,
    commands: usize,
    /// The leadership that proposes.
    leadership: Leadership,
    /// The place of the answer, reserved, so that nobody waits for a reader; none once it is answered.
    answer: Option<mpsc::OwnedPermit<Decided>>,
    /// Its part of the memory that waiting commands may take, given back with it.
    _memory: OwnedSemaphorePermit,
}

impl Proposal {
    fn answer(&mut self, decided: Decided) {
        if let Some(answer) = self.answer.take() {
            answer.send(decided);
        }
    }

    /// Rule L2, broken on purpose: what follows is told before it is decided.
    fn tell_too_early(&mut self, state: &RwLock<State>) {
        if let Ok(commands) = self.batch.commands() {
            let effects = machine::apply(state, &commands);
            let commands = self.commands;
            self.answer(Decided::Applied { commands, effects });
        }
    }
}

/// Takes proposals. A clone takes them into the same queue.
#[derive(Debug, Clone)]
pub(super) struct Proposer {
    queue: mpsc::WeakSender<Message>,
    /// Weak: the receiver learns that all has ended.
    decided: mpsc::WeakSender<Decided>,
    memory: Arc<Semaphore>,
    leadership: watch::Receiver<Leadership>,
}

impl Proposer {
    /// The queue is open as long as the sender lives.
    pub(super) fn new(
        decided: &mpsc::Sender<Decided>,
        leadership: watch::Receiver<Leadership>,
    ) -> (Self, mpsc::Sender<Message>, mpsc::Receiver<Message>) {
        let (queue, proposals) = mpsc::channel(QUEUE);
        let proposer = Self {
            queue: queue.downgrade(),
            decided: decided.downgrade(),
            memory: Arc::new(Semaphore::new(MAX_WAITING_KIB)),
            leadership,
        };
        (proposer, queue, proposals)
    }

    pub(super) fn propose(&self, commands: &[Command]) -> Result<(), ProposeError> {
        let batch = Batch::new(commands)?;
        let kib = u32::try_from(batch.len().div_ceil(1_024)).unwrap_or(u32::MAX);
        let queue = self.queue.upgrade().ok_or(ProposeError::Stopped)?;
        let memory = Arc::clone(&self.memory)
            .try_acquire_many_owned(kib)
            .map_err(|_| ProposeError::Busy)?;
        let decided = self.decided.upgrade().ok_or(ProposeError::Stopped)?;
        let answer = decided
            .try_reserve_owned()
            .map_err(|error| refused(&error))?;
        let proposal = Proposal {
            batch,
            commands: commands.len(),
            leadership: *self.leadership.borrow(),
            answer: Some(answer),
            _memory: memory,
        };
        queue
            .try_send(Message::Propose(proposal))
            .map_err(|error| refused(&error))
    }
}

fn refused<T>(error: &TrySendError<T>) -> ProposeError {
    match error {
        TrySendError::Full(_) => ProposeError::Busy,
        TrySendError::Closed(_) => ProposeError::Stopped,
    }
}

/// The task behind the queue.
pub(super) struct Proposals {
    pub(super) raft: Raft,
    pub(super) state: Arc<RwLock<State>>,
    pub(super) leadership: watch::Receiver<Leadership>,
    /// Counts proposals that were lost.
    pub(super) lost: watch::Sender<u64>,
}

impl Proposals {
    /// Hands proposals to openraft, in order, until it is told to stop or nobody can propose any more.
    pub(super) async fn run(
        self,
        mut queue: mpsc::Receiver<Message>,
    ) -> Option<oneshot::Sender<()>> {
        // Each proposal holds one end until it is answered.
        let (again, mut returned) = mpsc::channel(QUEUE);
        let stop = loop {
            let proposal = tokio::select! {
                biased;
                Some(proposal) = returned.recv() => {
                    env::sleep(RETRY).await;
                    proposal
                }
                message = queue.recv() => match message {
                    None => break None,
                    Some(Message::Stop(stop)) => break Some(stop),
                    Some(Message::Propose(proposal)) => proposal,
                },
            };
            if self.hand_over(proposal, again.clone()).await.is_none() {
                break None;
            }
        };
        queue.close();
        drop(again);
        let answered = async {
            while let Some(mut proposal) = returned.recv().await {
                let commands = proposal.commands;
                proposal.answer(Decided::Lost { commands });
            }
        };
        // What no quorum takes openraft answers only when it ends.
        let _ = env::timeout(LAST_ANSWERS, answered).await;
        stop
    }

    /// None when openraft has ended.
    async fn hand_over(&self, mut proposal: Proposal, again: mpsc::Sender<Proposal>) -> Option<()> {
        if broken(Rule::L2) {
            proposal.tell_too_early(&self.state);
        }
        let batch = proposal.batch.clone();
        let proposed = proposal.leadership;
        let (lost, leadership, raft) = (
            self.lost.clone(),
            self.leadership.clone(),
            self.raft.clone(),
        );
        // Who leads again after another one did must decide nothing that it wanted before: a member that it took for
        // dead may have been renewed since. The term shows that at once, and the watched leadership a moment later.
        let leads = move || {
            let term = raft.metrics().borrow_watched().current_term;
            proposed.own.is_some()
                && leadership.borrow().own == proposed.own
                && term == proposed.term
        };
        if proposed.own.is_some() && !leads() {
            let commands = proposal.commands;
            proposal.answer(Decided::Lost { commands });
            return Some(());
        }
        let tell = Answer(Box::new(move |result: ClientWriteResult<TypeConfig>| {
            let commands = proposal.commands;
            match result {
                Ok(written) => proposal.answer(Decided::Applied {
                    commands,
                    effects: written.data.effects,
                }),
                // It is not in the log. A leader takes nothing while no quorum answers it.
                Err(ClientWriteError::ForwardToLeader(_)) if leads() => {
                    if let Err(error) = again.try_send(proposal) {
                        error.into_inner().answer(Decided::Lost { commands });
                    }
                }
                Err(_) => {
                    // A leadership that is over already need not end once more.
                    let was_present = leads();
                    proposal.answer(Decided::Lost { commands });
                    if was_present {
                        lost.send_modify(|count| *count += 1);
                    }
                }
            }
        }));
        self.raft.client_write_ff(batch, Some(tell)).await.ok()
    }
}
