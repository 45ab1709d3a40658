//! What the README tells the operator of several servers to do, as it says it.

#![allow(
    clippy::unwrap_used,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use skyschedule_common::env;
use skyschedule_common::epoch::Epoch;
use skyschedule_tests::cluster::Cluster;
use skyschedule_tests::ledger::Ledger;
use skyschedule_tests::member::{Member, Rows};
use skyschedule_tests::numbering::{all, kept, settled};
use skyschedule_tests::server::Server;

const GROUP: &str = "1000";
const EXCLUSIVE: &str = "exclusive";

/// As long as a server counts a lease of two seconds, the shortest there is.
const LEASE: Duration = Duration::from_millis(2_100);

fn epochs(members: &[Member]) -> impl Iterator<Item = Epoch> {
    let epochs = members.iter().map(|member| member.rows().epoch.unwrap());
    epochs.map(|epoch| epoch.parse().unwrap())
}

fn newest(members: &[Member]) -> Epoch {
    epochs(members).max().unwrap()
}

/// Waits until these have settled; each has an epoch above that one.
async fn settled_above(members: &[Member], known: Epoch) {
    settled(&all(members)).await;
    assert!(
        epochs(members).all(|epoch| epoch > known),
        "{known}: {members:?}"
    );
}

/// A server is removed with --force, although one of those that stay is away: nothing is decided before that one is back,
/// as if most were away, and then it is done.
#[tokio::test]
async fn a_forced_removal_is_decided_when_enough_servers_are_back() {
    let (mut cluster, members) = Cluster::with_members(GROUP, 2, 6_000).await;
    let leader = cluster.leader().await;
    let [away, goes] = [(leader + 1) % 3, (leader + 2) % 3];
    let known = newest(&members);
    cluster.servers[away].kill().await;
    cluster.is_away(leader, away).await;
    let remove = format!("remove {}", goes + 1);
    let why = cluster.refusal(leader, &remove).await;
    assert!(why.contains("--force removes it nevertheless"), "{why}");
    let why = cluster.refusal(goes, &format!("{remove} --force")).await;
    assert!(why.contains("will be as soon as enough do"), "{why}");
    // Meanwhile an available group is numbered as without a quorum.
    let view = cluster.view(leader).await;
    assert_eq!(view["degraded"], true, "{view}");
    cluster.servers[away].restart().await;
    let removed = &mut cluster.servers[goes];
    assert_eq!(removed.ended().await.code(), Some(1), "{}", removed.log());
    for server in [leader, away] {
        cluster.voters(server, 2).await;
    }
    for member in &members {
        let anew = |rows: &Rows| {
            let epoch = rows.epoch.as_ref().map(|epoch| epoch.parse::<Epoch>());
            epoch.is_some_and(|epoch| epoch.is_ok_and(|it| it.degraded == 0 && it >= known))
        };
        member.rows_that("it is numbered by a quorum", anew).await;
    }
    settled(&all(&members)).await;
}

/// The leader dies, and is given up with one command, although nobody leads when it is called. Of the two that are left one
/// dies, too, and a command says what that means.
#[tokio::test]
async fn a_dead_leader_is_given_up_with_one_command_and_without_a_majority_it_says_so() {
    let mut cluster = Cluster::start().await;
    let leader = cluster.leader().await;
    let [first, second] = [(leader + 1) % 3, (leader + 2) % 3];
    for at in [first, second] {
        cluster.voters(at, 3).await;
    }
    cluster.servers[leader].kill().await;
    let remove = |at: usize| format!("remove {}", at + 1);
    let (done, text) = cluster.command(first, &remove(leader)).await;
    assert!(done, "{text}");

    cluster.lead(second).await;
    cluster.servers[second].kill().await;
    cluster.is_away(first, second).await;
    says_that_there_is_no_majority(&cluster, first, second).await;

    // The same where the one that is left has led.
    cluster.servers[second].restart().await;
    cluster.servers[first].ready().await;
    cluster.lead(first).await;
    let admin = cluster.servers[first].admin();
    admin.configure("orders", &serde_json::json!({})).await;
    cluster.servers[second].kill().await;
    cluster.is_away(first, second).await;
    says_that_there_is_no_majority(&cluster, first, second).await;
}

