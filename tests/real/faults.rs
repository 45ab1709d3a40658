//! Three servers over a bad network, and servers that die or stand still, while clients work on rows.
//!
//! Each network fault is met by an exclusive and an available group at the same time. The ledger tells who worked on
//! which row when.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use skyschedule_common::env;
use skyschedule_tests::cluster::Cluster;
use skyschedule_tests::ledger::Ledger;
use skyschedule_tests::member::{Event, Member, Options, Rows};
use skyschedule_tests::mesh::{Doors, Mesh};
use skyschedule_tests::numbering::{Kept, all, covered, kept, numbered, settled};
use skyschedule_tests::proxy::{Direction, Flow};
use skyschedule_tests::server::Server;

const EXCLUSIVE: &str = "exclusive";
const AVAILABLE: &str = "available";
const KEYS: i64 = 12;
const LEASE: Duration = Duration::from_secs(2);

/// How long a network fault lasts: long enough that leases end, and that others take the rows over.
const FAULT: Duration = Duration::from_secs(6);

/// A busy machine takes its time.
const SLACK: Duration = Duration::from_secs(10);

fn now() -> u64 {
    env::now().as_nanos()
}

fn after(at: u64, wait: Duration) -> u64 {
    at + u64::try_from(wait.as_nanos()).unwrap()
}

/// A client that works on the group's rows, over and over.
fn works(options: &Options, group: &str) -> Member {
    options
        .clone()
        .flag("--consistency", group)
        .flag("--keys", &KEYS.to_string())
        .flag("--work-ms", "15")
        .start()
}

/// A group in the middle of its work.
struct Group {
    name: &'static str,
    members: Vec<Member>,
    before: Vec<Kept>,
}

impl Group {
    async fn new(name: &'static str, members: &[Options]) -> Self {
        let start = |options: &Options| works(options, name);
        let members: Vec<Member> = members.iter().map(start).collect();
        settled(&all(&members)).await;
        let before = kept(&members);
        Self {
            name,
            members,
            before,
        }
    }

    fn all(&self) -> Vec<&Member> {
        all(&self.members)
    }

    /// The first so many, who have met no fault, have kept their memberships all the time.
    fn assert_members(&self, count: usize) {
        for (member, before) in self.members.iter().zip(&self.before).take(count) {
            let changed = member.events().into_iter().any(|event| match event {
                Event::State { membership, .. } => {
                    membership.is_some() && membership != before.membership
                }
                _ => false,
            });
            assert!(!changed, "it was taken for dead without reason: {member}");
        }
    }

    /// Nobody's rows were touched.
    fn assert_untouched(&self) {
        self.assert_members(self.members.len());
        for (member, before) in self.members.iter().zip(&self.before) {
            let other = |rows: &Rows| rows.epoch != before.epoch;
            let mut since = member.history().into_iter().skip_while(other);
            assert!(
                !since.any(|rows| other(&rows)),
                "a share has moved: {member}"
            );
        }
    }

    /// When the first of the first so many was renumbered, after that moment.
    fn renumbered_after(&self, at: u64, count: usize) -> Duration {
        let members = self.members.iter().zip(&self.before).take(count);
        let first = members.flat_map(|(member, before)| {
            let history = member.history().into_iter();
            history
                .filter(|rows| rows.at > at && rows.epoch != before.epoch)
                .map(|rows| rows.at)
                .min()
        });
        let first = first.min().unwrap();
        Duration::from_nanos(first - at)
    }

    /// What was done on the group's rows.
    fn ledger(&self) -> Ledger {
        let mut ledger = Ledger::default();
        for member in &self.members {
            ledger.add(member, &[]);
        }
        ledger
    }

    /// In an exclusive group no row had two workers; in each, none was left alone for longer than this.
    fn assert_ledger(&self, begun: u64, idle: Duration) {
        let ledger = self.ledger();
        let (overlaps, longest) = (ledger.overlaps(), ledger.longest_idle(KEYS, begun, now()));
        println!(
            "{}: {} executions, {} of them at the same time as another one of the row, a row was left alone for {longest:?}",
            self.name,
            ledger.len(),
            overlaps.len()
        );
        assert!(ledger.len() > 100, "they worked: {}", ledger.len());
        if self.name == EXCLUSIVE {
            assert_eq!(overlaps, []);
            assert_eq!(ledger.epochs_that_go_back(), []);
        }
        assert!(longest < idle + SLACK, "{longest:?}");
    }

