//! Leader only: events become commands, effects become messages.
//!
//! One task owns all of this. Sessions and the admin interface send it events; it gathers commands,
//! hands them to the consensus one batch at a time, and carries out what was decided. It keeps no
//! decision of its own: all that it remembers (deadlines, connections, who was asked for what) a new
//! leader can do without.
//!
//! | file | one idea |
//! |---|---|
//! | `connections` | clients log in and attach |
//! | `leases` | heartbeats, deadlines, ends of connections |
//! | `handovers` | releases are gathered, barriers are paced |
//! | `effects` | what was decided becomes messages |
//! | `requests` | what is shown and set through the admin interface |
//! | `batch`, `timers`, `track`, `flapping` | what is to be decided, done later, and remembered |

mod batch;
mod connections;
mod effects;
mod flapping;
mod handle;
mod handovers;
mod leases;
mod requests;
mod timers;
mod track;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_common::protocol::messages::{Numbering, ServerMessage, Serving};
use tokio::sync::{mpsc, oneshot, watch};

pub use handle::{AskError, ConfigureError, Handle};

use self::batch::Batch;
use self::connections::Connection;
use self::handle::Request;
use self::leases::Heartbeat;
use self::timers::Timers;
use self::track::GroupTrack;
use crate::consensus::{Consensus, ConsensusError, Decided, NotLeader};
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
    pub(crate) address: String,
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

    /// This leadership's own entry is applied (rule L1).
    ready: bool,
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
    draining: Vec<(GroupName, u64, DrainAnswer)>,
    heartbeats: Vec<Heartbeat>,
    confirming: Option<(Confirmation, Vec<Heartbeat>)>,
}

type ConfigureAnswer = oneshot::Sender<Result<GroupView, ConfigureError>>;
type DrainAnswer = oneshot::Sender<Option<MemberView>>;
type Confirmation = Pin<Box<dyn Future<Output = Result<(), NotLeader>> + Send>>;

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
        let (handle, requests) = Handle::new();
        let coordinator = Self {
            identity,
            consensus,
            decided,
            sessions,
            requests,
            handle: handle.clone(),
            metrics,
            ready: false,
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
            heartbeats: Vec::new(),
            confirming: None,
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
                .unwrap_or(self.looked + TICK)
                .min(self.looked + TICK);
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => {
                    self.say_goodbye();
                    return Ok(());
                }
                Some(decided) = self.decided.recv() => {
                    self.look_at_clock();
                    match decided {
                        Decided::Applied { effects, commands } => self.carry_out(commands, effects),
                        Decided::Failed(error) => return Err(error),
                    }
                }
                confirmed = confirmation(&mut self.confirming) => {
                    self.look_at_clock();
                    self.answer_heartbeats(confirmed);
                }
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
            self.confirm_heartbeats();
            self.propose();
        }
    }

    /// Notices that time went on without this task.
    fn look_at_clock(&mut self) {
        let now = env::now();
        let gap = now.saturating_duration_since(self.looked);
        self.looked = now;
        if gap > STOOD_STILL && self.ready {
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
        let may_act = self.ready || broken(Rule::L1);
        if self.deciding.is_some() || self.batch.is_empty() || !may_act {
            return;
        }
        let now = env::now();
        let commands = self.batch.take(|name| {
            let Some(track) = self.groups.get(name) else {
                return true;
            };
            // A barrier that ends within this batch must not be followed by the next one at once.
            let in_barrier = track.handover_began.is_some()
                && self.consensus.read(|state| {
                    let group = state.group(name);
                    group.is_some_and(|group| group.settings().numbering == Numbering::Modulo)
                });
            track.may_start(now) && !in_barrier
        });
        if commands.is_empty() {
            return;
        }
        // With one batch under way at a time, the queue is never full; when the consensus has stopped, it says why.
        if self.consensus.propose(commands).is_ok() {
            self.deciding = Some(now);
        }
    }

    fn say_goodbye(&mut self) {
        for (_, connection) in std::mem::take(&mut self.connections) {
            // Dropping the outbox closes the connection once the message is out.
            let _ = connection.outbox.send(ServerMessage::Serving {
                mode: Serving::None,
                hint: None,
            });
        }
        for (_, answer) in self.configuring.drain(..) {
            let _ = answer.send(Err(ConfigureError::Ask(AskError::Stopped)));
        }
        // Whoever waits without an answer learns that the server stops.
        self.draining.clear();
    }

    fn refuse_configure(answer: ConfigureAnswer, error: SettingsError) {
        // Whoever asked may have gone.
        let _ = answer.send(Err(ConfigureError::Settings(error)));
    }
}

/// Resolves when the round that is under way is over; never, when there is none.
async fn confirmation(round: &mut Option<(Confirmation, Vec<Heartbeat>)>) -> Result<(), NotLeader> {
    match round {
        Some((confirmation, _)) => confirmation.await,
        None => std::future::pending().await,
    }
}
