//! Slot groups of up to 200 members: a change moves exactly as many slots as the new sizes need, those that
//! stay are never paused, and each size is within one slot of its proportion.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_common::share::{Numbers, Share};
use skyschedule_server::state::{
    Change, Command, Effect, Event, Group, Joining, Settings, State, Update,
};

const MOST: usize = 200;
static NOTHING: Numbers = Numbers::EMPTY;

/// The slots of each member, by number.
type Owned = BTreeMap<u64, Numbers>;

/// A group, and its members as processes that stop working on what they must release, and say so.
struct World {
    slots: u32,
    name: GroupName,
    state: State,
    told: BTreeMap<u64, (Epoch, Share)>,
    /// Slots on which members had to stop since the group was quiet, with those of members that are gone.
    stopped: Owned,
    clients: u64,
    /// Members whose releases go into one command.
    at_once: usize,
}

impl World {
    fn new(slots: u32, at_once: usize) -> Self {
        let mut world = Self {
            slots,
            name: GroupName::new("orders").unwrap(),
            state: State::default(),
            told: BTreeMap::new(),
            stopped: Owned::new(),
            clients: 0,
            at_once,
        };
        let settings = Settings {
            numbering: Numbering::Slots(slots),
            ..Settings::default()
        };
        world.apply(Change::Configure {
            settings,
            start: true,
        });
        world
    }

    fn group(&self) -> &Group {
        self.state.group(&self.name).unwrap()
    }

    fn targets(&self) -> Owned {
        let members = self.group().members().iter();
        members
            .map(|(&number, member)| (number, member.target.numbers().clone()))
            .collect()
    }

    fn size(&self) -> usize {
        self.group().members().len()
    }

    fn member(&self, pick: usize) -> u64 {
        let members = self.group().members();
        *members.keys().nth(pick % members.len()).unwrap()
    }

    fn apply(&mut self, change: Change) {
        let command = Command::Group {
            group: self.name.clone(),
            change,
        };
        for effect in self.state.apply(&command) {
            let Effect::Group { event, .. } = effect else {
                panic!("{effect:?}")
            };
            match event {
                Event::Told {
                    member,
                    epoch,
                    share,
                } => {
                    let had = self.told.insert(member, (epoch, share.clone()));
                    let had = had.map_or(Numbers::EMPTY, |(_, had)| had.numbers().clone());
                    self.stop(member, &had.difference(share.numbers()));
                }
                Event::Parted { member, .. } => {
                    if let Some((_, had)) = self.told.remove(&member) {
                        self.stop(member, had.numbers());
                    }
                }
                _ => {}
            }
        }
    }

    fn stop(&mut self, member: u64, slots: &Numbers) {
        let stopped = self.stopped.entry(member).or_insert(Numbers::EMPTY);
        *stopped = stopped.union(slots);
    }

    fn join(&mut self, weights: &[u32]) {
        let members = weights.iter().map(|&weight| {
            self.clients += 1;
            Joining {
                client: ClientId::new(format!("client-{}", self.clients)).unwrap(),
                incarnation: Incarnation(self.clients.into()),
                weight,
                consistency: None,
            }
        });
        let members = members.collect();
        self.apply(Change::Join {
            members,
            start: true,
        });
    }

    /// All that must be released is released, `at_once` members at a time, until nothing moves.
    fn quiet(&mut self) {
        loop {
            let members = self.group().members();
            let due = members
                .iter()
                .filter(|(_, member)| !member.has_released())
                .map(|(&number, _)| (number, self.told[&number].0, Share::NONE));
            let due: Vec<_> = due.take(self.at_once).collect();
            if due.is_empty() {
                break;
            }
            self.apply(Change::Release(due));
        }
        assert!(!self.group().in_handover() && !self.group().wants_handover());
        for (number, member) in self.group().members() {
            let told = self.told.get(number).map(|(_, share)| share);
            let told = told.map_or(&NOTHING, Share::numbers);
            assert_eq!(
                told,
                member.target.numbers(),
                "member {number} works on its target"
            );
        }
    }

    /// Sizes within one slot of proportion; together all slots.
    fn check_sizes(&self) {
        let members = self.group().members().values();
        let weights: u64 = members.clone().map(|member| u64::from(member.weight)).sum();
        let mut all = 0;
        for member in members {
            let size = member.target.numbers().len();
            let fair = f64::from(self.slots) * f64::from(member.weight) / weights.max(1) as f64;
            assert!(
                (size as f64 - fair).abs() < 1.0,
                "{size} where {fair} are fair"
            );
            all += size;
        }
        assert_eq!(all, if weights == 0 { 0 } else { self.slots.into() });
    }

    /// Carries a change out from quiet to quiet, and checks what it moved.
    fn change(&mut self, step: &Step) -> Moved {
        self.stopped.clear();
        let before = self.targets();
        self.begin(step);
        let planned = moved(&before, &self.targets());
        assert_eq!(
            planned.slots, planned.needed,
            "the plan moves what must move"
        );
        self.check_sizes();
        self.quiet();
        // Also in fact: nobody stopped on a slot that it keeps, or gets later.
        let stopped: u64 = self.stopped.values().map(Numbers::len).sum();
        assert_eq!(stopped, planned.needed, "and so do the members");
        for (number, owned) in self.targets() {
            let stopped = self.stopped.get(&number).unwrap_or(&NOTHING);
            assert!(
                !stopped.meets(&owned),
                "member {number} stopped on a slot that is its own"
            );
        }
        planned
    }

