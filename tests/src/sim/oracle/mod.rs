//! Sees all clients and the server's state after every step, and says what must not be.
//!
//! It trusts the clients' own view of which rows they may begin (the row that a client begins is the row that
//! it believes to be its own), knows by itself which rows handlers work on, and compares all of them.

mod balance;
mod quiet;
mod replicas;
mod rows;

use skyschedule_client::{Inspection, Mode};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::share::{RowKey, Share};
use skyschedule_server::state::Group;
use std::collections::BTreeMap;
use std::time::Duration;

use super::profile::Profile;
use super::trace::Trace;
use super::worker::Begun;

pub use replicas::Applied;

/// What must hold at every step, by the number of the promise or the name of the rule that it shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// A short name: what kind.
    pub kind: &'static str,
    /// What was seen.
    pub what: String,
}

impl Violation {
    /// A violation of this kind.
    pub fn new(kind: &'static str, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
        }
    }
}

/// One client's process at one instant.
#[derive(Debug)]
pub struct View {
    /// The machine.
    pub host: usize,
    /// Tells the processes of one machine apart.
    pub process: u64,
    /// The client id.
    pub client_id: String,
    /// Whether it has been asked to leave.
    pub is_leaving: bool,
    /// Whether it wants rows, and is able to work: not stopped, not leaving, with a weight.
    pub willing: bool,
    /// The weight that its user wants for it.
    pub weight: u32,
    /// Whether its user wants its share to move away.
    pub drains: bool,
    /// Its numbering is of a server that has followed a leader for long.
    pub by_follower: bool,
    /// The inside of the client.
    pub inside: Inspection,
    /// Rows that its handlers work on.
    pub running: Vec<i64>,
    /// Rows begun since the last step.
    pub begun: Vec<Begun>,
}

impl View {
    /// Whether the client believes in its share now.
    pub fn is_trusting(&self) -> bool {
        matches!(self.inside.mode, Mode::Leased | Mode::Autonomous)
    }

    /// Whether it holds the row: it may begin it or works on it, under a lease that is not over.
    pub fn holds(&self, key: i64) -> bool {
        self.is_trusting()
            && (self.inside.rows.contains(RowKey::from(key)) || self.running.contains(&key))
    }
}

/// What the driver knows and no client shows.
#[derive(Debug, Clone, Copy, Default)]
pub struct World {
    /// Now.
    pub now: Duration,
    /// Something is wrong that allows rows of available groups to be held twice.
    pub is_troubled: bool,
    /// When the driver last did anything.
    pub last_event: Duration,
    /// Since when one server serves clients without a stop.
    pub served_since: Option<Duration>,
    /// It is there, and all clients reach it.
    pub is_reachable: bool,
}

/// What a process was told last.
#[derive(Debug)]
struct Known {
    membership: Membership,
    epoch: Epoch,
    share: Share,
    is_member: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Oracle {
    exclusive: bool,
    one_at_a_time: bool,
    several: bool,
    lease: Duration,
    drain: Duration,
    rejoin_grace: Duration,
    /// The server lost what it knew: quorum epochs may have begun again.
    history_lost: bool,
    troubled_at: Option<Duration>,
    /// Which member was told which share under an epoch.
    told: BTreeMap<Epoch, (u64, Share)>,
    /// The newest epoch and share of each membership in the state.
    members: BTreeMap<u64, (Epoch, Share)>,
    state: Option<Group>,
    /// The group after so many entries of the log.
    log: BTreeMap<u64, Option<Group>>,
    /// The most entries that any server has applied.
    newest: Option<u64>,
    /// How many entries each server's process has applied.
    applied: BTreeMap<(usize, u64), u64>,
    /// The newest membership and epoch that each process has had.
    processes: BTreeMap<(usize, u64), Known>,
    /// The last owner of each row, and its token.
    tokens: BTreeMap<i64, (Epoch, Option<Membership>)>,
    /// The newest epoch that each member was seen with.
    taken: BTreeMap<u64, Epoch>,
    /// Whose each row was when every member had taken its share.
    settled: BTreeMap<i64, u64>,
    /// Since when nobody holds a row.
    unheld: BTreeMap<i64, Duration>,
    /// Since when a member is told a share without this row.
    recalled: BTreeMap<(u64, i64), Duration>,
    /// Since when members of the state belong to no process that lives.
    zombies: BTreeMap<u64, Duration>,
    /// The last moment at which nothing moved.
    still: Option<balance::Still>,
    steps: u64,
}

impl Oracle {
    /// For a group of this profile.
    pub fn new(profile: &Profile) -> Self {
        let settings = &profile.settings;
        Self {
            exclusive: profile.is_exclusive(),
            one_at_a_time: profile.one_at_a_time,
            several: profile.servers > 1,
            lease: profile.longest_lease(),
            drain: settings.drain_timeout.duration(),
            rejoin_grace: settings.rejoin_grace.duration(),
            history_lost: false,
            troubled_at: None,
            told: BTreeMap::new(),
            members: BTreeMap::new(),
            state: None,
            log: BTreeMap::new(),
            newest: None,
            applied: BTreeMap::new(),
            processes: BTreeMap::new(),
            tokens: BTreeMap::new(),
            taken: BTreeMap::new(),
            settled: BTreeMap::new(),
            unheld: BTreeMap::new(),
            recalled: BTreeMap::new(),
            zombies: BTreeMap::new(),
            still: None,
            steps: 0,
        }
    }

