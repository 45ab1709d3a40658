//! What the replicas agree on: what was decided is on the disks of a quorum before anybody hears of it.
//!
//! A [`Consensus`] takes [`Command`]s, makes them durable, applies them to the [`State`] in order, and hands
//! back what follows. After a restart, wherever the process was killed, the state is that of all commands
//! that were ever answered. It is Raft, by openraft, whose types stay within this module; it runs on threads
//! and a runtime of its own, so that nothing that clients cause delays an election. One replica alone is a
//! cluster of one.
//!
//! | file | one idea |
//! |---|---|
//! | `raft` | openraft's types, with ours filled in |
//! | `proposals` | commands on their way into the log, and what became of them |
//! | `leadership` | who leads; each leader's own first entry |
//! | `machine` | decided batches are applied in order; snapshots |
//! | `log` | the log as openraft sees it |
//! | `writer` | one ordered queue to the disk: what waits together is one transaction |
//! | `store` | log, vote, snapshot and identity in redb |
//! | `folder` | one process has the data folder; a store appears in it complete or not at all |
//! | `mark` | notices when durable writes have gone missing |
//! | `memory_disk` | a disk that can fail, crash and be copied, for simulations and tests |
//! | `identity` | whose disk this is, and what its replica may do |
//! | `formation` | how replicas become a cluster, and how one that lost its disk comes back |
//! | `lineage`, `split` | notices data folders of different moments that run together |
//! | `twin` | no two processes are one replica |
//! | `members` | who the replicas are at present, and where |
//! | `change` | replicas are added and removed |
//! | `transfer` | another replica leads in place of this one |
//! | `wire`, `network`, `serve` | what replicas ask each other |
//! | `acknowledged` | notices a replica that has forgotten what it confirmed |
//! | `error` | what can go wrong, and what to do about it |

mod acknowledged;
mod change;
mod error;
mod folder;
mod formation;
mod identity;
mod leadership;
mod lineage;
mod log;
mod machine;
mod mark;
mod members;
mod memory_disk;
mod network;
mod proposals;
mod raft;
mod serve;
mod split;
mod start;
mod store;
#[cfg(all(test, not(sim)))]
mod suite;
mod transfer;
mod twin;
mod wire;
mod writer;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use openraft::ReadPolicy;
use openraft::async_runtime::WatchReceiver as _;
use skyschedule_common::auth::ClusterKey;
use skyschedule_common::env::Instant;
use tokio::sync::{mpsc, oneshot, watch};

pub use change::{Added, ChangeError, Removed};
pub use error::{ConfirmError, ConsensusError, ProposeError};
pub use leadership::Leadership;
pub use memory_disk::MemoryDisk;

use self::change::Changes;
use self::formation::Statuses;
use self::identity::Standing;
use self::members::Members;
use self::network::Network;
use self::proposals::{Message, Proposer};
use self::raft::Raft;
use self::serve::{Contact, Membership};
use self::split::Alarm;
use self::store::Change;
use self::writer::Writer;
use crate::peers::Peers;
use crate::state::{Command, Effect, State};

/// Most bytes that the commands of one proposal may have.
const MAX_BATCH: usize = 16 << 20;

/// Most replicas of a cluster.
pub(crate) const MAX_REPLICAS: usize = 9;

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

/// How long replicas wait for each other. For a wide network, all three are made longer together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A leader shows at least this often that it is there.
    pub heartbeat: Duration,
    /// A follower waits a random time for a leader, at least this long.
    pub election_min: Duration,
    /// And at most this long.
    pub election_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(50),
            election_min: Duration::from_millis(150),
            election_max: Duration::from_millis(300),
        }
    }
}

/// The replicas of a cluster of several.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// Every replica's `host:port`, this one included.
    pub replicas: BTreeMap<u16, String>,
    /// What they prove to each other.
    pub key: ClusterKey,
}

/// How a replica keeps its memory, and with whom.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where.
    pub storage: Storage,
    /// Commands after which the log is replaced by a snapshot of the state. A short log is replayed
    /// faster at a start; a snapshot costs a write of the whole state.
    pub snapshot_every: u64,
    /// This replica.
    pub replica_id: u16,
    /// Where clients reach it.
    pub advertise: String,
    /// None: it is alone.
    pub cluster: Option<Cluster>,
    /// How long replicas wait for each other.
    pub timing: Timing,
}

