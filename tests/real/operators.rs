//! What a new operator runs into: wrong addresses and secrets, groups that nobody works for, pipes that nobody reads,
//! disks that are older than they seem. Each is said once, in words that help, and can be put right.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::{join, join_all};
use serde_json::json;
use skyschedule_client::Client;
use skyschedule_common::env::{self, net::Stream};
use skyschedule_tests::cluster::Cluster;
use skyschedule_tests::member::{Member, Options, PATIENCE};
use skyschedule_tests::server::{PASSWORD, Server, USER};
use tempfile::TempDir;
use tokio::process::Command;

/// A probe takes a millisecond; this is what one may take on a busy machine. Those that were kept out took more, or failed.
const PROBED: Duration = Duration::from_secs(2);

/// The number of an epoch.
fn number(epoch: &str) -> u64 {
    epoch.parse().unwrap()
}

/// As many lines a server may write about one stranger since then.
fn most_lines(since: env::Instant) -> usize {
    1 + usize::try_from(since.elapsed().as_secs() / 10).unwrap()
}

#[tokio::test]
async fn a_crowd_that_asks_nothing_keeps_no_probe_out() {
    let server = Server::start().await;
    let address = (server.address().ip(), 9980).into();
    let mut crowd = Vec::new();
    for at in 1..=1_500 {
        crowd.push(Stream::connect(address).await.expect("it is accepted"));
        if at % 100 == 0 {
            let asked = env::now();
            assert!(server.admin().is_ready().await, "with {at} others");
            assert!(asked.elapsed() < PROBED, "{:?} with {at}", asked.elapsed());
        }
    }
}

#[tokio::test]
async fn an_address_where_no_server_is_and_a_wrong_password_are_told_once() {
    let mut server = Server::prepared();
    let nowhere = "no-such-host.invalid:9991";
    let lost = Options::new(server.address(), "orders", "lost")
        .flag("--servers", nowhere)
        .start();
    lost.until_logged("cannot be reached", 2).await;
    server.restart().await;
    lost.has_rows().await;
    lost.until_logged("this server is reached", 1).await;
    let told = |what: &str| {
        lost.count_logged(&format!(
            "cannot be reached, and is tried again and again: {what}"
        ))
    };
    assert_eq!(told("cannot connect to"), 1, "{lost}");
    assert_eq!(told("its name cannot be resolved"), 1, "{lost}");

    let began = env::now();
    let strangers: Vec<Member> = (0..4)
        .map(|at| {
            Options::new(server.address(), "orders", &format!("stranger-{at}"))
                .password("guess")
                .start()
        })
        .collect();
    let failures = join_all(strangers.iter().map(Member::failure)).await;
    for (stranger, failure) in strangers.iter().zip(failures) {
        assert!(failure.contains("credentials"), "{failure}");
        assert_eq!(
            stranger.count_logged("it refuses this client (credentials)"),
            1,
            "{stranger}"
        );
    }
    let most = most_lines(began);
    let lines = server.count_logged("refused a login");
    assert!((1..=most).contains(&lines), "{lines}: {}", server.log());
}

