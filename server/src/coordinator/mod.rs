//! On the leader: events become commands, effects become messages. The other replicas keep their clients
//! logged in, tell them where the leader is, and tell the leader what they see.
//!
//! One task owns all of this. Sessions and the admin interface send it events; it gathers commands,
//! hands them to the consensus one batch at a time, and carries out what was decided. It keeps no
//! decision of its own: all that it remembers (deadlines, connections, who was asked for what) a new
//! leader can do without.
//!
//! | file | one idea |
//! |---|---|
//! | `leadership` | a leader begins, and stops at once |
//! | `quorum` | a leader without a quorum steps aside |
//! | `degraded` | without a quorum for long, clients of available groups are numbered all the same |
//! | `reports` | what another replica saw of a client is told to the leader |
//! | `connections` | clients log in and attach |
//! | `leases` | heartbeats, deadlines, ends of connections |
//! | `handovers` | releases are gathered, barriers are paced |
//! | `effects` | what was decided becomes messages |
//! | `servers` | clients learn where all servers are |
//! | `requests` | what is shown and set through the admin interface |
//! | `batch`, `timers`, `track`, `flapping` | what is to be decided, done later, and remembered |

mod batch;
mod connections;
mod degraded;
mod effects;
mod flapping;
mod handle;
mod handovers;
mod leadership;
mod leases;
mod quorum;
mod reports;
mod requests;
mod servers;
mod timers;
mod track;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_common::protocol::messages::Numbering;
use tokio::sync::{mpsc, oneshot, watch};

pub use handle::{AskError, ConfigureError, DeleteError, Handle};
pub(crate) use track::server_lease;

use self::batch::Batch;
use self::connections::Connection;
use self::handle::Request;
use self::leadership::Hint;
use self::leases::Heartbeat;
use self::quorum::Quorum;
use self::reports::Reports;
use self::timers::Timers;
use self::track::GroupTrack;
use crate::consensus::{ConfirmError, Consensus, ConsensusError, Decided, Leadership};
use crate::degraded::{Degraded, Memory};
use crate::metrics::Metrics;
use crate::session::{ConnectionId, SessionEvent};
use crate::state::SettingsError;
use crate::view::{GroupView, MemberView};

/// The coordinator looks at its clock at least this often.
const TICK: Duration = Duration::from_millis(250);

/// A gap between two looks at the clock that means that this process, or its machine, stood still:
/// heartbeats wait unread, so that all members get a full lease to be heard, as from a new leader.
const STOOD_STILL: Duration = Duration::from_secs(1);

/// Events taken at once before anything is proposed.
const EVENTS_AT_ONCE: usize = 1_024;

/// Identity of this replica, for what it shows.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) replica_id: u16,
    /// Without a quorum for so long, it numbers clients of available groups by itself.
    pub(crate) degraded_after: Duration,
}

/// The task that turns events into commands and effects into messages.
pub(crate) struct Coordinator {
    identity: Identity,
    consensus: Consensus,
    decided: mpsc::Receiver<Decided>,
    sessions: mpsc::Receiver<SessionEvent>,
    requests: mpsc::Receiver<Request>,
    handle: Handle,
    metrics: Metrics,

    /// Who leads, as far as this replica knows.
    leadership: watch::Receiver<Leadership>,
    /// Where clients find all servers.
    servers: watch::Receiver<Vec<String>>,
    /// The leadership of this replica whose own entry is applied (rule L1).
    ready: Option<u64>,
    /// The last term in which a leader was known, and which; for the log.
    followed: Option<(u64, u16)>,
    /// Where clients are sent; none, when this replica leads or does not know who does.
    hint: Option<Hint>,
    reports: Reports,
    quorum: Quorum,
    degraded_after: Duration,
    /// This replica numbers by itself, since it has no quorum.
    degraded: Option<Degraded>,
    /// What it gave out when it last did.
    memory: Memory,
    writing: Option<degraded::Writing>,
    /// Since when it may act. An exclusive group without members gives nothing out for a lease from then on (rule L16).
    ready_at: Instant,
    looked: Instant,
    connections: BTreeMap<ConnectionId, Connection>,
    groups: BTreeMap<GroupName, GroupTrack>,
    joining: BTreeMap<(GroupName, ClientId), PendingJoin>,
    /// Clients that know memberships which this state has lost; answered once it has recovered.
    lost: Vec<(ConnectionId, skyschedule_common::ids::Membership)>,
    timers: Timers,

