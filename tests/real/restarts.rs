//! Rolling deploys and restarts: what a new process of a client id costs the others.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail like the test itself"
)]

use std::collections::BTreeSet;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use skyschedule_common::env;
use skyschedule_common::share::Share;
use skyschedule_tests::member::{Member, Options, Rows};
use skyschedule_tests::numbering::{covered, is_whole, numbered};
use skyschedule_tests::server::Server;

const GROUP: &str = "1000";

/// Members of a group that has these settings.
async fn group(size: usize, settings: &Value) -> (Server, Vec<Member>) {
    let server = Server::start().await;
    server.admin().configure(GROUP, settings).await;
    let start = |at| Member::start(server.address(), GROUP, &format!("client-{at}"));
    let members: Vec<Member> = (0..size).map(start).collect();
    covered(&members.iter().collect::<Vec<_>>()).await;
    (server, members)
}

/// A group that keeps shares for so long.
fn grace(millis: u32) -> Value {
    json!({ "rejoin_grace_ms": millis })
}

/// The numberings of a member so far, one after the other.
fn epochs(member: &Member) -> BTreeSet<u64> {
    let epoch = |rows: Rows| rows.epoch.unwrap().parse().unwrap();
    member.history().into_iter().map(epoch).collect()
}

/// How often a member was renumbered so far, the first time included: in a modulo group whenever the total is
/// another one. What it gets beside its own until then, of a member that is gone, stops nobody.
fn renumberings(member: &Member, slotted: bool) -> usize {
    let share = |rows: Rows| rows.share().filter(|share| !share.is_empty());
    let mut shares: Vec<Share> = member.history().into_iter().filter_map(share).collect();
    shares.dedup_by(|next, last| next == last || (!slotted && next.total() == last.total()));
    shares.len()
}

/// Ends a process, by a signal or by its death.
async fn end(member: &mut Member, signal: Signal) {
    member.signal(signal);
    if signal == Signal::TERM {
        member.closed().await;
    } else {
        member.ended().await;
    }
}

/// What a rolling deploy cost.
#[derive(Debug, Default)]
struct Cost {
    /// By the server's count.
    renumberings: f64,
    /// Of one client while another one was restarted, at most, on average over its life.
    of_one: f64,
    /// Epochs that one client saw beside that with which it began, at most.
    epochs: usize,
}

impl Cost {
    /// What a member saw since it had its first share: `known` renumberings and epochs were before.
    fn add(&mut self, member: &Member, known: (usize, usize), restarts: usize, slotted: bool) {
        let renumberings = renumberings(member, slotted) - known.0;
        self.of_one = self
            .of_one
            .max(renumberings as f64 / restarts.max(1) as f64);
        self.epochs = self.epochs.max(epochs(member).len() - known.1);
    }
}

/// Each client is stopped, then started anew with its id, one after the other.
async fn deploy(settings: &Value, clients: usize, signal: Signal) -> Cost {
    let slotted = settings["numbering"] == "slots";
    let (server, mut members) = group(clients, settings).await;
    let handovers = "skyschedule_handovers_total";
    let before = server.admin().metric(handovers).await;
    let start = env::now();
    let mut cost = Cost::default();
    let known = |member: &Member| (renumberings(member, slotted), epochs(member).len());
    let mut began: Vec<(usize, usize)> = members.iter().map(known).collect();
    for at in 0..clients {
        end(&mut members[at], signal).await;
        cost.add(&members[at], began[at], at + 1, slotted);
        members[at] = Member::start(server.address(), GROUP, &format!("client-{at}"));
        let rows = members[at].has_rows().await;
        let epoch: u64 = rows.epoch.unwrap().parse().unwrap();
        began[at] = (1, epochs(&members[at]).range(..=epoch).count());
    }
    covered(&members.iter().collect::<Vec<_>>()).await;
    let took = start.elapsed();
    for (at, member) in members.iter().enumerate() {
        cost.add(member, began[at], clients - at, slotted);
    }
    cost.renumberings = server.admin().metric(handovers).await - before;
    println!("{settings}, {signal:?}: {cost:?} in {took:.1?}");
    cost
}

#[tokio::test]
async fn a_deploy_of_20_clients_without_grace_costs_at_most_two_renumberings_a_client() {
    let slots = json!({"numbering": "slots"});
    for (settings, signal) in [
        (json!({}), Signal::TERM),
        (slots.clone(), Signal::TERM),
        (slots, Signal::KILL),
    ] {
        let cost = deploy(&settings, 20, signal).await;
        assert!(cost.renumberings <= 40.0, "{cost:?}");
        assert!(cost.of_one <= 2.0, "{cost:?}");
    }
}

#[tokio::test]
async fn a_deploy_of_20_clients_within_their_grace_renumbers_nobody() {
    let modulo = grace(6_000);
    let slots = json!({"rejoin_grace_ms": 6_000, "numbering": "slots"});
    let exclusive = json!({"rejoin_grace_ms": 60_000, "consistency": "exclusive"});
    for (settings, signal) in [
        (&modulo, Signal::TERM),
        (&modulo, Signal::KILL),
        (&slots, Signal::TERM),
        (&slots, Signal::KILL),
        (&exclusive, Signal::TERM),
    ] {
        let cost = deploy(settings, 20, signal).await;
        assert_eq!(cost.epochs, 0, "nobody is told anything: {cost:?}");
    }
}

