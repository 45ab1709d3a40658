//! Three servers, one numbering: any one of them may go, and clients do not mind.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail and print like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use skyschedule_common::env;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::messages::{ClientMessage, Code, Login, ServerMessage, Serving};
use skyschedule_tests::cluster::Cluster;
use skyschedule_tests::member::{Member, Rows};
use skyschedule_tests::numbering::{all, kept, numbered, settled};
use skyschedule_tests::peer::{Peer, login};
use skyschedule_tests::server::Server;

const GROUP: &str = "1000";

/// Without a quorum for so long, a replica numbers by itself.
const DEGRADED_AFTER: Duration = Duration::from_secs(5);

/// A cluster that gives short leases, and three members that have settled.
async fn group() -> (Cluster, Vec<Member>) {
    Cluster::with_members(GROUP, 3, 2_000).await
}

/// A new member, and how long after `start` all four had their numbers.
async fn one_more(cluster: &Cluster, members: &mut Vec<Member>, start: u64) -> Duration {
    members.push(cluster.member(GROUP, "one-more").start());
    numbered(&all(members)).await.after(start)
}

#[tokio::test]
async fn a_cluster_forms_in_any_order_of_starts() {
    let mut cluster = Cluster::prepared();
    for at in [2, 0, 1] {
        cluster.servers[at].launch();
        env::sleep(Duration::from_millis(300)).await;
    }
    cluster.ready().await;
    let leader = cluster.leader().await;
    for at in 0..3 {
        let deadline = env::now() + Duration::from_secs(20);
        let view = loop {
            let view = cluster.view(at).await;
            let replicas = view["replicas"].as_array().unwrap();
            assert_eq!(replicas.len(), 3);
            let is_there =
                |replica: &Value| replica["voter"] == true && replica["reachable"] == true;
            if replicas.iter().all(is_there) {
                break view;
            }
            assert!(env::now() < deadline, "{view}");
            env::sleep(Duration::from_millis(20)).await;
        };
        assert_eq!(view["replica_id"], at + 1);
        // Reads and writes are passed on.
        let admin = cluster.servers[at].admin();
        admin
            .configure(
                &format!("group-{at}"),
                &serde_json::json!({ "settle_ms": 30 }),
            )
            .await;
        assert!(admin.group(&format!("group-{at}")).await.is_some());
    }
    assert!(cluster.servers[leader].logged("leads, and serves clients"));
}

#[tokio::test]
async fn a_killed_leader_ends_no_membership_and_comes_back_as_a_follower() {
    let (mut cluster, mut members) = group().await;
    let of = |members: &[Member]| members.iter().map(Member::membership).collect::<Vec<_>>();
    let before = of(&members);
    let leader = cluster.leader().await;
    let killed = env::now().as_nanos();
    cluster.servers[leader].kill().await;
    let took = one_more(&cluster, &mut members, killed).await;
    println!("numbered a join {took:?} after the leader was killed");
    assert!(took < Duration::from_secs(10), "{took:?}");
    let next = cluster.leader_seen_by((leader + 1) % 3, Some(leader)).await;
    assert_eq!(of(&members[..3]), before);
    cluster.servers[next].hears(GROUP, members.len()).await;
    cluster.servers[leader].restart().await;
    settled(&all(&members)).await;
    assert_eq!(cluster.leader().await, next);
}

