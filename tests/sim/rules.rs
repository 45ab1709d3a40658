//! Each load-bearing rule is left out in turn, and the simulation must find that; with the rule, the same seeds pass.
//!
//! Covered: L1, L2, L3, L4, L5, L6, L7, L8, L10, L11, L15 (and that a renewal waits for it), L17, F1, F3, C2, C3, C4, C8, D1, D2, D3, D4, and that every told has an
//! epoch of its own. With one server, C3 shows only where it comes back with an older copy of its disk: it tells nothing out of
//! order on one connection. See `docs/simulation.md` of the server for how many seeds find each.
//!
//! The variables of the test `sim_seeds` work here, too, but for `SKY_SIM_SEED`: a rule asks for the first of many seeds.
//! With `SKY_SIM_COUNT=1` each rule is left out in all of `SKY_SIM_SEEDS` seeds, and those that notice are counted.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test may"
)]

#[cfg(not(sim))]
compile_error!(
    "this is a simulation: build it with RUSTFLAGS='--cfg tokio_unstable --cfg sim', or use tests/run --sim"
);

use skyschedule_common::fault::Rule;
use skyschedule_common::protocol::messages::Numbering;
use skyschedule_tests::sim::profile::{Event, Profile};
use skyschedule_tests::sim::seeds::{logs, number, report, run_all, run_many};

mod rules_of_several;

/// Leaves the rule out until it is found, then runs the same seeds with it.
fn is_missed(rule: Rule, profile: &Profile, kinds: &[&str]) {
    logs();
    let limit = number("SKY_SIM_SEEDS", 200);
    let first = number("SKY_SIM_FIRST", 1);
    if std::env::var_os("SKY_SIM_COUNT").is_some() {
        let found = run_all(first, limit, |_| profile.clone(), Some(rule)).len();
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        eprintln!("{test}: {rule:?} is found by {found} of {limit} seeds");
        return;
    }
    let (found, _) = run_many(first, limit, |_| profile.clone(), Some(rule));
    let Some(found) = found else {
        panic!("{rule:?} is left out, and {limit} seeds do not notice");
    };
    let violation = found.violation.as_ref().unwrap();
    eprintln!(
        "{rule:?}: seed {} finds it ({}: {})",
        found.seed, violation.kind, violation.what
    );
    let command = |seed: u64| {
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        format!("SKY_SIM_FIRST={seed} SKY_SIM_SEEDS=1 ./tests/run --sim --test sim_rules -- {test}")
    };
    assert!(
        kinds.contains(&violation.kind),
        "{rule:?} shows as something else: {}",
        report(&found, &command(found.seed))
    );
    let (failed, _) = run_many(first, found.seed - first + 1, |_| profile.clone(), None);
    if let Some(failed) = failed {
        panic!("with the rule:\n{}", report(&failed, &command(failed.seed)));
    }
}

fn exclusive(numbering: Numbering, events: &[(Event, u32)]) -> Profile {
    Profile::exclusive("directed", numbering, false).with_events(events)
}

fn trusting(events: &[(Event, u32)]) -> Profile {
    let mut profile = exclusive(Numbering::Modulo, events);
    profile.settings.trust_fin = true;
    profile
}

const COME_AND_GO: [(Event, u32); 5] = [
    (Event::Start, 10),
    (Event::Close, 5),
    (Event::Restart, 3),
    (Event::Weight, 4),
    (Event::TwoStarts, 4),
];

fn come_and_go(more: &[(Event, u32)]) -> Vec<(Event, u32)> {
    COME_AND_GO.iter().chain(more).copied().collect()
}

#[test]
fn l2_no_message_before_it_is_durable() {
    let events = come_and_go(&[(Event::CrashAtCommit, 10), (Event::ServerPowerLoss, 3)]);
    let mut profile = exclusive(Numbering::Modulo, &events);
    profile.disk_ms = vec![30];
    is_missed(
        Rule::L2,
        &profile,
        &["forgotten", "epoch twice", "epoch back"],
    );
}

#[test]
fn l3_a_new_leader_gives_full_leases() {
    let events = come_and_go(&[(Event::ServerKill, 6)]);
    let profile = exclusive(Numbering::Modulo, &events);
    is_missed(
        Rule::L3,
        &profile,
        &["held twice", "token back", "shares moved"],
    );
}

#[test]
fn l4_only_members_are_renewed() {
    let events = come_and_go(&[(Event::NearLapse, 15)]);
    let mut profile = exclusive(Numbering::Modulo, &events);
    profile.disk_ms = vec![100];
    profile.network_ms = vec![2];
    is_missed(Rule::L4, &profile, &["held twice", "token back"]);
}

#[test]
fn l5_the_condemned_are_not_renewed() {
    let events = come_and_go(&[(Event::NearLapse, 15)]);
    let mut profile = exclusive(Numbering::Modulo, &events);
    profile.disk_ms = vec![100];
    profile.network_ms = vec![2];
    is_missed(Rule::L5, &profile, &["held twice", "token back"]);
}