    /// The server comes back without what it knew.
    pub fn lose_history(&mut self, now: Duration) {
        self.history_lost = true;
        self.troubled_at = Some(now);
        // Who is no member any more has forgotten its epochs (C5), and cannot tell the server.
        self.processes.retain(|_, known| known.is_member);
        self.told.clear();
        self.members.clear();
        self.taken.clear();
        self.settled.clear();
        self.state = None;
        self.log.clear();
        self.newest = None;
        self.applied.clear();
        self.still = None;
    }

    /// The state as it was seen last.
    pub fn state(&self) -> Option<&Group> {
        self.state.as_ref()
    }

    /// Whether some rows are nobody's by intent: members have a cap.
    fn is_capped(&self) -> bool {
        let group = self.state.as_ref();
        group.is_some_and(|group| group.settings().max_slots.is_some())
    }

    /// What a server waits at most before a lease that it gave is over.
    fn server_lease(&self) -> Duration {
        self.lease + self.lease / 400 + Duration::from_millis(10)
    }

    /// A leader that had lost its quorum gives everyone another lease, once it knows that it is followed again.
    fn regained(&self) -> Duration {
        if self.several {
            self.server_lease()
        } else {
            Duration::ZERO
        }
    }

    /// Looks at everything.
    ///
    /// # Errors
    /// The first thing that must not be.
    pub fn observe(
        &mut self,
        world: &World,
        views: &[View],
        applied: Vec<Applied>,
        trace: &mut Trace,
    ) -> Result<(), Violation> {
        self.steps += 1;
        if world.is_troubled {
            self.troubled_at = Some(world.now);
        }
        self.observe_applied(applied, world.now, trace)?;
        self.observe_clients(views, trace)?;
        self.overlaps(world, views)?;
        self.begins(views)?;
        if let Some(since) = world.served_since {
            self.known(views)?;
            self.zombies(world.now, since, views)?;
        }
        if self.one_at_a_time {
            self.expelled(views)?;
        }
        if !self.exclusive && self.steps.is_multiple_of(4) {
            self.coverage(world, views)?;
        }
        Ok(())
    }

    /// Promise 4, and the core's own invariants.
    fn observe_state(&mut self, state: Option<Group>, trace: &mut Trace) -> Result<(), Violation> {
        if state == self.state {
            return Ok(());
        }
        let Some(group) = &state else {
            if self.state.is_some() {
                return Err(Violation::new(
                    "forgotten",
                    "the server has forgotten the group",
                ));
            }
            return Ok(());
        };
        if let Some(before) = &self.state
            && (group.epoch() < before.epoch()
                || group.next_membership() < before.next_membership())
        {
            return Err(Violation::new(
                "forgotten",
                format!(
                    "the state went back from epoch {} and membership {} to {} and {}",
                    before.epoch(),
                    before.next_membership(),
                    group.epoch(),
                    group.next_membership()
                ),
            ));
        }
        self.movement(group)?;
        let mut ids = BTreeMap::new();
        for (number, member) in group.members() {
            if let Some(other) = ids.insert(&member.client, number) {
                return Err(Violation::new(
                    "one id, two members",
                    format!("members {other} and {number} are both {}", member.client),
                ));
            }
            let before = self
                .members
                .insert(*number, (member.epoch, member.told.clone()));
            let unchanged = before
                .as_ref()
                .is_some_and(|(epoch, told)| *epoch == member.epoch && *told == member.told);
            if unchanged {
                continue;
            }
            trace.note(&format!(
                "state: member {number} {} told {:?} at {}, held {:?}, target {:?}",
                member.client, member.told, member.epoch, member.held, member.target
            ));
            if let Some((epoch, told)) = before
                && epoch >= member.epoch
            {
                return Err(Violation::new(
                    "epoch back",
                    format!(
                        "member {number} was told {told:?} at {epoch}, now {:?} at {}",
                        member.told, member.epoch
                    ),
                ));
            }
            note_told(&mut self.told, member.epoch, *number, &member.told)?;
        }
        if let Some(before) = &self.state {
            for number in before.members().keys() {
                if !group.members().contains_key(number) {
                    trace.note(&format!("state: member {number} is over"));
                }
            }
            if before.in_handover() != group.in_handover() {
                trace.note(if group.in_handover() {
                    "state: a handover began"
                } else {
                    "state: the handover is over"
                });
            }
        }
        self.state = state;
        Ok(())
    }