#[tokio::test]
async fn a_leader_that_stood_still_renews_nothing_and_grants_nothing() {
    let (cluster, mut members) = group().await;
    let before = kept(&members);
    let leader = cluster.leader().await;
    let admin = cluster.servers[leader].admin();
    let told = admin.metric("skyschedule_told_total").await;
    let committed = admin.metric("skyschedule_commits_total").await;
    cluster.servers[leader].signal(Signal::STOP);
    let other = (leader + 1) % 3;
    let next = cluster.leader_seen_by(other, Some(leader)).await;
    env::sleep(Duration::from_secs(10)).await;
    cluster.servers[next].hears(GROUP, members.len()).await;
    assert_eq!(kept(&members), before);
    // What it knows is out of date by the time that it wakes up.
    one_more(&cluster, &mut members, env::now().as_nanos()).await;
    settled(&all(&members)).await;
    let before = kept(&members);
    cluster.servers[leader].signal(Signal::CONT);
    env::sleep(Duration::from_secs(3)).await;
    settled(&all(&members)).await;
    assert_eq!(cluster.leader().await, next);
    assert_eq!(kept(&members), before);
    assert!(cluster.servers[leader].logged("leads no more"));
    assert_eq!(admin.metric("skyschedule_told_total").await, told);
    assert_eq!(admin.metric("skyschedule_commits_total").await, committed);
    assert_eq!(admin.metric("skyschedule_leader").await, 0.0);
}

#[tokio::test]
async fn a_rolling_restart_changes_no_epoch() {
    let (mut cluster, members) = group().await;
    let before = kept(&members);
    let leader = cluster.leader().await;
    // The leader first, so that the leadership moves twice at least.
    for at in [leader, (leader + 1) % 3, (leader + 2) % 3] {
        let leads = cluster.leader().await == at;
        let status = cluster.servers[at].stop().await;
        assert_eq!(status.code(), Some(0), "{}", cluster.servers[at].log());
        assert_eq!(
            cluster.servers[at].logged("handed the leadership over"),
            leads
        );
        cluster.servers[at].restart().await;
        let leader = cluster.leader().await;
        cluster.servers[leader].hears(GROUP, members.len()).await;
    }
    settled(&all(&members)).await;
    assert_eq!(kept(&members), before);
}

#[tokio::test]
async fn without_a_follower_all_goes_on() {
    let (mut cluster, mut members) = group().await;
    let leader = cluster.leader().await;
    cluster.servers[(leader + 1) % 3].kill().await;
    let took = one_more(&cluster, &mut members, env::now().as_nanos()).await;
    println!("numbered a join {took:?} after it began, with two replicas of three");
    settled(&all(&members)).await;
}

/// Whether a server serves a client that asks it, before it knows how it serves, to do so if it leads. Any other one says
/// nothing to that.
async fn answers_attach_to_leader(cluster: &Cluster, server: usize) -> bool {
    let mut peer = Peer::authenticated(cluster.servers[server].address()).await;
    let login = login("asked-early", &format!("of-{server}"));
    let asked = [
        ClientMessage::Login(login.into()),
        ClientMessage::AttachToLeader {
            membership: None,
            epoch: Epoch::ZERO,
        },
    ];
    for message in asked {
        peer.send(message).await;
    }
    let mode = peer
        .until(|message| match message {
            ServerMessage::Serving { mode, .. } => Some(mode),
            _ => None,
        })
        .await;
    if mode == Serving::Quorum {
        let welcomed = |message| matches!(message, ServerMessage::Welcome { .. }).then_some(());
        peer.until(welcomed).await;
        return true;
    }
    // Long enough for an answer.
    env::sleep(Duration::from_millis(500)).await;
    peer.send(ClientMessage::Ping { seq: 1 }).await;
    let next = peer.receive().await;
    assert!(
        matches!(next, Some(ServerMessage::Pong { seq: 1 })),
        "{next:?}"
    );
    false
}