/// Of two servers one is away: whatever the other one is asked to change.
async fn says_that_there_is_no_majority(cluster: &Cluster, left: usize, away: usize) {
    let server = &cluster.servers[left];
    let says = |text: &str| {
        let away = format!("Away: {} ({})", away + 1, cluster.servers[away].address());
        let reaches = format!("no majority: replica {} reaches 1 of 2 voters", left + 1);
        for part in [&reaches, &away, "Start those again"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    };
    let remove = format!("remove {}", away + 1);
    let (admin, settings) = (server.admin(), serde_json::json!({}));
    let ((removed, removal), (drained, drain), (status, change)) = tokio::join!(
        cluster.command(left, &remove),
        server.command(&["drain", "orders", "nobody"]),
        admin.put("orders", &settings),
    );
    says(&removal);
    says(&change);
    assert!(
        !removed && status == 503 && change.contains("\"unavailable\""),
        "{change}"
    );
    // A leader that does not know yet that it leads no more knows that there is no such member.
    let knows = drain.contains("no member nobody");
    assert!(!drained, "{drain}");
    if !knows {
        says(&drain);
    }
    // It numbers available groups by itself, or says why it does not.
    let (ready, status) = server.command(&["status"]).await;
    if !ready {
        says(&status);
    }
}

/// The lists of peers may be those of a cluster that has shrunk; but two servers form none.
#[tokio::test]
async fn a_cluster_that_has_shrunk_is_restarted_with_the_list_of_those_that_are_left() {
    let (mut cluster, members) = Cluster::with_members(GROUP, 2, 6_000).await;
    let before = kept(&members);
    cluster.change(0, "remove 3").await;
    cluster.servers[2].ended().await;
    cluster.servers.truncate(2);
    cluster.list_peers();
    for at in [0, 1] {
        cluster.servers[at].stop().await;
        cluster.servers[at].restart().await;
        cluster.voters(at, 2).await;
    }
    // One of the two lost its disk; the other one leads, and fills it.
    cluster.lead(0).await;
    cluster.voters(1, 2).await;
    cluster.servers[1].kill().await;
    cluster.servers[1].lose_disk();
    cluster.servers[1].restart().await;
    cluster.voters(0, 2).await;
    cluster.servers[0].hears(GROUP, 2).await;
    cluster.change(0, "remove 2").await;
    cluster.servers[1].ended().await;
    cluster.servers.truncate(1);
    cluster.list_peers();
    cluster.servers[0].stop().await;
    cluster.servers[0].restart().await;
    cluster.servers[0].hears(GROUP, 2).await;
    assert_eq!(kept(&members), before);
}

#[tokio::test]
async fn servers_that_form_no_cluster_yet_say_so() {
    let mut cluster = Cluster::prepared();
    cluster.servers.truncate(2);
    cluster.list_peers();
    for server in &mut cluster.servers {
        server.launch();
    }
    for server in &cluster.servers {
        server.until_logged("two servers form none").await;
        let (status, why) = server.admin().get("/readyz").await;
        assert_eq!(status, 503);
        assert!(why.contains("in no cluster yet"), "{why}");
    }
    let view = cluster.view(0).await;
    assert_eq!(view["formed"], false, "{view}");
    // The flags of the command may stand before and after its name.
    let admin = cluster.servers[0].admin().address().to_string();
    for arguments in [
        ["cluster", "--admin", &admin, "remove", "2"],
        ["cluster", "remove", "--admin", &admin, "2"],
    ] {
        let (done, text) = Server::command_line(&arguments).await;
        assert!(!done && text.contains("not in the cluster yet"), "{text}");
    }
    let (_, text) = Server::command_line(&["cluster", "--admin", &admin]).await;
    assert!(text.contains("in no cluster yet"), "{text}");
    assert!(!text.contains("learner"), "{text}");
}

/// Two processes with one id: by mistake in the id, and by mistake in the list of peers.
#[tokio::test]
async fn two_processes_of_one_id_are_named_and_the_wrong_one_ends() {
    let mut cluster = Cluster::prepared();
    let third = cluster.servers[2].address();
    cluster.servers[2].flag("--replica-id", "2");
    for server in &mut cluster.servers[..2] {
        server.launch();
    }
    cluster.servers[1].answers().await;
    let wrong = &mut cluster.servers[2];
    wrong.launch();
    assert_eq!(wrong.ended().await.code(), Some(1), "{}", wrong.log());
    assert!(wrong.logged("another process runs as replica 2"));
    assert!(cluster.servers[1].logged("two processes run as replica 2"));
    cluster.servers[2].flag("--replica-id", "3");
    cluster.servers[2].launch();
    cluster.ready().await;

    let mut wrong = Server::prepared();
    let peers = cluster.peers();
    let peers = peers.replace(&third.to_string(), &wrong.address().to_string());
    wrong.flag("--replica-id", "3");
    wrong.flag("--peers", &peers);
    wrong.launch();
    assert_eq!(wrong.ended().await.code(), Some(1), "{}", wrong.log());
    assert!(wrong.logged("another process runs as replica 3"));
    cluster.servers[2]
        .until_logged("two processes run as replica 3")
        .await;
    for at in 0..3 {
        cluster.voters(at, 3).await;
    }
}

/// A server that lost its disk is given up, and another one takes its place.
#[tokio::test]
async fn a_server_that_is_given_up_is_replaced_by_another_one() {
    let (mut cluster, members) = Cluster::with_members(GROUP, 2, 6_000).await;
    let before = kept(&members);
    let leader = cluster.leader().await;
    let lost = (leader + 1) % 3;
    cluster.servers[lost].kill().await;
    cluster.is_away(leader, lost).await;
    cluster
        .change(leader, &format!("remove {}", lost + 1))
        .await;
    let new = cluster.newcomer().await;
    let address = cluster.servers[new].address();
    let add = format!("add {} {address}", new + 1);
    cluster.change(leader, &add).await;
    let voters: Vec<usize> = (0..4).filter(|at| *at != lost).collect();
    for &at in &voters {
        cluster.voters(at, 3).await;
    }
    // Its folder is of no use any more, and its id is, with an empty one.
    let given_up = &mut cluster.servers[lost];
    given_up.launch();
    assert_eq!(given_up.ended().await.code(), Some(1));
    assert!(given_up.logged("takes part in it no more"));
    given_up.lose_disk();
    given_up.launch();
    cluster.waits_to_be_added(lost).await;
    let address = cluster.servers[lost].address();
    let add = format!("add {} {address}", lost + 1);
    cluster.change(leader, &add).await;
    for at in 0..4 {
        cluster.voters(at, 4).await;
    }
    cluster.lead(lost).await;
    cluster.servers[new].hears(GROUP, 2).await;
    assert_eq!(kept(&members), before);
}

/// A server goes to another address with its data folder: the lists are changed, and one is restarted after another.
#[tokio::test]
async fn a_server_moves_to_another_address_and_no_share_does() {
    let (mut cluster, members) = Cluster::with_members(GROUP, 2, 6_000).await;
    let before = kept(&members);
    let moves = (cluster.leader().await + 1) % 3;
    assert_eq!(cluster.servers[moves].stop().await.code(), Some(0));
    cluster.servers[moves].move_away();
    cluster.list_peers();
    cluster.servers[moves].launch();
    for at in [(moves + 1) % 3, (moves + 2) % 3] {
        assert_eq!(cluster.servers[at].stop().await.code(), Some(0));
        cluster.servers[at].restart().await;
        cluster.voters(at, 3).await;
    }
    cluster.voters(moves, 3).await;
    cluster.lead(moves).await;
    cluster.servers[moves].hears(GROUP, 2).await;
    settled(&all(&members)).await;
    assert_eq!(kept(&members), before);
    let address = cluster.servers[moves].address().to_string();
    let view = cluster.view((moves + 1) % 3).await;
    let mut shown = view["replicas"].as_array().unwrap().iter();
    assert!(shown.any(|it| it["address"] == *address), "{view}");
}

/// All disks are lost. First they are restored from a backup, which knows less than the clients; then, as none is left, the
/// servers begin with empty folders.
#[tokio::test]
async fn after_a_restore_and_after_the_loss_of_all_disks_numbering_goes_on_above_what_clients_know()
{
    let mut cluster = Cluster::start().await;
    let configure = async |cluster: &Cluster| {
        let admin = cluster.servers[0].admin();
        for group in [GROUP, EXCLUSIVE] {
            let consistency = if group == GROUP { "available" } else { group };
            let settings = serde_json::json!({
                "consistency": consistency, "lease_ms": 2_000, "drain_timeout_ms": 1_000
            });
            admin.configure(group, &settings).await;
        }
    };
    configure(&cluster).await;
    let start = |cluster: &Cluster, group: &str, id: &str| {
        let member = cluster.member(group, id);
        let consistency = if group == GROUP { "available" } else { group };
        let member = member.flag("--consistency", consistency);
        member.flag("--keys", "12").flag("--work-ms", "15").start()
    };
    let both =
        |cluster: &Cluster, id: &str| [GROUP, EXCLUSIVE].map(|group| start(cluster, group, id));
    let [mut available, mut exclusive] = [Vec::new(), Vec::new()];
    for id in ["one", "two"] {
        let [first, second] = both(&cluster, id);
        available.push(first);
        exclusive.push(second);
    }
    for members in [&available, &exclusive] {
        settled(&all(members)).await;
    }

    // Stop a server, copy its data folder, start it; then the next one. Meanwhile others lead, and something is decided.
    let mut copies = Vec::new();
    for at in [1, 2] {
        copies.push((at, cluster.back_up(at).await));
        cluster.lead(0).await;
        configure(&cluster).await;
    }
    // What the backup does not know.
    let [first, second] = both(&cluster, "three");
    available.push(first);
    exclusive.push(second);
    for members in [&available, &exclusive] {
        settled(&all(members)).await;
    }
    let known = [&available, &exclusive].map(|members| newest(members));

    for server in &mut cluster.servers {
        server.kill().await;
    }
    env::sleep(LEASE).await;
    cluster.servers[0].lose_disk();
    for (at, copy) in copies {
        cluster.servers[at].put_disk(copy);
    }
    for server in &mut cluster.servers {
        server.launch();
    }
    cluster.ready().await;
    for (members, known) in [&available, &exclusive].into_iter().zip(known) {
        settled_above(members, known).await;
    }

    let known = [&available, &exclusive].map(|members| newest(members));
    for server in &mut cluster.servers {
        server.kill().await;
        server.lose_disk();
    }
    env::sleep(LEASE).await;
    for server in &mut cluster.servers {
        server.launch();
    }
    cluster.ready().await;
    configure(&cluster).await;
    for (members, known) in [&available, &exclusive].into_iter().zip(known) {
        settled_above(members, known).await;
    }

    let mut ledger = Ledger::default();
    for member in &exclusive {
        ledger.add(member, &[]);
    }
    assert!(ledger.len() > 100, "they worked: {}", ledger.len());
    assert_eq!(ledger.overlaps(), []);
    assert_eq!(ledger.epochs_that_go_back(), []);
}
