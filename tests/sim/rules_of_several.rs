//! The rules of which more shows with several servers: who leads changes, and one that does no more may not know it.

use skyschedule_common::fault::Rule;
use skyschedule_common::protocol::messages::{Millis, Numbering};
use skyschedule_tests::sim::profile::{Event, Profile};
use std::time::Duration;

use super::{come_and_go, exclusive, is_missed, restored, trusting};

/// With three servers.
fn three(mut profile: Profile) -> Profile {
    profile.servers = 3;
    profile
}

/// A leader that does not know yet what was decided before it takes a member for unknown.
#[test]
fn l1_with_several_servers() {
    let events = [
        (Event::Start, 2),
        (Event::Close, 6),
        (Event::WelcomeThenKill, 20),
    ];
    let mut profile = three(exclusive(Numbering::Modulo, &events));
    profile.one_at_a_time = true;
    profile.twins_percent = 0;
    profile.every_ms = vec![500];
    profile.disk_ms = vec![100];
    profile.network_ms = vec![10];
    // Nobody is fenced for a handler that does not end: that moves shares, too, and is right.
    profile.handlers.slow_percent = 0;
    profile.handlers.stubborn_percent = 0;
    is_missed(Rule::L1, &profile, &["shares moved", "epoch back"]);
}

#[test]
fn l2_with_several_servers() {
    let events = come_and_go(&[(Event::CrashAtCommit, 10), (Event::Isolate, 6)]);
    let mut profile = three(exclusive(Numbering::Modulo, &events));
    profile.disk_ms = vec![30];
    is_missed(
        Rule::L2,
        &profile,
        &["forgotten", "epoch twice", "epoch back", "servers differ"],
    );
}

#[test]
fn l3_with_several_servers() {
    let events = come_and_go(&[(Event::ServerKill, 6)]);
    let profile = three(exclusive(Numbering::Modulo, &events));
    is_missed(
        Rule::L3,
        &profile,
        &["held twice", "token back", "shares moved"],
    );
}

#[test]
fn l4_a_deposed_leader_renews_nobody() {
    let events = [
        (Event::Start, 12),
        (Event::Close, 4),
        (Event::Restart, 6),
        (Event::LeaderApart, 4),
    ];
    let mut profile = three(exclusive(Numbering::Modulo, &events));
    profile.every_ms = vec![300];
    profile.trouble_ms = (8_000, 12_000);
    is_missed(Rule::L4, &profile, &["held twice", "token back"]);
}

/// Most servers have forgotten what a member knows.
#[test]
fn l15_a_renewal_waits_with_several_servers() {
    is_missed(Rule::L15Renewal, &three(restored()), &["held twice"]);
}

#[test]
fn l8_with_several_servers() {
    let events = come_and_go(&[(Event::DiskLoss, 3)]);
    let profile = three(Profile::lost_disks(Numbering::Modulo).with_events(&events));
    is_missed(Rule::L8, &profile, &["epoch back", "held twice"]);
}

#[test]
fn f1_with_several_servers() {
    let profile = three(trusting(&come_and_go(&[(Event::LateFin, 10)])));
    is_missed(Rule::F1, &profile, &["held twice", "token back"]);
}

/// Members whose leases end while their deaths are decided slowly.
#[test]
fn l5_with_several_servers() {
    let events = [(Event::Start, 10), (Event::NearLapse, 15)];
    let mut profile = three(exclusive(Numbering::Modulo, &events));
    profile.twins_percent = 0;
    profile.every_ms = vec![500];
    profile.disk_ms = vec![100];
    profile.network_ms = vec![50];
    is_missed(Rule::L5, &profile, &["held twice", "token back"]);
}

/// What a leader told is heard after what the next one told.
#[test]
fn c3_with_several_servers() {
    let events = [(Event::Start, 10), (Event::LateTold, 12)];
    let mut profile = three(exclusive(Numbering::Modulo, &events));
    profile.twins_percent = 0;
    profile.every_ms = vec![1_500];
    profile.handlers.slow_percent = 0;
    is_missed(Rule::C3, &profile, &["epoch back"]);
}

/// Without a quorum for a while, here or there, again and again.
fn few_left(more: &[(Event, u32)]) -> Profile {
    let mut profile = Profile::few_left(Numbering::Modulo).with_events(more);
    profile.twins_percent = 0;
    profile.every_ms = vec![500];
    profile.trouble_ms = (10_000, 15_000);
    profile
}

/// A server goes on numbering although it follows a leader, and clients that do not reach that one turn to it.
#[test]
fn d1_a_follower_numbers_nobody() {
    let profile = few_left(&[
        (Event::Start, 10),
        (Event::Close, 2),
        (Event::LastOneFollows, 6),
    ]);
    is_missed(Rule::D1, &profile, &["numbered by a follower"]);
}

/// A server that was restarted without a quorum gives out again what it gave out before.
#[test]
fn d2_what_is_given_out_without_a_quorum_is_on_the_disk() {
    let mut profile = few_left(&[
        (Event::Start, 10),
        (Event::Restart, 10),
        (Event::LastOneRestarts, 6),
    ]);
    profile.degraded_after = Duration::from_millis(1_500);
    is_missed(
        Rule::D2,
        &profile,
        &["epoch twice", "epoch back", "one is not enough"],
    );
}

/// A server without a quorum goes before all have heard of its last numbering, and those that have trust in it alone.
#[test]
fn d3_settled_is_not_said_too_early_without_a_quorum() {
    let mut profile = few_left(&[(Event::Start, 10), (Event::LastOneDies, 6)]);
    profile.trouble_ms = (16_000, 24_000);
    profile.handlers.slow_percent = 0;
    is_missed(Rule::D3, &profile, &["held by nobody"]);
}

/// A server without a quorum keeps rows for a client that is dead.
#[test]
fn d4_a_server_without_a_quorum_keeps_deadlines() {
    let mut profile = few_left(&[(Event::Start, 10), (Event::LastOneIsNotTold, 6)]);
    // A connection on which nothing comes is given up after three leases, whatever the deadline: that must be too late.
    profile.settings.drain_timeout = Millis(300);
    profile.trouble_ms = (16_000, 24_000);
    profile.handlers.slow_percent = 0;
    is_missed(Rule::D4, &profile, &["held by nobody"]);
}