/// Two replicas of three are killed, then a client joins and one dies.
async fn one_replica_is_enough(survivor_led: bool) {
    let (mut cluster, mut members) = group().await;
    let leader = cluster.leader().await;
    let survivor = if survivor_led {
        leader
    } else {
        (leader + 1) % 3
    };
    let admin = cluster.servers[survivor].admin();
    admin
        .configure(
            "exclusive",
            &serde_json::json!({ "consistency": "exclusive" }),
        )
        .await;
    let exclusive = [
        cluster.member("exclusive", "x-0").start(),
        cluster.member("exclusive", "x-1").start(),
    ];
    settled(&all(&exclusive)).await;
    settled(&all(&members)).await;
    let (before, exclusive_before) = (epochs(&members), kept(&exclusive));
    let exclusive_epochs = epochs(&exclusive);

    let others = [(survivor + 1) % 3, (survivor + 2) % 3];
    for server in 0..3 {
        let answered = answers_attach_to_leader(&cluster, server).await;
        assert_eq!(answered, server == leader, "{server}");
    }
    let killed = env::now().as_nanos();
    for other in others {
        cluster.servers[other].kill().await;
    }
    let mut dead = members.remove(1);
    dead.signal(Signal::KILL);
    dead.ended().await;
    members.push(cluster.member(GROUP, "late").start());
    let joined = numbered(&all(&members)).await.after(killed);
    let dropped = members[..2].iter().map(|member| {
        let history = member.history();
        let degraded = |rows: &&Rows| rows.is_leased() && epoch(rows).degraded > 0;
        history.iter().find(degraded).unwrap().at
    });
    let dropped = Duration::from_nanos(dropped.max().unwrap() - killed);
    println!(
        "numbered a drop {dropped:?} and a join {joined:?} after a quorum was lost (survivor led: {survivor_led})"
    );
    assert!(
        dropped < DEGRADED_AFTER + Duration::from_secs(1),
        "{dropped:?}"
    );
    // The process that joins has to start first.
    assert!(
        joined < DEGRADED_AFTER + Duration::from_secs(3),
        "{joined:?}"
    );
    settled(&all(&members)).await;
    assert!(!answers_attach_to_leader(&cluster, survivor).await);

    // It is marked everywhere.
    let degraded = epochs(&members);
    for epoch in &degraded {
        assert!(
            epoch.degraded > 0 && usize::from(epoch.replica) == survivor + 1,
            "{epoch}"
        );
        assert!(epoch > before.iter().max().unwrap(), "{epoch}");
    }
    let server = &cluster.servers[survivor];
    assert!(server.admin().is_ready().await);
    let shown = server.admin().group(GROUP).await.unwrap();
    assert_eq!(
        (&shown["degraded"], &shown["stale"]),
        (&true.into(), &false.into()),
        "{shown}"
    );
    assert_eq!(shown["members"].as_array().unwrap().len(), 3, "{shown}");
    assert_eq!(cluster.view(survivor).await["degraded"], true);
    let (_, metrics) = server.admin().get("/metrics").await;
    assert!(metrics.contains("\nskyschedule_degraded 1\n"), "{metrics}");
    assert!(server.logged("renumbered without a quorum"));
    // Exclusive groups wait.
    let shown = server.admin().group("exclusive").await.unwrap();
    assert_eq!(
        (&shown["degraded"], &shown["stale"]),
        (&false.into(), &true.into()),
        "{shown}"
    );
    assert_eq!(epochs(&exclusive), exclusive_epochs);

    if !survivor_led {
        restarted_alone(&mut cluster, survivor, &mut members).await;
    }
    let degraded = epochs(&members);
    for other in others {
        cluster.servers[other].launch();
    }
    cluster.ready().await;
    let leader = cluster.leader().await;
    let newest = degraded.iter().max().unwrap();
    let deadline = env::now() + Duration::from_secs(20);
    let is_renumbered = |member: &Member| {
        let rows = member.rows();
        rows.epoch.is_some() && epoch(&rows).degraded == 0 && epoch(&rows) > *newest
    };
    while !members.iter().all(is_renumbered) {
        let shown = || members.iter().map(ToString::to_string).collect::<String>();
        assert!(env::now() < deadline, "{}", shown());
        env::sleep(Duration::from_millis(20)).await;
    }
    settled(&all(&members)).await;
    cluster.servers[leader].hears(GROUP, members.len()).await;
    settled(&all(&exclusive)).await;
    assert_eq!(kept(&exclusive), exclusive_before);
    assert_eq!(cluster.view(survivor).await["degraded"], false);
}