    /// The rows that one member began between these moments.
    fn begun(&self, member: usize, from: u64, to: u64) -> usize {
        let events = self.members[member].events().into_iter();
        let within = events.filter(|event| match event {
            Event::Begun { at, epoch, .. } => epoch.is_some() && (from..to).contains(at),
            _ => false,
        });
        within.count()
    }
}

/// Both groups on one cluster; `members` says how those of a group reach the servers.
async fn groups(mesh: &Mesh, members: impl Fn(&str) -> Vec<Options>) -> [Group; 2] {
    groups_with(mesh, LEASE, members).await
}

async fn groups_with(
    mesh: &Mesh,
    lease: Duration,
    members: impl Fn(&str) -> Vec<Options>,
) -> [Group; 2] {
    let admin = mesh.cluster.servers[0].admin();
    let lease = u64::try_from(lease.as_millis()).unwrap();
    for group in [EXCLUSIVE, AVAILABLE] {
        let settings =
            json!({ "consistency": group, "lease_ms": lease, "drain_timeout_ms": 1_000 });
        admin.configure(group, &settings).await;
    }
    let (exclusive, available) = (members(EXCLUSIVE), members(AVAILABLE));
    [
        Group::new(EXCLUSIVE, &exclusive).await,
        Group::new(AVAILABLE, &available).await,
    ]
}

/// How often a replica became the leader.
fn elections(cluster: &Cluster) -> usize {
    let logs = cluster.servers.iter().map(Server::log);
    logs.map(|log| log.matches("leads, and serves clients").count())
        .sum()
}

/// Plays the beginning of a scene again while another replica becomes the leader by itself, as happens on a busy machine.
async fn undisturbed<T>(scene: impl AsyncFn(&Mesh, usize) -> T) -> (Mesh, usize, T) {
    for _ in 0..5 {
        let mesh = Mesh::start().await;
        let leader = mesh.cluster.leader().await;
        let led = elections(&mesh.cluster);
        let another_leads = async {
            while elections(&mesh.cluster) == led {
                env::sleep(Duration::from_millis(20)).await;
            }
        };
        let played = tokio::select! {
            biased;
            () = another_leads => None,
            played = scene(&mesh, leader) => Some(played),
        };
        if let Some(played) = played {
            return (mesh, leader, played);
        }
        println!("again: another replica leads");
    }
    panic!("no leader lasts");
}

/// Two of each group's members that reach all servers.
fn steady(cluster: &Cluster, group: &str) -> Vec<Options> {
    (0..2)
        .map(|at| cluster.member(group, &format!("steady-{at}")))
        .collect()
}

/// From `cut` to `healed` no server that leads heard the third member of either group. Where rows are exclusive it worked
/// until its lease was over, where they are available also without a server; the others never noticed.
async fn the_third_was_alone(groups: [&Group; 2], begun: u64, cut: u64, healed: u64) {
    for group in groups {
        settled(&group.all()).await;
        group.assert_members(2);
        group.assert_ledger(begun, 2 * LEASE);
    }
    let [exclusive, available] = groups;
    let without_lease = exclusive.begun(2, after(cut, LEASE), healed);
    assert_eq!(without_lease, 0, "somebody renewed its lease");
    let alone = available.begun(2, after(cut, 2 * LEASE), healed);
    assert!(alone > 0, "it works on without a server");
}

