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
//! | `derived` | what follows from the rest of the state, and is kept |
//! | `moving` | members that do not have what they should have |
//! | `obstacles` | rows that cannot be granted yet |
//! | `plan` | who should have which numbers |
//! | `unowned` | rows that nobody should have |

mod command;
mod derived;
mod effect;
mod group;
mod handover;
mod moving;
mod obstacles;
mod plan;
mod settings;
mod unowned;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use skyschedule_common::ids::GroupName;
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_common::share::{Numbers, Share};

use derived::Derived;

pub use command::{Change, Command, Joining, Update};
pub use effect::{Effect, Event, JoinRefusal, Parting};
pub use group::{Group, Member, Vacancy};
pub use settings::{MIN_LEASE, Settings, SettingsError};
pub use unowned::{Unowned, WhyUnowned};

/// Most groups that one cluster keeps.
pub const MAX_GROUPS: usize = 10_000;

/// Most names of groups, with those of groups that were deleted: a name is never forgotten, for its epochs must not
/// begin again.
pub const MAX_NAMES: usize = 2 * MAX_GROUPS;

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
    plan::targets(settings.numbering, settings.max_slots, &seats).shares(&seats)
}

/// All that is decided, for every group.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    groups: BTreeMap<GroupName, Group>,
    /// Of all groups.
    #[serde(skip)]
    members: Derived<usize>,
}

impl State {
    /// Takes one decision and says what follows from it. Commands that are stale change nothing.
    pub fn apply(&mut self, command: &Command) -> Vec<Effect> {
        let (name, change) = match command {
            Command::Ready { leader } => return vec![Effect::Ready { leader: *leader }],
            Command::Group { group, change } => (group, change),
        };
        let before = self.members_of(name);
        let events = match self.groups.get_mut(name) {
            Some(group) if group.exists() => {
                let events = group.apply(change);
                if *change == Change::Delete && *group == Group::default() {
                    self.groups.remove(name);
                }
                events
            }
            _ => self.found(name, change),
        };
        let after = self.members_of(name);
        let groups = &self.groups;
        self.members
            .change(|members| *members = *members + after - before);
        self.members.or_find(|| count(groups));
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
        let known = self.groups.get(name);
        let groups = self.groups.values().filter(|group| group.exists());
        let is_full = known.is_none() && self.groups.len() >= MAX_NAMES;
        if is_full || groups.count() >= MAX_GROUPS {
            return group::refuse_all(change);
        }
        let mut group = known.cloned().unwrap_or_default();
        let events = group.apply(change);
        if group != Group::default() {
            self.groups.insert(name.clone(), group);
        }
        events
    }

    /// The groups by name, also those that do not [exist](Group::exists) any more.
    pub fn groups(&self) -> &BTreeMap<GroupName, Group> {
        &self.groups
    }

    /// What is known of the group of this name, also where it does not [exist](Group::exists) any more.
    pub fn group(&self, name: &GroupName) -> Option<&Group> {
        self.groups.get(name)
    }

    fn members_of(&self, group: &GroupName) -> usize {
        let group = self.groups.get(group);
        group.map_or(0, |group| group.members().len())
    }

    /// Members of all groups.
    pub fn member_count(&self) -> usize {
        let counted = self.members.get().copied();
        counted.unwrap_or_else(|| count(&self.groups))
    }

    /// Checks what must hold after every command; the text names the first violation.
    ///
    /// # Errors
    /// When an invariant is broken: a fault of this module.
    pub fn check(&self) -> Result<(), String> {
        let members = count(&self.groups);
        if self.member_count() != members {
            return Err(format!(
                "{} members of {members} are counted",
                self.member_count()
            ));
        }
        self.groups.iter().try_for_each(|(name, group)| {
            group
                .check()
                .map_err(|violation| format!("group {name}: {violation}"))
        })
    }
}

/// Members of these groups.
fn count(groups: &BTreeMap<GroupName, Group>) -> usize {
    groups.values().map(|group| group.members().len()).sum()
}

#[cfg(test)]
mod tests {
    use skyschedule_common::epoch::Epoch;
    use skyschedule_common::ids::{ClientId, Incarnation};
    use skyschedule_common::protocol::messages::Consistency;

    use super::*;

    fn name() -> GroupName {
        GroupName::new("orders").unwrap()
    }

    fn apply(state: &mut State, change: Change) -> Vec<Event> {
        let group = name();
        let effects = state.apply(&Command::Group { group, change });
        state.check().unwrap();
        let event = |effect| match effect {
            Effect::Group { event, .. } => event,
            Effect::Ready { .. } => panic!("nobody begins to lead"),
        };
        effects.into_iter().map(event).collect()
    }

    fn join(state: &mut State, weights: &[u32], consistency: Option<Consistency>) -> Vec<Event> {
        let members = (0..).zip(weights);
        let members = members.map(|(at, &weight)| Joining {
            client: ClientId::new(format!("client-{at}")).unwrap(),
            incarnation: Incarnation(at),
            weight,
            consistency,
        });
        let members = members.collect();
        let start = true;
        apply(state, Change::Join { members, start })
    }