impl Options {
    /// The usual ones, for a replica alone.
    pub fn new(storage: Storage) -> Self {
        Self {
            storage,
            snapshot_every: 10_000,
            replica_id: 1,
            advertise: String::new(),
            cluster: None,
            timing: Timing::default(),
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
    /// This replica was not the leader any more. The batch may be decided later, or never. If it still
    /// leads, it does so anew, with a `Ready` of its own.
    Lost {
        /// How many commands it had.
        commands: usize,
    },
    /// The store failed. What was not answered may be durable or not; the server must stop. Only answers that were on
    /// their way may follow.
    Failed(ConsensusError),
}

/// Another replica, as this one sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    /// Where clients reach it.
    pub address: String,
    /// Whether it votes.
    pub voter: bool,
    /// Whether it answers.
    pub reachable: bool,
    /// How many entries it lacks, if this replica leads and knows.
    pub lag: Option<u64>,
}

/// A handle on the replica. A clone is the same replica, which stops when all handles are gone.
#[derive(Debug, Clone)]
pub struct Consensus {
    id: u16,
    state: Arc<RwLock<State>>,
    applied: Arc<AtomicU64>,
    membership: Membership,
    proposer: Proposer,
    /// Keeps the replica running.
    queue: mpsc::Sender<Message>,
    raft: RaftHandle,
    leadership: watch::Receiver<Leadership>,
    peers: Option<Peers>,
    members: Members,
    network: Network,
    changes: Changes,
    servers: watch::Receiver<Vec<String>>,
    statuses: Statuses,
    advertise: String,
    contact: Contact,
    writer: Writer,
    note: Option<Bytes>,
    lost: watch::Sender<u64>,
    alarm: Alarm,
}

/// Without what is in it.
#[derive(Clone)]
struct RaftHandle(Raft);

impl std::fmt::Debug for RaftHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Raft")
    }
}

impl Consensus {
    /// Opens the memory, or makes an empty one; verifies it; and takes part. Whenever this replica leads,
    /// the first [`Decided`] is that of this leadership's own [`Command::Ready`].
    ///
    /// # Errors
    /// When the memory is locked, damaged, foreign, too new, or cannot be written.
    pub async fn open(options: Options) -> Result<(Self, mpsc::Receiver<Decided>), ConsensusError> {
        start::start(options).await
    }

    /// Hands over commands. They are made durable together, applied in order, and answered by one
    /// [`Decided`]; batches are answered in the order of the calls. Does not wait.
    ///
    /// # Errors
    /// When too many wait, one is too large, or the replica has stopped: nothing was taken then.
    pub fn propose(&self, commands: &[Command]) -> Result<(), ProposeError> {
        self.proposer.propose(commands)
    }

    /// Resolves when a quorum has confirmed, after this call, that this replica leads, and all that was
    /// decided before is applied. A replica alone is its own quorum.
    ///
    /// # Errors
    /// When it does not lead, or too few answer, or it has stopped.
    pub async fn confirm(&self) -> Result<(), ConfirmError> {
        let own = self.leadership().own.ok_or(ConfirmError::NotLeader)?;
        if self.queue.is_closed() || self.alarm.is_raised() {
            return Err(ConfirmError::NotLeader);
        }
        let confirmed = self.raft.0.ensure_linearizable(ReadPolicy::ReadIndex).await;
        match confirmed {
            // Another leadership than the one that asked.
            Ok(_) if self.leadership().own != Some(own) || self.alarm.is_raised() => {
                Err(ConfirmError::NotLeader)
            }
            Ok(_) => Ok(()),
            Err(_) if self.leadership().own == Some(own) => Err(ConfirmError::NoQuorum),
            Err(_) => Err(ConfirmError::NotLeader),
        }
    }

    /// Looks at the applied state, which may be ahead of the answers that were taken. Applying waits
    /// meanwhile: look, and do not compute.
    pub fn read<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many entries of the log are applied.
    pub fn applied(&self) -> u64 {
        self.applied.load(Ordering::Relaxed)
    }

    /// Whether this replica takes part in full: it did not lose its disk, or has been brought up since.
    pub fn is_full(&self) -> bool {
        self.membership.identity().standing == Standing::Full
    }

    /// Who leads at present.
    pub fn leadership(&self) -> Leadership {
        *self.leadership.borrow()
    }