#[tokio::test]
async fn a_share_is_kept_for_the_grace_and_then_given_out() {
    const GRACE: Duration = Duration::from_millis(1_000);
    for (at, signal) in [(0, Signal::TERM), (1, Signal::KILL)] {
        let (server, mut members) = group(3, &grace(1_000)).await;
        let known: Vec<_> = members.iter().map(epochs).collect();
        let ended = env::now().as_nanos();
        end(&mut members[at], signal).await;
        let others: Vec<&Member> = members
            .iter()
            .filter(|m| m.id() != members[at].id())
            .collect();
        let without = numbered(&others).await;
        assert!(without.after(ended) > GRACE, "{:?}", without.after(ended));
        // Nobody was told anything before.
        for (index, member) in members.iter().enumerate().filter(|(index, _)| *index != at) {
            let first_new = member.history().into_iter().find(|rows| {
                let epoch: u64 = rows.epoch.as_ref().unwrap().parse().unwrap();
                !known[index].contains(&epoch)
            });
            let after = Duration::from_nanos(first_new.unwrap().at - ended);
            assert!(after > GRACE, "{after:?}");
        }
        // Who comes back now is a newcomer.
        members[at] = Member::start(server.address(), GROUP, &format!("client-{at}"));
        numbered(&members.iter().collect::<Vec<_>>()).await;
    }
}

#[tokio::test]
async fn two_clients_that_are_away_each_get_their_own_share_back() {
    let (server, mut members) = group(4, &grace(6_000)).await;
    let before: Vec<Option<Share>> = members.iter().map(|member| member.rows().share()).collect();
    let known = [epochs(&members[0]), epochs(&members[3])];
    end(&mut members[1], Signal::KILL).await;
    end(&mut members[2], Signal::TERM).await;
    for at in [2, 1] {
        members[at] = Member::start(server.address(), GROUP, &format!("client-{at}"));
        members[at].has_rows().await;
    }
    numbered(&members.iter().collect::<Vec<_>>()).await;
    let after: Vec<Option<Share>> = members.iter().map(|member| member.rows().share()).collect();
    assert_eq!(after, before);
    assert_eq!([epochs(&members[0]), epochs(&members[3])], known);
}

#[tokio::test]
async fn another_client_gets_nothing_of_a_share_that_is_kept() {
    let (server, mut members) = group(3, &grace(6_000)).await;
    end(&mut members[2], Signal::KILL).await;
    members.push(Member::start(server.address(), GROUP, "client-3"));
    let of_four = |rows: &Rows| rows.node.is_some_and(|(total, _)| total == 4);
    let mut shares = Vec::new();
    for at in [0, 1, 3] {
        let rows = members[at].rows_that("it is one of four", of_four).await;
        shares.push(rows.share().unwrap());
    }
    assert!(!is_whole(&shares), "a fourth is kept: {shares:?}");
    let known = [0, 1, 3].map(|at| epochs(&members[at]));
    members[2] = Member::start(server.address(), GROUP, "client-2");
    numbered(&members.iter().collect::<Vec<_>>()).await;
    assert_eq!([0, 1, 3].map(|at| epochs(&members[at])), known);
}

#[tokio::test]
async fn a_client_that_comes_back_with_another_weight_gets_its_new_part() {
    let slots = json!({"rejoin_grace_ms": 6_000, "numbering": "slots", "slots": 64});
    for settings in [grace(6_000), slots] {
        let (server, mut members) = group(3, &settings).await;
        let had = members[1].rows().share().unwrap();
        end(&mut members[1], Signal::TERM).await;
        members[1] = Options::new(server.address(), GROUP, "client-1")
            .flag("--weight", "2")
            .start();
        let half = |rows: &Rows| {
            let share = rows.share().unwrap_or_default();
            2 * share.numbers().len() == u64::from(share.total()) && !share.is_empty()
        };
        members[1].rows_that("it has half of all", half).await;
        covered(&members.iter().collect::<Vec<_>>()).await;
        let has = members[1].rows().share().unwrap();
        assert_eq!(
            has.numbers().intersection(had.numbers()),
            had.numbers().clone(),
            "what was kept for it is part of that"
        );
    }
}

/// The time does not go on while the server is away, and starts anew in full.
#[tokio::test]
async fn a_server_that_is_restarted_keeps_shares_for_their_full_grace() {
    const GRACE: Duration = Duration::from_secs(6);
    let (mut server, mut members) = group(3, &grace(6_000)).await;
    end(&mut members[1], Signal::KILL).await;
    end(&mut members[2], Signal::KILL).await;
    env::sleep(GRACE * 6 / 10).await;
    server.kill().await;
    let restarted = env::now().as_nanos();
    server.restart().await;
    // One is back within the new time, though not within the old one.
    env::sleep(GRACE / 2).await;
    let had = members[1].rows().share();
    members[1] = Member::start(server.address(), GROUP, "client-1");
    let back = members[1].has_rows().await;
    assert_eq!(back.share(), had, "it is kept for it");
    // The other one is not.
    let without = numbered(&[&members[0], &members[1]]).await;
    assert!(
        without.after(restarted) > GRACE,
        "{:?}",
        without.after(restarted)
    );
}
