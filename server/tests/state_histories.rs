//! Random histories of a group: whatever happens in whatever order, no two members work on one row
//! unless one was overtaken, epochs grow, and in quiet times every row has exactly one owner.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

#[path = "histories/world.rs"]
mod world;

use proptest::prelude::*;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::protocol::messages::{Consistency, Millis, Numbering};
use skyschedule_common::share::Share;
use skyschedule_server::state::{Change, Event, Settings, Update};
use world::World;

/// What can happen. Members and other things are picked among those that there are.
#[derive(Debug, Clone)]
enum Step {
    Join {
        clients: Vec<u8>,
        weight: u32,
        start: bool,
    },
    End {
        members: Vec<u8>,
        died: bool,
        start: bool,
    },
    Deliver {
        member: u8,
        told: u8,
    },
    DeliverAll,
    Release {
        members: Vec<u8>,
        keep: u64,
    },
    RepeatRelease(u8),
    ReleaseAll,
    Overtake(u8),
    Fence(u8),
    Update {
        member: u8,
        weight: Option<u32>,
        drain: Option<bool>,
        start: bool,
    },
    Vacate {
        client: u8,
        start: bool,
    },
    Configure {
        numbering: Numbering,
        cap: Option<u32>,
        grace: bool,
        start: bool,
    },
    Start,
    Reissue {
        member: u8,
        degraded: u32,
    },
    Recover {
        above: u64,
    },
    /// After all have left, or as things stand.
    Delete {
        all_left: bool,
    },
    Restore,
    Quiet,
}

fn steps() -> impl Strategy<Value = Step> {
    let some = || proptest::collection::vec(any::<u8>(), 1..4);
    let keep = || prop_oneof![3 => Just(0u64), 2 => any::<u64>()];
    prop_oneof![
        6 => (proptest::collection::vec(0..9u8, 1..4), 0..4u32, any::<bool>())
            .prop_map(|(clients, weight, start)| Step::Join { clients, weight, start }),
        5 => (some(), any::<bool>(), any::<bool>())
            .prop_map(|(members, died, start)| Step::End { members, died, start }),
        8 => (any::<u8>(), any::<u8>()).prop_map(|(member, told)| Step::Deliver { member, told }),
        4 => Just(Step::DeliverAll),
        10 => (some(), keep()).prop_map(|(members, keep)| Step::Release { members, keep }),
        2 => any::<u8>().prop_map(Step::RepeatRelease),
        2 => Just(Step::ReleaseAll),
        2 => any::<u8>().prop_map(Step::Overtake),
        2 => any::<u8>().prop_map(Step::Fence),
        3 => (any::<u8>(), proptest::option::of(0..4u32), proptest::option::of(any::<bool>()), any::<bool>())
            .prop_map(|(member, weight, drain, start)| Step::Update { member, weight, drain, start }),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(client, start)| Step::Vacate { client, start }),
        1 => (numberings(), proptest::option::of(1..9u32), any::<bool>(), any::<bool>())
            .prop_map(|(numbering, cap, grace, start)| Step::Configure { numbering, cap, grace, start }),
        4 => Just(Step::Start),
        2 => (any::<u8>(), 1..4u32).prop_map(|(member, degraded)| Step::Reissue { member, degraded }),
        1 => (0..20u64).prop_map(|above| Step::Recover { above }),
        1 => any::<bool>().prop_map(|all_left| Step::Delete { all_left }),
        1 => Just(Step::Restore),
        2 => Just(Step::Quiet),
    ]
}