#[tokio::test]
async fn a_leader_cut_off_from_its_peers_renews_nothing_and_its_clients_move_on() {
    // One of each group reaches no other server: to it, all seems well.
    let shut = |doors: &[Doors], leader: usize, flow: Flow| {
        for doors in doors {
            let others = (0..3).filter(|other| *other != leader);
            others.for_each(|other| doors.set_both(other, flow));
        }
    };
    let (mesh, leader, (doors, [exclusive, available])) = undisturbed(async |mesh, leader| {
        let cluster = &mesh.cluster;
        let doors = [Doors::to(cluster).await, Doors::to(cluster).await];
        shut(&doors, leader, Flow::Stall);
        let groups = groups(mesh, |group| {
            let own = &doors[usize::from(group == AVAILABLE)];
            [steady(cluster, group), vec![own.member(group, "deluded")]].concat()
        });
        let groups = groups.await;
        (doors, groups)
    })
    .await;
    let cluster = &mesh.cluster;
    let begun = now();

    mesh.network.reaches(leader, false);
    let cut = now();
    cluster.leader_seen_by((leader + 1) % 3, Some(leader)).await;
    let stops = exclusive.members[2].rows_that("its lease is over", |rows| !rows.is_leased());
    assert!(stops.await.at < after(cut, LEASE + SLACK));
    let works_on = available.members[2].rows_that("it is alone", |rows| rows.mode == "autonomous");
    works_on.await;
    // The others have its rows, and had to wait until the new leader knew that its lease is over.
    for group in [&exclusive, &available] {
        covered(&group.all()[..2]).await;
        let renumbered = group.renumbered_after(cut, 2);
        println!("{}: renumbered {renumbered:?} after the cut", group.name);
        assert!(renumbered > LEASE, "{renumbered:?}");
    }
    // At last it numbers by itself who knows nobody else.
    while cluster.view(leader).await["degraded"] != true {
        let log = || cluster.servers[leader].log();
        assert!(now() < after(cut, FAULT + SLACK), "{}", log());
        env::sleep(Duration::from_millis(50)).await;
    }
    env::sleep(FAULT.saturating_sub(Duration::from_nanos(now() - cut))).await;
    let healed = now();
    mesh.network.reaches(leader, true);
    shut(&doors, leader, Flow::Pass);

    the_third_was_alone([&exclusive, &available], begun, cut, healed).await;
}

/// Its connections, each server's in the order in which it was named.
fn links(events: &[Event]) -> Option<&[String]> {
    events.iter().rev().find_map(|event| match event {
        Event::State { links, .. } => Some(links.as_slice()),
        _ => None,
    })
}

/// Waits until the leader serves this client, over a connection of its own or not; which server's it is.
async fn served(member: &Member, link: &str) -> usize {
    let what = format!("its connections: {link}");
    let at = |events: &[Event]| links(events)?.iter().position(|known| known == link);
    member.wait_for(&what, at).await
}

#[tokio::test]
async fn clients_cut_off_from_the_leader_only_work_through_other_servers_until_the_way_is_whole() {
    undisturbed(cut_off_from_the_leader).await;
}

async fn cut_off_from_the_leader(mesh: &Mesh, leader: usize) {
    // A busy machine takes its time for a login, too.
    const LEASE: Duration = Duration::from_secs(3);
    let cluster = &mesh.cluster;
    let mut doors = Vec::new();
    for _ in 0..4 {
        doors.push(Doors::to(cluster).await);
    }
    // Two of each group: one hears the leader no more, the other one is not heard either.
    let mut groups = groups_with(mesh, LEASE, |group| {
        let own = match group {
            EXCLUSIVE => &doors[..2],
            _ => &doors[2..],
        };
        let cut_off = ["deaf", "cut-off"].into_iter().zip(own);
        let cut_off = cut_off.map(|(id, doors)| doors.member(group, id));
        [steady(cluster, group), cut_off.collect()].concat()
    })
    .await;
    let begun = now();

    for (at, doors) in doors.iter().enumerate() {
        doors.set(leader, Direction::ToClient, Flow::Stall);
        if at % 2 == 1 {
            doors.set(leader, Direction::ToServer, Flow::Stall);
        }
    }
    let cut = now();
    for member in groups.iter().flat_map(|group| &group.members[2..]) {
        let through = served(member, "Relaying").await;
        assert_ne!(through, leader);
        let text =
            "the leader cannot be reached directly: this client works through another server";
        member.until_logged(text, 1).await;
    }
    // Several leases long, nobody minds.
    env::sleep((3 * LEASE).saturating_sub(Duration::from_nanos(now() - cut))).await;
    for group in &groups {
        group.assert_untouched();
    }
    // What is decided reaches them.
    for group in &mut groups {
        let newcomer = cluster.member(group.name, "newcomer");
        group.members.push(works(&newcomer, group.name));
        settled(&group.all()).await;
        group.before = kept(&group.members);
    }
    // One of the servers between dies: that is not the clients' death, which go on through the other one.
    let killed = served(&groups[0].members[2], "Relaying").await;
    cluster.servers[killed].signal(Signal::KILL);
    let died = now();
    for member in groups.iter().flat_map(|group| &group.members[2..4]) {
        let other = |events: &[Event]| {
            let now = links(events)?.iter().position(|link| link == "Relaying");
            now.filter(|now| *now != killed)
        };
        member.wait_for("it goes on through the third", other).await;
    }
    env::sleep((2 * LEASE).saturating_sub(Duration::from_nanos(now() - died))).await;
    for group in &groups {
        group.assert_untouched();
    }
    for doors in &doors {
        doors.set_both(leader, Flow::Pass);
    }
    for member in groups.iter().flat_map(|group| &group.members[2..4]) {
        assert_eq!(served(member, "Attached").await, leader, "{member}");
    }
    for group in &groups {
        settled(&group.all()).await;
        group.assert_untouched();
        group.assert_ledger(begun, Duration::from_secs(1));
        assert_eq!(group.ledger().overlaps(), [], "no row had two workers");
    }
}

