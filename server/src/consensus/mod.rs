//! The memory of the server: what was decided is on disk before anybody hears of it.
//!
//! A [`Consensus`] takes [`Command`]s, makes them durable, applies them to the [`State`] in order, and hands
//! back what follows. After a restart, wherever the process was killed, the state is that of all commands
//! that were ever answered. At present one replica is its own quorum.
//!
//! | file | one idea |
//! |---|---|
//! | `replica` | the task: proposals in, one transaction for those that wait together, effects out |
//! | `store` | the command log and its snapshots in redb |
//! | `folder` | one process has the data folder; a store appears in it complete or not at all |
//! | `mark` | notices when durable entries have gone missing |
//! | `memory_disk` | a disk that can fail, crash and be copied, for simulations and tests |
//! | `error` | what can go wrong, and what to do about it |

mod error;
mod folder;
mod mark;
mod memory_disk;
mod replica;
mod store;

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use skyschedule_common::env;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, oneshot};

pub use error::{ConsensusError, NotLeader, ProposeError};
pub use memory_disk::MemoryDisk;

use crate::state::{Command, Effect, State};
use replica::{Batch, Message, Replica};
use store::Store;

/// Most bytes that the commands of one proposal may have.
const MAX_BATCH: usize = 16 << 20;

/// Most bytes of all proposals that wait, in KiB.
const MAX_WAITING_KIB: usize = 64 << 10;

/// Proposals that wait, and answers that were not taken yet; more are refused.
const QUEUE: usize = 1_024;

/// Where the memory is.
#[derive(Debug, Clone)]
pub enum Storage {
    /// A folder of this replica's own. It is made where needed.
    Folder(PathBuf),
    /// For simulations and tests.
    Memory(MemoryDisk),
}

/// How a replica keeps its memory.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where.
    pub storage: Storage,
    /// Commands after which the log is replaced by a snapshot of the state. A short log is replayed
    /// faster at a start; a snapshot costs a write of the whole state.
    pub snapshot_every: u64,
}

impl Options {
    /// The usual ones.
    pub fn new(storage: Storage) -> Self {
        Self {
            storage,
            snapshot_every: 10_000,
        }
    }
}

/// What became of proposals, in their order.
#[derive(Debug)]
pub enum Decided {
    /// A batch is durable and applied.
    Applied {
        /// How many commands it had.
        commands: usize,
        /// What follows, each with the index of its command in the batch.
        effects: Vec<(usize, Effect)>,
    },
    /// The store failed. What was not answered may be durable or not; the server must stop.
    Failed(ConsensusError),
}

/// A handle on the replica. A clone is the same replica, which stops when all handles are gone.
#[derive(Debug, Clone)]
pub struct Consensus {
    state: Arc<RwLock<State>>,
    term: u64,
    queue: mpsc::Sender<Message>,
    /// Weak: the receiver learns that the task has ended.
    decided: mpsc::WeakSender<Decided>,
    memory: Arc<Semaphore>,
}

impl Consensus {
    /// Opens the memory, or makes an empty one; verifies and replays it; leads. The first [`Decided`] is
    /// that of this leadership's own [`Command::Ready`].
    ///
    /// # Errors
    /// When the memory is locked, damaged, foreign, too new, or cannot be written.
    pub async fn open(options: Options) -> Result<(Self, mpsc::Receiver<Decided>), ConsensusError> {
        let (place, latency) = match &options.storage {
            Storage::Folder(path) => (path.display().to_string(), Duration::ZERO),
            Storage::Memory(disk) => ("memory".to_owned(), disk.latency()),
        };
        let Options {
            storage,
            snapshot_every,
        } = options;
        let opening = move || Store::open(&storage, snapshot_every);
        let (store, remembered) = replica::blocking(&place, opening).await?;

        let state = Arc::new(RwLock::new(remembered.state));
        let term = remembered.term + 1;
        let (queue, proposals) = mpsc::channel(QUEUE);
        // One more, for the failure.
        let (decided, answers) = mpsc::channel(QUEUE + 1);
        let failure = decided.clone().try_reserve_owned();
        let handle = Self {
            state: Arc::clone(&state),
            term,
            queue,
            decided: decided.downgrade(),
            memory: Arc::new(Semaphore::new(MAX_WAITING_KIB)),
        };
        let ready = Command::Ready {
            leader: env::rng::u64(),
        };
        if let (Ok(failure), Ok(())) = (failure, handle.propose(vec![ready])) {
            let replica = Replica {
                store,
                state,
                term,
                latency,
            };
            env::spawn(replica.run(proposals, failure));
        }
        Ok((handle, answers))
    }

    /// Hands over commands. They are made durable together, applied in order, and answered by one
    /// [`Decided::Applied`]; batches are answered in the order of the calls. Does not wait.
    ///
    /// # Errors
    /// When too many wait, one is too large, or the replica has stopped: nothing was taken then.
    pub fn propose(&self, commands: Vec<Command>) -> Result<(), ProposeError> {
        let entries = commands
            .iter()
            .map(|command| store::encode_entry(self.term, command))
            .collect::<Result<Vec<Bytes>, _>>()
            .ok();
        let bytes = |entries: &Vec<Bytes>| entries.iter().map(Bytes::len).sum::<usize>();
        let entries = entries
            .filter(|entries| bytes(entries) <= MAX_BATCH)
            .ok_or(ProposeError::TooLarge { limit: MAX_BATCH })?;
        let kib = u32::try_from(bytes(&entries).div_ceil(1_024)).unwrap_or(u32::MAX);
        let memory = Arc::clone(&self.memory)
            .try_acquire_many_owned(kib)
            .map_err(|_| ProposeError::Busy)?;
        let decided = self.decided.upgrade().ok_or(ProposeError::Stopped)?;
        let answer = decided.try_reserve_owned().map_err(|error| match error {
            TrySendError::Full(_) => ProposeError::Busy,
            TrySendError::Closed(_) => ProposeError::Stopped,
        })?;
        let batch = Batch {
            commands,
            entries,
            answer: Some(answer),
            _memory: memory,
        };
        let taken = self.queue.try_send(Message::Propose(batch));
        taken.map_err(|error| match error {
            TrySendError::Full(_) => ProposeError::Busy,
            TrySendError::Closed(_) => ProposeError::Stopped,
        })
    }

    /// Resolves when a quorum has confirmed, after this call, that this replica leads. A replica alone is
    /// its own quorum: nobody else can have its memory while its task lives.
    ///
    /// # Errors
    /// When it does not lead, or has stopped.
    #[expect(
        clippy::unused_async,
        reason = "with several replicas it asks the others"
    )]
    pub async fn confirm(&self) -> Result<(), NotLeader> {
        if self.queue.is_closed() {
            Err(NotLeader)
        } else {
            Ok(())
        }
    }

    /// Looks at the applied state, which may be ahead of the answers that were taken. Applying waits
    /// meanwhile: look, and do not compute.
    pub fn read<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts leaderships.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Makes durable and answers what was proposed before, then stops. Other handles are told `Stopped`.
    pub async fn shutdown(self) {
        let (stop, stopped) = oneshot::channel();
        if self.queue.send(Message::Stop(stop)).await.is_ok() {
            // An error means that it has failed, and stopped.
            let _ = stopped.await;
        }
    }
}