/// What was given out is never given out again.
async fn restarted_alone(cluster: &mut Cluster, survivor: usize, members: &mut Vec<Member>) {
    let newest = epochs(members).into_iter().max();
    let memberships: Vec<_> = members.iter().map(Member::membership).collect();
    cluster.servers[survivor].kill().await;
    cluster.servers[survivor].launch();
    members.push(cluster.member(GROUP, "later").start());
    settled(&all(members)).await;
    assert!(epochs(members).into_iter().min() > newest);
    let minted = members.last().and_then(Member::membership);
    assert!(
        minted.as_ref().is_some_and(|it| it.contains('@')),
        "{minted:?}"
    );
    assert!(!memberships.contains(&minted), "{memberships:?}");
}

fn epochs(members: &[Member]) -> Vec<Epoch> {
    members.iter().map(|member| epoch(&member.rows())).collect()
}

fn epoch(rows: &Rows) -> Epoch {
    rows.epoch.as_ref().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_follower_that_is_left_alone_numbers_available_groups() {
    one_replica_is_enough(false).await;
}

#[tokio::test]
async fn a_leader_that_is_left_alone_numbers_available_groups() {
    one_replica_is_enough(true).await;
}

#[tokio::test]
async fn replicas_without_the_secret_are_turned_away() {
    let mut cluster = Cluster::prepared();
    let folder = tempfile::TempDir::new().unwrap();
    for (at, server) in cluster.servers.iter_mut().enumerate() {
        let secret = if at == 2 {
            "another secret of 16"
        } else {
            "the secret of the cluster"
        };
        let file = folder.path().join(format!("secret-{at}"));
        std::fs::write(&file, secret).unwrap();
        server.flag("--cluster-secret-file", file.to_str().unwrap());
        server.launch();
    }
    let deadline = env::now() + Duration::from_secs(20);
    while !cluster.servers[0].logged("another one; give all replicas the same cluster_secret")
        && !cluster.servers[0].logged("does not know this cluster's secret")
    {
        assert!(env::now() < deadline, "{}", cluster.servers[0].log());
        env::sleep(Duration::from_millis(20)).await;
    }
    // All three must be there to form a cluster.
    for server in &cluster.servers {
        assert!(!server.admin().is_ready().await);
    }
    cluster.servers[2].kill().await;
    std::fs::write(folder.path().join("secret-2"), "the secret of the cluster").unwrap();
    cluster.servers[2].launch();
    cluster.ready().await;
}

#[tokio::test]
async fn replicas_with_other_peers_say_so_and_form_no_cluster() {
    let mut cluster = Cluster::prepared();
    let peers = cluster.peers();
    let more = format!("{peers},4=127.0.0.1:1");
    for (at, server) in cluster.servers.iter_mut().enumerate() {
        server.flag("--peers", if at == 0 { &peers } else { &more });
        server.launch();
    }
    let deadline = env::now() + Duration::from_secs(20);
    for server in &cluster.servers {
        while !server.logged("other replicas have other peers; give all replicas the same peers") {
            assert!(env::now() < deadline, "{}", server.log());
            env::sleep(Duration::from_millis(20)).await;
        }
    }
    while !cluster.servers[1].logged("waits for replicas [4]") {
        assert!(env::now() < deadline, "{}", cluster.servers[1].log());
        env::sleep(Duration::from_millis(20)).await;
    }
    for server in &mut cluster.servers {
        assert!(!server.admin().is_ready().await);
        server.stop().await;
        server.flag("--peers", &peers);
        server.launch();
    }
    cluster.ready().await;
}

#[tokio::test]
async fn a_disk_of_another_cluster_or_another_replica_is_refused() {
    let mut one = Cluster::start().await;
    let mut other = Cluster::start().await;
    let (a, b) = (one.leader().await, other.leader().await);
    let follower = (0..3).find(|at| *at != a && *at != b).unwrap();
    one.servers[follower].kill().await;
    other.servers[follower].kill().await;
    one.servers[follower].swap_disks(&mut other.servers[follower]);
    one.servers[follower].launch();
    assert_eq!(one.servers[follower].ended().await.code(), Some(1));
    assert!(one.servers[follower].logged("from another cluster"));
    assert!(one.servers[a].admin().is_ready().await);

    let next = (follower + 1) % 3;
    one.servers[next].stop().await;
    let (low, high) = (follower.min(next), follower.max(next));
    let [first, .., last] = &mut one.servers[low..=high] else {
        panic!("two servers");
    };
    first.swap_disks(last);
    first.launch();
    assert_eq!(first.ended().await.code(), Some(1));
    assert!(first.logged("is that of replica"), "{}", first.log());
}

#[tokio::test]
async fn a_replica_that_lost_its_disk_is_brought_up_before_it_counts() {
    let (mut cluster, members) = group().await;
    let before = kept(&members);
    let leader = cluster.leader().await;
    let [blank, other] = [(leader + 1) % 3, (leader + 2) % 3];
    cluster.servers[blank].kill().await;
    cluster.servers[blank].lose_disk();
    // While another one is away, too, nobody can tell it what it has forgotten.
    cluster.servers[other].kill().await;
    cluster.servers[blank].launch();
    env::sleep(Duration::from_secs(2)).await;
    assert!(!cluster.servers[leader].admin().is_ready().await);
    assert!(!cluster.servers[blank].admin().is_ready().await);
    cluster.servers[other].restart().await;
    cluster.ready().await;
    let deadline = env::now() + Duration::from_secs(20);
    let brought_up = |log: &str| {
        let after = log.rsplit_once("standing=Returning");
        after.is_some_and(|(_, after)| after.contains("standing=Full"))
    };
    while !brought_up(&cluster.servers[blank].log()) {
        assert!(env::now() < deadline, "{}", cluster.servers[blank].log());
        env::sleep(Duration::from_millis(20)).await;
    }
    let leader = cluster.leader().await;
    cluster.servers[leader].hears(GROUP, members.len()).await;
    settled(&all(&members)).await;
    assert_eq!(kept(&members), before);
    // It knows all: with it, and without the leader, the numbering goes on where it was.
    let leader = cluster.leader().await;
    if leader != blank {
        cluster.servers[leader].kill().await;
        let next = cluster.leader_seen_by(blank, Some(leader)).await;
        cluster.servers[next].hears(GROUP, members.len()).await;
        settled(&all(&members)).await;
        assert_eq!(kept(&members), before);
    }
}

/// Whatever keeps it from becoming a member, whether that is known at once or only when it is decided: by the numbering of
/// the quorum, rows that a replica gave without one are others'.
#[tokio::test]
async fn a_client_numbered_without_a_quorum_gives_its_rows_up_when_it_has_to_wait() {
    let server = Server::start_open().await;
    let (address, minted) = (
        server.address(),
        Membership {
            number: 7,
            replica: 2,
        },
    );
    let heavy = |client: &str| Login {
        weight: 1_000,
        ..login(GROUP, client)
    };
    let attach = |membership| ClientMessage::Attach {
        membership,
        epoch: Epoch::ZERO,
    };
    // As many as go into a modulo group.
    let mut members = Vec::new();
    for at in 0..65 {
        let mut member = Peer::authenticated(address).await;
        let login = heavy(&format!("{at}"));
        member.send(ClientMessage::Login(login.into())).await;
        member.attach().await;
        members.push(member);
    }
    for (client, code) in [("1", Code::ID_IN_USE), ("65", Code::LIMIT)] {
        let mut peer = Peer::authenticated(address).await;
        let login = Login {
            membership: Some(minted),
            ..heavy(client)
        };
        peer.send(ClientMessage::Login(login.into())).await;
        for named in [Some(minted), None] {
            peer.send(attach(named)).await;
            let answer = |message: ServerMessage| match message {
                ServerMessage::Gone { membership } => Some(Ok(membership)),
                ServerMessage::Wait(refusal) => Some(Err(refusal.code)),
                _ => None,
            };
            if let Some(membership) = named {
                assert_eq!(peer.until(answer).await, Ok(membership), "{client}");
            }
            assert_eq!(peer.until(answer).await, Err(code), "{client}");
        }
    }
}