    /// Whether most of the replicas follow another one at present: this one must number nobody by itself, whatever keeps it
    /// from following, too.
    pub(crate) fn is_led_elsewhere(&self) -> bool {
        let Some(known) = self.members.effective() else {
            return false;
        };
        let statuses = self.statuses.lock().unwrap_or_else(PoisonError::into_inner);
        let followed = known.voters.iter().filter_map(|id| {
            let status = statuses.get(id)?;
            Some((status.term, status.follows?))
        });
        let mut leaders: BTreeMap<(u64, u16), usize> = BTreeMap::new();
        for (term, leader) in followed.filter(|(_, leader)| *leader != self.id) {
            *leaders.entry((term, leader)).or_default() += 1;
        }
        leaders.values().any(|count| count * 2 > known.voters.len())
    }

    /// When this replica followed a leader last.
    pub fn last_contact(&self) -> Option<Instant> {
        self.contact.last()
    }

    /// Ends this replica's leadership, if it has one, for those who watch it. If it still leads, it does so
    /// anew, with a `Ready` of its own.
    pub(crate) fn lead_anew(&self) {
        self.lost.send_modify(|count| *count += 1);
    }

    /// What was kept for this replica alone, as it was at its start.
    pub(crate) fn note(&self) -> Option<&Bytes> {
        self.note.as_ref()
    }

    /// Keeps something for this replica alone, in place of what was kept; resolves once it is durable.
    ///
    /// # Errors
    /// When the disk has failed, which ends this replica.
    pub(crate) async fn keep_note(&self, note: Bytes) -> std::io::Result<()> {
        self.writer.write(Change::Note(note)).await
    }

    /// Follows who leads.
    pub fn watch_leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.clone()
    }

    /// Counts leaderships.
    pub fn term(&self) -> u64 {
        self.leadership().term
    }

    /// This replica's id.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// All replicas, this one included.
    pub fn replicas(&self) -> BTreeMap<u16, Replica> {
        let statuses = self.statuses.lock().unwrap_or_else(PoisonError::into_inner);
        let lags = self.lags();
        let known = self.members.effective().or_else(|| self.members.decided());
        let voters = known.as_ref().map(|known| &known.voters);
        let replica = |id: u16, address: String, reachable| Replica {
            address,
            voter: voters.is_some_and(|voters| voters.contains(&id)),
            reachable,
            lag: lags.get(&id).copied(),
        };
        let places: Vec<(u16, String)> = match &known {
            Some(known) => known
                .places
                .iter()
                .map(|(id, place)| (*id, place.advertise.clone()))
                .collect(),
            None => self.members.configured().clone().into_iter().collect(),
        };
        let mut replicas: BTreeMap<u16, Replica> = BTreeMap::new();
        for (id, address) in places {
            let status = statuses.get(&id);
            let address = status.map_or(address, |status| status.advertise.clone());
            replicas.insert(id, replica(id, address, status.is_some()));
        }
        replicas.insert(self.id, replica(self.id, self.advertise.clone(), true));
        replicas
    }

    /// Whether the voters are being changed: both those of before and those of after must agree.
    pub fn changes_voters(&self) -> bool {
        self.members.is_joint()
    }

    /// Follows where clients find the replicas that may lead; empty, where this one is alone.
    pub(crate) fn watch_servers(&self) -> watch::Receiver<Vec<String>> {
        self.servers.clone()
    }

    /// How many entries each of the others lacks; empty, if this replica does not lead.
    fn lags(&self) -> BTreeMap<u16, u64> {
        let metrics = self.raft.0.metrics();
        let metrics = metrics.borrow_watched();
        let last = metrics.last_log_index.map_or(0, |last| last + 1);
        let known = metrics.replication.iter().flatten();
        known
            .filter(|(id, _)| **id != u64::from(self.id))
            .filter_map(|(id, has)| {
                let has = has.as_ref().map_or(0, |has| has.index + 1);
                Some((u16::try_from(*id).ok()?, last.saturating_sub(has)))
            })
            .collect()
    }

    /// Whether this replica is in a cluster.
    pub(crate) fn is_formed(&self) -> bool {
        self.members.effective().is_some()
    }

    /// Where clients reach this replica, whether it answers or not.
    pub(crate) fn address_of(&self, id: u16) -> Option<String> {
        Some(self.replicas().remove(&id)?.address)
    }

    /// The other replicas; none, if this one is alone.
    pub(crate) fn peers(&self) -> Option<&Peers> {
        self.peers.as_ref()
    }

    /// Answers what was proposed before, then stops. Other handles are told `Stopped`.
    pub async fn shutdown(self) {
        let (stop, stopped) = oneshot::channel();
        if self.queue.send(Message::Stop(stop)).await.is_ok() {
            // An error means that it has failed, and stopped.
            let _ = stopped.await;
        }
    }
}