#[tokio::test]
async fn a_group_that_nobody_works_for_is_told_of_and_one_that_nobody_needs_is_deleted() {
    let server = Server::start().await;
    let admin = server.admin();
    admin.configure("orders", &json!({})).await;
    let (_, metrics) = admin.get("/metrics").await;
    for counter in [
        r#"skyschedule_expired_total{group="orders",why="lease"} 0"#,
        r#"skyschedule_overtaken_total{group="orders"} 0"#,
        r#"skyschedule_fenced_total{group="orders"} 0"#,
        r#"skyschedule_delayed_joins_total{group="orders"} 0"#,
        r#"skyschedule_unowned_ratio{group="orders"} 0"#,
    ] {
        assert!(metrics.contains(counter), "{counter} in\n{metrics}");
    }

    let mut members = [
        Member::start(server.address(), "orders", "a"),
        Member::start(server.address(), "orders", "b"),
    ];
    join(members[0].has_rows(), members[1].has_rows()).await;
    let run = async |arguments: &[&str]| {
        let (done, text) = server.command(arguments).await;
        assert!(done, "{arguments:?}: {text}");
        text
    };
    run(&["drain", "orders", "a"]).await;
    run(&["drain", "orders", "b"]).await;
    server
        .until_logged("rows have no owner: nobody works")
        .await;
    assert!((admin.metric("skyschedule_unowned_ratio").await - 1.0).abs() < 1e-9);
    for command in [["status"].as_slice(), &["groups"], &["members", "orders"]] {
        let shown = run(command).await;
        assert!(
            shown.contains("group orders: nobody works: of 2 members, 2 drain"),
            "{shown}"
        );
    }

    // Twice is as good as once.
    for _ in 0..2 {
        let shown = run(&["undrain", "orders", "a"]).await;
        assert!(shown.contains("drains no more"), "{shown}");
    }
    let rows = members[0].has_rows().await;
    server.until_logged("all rows have an owner again").await;
    assert!(admin.metric("skyschedule_unowned_ratio").await < 1e-9);
    assert_eq!(server.count_logged("rows have no owner"), 1);
    let (done, text) = server.command(&["undrain", "orders", "nobody"]).await;
    assert!(!done && text.contains("no member nobody"), "{text}");

    let (done, text) = server.command(&["groups", "delete", "orders"]).await;
    assert!(
        !done && text.contains("group orders has members (2)"),
        "{text}"
    );
    for member in &mut members {
        member.tell("close").await;
        member.closed().await;
    }
    let text = run(&["groups", "delete", "orders"]).await;
    assert!(text.contains("group orders is deleted"), "{text}");
    assert!(admin.group("orders").await.is_none());
    let (done, text) = server.command(&["groups", "delete", "orders"]).await;
    assert!(!done && text.contains("there is no group orders"), "{text}");

    // Made again, it goes on above what its clients knew.
    let again = Member::start(server.address(), "orders", "a");
    let epoch = again.has_rows().await.epoch.unwrap();
    assert!(number(&epoch) > number(&rows.epoch.unwrap()), "{again}");

    for name in [".", ".."] {
        let (done, text) = server.command(&["members", name]).await;
        assert!(!done && text.contains("neither . nor .."), "{text}");
        let path = format!("/api/v1/groups/{}", name.replace('.', "%2E"));
        let (status, text) = admin.get(&path).await;
        assert!(
            status == 400 && text.contains("neither . nor .."),
            "{status} {text}"
        );
        let refused = Member::start(server.address(), name, "a").failure().await;
        assert!(refused.contains("neither . nor .."), "{refused}");
    }
}

#[tokio::test]
async fn a_weight_that_does_not_fit_is_declined_in_words() {
    let server = Server::start().await;
    let heavy = (0..65).map(|at| {
        let client = Client::builder()
            .servers([server.address().to_string()])
            .group("orders")
            .client_id(format!("heavy-{at}"))
            .credentials(USER, PASSWORD)
            .weight(1_000);
        client.connect()
    });
    let heavy: Vec<Client> = join_all(heavy)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let mut light = Member::start(server.address(), "orders", "light");
    light.has_rows().await;
    light.tell("weight 1000").await;
    light
        .until_logged("is not done, and all stays as it was", 1)
        .await;
    light
        .until_logged("lower the weights, or use slots", 1)
        .await;
    // It goes on as it was.
    light.has_rows().await;
    let shown = server.admin().member("orders", "light").await.unwrap();
    assert_eq!(shown["weight"], 1);
    drop(heavy);
}