    batch: Batch,
    /// A batch is being decided.
    deciding: Option<Instant>,
    configuring: Vec<(GroupName, ConfigureAnswer)>,
    /// Members, and whether they shall drain.
    draining: Vec<(GroupName, u64, bool, DrainAnswer)>,
    deleting: Vec<(GroupName, DeleteAnswer)>,
    heartbeats: Vec<Heartbeat>,
    /// Members whose leases are over, if a quorum still knows this leader.
    suspects: BTreeSet<(GroupName, u64)>,
    /// The last round failed: heartbeats may have come that could not be answered.
    unconfirmed: bool,
    confirming: Option<(Confirmation, Vec<Heartbeat>)>,
    /// The next round does not begin before.
    next_round: Instant,
}

type ConfigureAnswer = oneshot::Sender<Result<GroupView, ConfigureError>>;
type DrainAnswer = oneshot::Sender<Option<MemberView>>;
type DeleteAnswer = oneshot::Sender<Result<(), DeleteError>>;
type Confirmation = Pin<Box<dyn Future<Output = Result<(), ConfirmError>> + Send>>;

/// A client whose `Join` is under way.
#[derive(Debug)]
struct PendingJoin {
    incarnation: Incarnation,
    connection: ConnectionId,
    /// The connection ended meanwhile.
    ended: Option<leases::End>,
}

impl Coordinator {
    pub(crate) fn new(
        identity: Identity,
        consensus: Consensus,
        decided: mpsc::Receiver<Decided>,
        sessions: mpsc::Receiver<SessionEvent>,
        metrics: Metrics,
    ) -> (Self, Handle) {
        let (handle, requests) = Handle::new(consensus.clone());
        if let Some(peers) = consensus.peers() {
            reports::serve(peers, &handle);
        }
        let consensus_leadership = consensus.watch_leadership();
        let servers = consensus.watch_servers();
        let memory = Self::memory_on_disk(&consensus);
        let coordinator = Self {
            consensus,
            decided,
            sessions,
            requests,
            handle: handle.clone(),
            metrics,
            leadership: consensus_leadership,
            servers,
            ready: None,
            hint: None,
            followed: None,
            reports: Reports::default(),
            quorum: Quorum::new(env::now()),
            degraded_after: identity.degraded_after,
            degraded: None,
            memory,
            writing: None,
            identity,
            ready_at: env::now(),
            looked: env::now(),
            connections: BTreeMap::new(),
            groups: BTreeMap::new(),
            joining: BTreeMap::new(),
            lost: Vec::new(),
            timers: Timers::default(),
            batch: Batch::default(),
            deciding: None,
            configuring: Vec::new(),
            draining: Vec::new(),
            deleting: Vec::new(),
            heartbeats: Vec::new(),
            suspects: BTreeSet::new(),
            unconfirmed: false,
            confirming: None,
            next_round: env::now(),
        };
        (coordinator, handle)
    }

