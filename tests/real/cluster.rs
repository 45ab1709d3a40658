//! Servers are added and removed while members work, and no share moves.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use rustix::process::Signal;
use skyschedule_tests::cluster::Cluster;
use skyschedule_tests::member::{Event, Member, Options};
use skyschedule_tests::numbering::{all, kept, numbered, settled};
use skyschedule_tests::server::Server;

const GROUP: &str = "1000";

/// Leases that are longer than it takes to restart one server of several, or a server alone, on a busy machine.
const OF_SEVERAL: u64 = 4_000;
const ALONE: u64 = 12_000;

async fn leases(server: &Server, millis: u64) {
    let settings = serde_json::json!({ "lease_ms": millis, "drain_timeout_ms": 1_000 });
    server.admin().configure(GROUP, &settings).await;
}

/// Waits until a member has done more rows than it has by now.
async fn works(member: &Member) {
    let before = member.events().len();
    let ends = |event: &Event| matches!(event, Event::Ended { revoked: false, .. });
    member
        .wait_for("it works", |events| {
            events[before..].iter().find(|event| ends(event)).cloned()
        })
        .await;
}

#[tokio::test]
async fn replicas_come_and_go_until_all_are_others_and_no_share_moves() {
    let mut cluster = Cluster::start().await;
    let leader = cluster.leader().await;
    leases(&cluster.servers[leader], OF_SEVERAL).await;
    let busy = |options: Options| options.flag("--keys", "300").flag("--work-ms", "20");
    // One of them was told of only one server, which is about to be removed.
    let only = Options::new(cluster.servers[leader].address(), GROUP, "knows-one");
    let mut members = vec![busy(only).start()];
    for at in 0..2 {
        members.push(busy(cluster.member(GROUP, &format!("client-{at}"))).start());
    }
    settled(&all(&members)).await;
    let before = kept(&members);
    let [first, second] = [(leader + 1) % 3, (leader + 2) % 3];

    // 3, 4, 5: by way of any server.
    for (at, by) in [(3, first), (4, 3)] {
        assert_eq!(cluster.newcomer().await, at);
        let address = cluster.servers[at].address();
        let shown = cluster
            .change(by, &format!("add {} {address}", at + 1))
            .await;
        assert!(shown.contains(&address.to_string()), "{shown}");
        // Again: nothing is left to do.
        cluster
            .change(by, &format!("add {} {address}", at + 1))
            .await;
        for seen_by in 0..=at {
            cluster.voters(seen_by, at + 1).await;
        }
    }
    cluster.servers[4].hears(GROUP, 3).await;
    assert_eq!(kept(&members), before);

    // The leader of all the time hands over, goes, and is not let in again.
    cluster
        .change(second, &format!("remove {}", leader + 1))
        .await;
    let removed = &mut cluster.servers[leader];
    assert_eq!(removed.ended().await.code(), Some(1), "{}", removed.log());
    assert!(removed.logged("this replica was removed from the cluster"));
    removed.launch();
    assert_eq!(removed.ended().await.code(), Some(1));
    assert!(
        removed.logged("takes part in it no more"),
        "{}",
        removed.log()
    );
    cluster.servers[3].hears(GROUP, 3).await;

    // One of the first three is restarted, with the list of peers that it had.
    cluster.servers[first].kill().await;
    cluster.servers[first].restart().await;
    assert!(cluster.servers[first].logged("the list of peers is out of date"));
    cluster.voters(first, 4).await;
    cluster.voters(4, 4).await;

    // Both others of the first three die; the first of them is given up before the second.
    cluster.servers[first].kill().await;
    let leader = cluster.leader_seen_by(4, Some(first)).await;
    cluster.is_away(leader, first).await;
    let why = cluster.refusal(4, &format!("transfer {}", first + 1)).await;
    assert!(why.contains("did not take the leadership over"), "{why}");
    cluster.change(4, &format!("remove {}", first + 1)).await;
    cluster.voters(4, 3).await;
    cluster.servers[second].kill().await;
    cluster.leader_seen_by(4, Some(second)).await;
    cluster.servers[4].hears(GROUP, 3).await;
    for member in &members {
        works(member).await;
    }
    assert_eq!(kept(&members), before);

    // Numbering goes on.
    let new = Options::new(cluster.servers[4].address(), GROUP, "one-more").start();
    members.push(new);
    numbered(&all(&members)).await;
    let kept = kept(&members).into_iter().map(|kept| kept.membership);
    let memberships = before.iter().map(|kept| kept.membership.clone());
    assert!(kept.take(3).eq(memberships), "nobody was taken for dead");
}