fn numberings() -> impl Strategy<Value = Numbering> {
    prop_oneof![
        2 => Just(Numbering::Modulo),
        1 => Just(Numbering::Slots(16)),
        1 => Just(Numbering::Slots(32)),
        1 => Just(Numbering::Slots(64)),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    (numberings(), any::<bool>(), any::<bool>()).prop_map(|(numbering, exclusive, grace)| {
        let consistency = if exclusive {
            Consistency::Exclusive
        } else {
            Consistency::Available
        };
        let rejoin_grace = Millis(if grace { 1_000 } else { 0 });
        Settings {
            numbering,
            consistency,
            rejoin_grace,
            ..Settings::default()
        }
    })
}

fn take(world: &mut World, step: Step) {
    let numbers = |world: &World, picks: &[u8]| -> Vec<u64> {
        let picked = picks.iter().filter_map(|&pick| world.member(pick));
        picked
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect()
    };
    match step {
        Step::Join {
            clients,
            weight,
            start,
        } => drop(world.join(&clients, weight, start)),
        Step::End {
            members,
            died,
            start,
        } => {
            let members = numbers(world, &members);
            world.end(members, died, start);
        }
        Step::Deliver { member, told } => {
            if let Some(member) = world.member(member) {
                world.deliver(member, told);
            }
        }
        Step::DeliverAll => world.deliver_all(),
        Step::Release { members, keep } => {
            let members = numbers(world, &members);
            let releases = members
                .into_iter()
                .map(|member| world.say_release(member, keep))
                .collect();
            world.apply(Change::Release(releases));
        }
        Step::RepeatRelease(pick) => world.repeat_release(pick),
        Step::ReleaseAll => drop(world.release_all()),
        Step::Overtake(pick) => {
            if let Some(member) = world.member(pick) {
                let epoch = world.group().members()[&member].epoch;
                let exclusive = world.is_exclusive();
                let events = world.apply(Change::Overtake(vec![(member, epoch)]));
                assert!(
                    events.is_empty() || !exclusive,
                    "nobody overtakes in an exclusive group"
                );
            }
        }
        Step::Fence(pick) => {
            if let Some(member) = world.member(pick) {
                world.apply(Change::Fence(vec![member]));
            }
        }
        Step::Update {
            member,
            weight,
            drain,
            start,
        } => {
            if let Some(member) = world.member(member) {
                world.update(member, weight, drain, start);
            }
        }
        Step::Vacate { client, start } => {
            if let Some(client) = world.vacant(client) {
                world.apply(Change::Vacate {
                    clients: vec![client],
                    start,
                });
            }
        }
        Step::Configure {
            numbering,
            cap,
            grace,
            start,
        } => {
            let mut settings = world.group().settings().clone();
            settings.numbering = numbering;
            settings.max_slots = cap.filter(|_| numbering != Numbering::Modulo);
            settings.rejoin_grace = Millis(if grace { 1_000 } else { 0 });
            world.configure(settings, start);
        }
        Step::Start => drop(world.apply(Change::Start)),
        Step::Reissue { member, degraded } => {
            if let Some(member) = world.member(member) {
                world.reissue(member, degraded);
            }
        }
        Step::Recover { above } => {
            let number = world.group().next_membership() + above;
            let epoch = Epoch::quorum(world.group().epoch().quorum + above);
            world.apply(Change::Recover { number, epoch });
            assert!(world.group().next_membership() > number);
        }
        Step::Delete { all_left } => {
            if all_left {
                let members = world.group().members().keys().copied().collect();
                world.end(members, false, true);
            }
            let members = world.group().members().len();
            let expected = match members {
                0 => Event::Deleted,
                members => Event::DeleteRefused { members },
            };
            assert_eq!(world.apply(Change::Delete), [expected]);
        }
        Step::Restore => world.restore(),
        Step::Quiet => world.quiet(),
    }
}

/// A history, from the settings that the operator made before, if any, to a quiet end.
fn live(settings: Option<Settings>, history: Vec<Step>) {
    let mut world = World::new(settings);
    for step in history {
        take(&mut world, step);
    }
    world.quiet();
    world.restore();
}

fn histories() -> impl Strategy<Value = (Option<Settings>, Vec<Step>)> {
    (
        proptest::option::of(settings()),
        proptest::collection::vec(steps(), 1..60),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_row_has_two_owners_and_in_quiet_times_each_has_one((settings, history) in histories()) {
        live(settings, history);
    }

    #[test]
    fn a_handover_takes_two_commands_whatever_the_number_of_members(
        settings in settings(),
        weights in proptest::collection::vec(0..4u32, 1..12),
        change in 0..4u8,
        picks in proptest::collection::vec(any::<u8>(), 1..4),
    ) {
        let mut world = settled(&settings, &weights);
        change_once(&mut world, change, &picks);
        world.deliver_all();
        world.release_all();
        assert!(!world.group().in_handover() && !world.group().wants_handover());
        world.deliver_all();
        world.quiet();
    }

    #[test]
    fn in_slots_a_change_moves_no_more_than_balance_needs(
        slots in prop_oneof![Just(16u32), Just(64), Just(1_024)],
        weights in proptest::collection::vec(0..4u32, 1..12),
        change in 0..4u8,
        picks in proptest::collection::vec(any::<u8>(), 1..4),
    ) {
        let numbering = Numbering::Slots(slots);
        let mut world = settled(&Settings { numbering, ..Settings::default() }, &weights);
        let before = world.shares();
        change_once(&mut world, change, &picks);
        world.quiet();
        for (number, share) in world.shares() {
            let had = before.get(&number).map_or(Share::none_of(slots), Clone::clone);
            let kept = had.numbers().intersection(share.numbers()).len();
            assert_eq!(kept, had.numbers().len().min(share.numbers().len()), "member {number}");
        }
    }

    #[test]
    fn in_modulo_groups_numbers_below_the_total_stay_and_the_highest_fill_the_holes(
        count in 1..12u8,
        died in any::<bool>(),
        picks in proptest::collection::vec(any::<u8>(), 1..4),
    ) {
        let mut world = settled(&Settings::default(), &vec![1; usize::from(count)]);
        let before = world.shares();
        let leaving: Vec<u64> = picks.iter().map(|&pick| world.member(pick).unwrap()).collect();
        world.end(leaving, died, true);
        world.quiet();
        let after = world.shares();
        let total = u32::try_from(after.len()).unwrap();
        let number = |share: &Share| share.numbers().first().unwrap();
        let mut stay: Vec<u32> = Vec::new();
        let mut moved: Vec<(u32, u32)> = Vec::new();
        for (member, share) in &after {
            let (had, has) = (number(&before[member]), number(share));
            if had < total {
                assert_eq!(had, has);
                stay.push(had);
            } else {
                moved.push((had, has));
            }
        }
        let holes: Vec<u32> = (0..total).filter(|hole| !stay.contains(hole)).collect();
        moved.sort_unstable();
        assert_eq!(moved.into_iter().map(|(_, has)| has).collect::<Vec<_>>(), holes);
    }
}

/// A quiet group of members with these weights.
fn settled(settings: &Settings, weights: &[u32]) -> World {
    let mut world = World::new(Some(Settings {
        rejoin_grace: Millis(0),
        ..settings.clone()
    }));
    for (at, &weight) in (0u8..).zip(weights) {
        world.join(&[at], weight, true);
    }
    world.quiet();
    world
}

/// Joins, deaths, leaves or a new weight, in one command.
fn change_once(world: &mut World, change: u8, picks: &[u8]) {
    let members: std::collections::BTreeSet<u64> = picks
        .iter()
        .filter_map(|&pick| world.member(pick))
        .collect();
    match change {
        0 => {
            let clients: Vec<u8> = (100u8..).take(picks.len()).collect();
            world.join(&clients, 1 + u32::from(picks[0] % 3), true);
        }
        1 | 2 => drop(world.end(members.into_iter().collect(), change == 1, true)),
        _ => {
            let member = members.first().copied().unwrap();
            world.update(
                member,
                Some(u32::from(picks[0] % 5)),
                Some(picks[0].is_multiple_of(7)),
                true,
            );
        }
    }
}

#[test]
fn a_grant_between_two_totals_takes_nothing_away_that_is_worked_on() {
    let slots = |slots| Settings {
        numbering: Numbering::Slots(slots),
        ..Settings::default()
    };
    let mut world = World::new(Some(slots(32)));
    world.join(&[0, 1], 1, true);
    world.deliver_all();
    world.apply(Change::Fence(vec![1]));
    // Member 2 holds {16-31}/32, its target becomes {0-15}/16, and the fenced member's {0-15}/32 is in the way of all of it.
    world.configure(slots(16), true);
    assert_eq!(world.group().members()[&2].held.total(), 32);
    world.quiet();
}

#[test]
fn a_drained_member_does_not_close_the_barrier_to_those_who_come_meanwhile() {
    let mut world = settled(&Settings::default(), &[1, 1, 1]);
    world.update(1, None, Some(true), true);
    world.quiet();
    let before = world.handovers;
    world.join(&[10], 1, true);
    world.join(&[11], 1, false);
    world.join(&[12], 1, false);
    world.deliver_all();
    world.release_all();
    assert_eq!(world.handovers, before + 1, "one renumbering for all");
    assert!(!world.group().in_handover() && !world.group().wants_handover());
    world.quiet();
}

#[test]
fn pacing_keeps_nobody_waiting_where_nobody_works() {
    let mut world = settled(&Settings::default(), &[1]);
    world.end(vec![1], true, true);
    world.join(&[10], 1, false);
    let newcomer = &world.group().members()[&2];
    assert!(
        newcomer.is_settled() && !newcomer.held.is_empty(),
        "{newcomer:?}"
    );
    world.quiet();
}

#[test]
fn rows_that_nobody_could_take_go_to_the_first_who_can_whatever_the_pacing() {
    let mut world = settled(&Settings::default(), &[1, 1]);
    world.apply(Change::Update {
        members: vec![Update {
            member: 2,
            weight: Some(0),
            drain: None,
        }],
        start: false,
    });
    world.end(vec![1], true, false);
    assert!(world.group().members()[&2].target.numbers().len() < 2);
    world.join(&[10], 1, false);
    let newcomer = &world.group().members()[&3];
    assert!(
        newcomer.is_settled() && !newcomer.held.is_empty(),
        "{newcomer:?}"
    );
    world.quiet();
}

#[test]
fn a_dead_members_slots_fill_no_one_beyond_the_cap() {
    let numbering = Numbering::Slots(16);
    let settings = Settings {
        numbering,
        max_slots: Some(6),
        ..Settings::default()
    };
    let mut world = settled(&settings, &[1, 1, 1]);
    world.end(vec![1], true, false);
    assert!(
        world
            .shares()
            .values()
            .all(|share| share.numbers().len() <= 6)
    );
    world.quiet();
}

#[test]
fn weights_too_large_for_modulo_keep_a_group_in_slots() {
    let slots = Settings {
        numbering: Numbering::Slots(16),
        ..Settings::default()
    };
    let mut world = World::new(Some(slots.clone()));
    world.join(&[0, 1], 40_000, true);
    let modulo = Settings {
        numbering: Numbering::Modulo,
        ..slots.clone()
    };
    let events = world.apply(Change::Configure {
        settings: modulo,
        start: true,
    });
    assert!(
        matches!(events[..], [Event::ConfigureRefused(_)]),
        "{events:?}"
    );
    assert_eq!(*world.group().settings(), slots);
}

#[test]
fn a_client_that_comes_back_does_not_count_twice() {
    let settings = Settings {
        rejoin_grace: Millis(1_000),
        ..Settings::default()
    };
    let mut world = World::new(Some(settings));
    world.join(&[0], 40_000, true);
    world.end(vec![1], true, true);
    let events = world.join(&[0], 40_000, true);
    assert!(matches!(events[0], Event::Joined { .. }), "{events:?}");
}

#[test]
fn absurd_claims_of_clients_change_nothing() {
    let mut world = settled(&Settings::default(), &[1]);
    let before = world.state.clone();
    let epoch = Epoch::quorum(u64::MAX);
    world.apply(Change::Recover {
        number: u64::MAX,
        epoch,
    });
    world.apply(Change::Recover { number: 1, epoch });
    world.apply(Change::Reissue(vec![(1, epoch)]));
    assert!(world.state == before);
}

#[test]
fn numbering_goes_on_far_above_what_was_lost_and_the_operator_says_anew_what_the_group_promises() {
    // Others, who have not come back yet, may know some more than the one who shows that the state was lost.
    const SOME: u64 = 1_000_000;
    let mut world = World::new(None);
    world.apply(Change::Recover {
        number: 7,
        epoch: Epoch::quorum(40),
    });
    assert!(world.group().epoch() > Epoch::quorum(40 + SOME));
    let settings = Settings {
        consistency: Consistency::Exclusive,
        ..Settings::default()
    };
    let start = true;
    let events = world.apply(Change::Configure { settings, start });
    assert!(matches!(events[..], [Event::Configured(_)]), "{events:?}");

    let mut world = settled(&Settings::default(), &[1]);
    let known = Epoch::quorum(world.group().epoch().quorum + 10);
    world.apply(Change::Reissue(vec![(1, known)]));
    assert!(world.group().epoch() > Epoch::quorum(known.quorum + SOME));
    // A degraded epoch shows no loss.
    let newest = world.group().epoch();
    let degraded = Epoch {
        degraded: 1,
        replica: 2,
        ..newest
    };
    world.apply(Change::Reissue(vec![(1, degraded)]));
    assert_eq!(world.group().epoch(), Epoch::quorum(newest.quorum + 1));
}

#[test]
fn nobody_is_overtaken_in_an_exclusive_group() {
    let settings = Settings {
        consistency: Consistency::Exclusive,
        ..Settings::default()
    };
    let mut world = settled(&settings, &[1]);
    world.join(&[9], 1, true);
    let shrinking = world.group().members()[&1].epoch;
    assert!(
        world
            .apply(Change::Overtake(vec![(1, shrinking)]))
            .is_empty()
    );
    assert!(world.group().in_handover());
    world.quiet();
}

#[test]
fn what_concerns_no_group_makes_none() {
    let mut world = World::new(None);
    let stale = [
        Change::Start,
        Change::Dead {
            members: vec![1],
            start: true,
        },
        Change::Release(vec![(1, Epoch::quorum(1), Share::NONE)]),
        Change::Configure {
            settings: Settings {
                settle: Millis(0),
                ..Settings::default()
            },
            start: true,
        },
    ];
    for change in stale {
        world
            .state
            .apply(&skyschedule_server::state::Command::Group {
                group: "none".parse().unwrap(),
                change,
            });
    }
    assert!(world.state.groups().is_empty());
}

/// Each rule that the core upholds, left out, is found by the histories above.
#[cfg(sim)]
#[test]
fn each_rule_of_the_core_is_needed() {
    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
    use skyschedule_common::fault::{Rule, breaking};

    for rule in [Rule::L7, Rule::L10, Rule::L11, Rule::UniqueEpochs] {
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let config = Config {
            cases: 3_000,
            max_shrink_iters: 0,
            failure_persistence: None,
            ..Config::default()
        };
        let found = breaking(rule, || {
            TestRunner::new_with_rng(config, rng).run(&histories(), |(settings, history)| {
                live(settings, history);
                Ok(())
            })
        });
        assert!(found.is_err(), "without rule {rule:?} nothing was found");
    }
}