/// Between the leader and both followers one way is lost: what it says, or what it hears.
async fn one_way(leader_hears: bool) {
    let mesh = Mesh::start().await;
    let cluster = &mesh.cluster;
    let leader = cluster.leader().await;
    let [exclusive, available] = groups(&mesh, |group| steady(cluster, group)).await;
    let begun = now();

    let others = [(leader + 1) % 3, (leader + 2) % 3];
    for other in others {
        match leader_hears {
            true => mesh.network.carries(leader, other, false),
            false => mesh.network.carries(other, leader, false),
        }
    }
    let cut = now();
    cluster.leader_seen_by(others[0], Some(leader)).await;
    let took = Duration::from_nanos(now() - cut);
    println!("the old leader hears: {leader_hears}; another one after {took:?}");
    env::sleep(FAULT.saturating_sub(Duration::from_nanos(now() - cut))).await;
    mesh.network.reaches(leader, true);

    for group in [&exclusive, &available] {
        settled(&group.all()).await;
        group.assert_untouched();
        group.assert_ledger(begun, 2 * LEASE);
    }
}

#[tokio::test]
async fn one_way_loss_between_leader_and_followers_moves_no_share() {
    tokio::join!(one_way(true), one_way(false));
}

#[tokio::test]
async fn half_open_connections_move_only_the_rows_of_a_client_that_nobody_hears() {
    let mesh = Mesh::start().await;
    let cluster = &mesh.cluster;
    let leader = cluster.leader().await;
    let doors = [Doors::to(cluster).await, Doors::to(cluster).await];
    let [exclusive, available] = groups(&mesh, |group| {
        let own = if group == EXCLUSIVE {
            &doors[0]
        } else {
            &doors[1]
        };
        [steady(cluster, group), vec![own.member(group, "vanished")]].concat()
    })
    .await;
    let begun = now();

    // Between the leader and a follower: nobody minds.
    mesh.network.connects(leader, (leader + 1) % 3, false);
    env::sleep(LEASE + Duration::from_secs(1)).await;
    exclusive.assert_untouched();
    available.assert_untouched();
    // A client whose machine vanished: no connection of it ends.
    for doors in &doors {
        (0..3).for_each(|server| doors.set_both(server, Flow::Stall));
    }
    let vanished = now();
    for group in [&exclusive, &available] {
        covered(&group.all()[..2]).await;
        let renumbered = group.renumbered_after(vanished, 2);
        println!(
            "{}: renumbered {renumbered:?} after a client vanished",
            group.name
        );
        assert!(
            renumbered > LEASE / 2 && renumbered < LEASE + SLACK,
            "{renumbered:?}"
        );
    }
    env::sleep(FAULT.saturating_sub(Duration::from_nanos(now() - vanished))).await;
    let healed = now();
    for doors in &doors {
        (0..3).for_each(|server| doors.set_both(server, Flow::Pass));
    }
    mesh.network.reaches(leader, true);

    the_third_was_alone([&exclusive, &available], begun, vanished, healed).await;
}

/// Eight members of an available group that work, each on every server. Leases are as long as usual.
async fn eight() -> (Cluster, Group) {
    let cluster = Cluster::start().await;
    let options: Vec<Options> = (0..8)
        .map(|at| cluster.member(AVAILABLE, &format!("client-{at}")))
        .collect();
    let group = Group::new(AVAILABLE, &options).await;
    connected(&group.members).await;
    (cluster, group)
}

/// Whether a client is logged in there.
fn is_up(link: &str) -> bool {
    link == "Standby" || link == "Attached"
}

/// Waits until each is logged in to every server.
async fn connected(members: &[Member]) {
    for member in members {
        let all = |events: &[Event]| {
            let last = events.iter().rev().find_map(|event| match event {
                Event::State { links, .. } => Some(links),
                _ => None,
            });
            last?.iter().all(|link| is_up(link)).then_some(())
        };
        member
            .wait_for("it is logged in to every server", all)
            .await;
    }
}