/// The example consumer of the group `orders`, on a table of its own in this folder.
fn consumer(folder: &TempDir, servers: &str) -> Command {
    let binaries = std::env::var_os("SKY_BIN_DIR").expect("run the tests by tests/run");
    let mut command = Command::new(std::path::Path::new(&binaries).join("sql-consumer"));
    let table = folder.path().join("tasks.db");
    command
        .args(["--servers", servers])
        .args(["--group", "orders", "--user", USER, "--create"])
        .args(["--database-url", &format!("sqlite://{}", table.display())])
        .env("SKY_PASSWORD", PASSWORD)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

#[tokio::test]
async fn a_consumer_of_a_group_that_promises_something_else_ends_at_once_and_says_so() {
    let cluster = Cluster::start().await;
    let admin = cluster.servers[cluster.leader().await].admin();
    let settings = json!({ "lease_ms": 2_000, "drain_timeout_ms": 1_000 });
    admin.configure("orders", &settings).await;
    // Then it is decided what the group promises.
    cluster.member("orders", "first").start().has_rows().await;
    let addresses = cluster.servers.iter().map(|it| it.address().to_string());
    let servers = addresses.collect::<Vec<_>>().join(",");
    let folder = TempDir::new().unwrap();
    let ended = consumer(&folder, &servers)
        .args(["--consistency", "exclusive"])
        .output();
    // A client that may yet be served tries for 30 s.
    let ended = env::timeout(Duration::from_secs(20), ended).await;
    let output = ended.expect("it ends").unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(
        last.contains("is available, and the client relies on exclusive"),
        "{text}"
    );
}

#[tokio::test]
async fn a_pipe_that_nobody_reads_stops_no_consumer() {
    let server = Server::start().await;
    let folder = TempDir::new().unwrap();
    let mut consumer = consumer(&folder, &server.address().to_string())
        .args(["--seed", "1000", "--until-empty"])
        .env("RUST_LOG", "trace")
        .spawn()
        .unwrap();
    // Held open, and not read.
    let stderr = consumer.stderr.take();
    let status = env::timeout(PATIENCE * 2, consumer.wait()).await;
    assert!(status.expect("it is done in time").unwrap().success());
    drop(stderr);
}

fn secret(folder: &TempDir, name: &str) -> String {
    let file = folder.path().join(name);
    std::fs::write(&file, format!("a secret of the tests: {name}")).unwrap();
    file.display().to_string()
}

#[tokio::test]
async fn a_replica_with_another_secret_and_one_with_an_older_disk_are_told_of() {
    let folder = TempDir::new().unwrap();
    let mut cluster = Cluster::prepared();
    let one = secret(&folder, "one");
    for server in &mut cluster.servers {
        server.flag("--cluster-secret-file", &one);
        server.launch();
    }
    cluster.ready().await;
    let mut stranger = Server::prepared();
    stranger.flag("--replica-id", "4");
    let peers = format!("{},4={}", cluster.peers(), stranger.address());
    stranger.flag("--peers", &peers);
    stranger.flag("--cluster-secret-file", &secret(&folder, "another"));
    stranger.launch();
    let began = env::now();

    let mut restarted = BTreeSet::new();
    // What is told must be known to the leader of before: on a busy machine another one may come.
    loop {
        let leader = cluster.leader().await;
        let follower = (leader + 1) % 3;
        restarted.insert(follower);
        let change = async |cluster: &Cluster, settle: u32| {
            let admin = cluster.servers[leader].admin();
            admin
                .configure("orders", &json!({ "settle_ms": settle }))
                .await;
        };
        change(&cluster, 30).await;
        cluster.servers[follower].stop().await;
        let older = cluster.servers[follower].copy_disk();
        cluster.servers[follower].restart().await;
        for settle in 40..50 {
            change(&cluster, settle).await;
        }
        caught_up(&cluster, leader, follower).await;
        cluster.servers[follower].stop().await;
        cluster.servers[follower].put_disk(older);
        cluster.servers[follower].restart().await;
        caught_up(&cluster, leader, follower).await;
        let told = "another replica has forgotten what it had confirmed";
        if cluster.leader().await == leader {
            let leads = &cluster.servers[leader];
            leads.until_logged(told).await;
            let lines = leads.log();
            let line = lines.lines().find(|line| line.contains(told)).unwrap();
            assert!(
                line.contains(&format!("replica={}", follower + 1)),
                "{line}"
            );
            // What it says puts it right, and is no reason to say it again.
            cluster.servers[follower].stop().await;
            cluster.servers[follower].lose_disk();
            cluster.servers[follower].restart().await;
            caught_up(&cluster, leader, follower).await;
            let times = cluster.servers[leader].count_logged(told);
            assert_eq!(times, 1, "{}", cluster.servers[leader].log());
            break;
        }
    }

    for (at, server) in cluster.servers.iter().enumerate() {
        server.until_logged("secret is another one").await;
        let lines = server.count_logged("turned away what says to be a replica");
        let is_new = restarted.contains(&at);
        assert!(
            is_new || lines <= most_lines(began),
            "{lines}: {}",
            server.log()
        );
    }
    stranger
        .until_logged("it does not know this cluster's secret")
        .await;
}

/// Waits until a follower lacks nothing.
async fn caught_up(cluster: &Cluster, leader: usize, follower: usize) {
    let deadline = env::now() + PATIENCE;
    loop {
        let view = cluster.view(leader).await;
        let replicas = view["replicas"].as_array().unwrap();
        let lags = replicas
            .iter()
            .any(|it| it["id"] == follower + 1 && it["lag"] != 0);
        if view["leader"] != leader + 1 || !lags {
            return;
        }
        assert!(env::now() < deadline, "{view}");
        env::sleep(Duration::from_millis(20)).await;
    }
}