#[test]
fn l6_a_reset_proves_nothing() {
    let events = come_and_go(&[(Event::Reset, 6)]);
    let profile = exclusive(Numbering::Modulo, &events);
    is_missed(Rule::L6, &profile, &["held twice", "token back"]);
}

#[test]
fn l7_one_member_for_each_id() {
    let events = come_and_go(&[(Event::Restart, 6)]);
    let profile = exclusive(Numbering::Modulo, &events);
    is_missed(Rule::L7, &profile, &["one id, two members"]);
}

#[test]
fn l8_a_lost_state_is_recovered_above_what_clients_know() {
    let events = come_and_go(&[(Event::DiskLoss, 3)]);
    let profile = Profile::lost_disks(Numbering::Modulo).with_events(&events);
    is_missed(Rule::L8, &profile, &["epoch back", "held twice"]);
}

#[test]
fn l10_a_release_answers_one_epoch() {
    let mut profile = exclusive(Numbering::Slots(16), &come_and_go(&[]));
    profile.every_ms = vec![100];
    profile.network_ms = vec![50];
    is_missed(Rule::L10, &profile, &["held twice", "token back"]);
}

#[test]
fn l11_grants_follow_releases() {
    let profile = exclusive(Numbering::Modulo, &come_and_go(&[]));
    is_missed(Rule::L11, &profile, &["held twice", "state"]);
}

#[test]
fn l15_later_epochs_are_told_again() {
    let events = [
        (Event::Start, 12),
        (Event::Weight, 8),
        (Event::Backup, 8),
        (Event::Restore, 6),
    ];
    let mut profile = Profile::lost_disks(Numbering::Modulo).with_events(&events);
    profile.every_ms = vec![500];
    profile.twins_percent = 0;
    is_missed(
        Rule::L15,
        &profile,
        &["not settled", "held by nobody", "epoch back"],
    );
}

/// A member that knows more than the restored servers works on what it knows, when others have it.
#[test]
fn l15_a_renewal_waits_for_what_is_told_again() {
    is_missed(Rule::L15Renewal, &restored(), &["held twice"]);
}

fn restored() -> Profile {
    let events = [(Event::Start, 10), (Event::RestoreByTheBook, 10)];
    let mut profile = Profile::restored("directed", Numbering::Modulo).with_events(&events);
    profile.twins_percent = 0;
    profile.every_ms = vec![500];
    profile.disk_ms = vec![30];
    profile.trouble_ms = (14_000, 20_000);
    profile.handlers.slow_percent = 0;
    profile
}

#[test]
fn l17_settled_is_not_said_too_early() {
    let mut profile = Profile::available("directed", Numbering::Modulo)
        .with_events(&[(Event::WelcomeThenAway, 10), (Event::Close, 5)]);
    profile.trouble_ms = (14_000, 22_000);
    profile.twins_percent = 0;
    profile.every_ms = vec![500];
    profile.handlers.slow_percent = 5;
    is_missed(Rule::L17, &profile, &["held by nobody"]);
}

#[test]
fn f1_a_fin_concerns_its_own_membership() {
    let profile = trusting(&come_and_go(&[(Event::LateFin, 10)]));
    is_missed(Rule::F1, &profile, &["held twice", "token back"]);
}

#[test]
fn f3_connections_end_with_a_reset() {
    let profile = trusting(&come_and_go(&[(Event::Reset, 6)]));
    is_missed(Rule::F3, &profile, &["held twice", "token back"]);
}

#[test]
fn c2_a_lease_counts_from_sending() {
    let events = [
        (Event::Start, 10),
        (Event::LateAnswers, 10),
        (Event::Close, 1),
    ];
    let mut profile = exclusive(Numbering::Modulo, &events);
    profile.every_ms = vec![500];
    profile.twins_percent = 0;
    profile.handlers.slow_percent = 0;
    is_missed(Rule::C2, &profile, &["held twice", "token back"]);
}

#[test]
fn c3_only_later_epochs_are_taken() {
    let events = come_and_go(&[(Event::Backup, 8), (Event::Restore, 4)]);
    let profile = Profile::lost_disks(Numbering::Modulo).with_events(&events);
    is_missed(Rule::C3, &profile, &["epoch back"]);
}

#[test]
fn c4_nothing_is_released_that_is_worked_on() {
    let profile = exclusive(Numbering::Modulo, &come_and_go(&[]));
    is_missed(Rule::C4, &profile, &["held twice", "token back"]);
}

#[test]
fn c8_the_base_has_all_shares_since_the_last_settled_one() {
    let mut profile = Profile::available("directed", Numbering::Modulo)
        .with_events(&[(Event::WelcomeThenAway, 10), (Event::Close, 5)]);
    profile.trouble_ms = (14_000, 22_000);
    profile.twins_percent = 0;
    profile.every_ms = vec![500];
    profile.handlers.slow_percent = 5;
    is_missed(Rule::C8, &profile, &["held by nobody"]);
}

#[test]
fn unique_epochs_order_all_that_is_told() {
    let profile = exclusive(Numbering::Modulo, &come_and_go(&[]));
    is_missed(
        Rule::UniqueEpochs,
        &profile,
        &["state", "epoch twice", "epoch back"],
    );
}