    /// Runs until `stop` changes, or the consensus fails.
    pub(crate) async fn run(
        mut self,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), ConsensusError> {
        loop {
            let wake = self
                .timers
                .next()
                .into_iter()
                .chain(self.degraded.as_ref().and_then(Degraded::next))
                .chain(self.quorum.missing_at(self.degraded_after, self.looked))
                .fold(self.looked + TICK, Instant::min);
            tokio::select! {
                biased;
                () = stopped(&mut stop) => {
                    self.say_goodbye().await;
                    return Ok(());
                }
                Ok(()) = self.leadership.changed() => {
                    self.look_at_clock();
                    self.follow_leadership();
                }
                Ok(()) = self.servers.changed() => {
                    self.look_at_clock();
                    self.servers_changed();
                }
                Some(decided) = self.decided.recv() => {
                    self.look_at_clock();
                    match decided {
                        Decided::Applied { effects, commands } => self.carry_out(commands, effects),
                        // The leadership in which it was proposed is over, which is about to be told.
                        Decided::Lost { .. } => self.deciding = None,
                        Decided::Failed(error) => return Err(error),
                    }
                }
                confirmed = confirmation(&mut self.confirming) => {
                    self.look_at_clock();
                    self.round_is_over(confirmed);
                }
                sent = self.reports.sent() => self.reports.note(sent),
                written = degraded::written(&mut self.writing) => self.note_written(written),
                Some(event) = self.sessions.recv() => {
                    self.look_at_clock();
                    self.take_event(event);
                    for _ in 0..EVENTS_AT_ONCE {
                        let Ok(event) = self.sessions.try_recv() else { break };
                        self.take_event(event);
                    }
                }
                Some(request) = self.requests.recv() => {
                    self.look_at_clock();
                    self.answer(request);
                }
                () = env::sleep_until(wake) => self.look_at_clock(),
            }
            self.fire_timers();
            self.look_for_quorum();
            self.number_degraded();
            self.confirm_heartbeats();
            self.send_reports();
            self.propose();
        }
    }

    /// Notices that time went on without this task.
    fn look_at_clock(&mut self) {
        let now = env::now();
        let gap = now.saturating_duration_since(self.looked);
        self.looked = now;
        if gap > STOOD_STILL {
            self.quorum.seen(now);
        }
        if gap > STOOD_STILL && self.ready.is_some() {
            tracing::warn!(
                gap_ms = gap.as_millis(),
                "the server stood still; every member gets a full lease to be heard"
            );
            self.full_leases(now);
        }
    }

    fn take_event(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::LoggedIn(logged_in) => self.logged_in(*logged_in),
            SessionEvent::Message {
                connection,
                read_at,
                message,
            } => self.take_message(connection, read_at, message),
            SessionEvent::Ended { connection, ending } => self.ended(connection, ending),
        }
    }

    fn propose(&mut self) {
        if self.deciding.is_some() || self.batch.is_empty() || !self.may_act() {
            return;
        }
        let now = env::now();
        let commands = self.batch.take(|name, batch| {
            let Some(track) = self.groups.get(name) else {
                return true;
            };
            // A barrier that ends within this batch must not be followed by the next one at once.
            let in_barrier = track.handover_began.is_some()
                && self.consensus.read(|state| {
                    let group = state.group(name);
                    group.is_some_and(|group| group.settings().numbering == Numbering::Modulo)
                });
            // What is freed goes where it belongs at once: it would move twice if it waited for logins.
            let may_start = if batch.frees_rows() {
                track.may_plan(now)
            } else {
                track.may_start(now)
            };
            may_start && !in_barrier
        });
        if commands.is_empty() {
            return;
        }
        // With one batch under way at a time, the queue is never full; when the consensus has stopped, it says why.
        if self.consensus.propose(&commands).is_ok() {
            self.deciding = Some(now);
        }
    }

    fn refuse_configure(answer: ConfigureAnswer, error: SettingsError) {
        // Whoever asked may have gone.
        let _ = answer.send(Err(ConfigureError::Settings(error)));
    }
}

/// Resolves when the server is told to stop, or nobody can tell it any more.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Resolves when the round that is under way is over; never, when there is none.
async fn confirmation(
    round: &mut Option<(Confirmation, Vec<Heartbeat>)>,
) -> Result<(), ConfirmError> {
    match round {
        Some((confirmation, _)) => confirmation.await,
        None => std::future::pending().await,
    }
}