#[tokio::test]
async fn the_named_replica_leads_and_impossible_changes_are_refused() {
    let mut cluster = Cluster::start().await;
    let leader = cluster.leader().await;
    let [first, second] = [(leader + 1) % 3, (leader + 2) % 3];
    cluster.voters(leader, 3).await;
    cluster
        .change(second, &format!("transfer {}", first + 1))
        .await;
    assert_eq!(cluster.leader().await, first);
    // It leads already.
    cluster
        .change(leader, &format!("transfer {}", first + 1))
        .await;
    cluster.change(leader, "transfer").await;
    let leader = cluster.leader_seen_by(first, Some(first)).await;
    cluster.voters(leader, 3).await;

    let nobody = cluster.servers[0].address();
    let elsewhere = nobody.to_string().replace(":9991", ":9992");
    let refused = [
        (
            "remove 9".to_owned(),
            "there is no replica 9 in this cluster",
        ),
        (
            "transfer 9".to_owned(),
            "there is no replica 9 in this cluster",
        ),
        (format!("add 4 {nobody}"), "is the address of replica 1"),
        (
            format!("add 2 {elsewhere}"),
            "replica 2 is in the cluster already",
        ),
        ("add 4 sky-4".to_owned(), "is not host:port"),
        (
            format!("add 4 {elsewhere}"),
            "start it there with --replica-id 4",
        ),
        ("add 0 sky-4:9991".to_owned(), "0 is not in 1..="),
    ];
    for (command, text) in refused {
        let why = cluster.refusal(first, &command).await;
        assert!(why.contains(text), "cluster {command}: {why}");
    }

    // Whoever is asked shows what each lacks, which only the leader knows.
    let [away, other] = [(leader + 1) % 3, (leader + 2) % 3];
    let shown = cluster.change(other, "--json").await;
    let view: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(view["replica_id"], other + 1, "{view}");
    let lags = view["replicas"].as_array().unwrap().iter();
    let known = lags.filter(|it| it["lag"].is_u64()).count();
    assert_eq!(known, 2, "{view}");

    // One that has stopped a moment ago, of which nobody knows yet, is not handed the leadership, and no third one gets it.
    cluster.servers[away].signal(Signal::STOP);
    let (done, why) = cluster
        .command(leader, &format!("transfer {}", away + 1))
        .await;
    let leads_on = format!("replica {} leads on", leader + 1);
    assert!(!done && why.contains(&leads_on), "{why}");
    assert_eq!(cluster.leader_seen_by(other, None).await, leader);

    // With one away, the other one must stay.
    cluster.servers[away].kill().await;
    cluster.is_away(leader, away).await;
    for id in [other + 1, leader + 1] {
        let why = cluster.refusal(other, &format!("remove {id}")).await;
        assert!(
            why.contains("too few of the voters could be reached"),
            "{why}"
        );
    }
    let text = cluster
        .change(other, &format!("remove {} --json", away + 1))
        .await;
    let view: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(view["replicas"].as_array().unwrap().len(), 2);
    cluster
        .change(leader, &format!("remove {}", other + 1))
        .await;
    cluster.voters(leader, 1).await;
    let why = cluster
        .refusal(leader, &format!("remove {}", leader + 1))
        .await;
    assert!(why.contains("is the only voter"), "{why}");
    assert!(cluster.servers[leader].admin().is_ready().await);
}

#[tokio::test]
async fn a_server_alone_becomes_one_of_three_and_keeps_its_members() {
    let mut server = Server::start().await;
    leases(&server, ALONE).await;
    let members: Vec<Member> = (0..2)
        .map(|at| Member::start(server.address(), GROUP, &format!("client-{at}")))
        .collect();
    settled(&all(&members)).await;
    let before = kept(&members);
    let (done, why) = server
        .command(&["cluster", "add", "2", "127.0.0.1:1"])
        .await;
    assert!(!done && why.contains("this replica is alone"), "{why}");

    server.stop().await;
    let mut cluster = Cluster {
        servers: vec![server],
    };
    let others = [Server::prepared(), Server::prepared()];
    cluster.servers.extend(others);
    cluster.list_peers();
    cluster.servers[0].restart().await;
    let settings = serde_json::json!({ "settle_ms": 30 });
    for at in [1, 2] {
        cluster.servers[at].launch();
        cluster.waits_to_be_added(at).await;
        let address = cluster.servers[at].address();
        let add = format!("add {} {address}", at + 1);
        let why = cluster.refusal(at, &add).await;
        assert!(why.contains("is not in the cluster yet"), "{why}");
        assert!(!why.contains("no majority"), "{why}");
        let (status, why) = cluster.servers[at].admin().put(GROUP, &settings).await;
        let refused = status == 503 && why.contains("is not in the cluster yet");
        assert!(refused, "{status} {why}");
        cluster.change(0, &add).await;
    }
    cluster.voters(2, 3).await;
    cluster.servers[2].hears(GROUP, 2).await;
    assert_eq!(kept(&members), before);
    // The first one may go by now.
    cluster.servers[0].kill().await;
    cluster.leader_seen_by(1, Some(0)).await;
    cluster.servers[1].hears(GROUP, 2).await;
    settled(&all(&members)).await;
    assert_eq!(kept(&members), before);
}