    /// What each process was told only ever grows, over all its memberships.
    fn observe_clients(&mut self, views: &[View], trace: &mut Trace) -> Result<(), Violation> {
        for view in views {
            let key = (view.host, view.process);
            let (Some(membership), Some(epoch)) = (view.inside.membership, view.inside.epoch)
            else {
                let known = self.processes.get_mut(&key);
                // Kept: the next membership must be above.
                if let Some(known) = known.filter(|known| known.is_member) {
                    known.is_member = false;
                    trace.note(&format!("{}: no member any more", name(view)));
                }
                continue;
            };
            let known = self.processes.get(&key);
            let unchanged = known.is_some_and(|known| {
                known.membership == membership
                    && known.epoch == epoch
                    && known.share == view.inside.share
            });
            if unchanged {
                continue;
            }
            trace.note(&format!(
                "{}: member {membership} told {:?} at {epoch} ({})",
                name(view),
                view.inside.share,
                view.inside.mode
            ));
            if view.by_follower {
                return Err(Violation::new(
                    "numbered by a follower",
                    format!("{} took {:?} at {epoch}", name(view), view.inside.share),
                ));
            }
            let mut taken_over = false;
            if let Some(before) = known {
                // Memberships that degraded replicas give are counted apart.
                let earlier = before.membership != membership
                    && before.membership.replica == membership.replica
                    && before.membership.number >= membership.number;
                // A leader that takes over a client from a server without a quorum tells it more in a moment.
                let same = before.epoch == epoch && before.share == view.inside.share;
                taken_over = same && before.membership.replica != 0 && membership.replica == 0;
                let back = (before.epoch >= epoch && !taken_over) || earlier;
                if back {
                    return Err(Violation::new(
                        "epoch back",
                        format!(
                            "{} was member {} with {:?} at {}, and took {:?} at {epoch} as member {membership}",
                            name(view),
                            before.membership,
                            before.share,
                            before.epoch,
                            view.inside.share
                        ),
                    ));
                }
            }
            if !self.history_lost && !taken_over {
                note_told(&mut self.told, epoch, membership.number, &view.inside.share)?;
            }
            let known = Known {
                membership,
                epoch,
                share: view.inside.share.clone(),
                is_member: true,
            };
            self.processes.insert(key, known);
        }
        Ok(())
    }

    /// Promise 7, rule L2: no client knows what the server does not.
    fn known(&self, views: &[View]) -> Result<(), Violation> {
        if self.history_lost {
            return Ok(());
        }
        for view in views {
            let (Some(membership), Some(epoch)) = (view.inside.membership, view.inside.epoch)
            else {
                continue;
            };
            if is_degraded(membership, epoch) {
                continue;
            }
            let forgotten = self.state.as_ref().is_none_or(|group| {
                membership.number >= group.next_membership() || epoch > group.epoch()
            });
            if forgotten {
                return Err(Violation::new(
                    "forgotten",
                    format!(
                        "{} knows membership {membership} and epoch {epoch}, which the server does not",
                        name(view)
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Promise 6: where only servers are in trouble, and one at a time, nobody who lives loses a membership.
    fn expelled(&self, views: &[View]) -> Result<(), Violation> {
        for view in views {
            let key = (view.host, view.process);
            let known = self.processes.get(&key);
            let Some(known) = known.filter(|known| !known.is_member && !view.is_leaving) else {
                continue;
            };
            return Err(Violation::new(
                "shares moved",
                format!("{} was expelled as {}", name(view), known.membership),
            ));
        }
        Ok(())
    }

    /// A member whose process is dead is over within a lease.
    fn zombies(
        &mut self,
        now: Duration,
        served_since: Duration,
        views: &[View],
    ) -> Result<(), Violation> {
        let Some(group) = &self.state else {
            return Ok(());
        };
        let lives = |number: u64| {
            let membership = Some(Membership::quorum(number));
            views
                .iter()
                .any(|view| view.inside.membership == membership)
        };
        let dead: Vec<u64> = group
            .members()
            .keys()
            .copied()
            .filter(|number| !lives(*number))
            .collect();
        self.zombies.retain(|number, _| dead.contains(number));
        let bound = self.server_lease() + self.regained() + Duration::from_millis(600);
        for number in dead {
            let since = *self.zombies.entry(number).or_insert(now);
            if now > since.max(served_since) + bound {
                return Err(Violation::new(
                    "zombie",
                    format!(
                        "member {number} belongs to no process since {since:?}, and is still there"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Whether it comes from a replica without a quorum.
fn is_degraded(membership: Membership, epoch: Epoch) -> bool {
    membership.replica != 0 || epoch.degraded != 0
}

fn note_told(
    told: &mut BTreeMap<Epoch, (u64, Share)>,
    epoch: Epoch,
    member: u64,
    share: &Share,
) -> Result<(), Violation> {
    if let Some((other, known)) = told.get(&epoch) {
        if *other == member && known == share {
            return Ok(());
        }
        return Err(Violation::new(
            "epoch twice",
            format!(
                "epoch {epoch} is {known:?} for member {other}, and {share:?} for member {member}"
            ),
        ));
    }
    told.insert(epoch, (member, share.clone()));
    Ok(())
}

fn name(view: &View) -> String {
    format!("host {} ({}.{})", view.host, view.client_id, view.process)
}