/// No member has lost its connection to a server that lives.
fn assert_connected(members: &[Member], since: &[usize], dead: usize) {
    for (member, since) in members.iter().zip(since) {
        for event in &member.events()[*since..] {
            let Event::State { links, .. } = event else {
                continue;
            };
            let mut lives = links.iter().enumerate().filter(|(at, _)| *at != dead);
            assert!(
                lives.all(|(_, link)| is_up(link)),
                "it reconnects: {member}"
            );
        }
    }
}

fn events(members: &[Member]) -> Vec<usize> {
    members.iter().map(|member| member.events().len()).collect()
}

#[tokio::test]
async fn when_the_leader_is_killed_no_share_moves_no_client_reconnects_and_a_join_waits_a_moment() {
    const KILLS: usize = 7;
    let (mut cluster, mut group) = eight().await;
    let begun = now();
    let mut joins = Vec::new();
    for _ in 0..KILLS {
        settled(&group.all()).await;
        connected(&group.members).await;
        let (leader, since) = (cluster.leader().await, events(&group.members));
        group.before = kept(&group.members);
        let killed = now();
        cluster.servers[leader].signal(Signal::KILL);
        let mut newcomer = cluster.member(AVAILABLE, "newcomer").start();
        let membership = newcomer.membership_other_than(None);
        membership.await;
        let all = [group.all(), vec![&newcomer]].concat();
        let numbering = numbered(&all).await;
        joins.push(numbering.after(killed));
        // Until the join: nothing. And it is not the end of anybody's membership.
        assert_connected(&group.members, &since, leader);
        group.assert_members(8);
        cluster.servers[leader].ended().await;
        newcomer.signal(Signal::TERM);
        newcomer.closed().await;
        cluster.servers[leader].restart().await;
    }
    joins.sort();
    let median = joins[KILLS / 2];
    println!("a join was numbered {median:?} after the leader was killed (median; all: {joins:?})");
    assert!(median < Duration::from_secs(1), "{joins:?}");
    settled(&group.all()).await;
    let overlaps = group.ledger().overlaps();
    if !overlaps.is_empty() {
        for server in &cluster.servers {
            println!("{}", server.log());
        }
        for member in &group.members {
            println!("{}: {:#?}", member.id(), member.history());
        }
    }
    assert_eq!(overlaps, [], "no row had two workers");
    group.assert_ledger(begun, Duration::from_secs(1));
}

#[tokio::test]
async fn when_the_leader_stands_still_for_ten_seconds_no_share_moves_and_no_client_reconnects() {
    let (cluster, group) = eight().await;
    let (begun, since) = (now(), events(&group.members));
    let leader = cluster.leader().await;
    cluster.servers[leader].signal(Signal::STOP);
    cluster.leader_seen_by((leader + 1) % 3, Some(leader)).await;
    env::sleep(Duration::from_secs(10)).await;
    group.assert_untouched();
    cluster.servers[leader].signal(Signal::CONT);
    // It hears that it is deposed, and clients may come back to it as a standby.
    env::sleep(LEASE).await;
    settled(&group.all()).await;
    group.assert_untouched();
    assert_connected(&group.members, &since, leader);
    assert_eq!(group.ledger().overlaps(), [], "no row had two workers");
    group.assert_ledger(begun, Duration::from_secs(1));
}

/// What it proposed and nobody takes any more must not keep it from ending.
#[tokio::test]
async fn a_leader_without_followers_stops_when_it_is_asked_to() {
    let mut mesh = Mesh::start().await;
    let leader = mesh.cluster.leader().await;
    let address = mesh.cluster.servers[leader].address();
    let member = Options::new(address, AVAILABLE, "member").start();
    numbered(&[&member]).await;
    mesh.network.reaches(leader, false);
    // It tells the leader that it is gone, which is to be decided.
    drop(member);
    env::sleep(Duration::from_millis(300)).await;
    let asked = env::now();
    let server = &mut mesh.cluster.servers[leader];
    let status = server.stop().await;
    assert_eq!(status.code(), Some(0), "{}", server.log());
    println!("it ended {:?} after it was asked to", asked.elapsed());
    assert!(asked.elapsed() < SLACK, "{}", server.log());
}