    fn begin(&mut self, step: &Step) {
        let picked = |world: &Self, picks: &[usize]| -> Vec<u64> {
            let numbers: BTreeSet<u64> = picks.iter().map(|&pick| world.member(pick)).collect();
            numbers.into_iter().collect()
        };
        match step {
            Step::Join(weights) => {
                let room = MOST - self.size();
                self.join(&weights[..weights.len().min(room)]);
            }
            Step::Drop { picks, died } if self.size() > picks.len() => {
                let members = picked(self, picks);
                self.apply(if *died {
                    Change::Dead {
                        members,
                        start: true,
                    }
                } else {
                    Change::Leave {
                        members,
                        start: true,
                    }
                });
            }
            Step::Drop { .. } => {}
            Step::Weigh { pick, weight } => {
                let update = Update {
                    member: self.member(*pick),
                    weight: Some(*weight),
                    drain: None,
                };
                self.apply(Change::Update {
                    members: vec![update],
                    start: true,
                });
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Moved {
    /// Slots that left a member.
    slots: u64,
    /// The sum of max(0, old − new) over the members' sizes.
    needed: u64,
}

fn moved(before: &Owned, after: &Owned) -> Moved {
    let mut sum = Moved {
        slots: 0,
        needed: 0,
    };
    for (number, old) in before {
        let new = after.get(number).unwrap_or(&NOTHING);
        sum.slots += old.difference(new).len();
        sum.needed += old.len().saturating_sub(new.len());
    }
    sum
}

#[derive(Debug, Clone)]
enum Step {
    /// With these weights.
    Join(Vec<u32>),
    Drop {
        picks: Vec<usize>,
        died: bool,
    },
    Weigh {
        pick: usize,
        weight: u32,
    },
}

fn weights(weighted: bool) -> BoxedStrategy<u32> {
    if weighted {
        prop_oneof![0..5u32, 1..1_000u32].boxed()
    } else {
        Just(1).boxed()
    }
}

fn steps(weighted: bool) -> impl Strategy<Value = Step> {
    let drops = (
        proptest::collection::vec(any::<usize>(), 1..4),
        any::<bool>(),
    );
    prop_oneof![
        3 => proptest::collection::vec(weights(weighted), 1..4).prop_map(Step::Join),
        3 => drops.prop_map(|(picks, died)| Step::Drop { picks, died }),
        1 => (any::<usize>(), weights(weighted)).prop_map(|(pick, weight)| Step::Weigh { pick, weight }),
    ]
}

fn slots() -> impl Strategy<Value = u32> {
    prop_oneof![Just(64), Just(1_024)]
}

fn histories() -> impl Strategy<Value = (Vec<u32>, Vec<Step>)> {
    any::<bool>().prop_flat_map(|weighted| {
        (
            proptest::collection::vec(weights(weighted), 1..=MOST),
            proptest::collection::vec(steps(weighted), 1..30),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn joins_and_drops_in_any_order_move_exactly_what_must_move(
        slots in slots(),
        (members, history) in histories(),
        at_once in 1..=MOST,
    ) {
        let mut world = World::new(slots, at_once);
        world.change(&Step::Join(members));
        for step in &history {
            world.change(step);
        }
        world.state.check().unwrap();
    }

    /// Whatever comes while slots are on their way, each plan moves no more than it must against the one before.
    #[test]
    fn a_change_within_a_handover_moves_exactly_what_must_move(
        slots in slots(),
        (members, history) in histories(),
    ) {
        let mut world = World::new(slots, 3);
        world.change(&Step::Join(members));
        for (at, step) in history.iter().enumerate() {
            let before = world.targets();
            world.begin(step);
            let planned = moved(&before, &world.targets());
            prop_assert_eq!(planned.slots, planned.needed);
            world.check_sizes();
            if at % 5 == 4 {
                world.state.check().unwrap();
                world.quiet();
            }
        }
        world.quiet();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2))]

    /// Every size from 1 to 200, up and down.
    #[test]
    fn from_1_to_200_members_and_back_one_by_one(
        order in Just((0..MOST).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        up_and_down(64, &order);
        up_and_down(1_024, &order);
    }
}

/// Of equal members, a newcomer takes just what it gets, and one that is gone leaves just what it had: nobody else
/// loses a slot.
fn up_and_down(slots: u32, order: &[usize]) {
    let mut world = World::new(slots, MOST);
    for size in 1..=order.len() {
        let change = world.change(&Step::Join(vec![1]));
        assert_eq!(world.size(), size);
        let (_, newcomer) = world.targets().pop_last().unwrap();
        let found = if size == 1 { 0 } else { newcomer.len() };
        assert_eq!(change.needed, found);
    }
    for (&pick, size) in order.iter().zip((1..order.len()).rev()) {
        let gone = world.targets()[&world.member(pick)].len();
        let change = world.change(&Step::Drop {
            picks: vec![pick],
            died: true,
        });
        assert_eq!((world.size(), change.needed), (size, gone));
    }
}
