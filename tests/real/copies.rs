//! Copies of data folders of different moments run together, which the README forbids: some server notices it and says so,
//! and none goes on as if nothing had been.
//!
//! Two servers are killed and begin again with older copies, while the third, which knows what they have forgotten, stands
//! still. They decide something else in the same places of the log. Then the third one goes on.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a helper of a test may fail and print like the test itself"
)]

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use skyschedule_common::env;
use skyschedule_tests::cluster::Cluster;
use skyschedule_tests::mesh::Mesh;
use skyschedule_tests::proxy::{Direction, Flow};

/// How long servers may take to notice.
const PATIENCE: Duration = Duration::from_secs(20);

/// Without a quorum for so many seconds, a server numbers by itself.
const DEGRADED_AFTER: f64 = 5.0;

/// The metric of this time.
const WITHOUT_QUORUM: &str = "skyschedule_without_quorum_seconds";

/// What a server says that notices, and ends.
const SPLIT: &str = "This one ends, and overwrites nothing";

/// What the others say.
const TOLD: &str = "another replica has ended, since it and";

/// What all of them tell the operator to do.
const REMEDY: &str = "go on as the README says under Restore";

/// How the leaderships of those with copies compare with that of the one that stood still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Terms {
    /// The one that stood still has led in a later term than they know.
    Earlier,
    /// They have a leader in the very term in which the other one leads.
    Same,
    /// They have had one in its term, and then another one later.
    Later,
}

async fn term(cluster: &Cluster, at: usize) -> u64 {
    cluster.view(at).await["term"].as_u64().unwrap()
}

/// Decides something that shows who decided it.
async fn decide(cluster: &Cluster, leader: usize, who: &str, times: usize) {
    let server = &cluster.servers[leader];
    let body = json!({ "settle_ms": 30 });
    for time in 0..times {
        let group = format!("{who}-{time}");
        let deadline = env::now() + PATIENCE;
        while !server.admin().try_configure(&group, &body).await {
            assert!(env::now() < deadline, "{}", server.log());
            env::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// One of these leads, in this term at least: the leadership goes from one to the other until it does.
async fn lead_in(cluster: &Cluster, servers: [usize; 2], wanted: u64) -> usize {
    let deadline = env::now() + PATIENCE;
    let mut left = 0;
    loop {
        let leader = cluster.leader_seen_by(servers[0], None).await;
        let term = term(cluster, servers[0]).await;
        let agreed = cluster.leader_seen_by(servers[1], None).await == leader;
        let leads = agreed && servers.contains(&leader) && term > left;
        if leads && cluster.servers[leader].admin().is_ready().await {
            if term >= wanted {
                return leader;
            }
            let other = servers[usize::from(servers[0] == leader)];
            let transfer = format!("transfer {}", other + 1);
            let (done, _) = cluster.command(leader, &transfer).await;
            left = if done { term } else { 0 };
        }
        assert!(env::now() < deadline, "{}", cluster.servers[leader].log());
        env::sleep(Duration::from_millis(20)).await;
    }
}

async fn run_together(terms: Terms) {
    let mut cluster = Cluster::start().await;
    cluster.lead(0).await;
    decide(&cluster, 0, "before", 2).await;
    let mut copies = Vec::new();
    for at in [1, 2] {
        copies.push((at, cluster.back_up(at).await));
        cluster.lead(at).await;
        decide(&cluster, at, "meanwhile", 1).await;
    }
    // Some terms later.
    for at in [1, 0, 2, 0] {
        cluster.lead(at).await;
    }
    decide(&cluster, 0, "forgotten", 5).await;
    let known = term(&cluster, 0).await;
    cluster.servers[0].signal(Signal::STOP);
    for (at, copy) in copies {
        cluster.servers[at].kill().await;
        cluster.servers[at].put_disk(copy);
    }
    for at in [1, 2] {
        cluster.servers[at].launch();
    }
    for at in [1, 2] {
        cluster.servers[at].ready().await;
    }
    let mut leader = lead_in(&cluster, [1, 2], 0).await;
    let begun = term(&cluster, leader).await;
    assert!(begun < known, "{begun} and {known}");
    if terms != Terms::Earlier {
        leader = lead_in(&cluster, [1, 2], known).await;
    }
    decide(&cluster, leader, "otherwise", 9).await;
    if terms == Terms::Later {
        leader = lead_in(&cluster, [1, 2], known + 1).await;
        decide(&cluster, leader, "later", 1).await;
    }
    // On a busy machine they may have elected once more than they were asked to.
    let led = term(&cluster, leader).await;
    println!("{terms:?}: {led} and {known}");

    cluster.servers[0].signal(Signal::CONT);
    let deadline = env::now() + PATIENCE;
    let logs = || {
        cluster
            .servers
            .iter()
            .map(|server| server.log())
            .collect::<Vec<_>>()
            .join("\n----\n")
    };
    while !cluster.servers.iter().any(|server| server.logged(SPLIT)) {
        assert!(
            env::now() < deadline,
            "{terms:?}: nobody notices:\n{}",
            logs()
        );
        env::sleep(Duration::from_millis(20)).await;
    }
    let noticed: Vec<usize> = (0..3)
        .filter(|at| cluster.servers[*at].logged(SPLIT))
        .collect();
    for at in noticed {
        let server = &mut cluster.servers[at];
        assert_eq!(server.ended().await.code(), Some(1), "{}", server.log());
    }
    for server in &cluster.servers {
        // Whoever led in the same term has noticed, too.
        let said = if server.logged(SPLIT) { SPLIT } else { TOLD };
        server.until_logged(said).await;
        let lines = server.log();
        let mut lines = lines.lines().filter(|line| line.contains(said));
        assert!(
            lines.any(|line| line.contains("ERROR") && line.contains(REMEDY)),
            "{}",
            server.log()
        );
    }
    for server in cluster.servers.iter().filter(|server| !server.runs()) {
        let log = server.log();
        let last = log.lines().rfind(|line| line.contains("ERROR"));
        let last = last.unwrap_or_default();
        for part in [
            "the server has ended",
            "have decided different things",
            REMEDY,
        ] {
            assert!(last.contains(part), "{part}: {log}");
        }
    }
}

#[tokio::test]
async fn copies_of_different_moments_that_run_together_are_noticed() {
    tokio::join!(
        run_together(Terms::Earlier),
        run_together(Terms::Same),
        run_together(Terms::Later),
    );
}

/// A server that no other one asks anything, but that asks them, sees that they have a leader.
#[tokio::test]
async fn a_server_that_sees_most_others_follow_one_of_them_numbers_nobody_by_itself() {
    let mesh = Mesh::start().await;
    let cluster = &mesh.cluster;
    let leader = cluster.leader().await;
    let apart = (leader + 1) % 3;
    for other in [leader, (leader + 2) % 3] {
        let way = mesh.network.way(other, apart);
        way.set(Direction::ToServer, Flow::Stall);
    }
    let admin = cluster.servers[apart].admin();
    let without = async |long: f64| {
        let deadline = env::now() + PATIENCE;
        while admin.metric(WITHOUT_QUORUM).await < long {
            assert!(env::now() < deadline, "{}", cluster.servers[apart].log());
            env::sleep(Duration::from_millis(50)).await;
        }
    };
    without(DEGRADED_AFTER + 1.5).await;
    let view = cluster.view(apart).await;
    assert_eq!(view["degraded"], false, "{view}");
    // It is for this that it did not.
    mesh.network.reaches(apart, false);
    cluster.servers[apart]
        .until_logged("this replica numbers by itself")
        .await;
}
