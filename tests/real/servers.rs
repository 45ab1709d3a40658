//! Servers come and go, and clients do not mind.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use skyschedule_client::{Client, Mode};
use skyschedule_common::env;
use skyschedule_tests::member::{Member, Options};
use skyschedule_tests::numbering::{all, covered, kept, numbered, settled};
use skyschedule_tests::server::{PASSWORD, Server, USER};

const GROUP: &str = "1000";
const LEASE: Duration = Duration::from_secs(2);

/// Three members of a server that gives short leases.
async fn group() -> (Server, Vec<Member>) {
    let server = Server::start().await;
    server.admin().short_leases(GROUP).await;
    let start = |at| Member::start(server.address(), GROUP, &format!("client-{at}"));
    let members: Vec<Member> = (0..3).map(start).collect();
    settled(&all(&members)).await;
    (server, members)
}

#[tokio::test]
async fn a_server_that_is_restarted_moves_no_share() {
    let (mut server, members) = group().await;
    let before = kept(&members);
    assert_eq!(server.stop().await.code(), Some(0), "{}", server.log());
    server.restart().await;
    server.hears(GROUP, members.len()).await;
    settled(&all(&members)).await;
    assert_eq!(kept(&members), before);
}

#[tokio::test]
async fn a_server_that_is_killed_has_forgotten_nothing_that_it_said() {
    let (mut server, members) = group().await;
    for _ in 0..3 {
        let before = kept(&members);
        server.kill().await;
        server.restart().await;
        server.hears(GROUP, members.len()).await;
        settled(&all(&members)).await;
        assert_eq!(kept(&members), before);
    }
    // It also goes on counting where it was: who joins now gets a higher epoch.
    let newcomer = Member::start(server.address(), GROUP, "newcomer");
    let mut all: Vec<&Member> = members.iter().collect();
    all.push(&newcomer);
    let epochs = |members: &[Member]| -> Vec<u64> {
        let of = |member: &Member| member.rows().epoch.unwrap().parse().unwrap();
        members.iter().map(of).collect()
    };
    let before = epochs(&members);
    numbered(&all).await;
    assert!(
        epochs(&members)
            .iter()
            .zip(before)
            .all(|(now, before)| *now > before)
    );
}

#[tokio::test]
async fn while_every_server_is_away_clients_work_on_and_nothing_has_moved_when_it_is_back() {
    let (mut server, mut members) = group().await;
    let before = kept(&members);
    server.kill().await;
    for member in &members {
        let alone = member
            .rows_that("it works on alone", |rows| rows.mode == "autonomous")
            .await;
        assert_eq!(alone.share().map(|share| share.total()), Some(3));
    }
    env::sleep(2 * LEASE).await;
    for (at, member) in members.iter_mut().enumerate() {
        let own = i64::from(before[at].shares[0].1[0].0);
        assert!(member.begin(own).await, "its own row; {member}");
        member.end(own).await;
        assert!(!member.begin(own + 1).await, "another's row; {member}");
    }
    server.restart().await;
    server.hears(GROUP, members.len()).await;
    settled(&all(&members)).await;
    assert_eq!(kept(&members), before);
}

/// Heartbeats wait unread while a server is stopped: its silence is not theirs.
#[tokio::test]
async fn a_server_that_stood_still_for_longer_than_a_lease_drops_nobody() {
    let (server, members) = group().await;
    let before = kept(&members);
    server.signal(Signal::STOP);
    env::sleep(2 * LEASE).await;
    server.signal(Signal::CONT);
    env::sleep(LEASE).await;
    settled(&all(&members)).await;
    assert_eq!(kept(&members), before);
}

#[tokio::test]
async fn a_client_that_died_while_the_server_was_away_is_dropped_one_lease_after_it_is_back() {
    let (mut server, mut members) = group().await;
    server.kill().await;
    members[1].signal(Signal::KILL);
    members[1].ended().await;
    server.restart().await;
    let back = env::now().as_nanos();
    let without = covered(&[&members[0], &members[2]]).await;
    assert!(
        without.after(back) < LEASE + Duration::from_secs(10),
        "{:?}",
        without.after(back)
    );
}

/// All clients reconnect with jitter while the server is a moment late: it finds its members before their leases end.
#[tokio::test]
async fn a_server_that_stops_tells_its_clients_and_closes_nothing_by_force() {
    let (mut server, members) = group().await;
    let start = env::now();
    assert_eq!(server.stop().await.code(), Some(0));
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "it does not wait for clients"
    );
    for member in &members {
        member
            .wait_for("it knows that its server is gone", |events| {
                events.iter().rev().find_map(|event| match event {
                    skyschedule_tests::member::Event::State { links, .. } => {
                        links.iter().all(|link| link != "Attached").then_some(())
                    }
                    _ => None,
                })
            })
            .await;
    }
}

#[tokio::test]
async fn a_client_starts_with_any_one_server_of_its_list() {
    let server = Server::start().await;
    let (away, nowhere) = (Server::prepared(), Server::prepared());
    let member = Options::new(away.address(), GROUP, "one")
        .server(server.address())
        .server(nowhere.address())
        .start();
    numbered(&[&member]).await;
}

#[tokio::test]
async fn a_client_can_start_while_every_server_is_away() {
    let mut server = Server::prepared();
    let builder = || {
        Client::builder()
            .servers([server.address().to_string()])
            .group(GROUP)
            .credentials(USER, PASSWORD)
            .connect_timeout(Duration::from_millis(500))
    };
    let error = builder().connect().await.unwrap_err().to_string();
    assert!(error.contains(&server.address().to_string()), "{error}");
    let client = builder().connect_in_background().unwrap();
    assert_eq!(client.inspect().mode, Mode::Outside);
    server.restart().await;
    let work = env::timeout(Duration::from_secs(20), client.acquire())
        .await
        .unwrap()
        .unwrap();
    assert!(work.begin(7).is_some());
}
