//! The pure core: it alone decides which rows belong to whom.
//!
//! [`State::apply`] takes one [`Command`] and answers with [`Effect`]s. It is deterministic: no clock,
//! no socket, no randomness. Whoever applies the same commands in the same order has the same state,
//! so the command log is the memory of the system, and a replica that replays it knows all that was
//! ever decided.
//!
//! | file | one idea |
//! |---|---|
//! | `command` | what can be decided |
//! | `effect` | what follows from a decision |
//! | `settings` | what operators set for a group, and which combinations are possible |
//! | `group` | members come, change and go |
//! | `handover` | rows move: shrink, release, grant |
//! | `obstacles` | rows that cannot be granted yet |
//! | `plan` | who should have which numbers |

mod command;
mod effect;
mod group;
mod handover;
mod obstacles;
mod plan;
mod settings;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use skyschedule_common::ids::GroupName;
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_common::share::{Numbers, Share};

pub use command::{Change, Command, Joining, Update};
pub use effect::{Effect, Event, JoinRefusal, Parting};
pub use group::{Group, Member, Vacancy};
pub use settings::{MIN_LEASE, Settings, SettingsError};

/// Most groups that one cluster keeps. A group is never forgotten: its epochs must not begin again.
pub const MAX_GROUPS: usize = 10_000;

/// Divides the rows of a group among members of these weights, each of which keeps what it can of the share
/// that it has, the first named first.
pub(crate) fn divide(settings: &Settings, members: &[(u32, &Share)]) -> Vec<Share> {
    let mut taken = Numbers::EMPTY;
    let present: Vec<Numbers> = members
        .iter()
        .map(|(_, share)| {
            let fits = match settings.numbering {
                Numbering::Modulo => true,
                Numbering::Slots(slots) => share.total() == slots,
            };
            if !fits || share.is_empty() {
                return Numbers::EMPTY;
            }
            let own = share.numbers().difference(&taken);
            taken = taken.union(&own);
            own
        })
        .collect();
    let seats: Vec<_> = members
        .iter()
        .zip(&present)
        .map(|((weight, _), present)| plan::Seat {
            weight: *weight,
            present,
            working: present,
        })
        .collect();
    plan::targets(settings.numbering, settings.max_slots, &seats)
}

/// All that is decided, for every group.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    groups: BTreeMap<GroupName, Group>,
}

impl State {
    /// Takes one decision and says what follows from it. Commands that are stale change nothing.
    pub fn apply(&mut self, command: &Command) -> Vec<Effect> {
        let (name, change) = match command {
            Command::Ready { leader } => return vec![Effect::Ready { leader: *leader }],
            Command::Group { group, change } => (group, change),
        };
        let events = match self.groups.get_mut(name) {
            Some(group) => group.apply(change),
            None => self.found(name, change),
        };
        events
            .into_iter()
            .map(|event| Effect::Group {
                group: name.clone(),
                event,
            })
            .collect()
    }

    /// A group comes into being with the first change that leaves a trace.
    fn found(&mut self, name: &GroupName, change: &Change) -> Vec<Event> {
        if self.groups.len() >= MAX_GROUPS {
            return group::refuse_all(change);
        }
        let mut group = Group::default();
        let events = group.apply(change);
        if group != Group::default() {
            self.groups.insert(name.clone(), group);
        }
        events
    }

    /// The groups by name.
    pub fn groups(&self) -> &BTreeMap<GroupName, Group> {
        &self.groups
    }

    /// The group of this name.
    pub fn group(&self, name: &GroupName) -> Option<&Group> {
        self.groups.get(name)
    }

    /// Members of all groups.
    pub fn member_count(&self) -> usize {
        self.groups
            .values()
            .map(|group| group.members().len())
            .sum()
    }

    /// Checks what must hold after every command; the text names the first violation.
    ///
    /// # Errors
    /// When an invariant is broken: a fault of this module.
    pub fn check(&self) -> Result<(), String> {
        self.groups.iter().try_for_each(|(name, group)| {
            group
                .check()
                .map_err(|violation| format!("group {name}: {violation}"))
        })
    }
}
