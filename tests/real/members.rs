//! Clients come and go: in order, abruptly, and while they work.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use skyschedule_client::{Client, Numbers, Share};
use skyschedule_common::env;
use skyschedule_tests::member::{Event, Member, Options, Rows};
use skyschedule_tests::numbering::{covered, numbered, settled};
use skyschedule_tests::server::{PASSWORD, Server, USER};

/// Ten times what is aimed at on an idle machine.
const RENUMBERED: Duration = Duration::from_secs(1);

const GROUP: &str = "1000";

/// The group of a test with this many members, each a process, that are numbered.
async fn group(server: &Server, size: usize) -> Vec<Member> {
    let start = |at| Member::start(server.address(), GROUP, &format!("client-{at}"));
    let members: Vec<Member> = (0..size).map(start).collect();
    numbered(&members.iter().collect::<Vec<_>>()).await;
    members
}

fn others<'a>(members: &'a [Member], gone: &str) -> Vec<&'a Member> {
    members
        .iter()
        .filter(|member| member.id() != gone)
        .collect()
}

#[tokio::test]
async fn clients_that_join_one_by_one_are_numbered_at_once() {
    let server = Server::start().await;
    let mut members = Vec::new();
    for size in 1..=5 {
        members.push(Member::start(
            server.address(),
            GROUP,
            &format!("client-{size}"),
        ));
        let numbering = numbered(&members.iter().collect::<Vec<_>>()).await;
        let mut nodes: Vec<_> = numbering.rows.iter().map(|rows| rows.node).collect();
        nodes.sort_unstable();
        assert_eq!(
            nodes,
            (0..size)
                .map(|number| Some((size, number)))
                .collect::<Vec<_>>()
        );
    }
    for member in &members {
        let epochs: Vec<u64> = member
            .history()
            .iter()
            .map(|rows| rows.epoch.as_ref().unwrap().parse().unwrap())
            .collect();
        assert!(epochs.is_sorted(), "epochs go back: {epochs:?}");
    }
    let mut shown = server.admin().members(GROUP).await;
    shown.sort_unstable();
    assert_eq!(
        shown,
        (1..=5).map(|at| format!("client-{at}")).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn a_client_that_is_asked_to_stop_finishes_its_rows_and_hands_over_at_once() {
    let server = Server::start().await;
    let mut members = group(&server, 3).await;
    let row = i64::from(members[1].rows().node.unwrap().1);
    assert!(members[1].begin(row).await);
    members[1].signal(Signal::TERM);

    // It begins nothing any more. Commands and the signal take different ways: it may need a moment to see it.
    while members[1].begin(row + 3).await {
        members[1].end(row + 3).await;
    }
    for other in others(&members, "client-1") {
        assert_eq!(
            other.rows().shares[0].0,
            3,
            "the others wait for the row that it still works on"
        );
    }
    let released = members[1].end(row).await;
    members[1].closed().await;
    let numbering = covered(&others(&members, "client-1")).await;
    assert!(
        numbering.after(released) < RENUMBERED,
        "{:?}",
        numbering.after(released)
    );
    numbered(&others(&members, "client-1")).await;
    assert_eq!(
        server.admin().metric("skyschedule_expired_total").await,
        0.0
    );
}

#[tokio::test]
async fn when_a_client_is_killed_the_others_are_renumbered_at_once() {
    let server = Server::start().await;
    let mut members = group(&server, 5).await;
    // A process that is killed with unread bytes shows a reset, which proves nothing: everything is said by now.
    settled(&members.iter().collect::<Vec<_>>()).await;
    let killed = members[2].signal(Signal::KILL);
    let numbering = covered(&others(&members, "client-2")).await;
    println!("renumbered after {:?}", numbering.after(killed));
    assert!(
        numbering.after(killed) < RENUMBERED,
        "{:?}",
        numbering.after(killed)
    );
    members[2].ended().await;

    // Numbers below the new total stay where they are; one of the survivors may have had the dead one's, too.
    let survivors = others(&members, "client-2");
    let numbering = numbered(&survivors).await;
    for (member, rows) in survivors.iter().zip(numbering.rows) {
        let of_five = |rows: &Rows| rows.share().filter(|share| share.total() == 5);
        let before = member.history().iter().rev().find_map(of_five).unwrap();
        let kept = before.numbers().first().unwrap();
        if kept < 4 {
            assert!(before.numbers().contains(rows.node.unwrap().1), "{member}");
        }
    }

    // A new process under the old name is let in at once: the old one is known to be dead.
    members[2] = Member::start(server.address(), GROUP, "client-2");
    numbered(&members.iter().collect::<Vec<_>>()).await;
}

#[tokio::test]
async fn a_client_that_keeps_dying_is_let_in_only_after_a_delay_and_the_others_work() {
    let server = Server::start().await;
    let steady = Member::start(server.address(), GROUP, "steady");
    // The delay grows from 1 s: on a slow machine the first ones may be over before it tries to come back.
    let mut lives = 0;
    while server
        .admin()
        .metric("skyschedule_delayed_joins_total")
        .await
        == 0.0
    {
        assert!(lives < 6, "nothing slows it down");
        lives += 1;
        let mut dying = Member::start(server.address(), GROUP, "dying");
        numbered(&[&steady, &dying]).await;
        dying.signal(Signal::KILL);
        dying.ended().await;
        numbered(&[&steady]).await;
    }
    assert!(lives > 3, "its first deaths cost it nothing: {lives}");
}

#[tokio::test]
async fn a_weight_is_a_part_of_the_whole_and_can_change() {
    let server = Server::start().await;
    let mut heavy = Options::new(server.address(), GROUP, "heavy")
        .flag("--weight", "3")
        .start();
    let light = Member::start(server.address(), GROUP, "light");
    heavy
        .rows_that("it has three numbers of four", |rows| {
            rows.share()
                .is_some_and(|share| share.total() == 4 && share.numbers().len() == 3)
        })
        .await;
    let numbering = covered(&[&heavy, &light]).await;
    assert_eq!(
        numbering.rows[0].node, None,
        "a client with several numbers is no single node"
    );

    heavy.tell("weight 1").await;
    numbered(&[&heavy, &light]).await;
}

/// Promise 5: a join moves as many slots as balance needs, and the others keep theirs.
#[tokio::test]
async fn a_group_can_change_to_slots_while_it_works_and_then_moves_few() {
    let server = Server::start().await;
    let mut members = group(&server, 3).await;
    let slots = json!({ "numbering": "slots", "slots": 64 });
    server.admin().configure(GROUP, &slots).await;
    let slots_of = |members: &[Member]| -> Vec<Numbers> {
        members
            .iter()
            .map(|member| member.rows().share().unwrap().numbers().clone())
            .collect()
    };
    let balanced = async |members: &[Member]| {
        let least = 64 / members.len() as u64;
        for member in members {
            let wanted = format!("it has {least} or one more of 64 slots");
            let fair = |share: Share| {
                share.total() == 64 && (least..=least + 1).contains(&share.numbers().len())
            };
            member
                .rows_that(&wanted, |rows| rows.share().is_some_and(fair))
                .await;
        }
        covered(&members.iter().collect::<Vec<_>>()).await;
        slots_of(members)
    };
    let before = balanced(&members).await;
    members.push(Member::start(server.address(), GROUP, "client-3"));
    let after = balanced(&members).await;
    for (before, after) in before.iter().zip(&after) {
        assert!(after.is_subset(before), "{before} became {after}");
    }
}

#[tokio::test]
async fn a_client_can_ask_for_its_share() {
    let server = Server::start().await;
    let mut member = Member::start(server.address(), GROUP, "one");
    let rows = member.has_rows().await;
    let (epoch, numbers) = member
        .ask("pull", |event| match event {
            Event::Pulled { epoch, numbers } => Some((epoch.clone(), numbers.clone())),
            _ => None,
        })
        .await;
    assert_eq!(Some(epoch), rows.epoch);
    assert_eq!(numbers, "0/1");
}

/// All clients of a process share its I/O thread, and are members of their own.
#[tokio::test]
async fn one_process_has_several_clients_in_several_groups() {
    let server = Server::start().await;
    let connect = |group: &str, id: &str| {
        let builder = Client::builder()
            .servers([server.address().to_string()])
            .group(group)
            .client_id(id)
            .credentials(USER, PASSWORD);
        builder.connect()
    };
    let mut clients = Vec::new();
    for (group, id) in [
        ("one", "a"),
        ("one", "b"),
        ("two", "a"),
        ("two", "b"),
        ("two", "c"),
    ] {
        clients.push(connect(group, id).await.unwrap());
    }
    for client in &clients {
        let total = if client.group().as_str() == "one" {
            2
        } else {
            3
        };
        let mut shares = client.shares();
        let wanted = shares
            .wait_for(|status| status.settled && status.node.is_some_and(|node| node.0 == total));
        env::timeout(Duration::from_secs(20), wanted)
            .await
            .unwrap()
            .unwrap();
    }
    // One of them leaves: only its group is renumbered.
    let epochs: Vec<_> = clients
        .iter()
        .map(|client| client.inspect().epoch)
        .collect();
    clients[3].close().await.unwrap();
    for at in [2, 4] {
        let mut shares = clients[at].shares();
        let wanted =
            shares.wait_for(|status| status.settled && status.node.is_some_and(|node| node.0 == 2));
        env::timeout(Duration::from_secs(20), wanted)
            .await
            .unwrap()
            .unwrap();
    }
    for at in [0, 1] {
        assert_eq!(clients[at].inspect().epoch, epochs[at]);
    }
}