    fn update(
        state: &mut State,
        member: u64,
        weight: Option<u32>,
        drain: Option<bool>,
    ) -> Vec<Event> {
        let members = vec![Update {
            member,
            weight,
            drain,
        }];
        apply(
            state,
            Change::Update {
                members,
                start: true,
            },
        )
    }

    fn leave(state: &mut State, members: std::ops::RangeInclusive<u64>) {
        let members = members.collect();
        apply(
            state,
            Change::Leave {
                members,
                start: true,
            },
        );
    }

    fn epochs(events: &[Event]) -> Vec<Epoch> {
        let epoch = |event: &Event| match event {
            Event::Told { epoch, .. } => Some(*epoch),
            _ => None,
        };
        events.iter().filter_map(epoch).collect()
    }

    #[test]
    fn only_a_group_without_members_is_deleted_and_its_epochs_go_on_when_it_is_made_again() {
        let mut state = State::default();
        let first = epochs(&join(&mut state, &[1, 1], None));
        let refused = apply(&mut state, Change::Delete);
        assert_eq!(refused, [Event::DeleteRefused { members: 2 }]);
        leave(&mut state, 1..=2);
        let configured = Settings {
            numbering: Numbering::Slots(16),
            ..Settings::default()
        };
        let change = Change::Configure {
            settings: configured,
            start: true,
        };
        apply(&mut state, change);
        assert_eq!(apply(&mut state, Change::Delete), [Event::Deleted]);
        let left = state.group(&name()).unwrap();
        assert!(!left.exists());
        assert_eq!(left.settings(), &Settings::default());
        assert_eq!(
            apply(&mut state, Change::Delete),
            [Event::Deleted],
            "twice is as good"
        );

        let again = epochs(&join(&mut state, &[1], None));
        assert!(
            again.iter().min() > first.iter().max(),
            "{again:?} after {first:?}"
        );
        assert!(state.group(&name()).unwrap().members().contains_key(&3));
    }

    #[test]
    fn who_relied_on_an_available_group_is_not_betrayed_by_its_deletion() {
        let exclusive = Some(Consistency::Exclusive);
        let mut state = State::default();
        join(&mut state, &[1], None);
        leave(&mut state, 1..=1);
        apply(&mut state, Change::Delete);
        let refused = join(&mut state, &[1], exclusive);
        assert!(
            matches!(refused.as_slice(), [Event::JoinRefused { .. }]),
            "{refused:?}"
        );
        let settings = Settings {
            consistency: Consistency::Exclusive,
            ..Settings::default()
        };
        let start = true;
        let refused = apply(&mut state, Change::Configure { settings, start });
        assert_eq!(
            refused,
            [Event::ConfigureRefused(SettingsError::BecomesExclusive)]
        );

        let mut state = State::default();
        join(&mut state, &[1], exclusive);
        leave(&mut state, 1..=1);
        apply(&mut state, Change::Delete);
        join(&mut state, &[1], Some(Consistency::Available));
        let group = state.group(&name()).unwrap();
        assert_eq!(group.settings().consistency, Consistency::Available);
    }

    #[test]
    fn a_group_that_never_had_members_leaves_nothing() {
        let mut state = State::default();
        let settings = Settings::default();
        let start = true;
        apply(&mut state, Change::Configure { settings, start });
        apply(&mut state, Change::Delete);
        assert_eq!(state, State::default());
        assert_eq!(apply(&mut state, Change::Delete), [Event::Deleted]);
        assert_eq!(state, State::default());
    }

    #[test]
    fn rows_that_nobody_should_have_are_told() {
        let mut state = State::default();
        let unowned = |state: &State| state.group(&name()).unwrap().unowned();
        join(&mut state, &[1, 0], None);
        assert_eq!(unowned(&state), None);
        update(&mut state, 1, None, Some(true));
        let nobody = unowned(&state).unwrap();
        assert!((nobody.ratio() - 1.0).abs() < f64::EPSILON);
        assert_eq!(
            nobody.why,
            WhyUnowned::Nobody {
                draining: 1,
                fenced: 0,
                weightless: 1
            }
        );
        update(&mut state, 1, None, Some(false));
        assert_eq!(unowned(&state), None);

        let settings = Settings {
            numbering: Numbering::Slots(16),
            max_slots: Some(4),
            ..Settings::default()
        };
        let start = true;
        apply(&mut state, Change::Configure { settings, start });
        let capped = unowned(&state).unwrap();
        assert_eq!((capped.numbers, capped.total), (12, 16));
        assert_eq!(capped.why, WhyUnowned::Cap { max_slots: 4 });
        leave(&mut state, 1..=2);
        assert_eq!(unowned(&state), None, "nobody is there");
    }

    #[test]
    fn a_weight_that_modulo_cannot_divide_by_is_refused() {
        let mut state = State::default();
        join(&mut state, &[1; 2], None);
        let too_much = skyschedule_common::share::MAX_TOTAL;
        let refused = update(&mut state, 1, Some(too_much), None);
        assert_eq!(refused, [Event::WeightRefused { member: 1 }]);
        assert_eq!(state.group(&name()).unwrap().members()[&1].weight, 1);
    }
}
