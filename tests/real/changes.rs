//! A change of the replicas is cut off in its middle: a server is killed while one is added or removed. Afterwards all
//! agree on who they are, the same command does what is left to do, and no share has moved.
//!
//! The middle is not met by luck: the network stalls before the entry of the log that the scene is about.

#![allow(
    clippy::unwrap_used,
    reason = "a helper of a test may fail like the test itself"
)]

use rustix::process::Signal;
use skyschedule_tests::member::Member;
use skyschedule_tests::mesh::Mesh;
use skyschedule_tests::numbering::{Kept, all, kept, settled};
use skyschedule_tests::proxy::{Direction, Flow, Proxy};

const GROUP: &str = "1000";

/// Three servers with two members of a group, and a fourth one that waits to be added.
struct Scene {
    mesh: Mesh,
    leader: usize,
    followers: [usize; 2],
    new: usize,
    /// How the others reach the new one.
    way: Proxy,
    members: Vec<Member>,
    before: Vec<Kept>,
}

/// What an entry that changes the voters has on the wire: two lists of them, each with its length and the ids.
fn joint(before: &[usize], after: &[usize]) -> Vec<u8> {
    let byte = |number: usize| u8::try_from(number).unwrap();
    let mut bytes = vec![2];
    for places in [before, after] {
        let mut ids: Vec<u8> = places.iter().map(|at| byte(at + 1)).collect();
        ids.sort_unstable();
        bytes.push(byte(ids.len()));
        bytes.extend(ids);
    }
    bytes
}

impl Scene {
    async fn new() -> Self {
        let mut mesh = Mesh::start().await;
        let leader = mesh.cluster.leader().await;
        let settings = serde_json::json!({ "lease_ms": 6_000, "drain_timeout_ms": 1_000 });
        let admin = mesh.cluster.servers[leader].admin();
        admin.configure(GROUP, &settings).await;
        let members = mesh.cluster.members(GROUP, 2);
        let (new, way) = mesh.newcomer().await;
        settled(&all(&members)).await;
        let before = kept(&members);
        // Another one may lead by now.
        let leader = mesh.cluster.leader_seen_by(0, None).await;
        Self {
            followers: [(leader + 1) % 3, (leader + 2) % 3],
            mesh,
            leader,
            new,
            way,
            members,
            before,
        }
    }

    fn add(&self) -> String {
        format!("add {} {}", self.new + 1, self.way.address())
    }

    fn signal(&self, server: usize, signal: Signal) {
        self.mesh.cluster.servers[server].signal(signal);
    }

    /// From here on, of the change that makes the new server a voter only the leader and the first follower hear: it waits on
    /// its way to the new one, and the second follower stands still.
    fn hold_back_from_two(&self) {
        self.signal(self.followers[1], Signal::STOP);
        self.way.stall_at(&joint(&[0, 1, 2], &[0, 1, 2, 3]));
    }

    /// Until both have heard of it.
    async fn one_follower_knows(&self) {
        self.way.stalled().await;
        let [first, _] = self.followers;
        self.mesh.cluster.votes(first, self.new).await;
    }

    /// What a server asks another one goes through again.
    fn flows(&self) {
        let (leader, followers) = (self.leader, self.followers);
        let ways = followers.map(|to| self.mesh.network.way(leader, to));
        for way in ways.into_iter().chain([&self.way]) {
            way.set(Direction::ToServer, Flow::Pass);
        }
    }

    /// The servers that were killed are back: all agree on their number, and no share has moved.
    async fn all_is_well(mut self, killed: usize, voters: &[usize]) {
        self.mesh.cluster.servers[killed].ended().await;
        self.mesh.cluster.servers[killed].launch();
        self.mesh.cluster.servers[killed].answers().await;
        for &server in voters {
            self.mesh.cluster.voters(server, voters.len()).await;
        }
        let server = &self.mesh.cluster.servers[voters[0]];
        server.hears(GROUP, self.members.len()).await;
        settled(&all(&self.members)).await;
        assert_eq!(kept(&self.members), self.before);
    }
}

/// The new server is a learner that has nothing yet, when the leader dies: the command goes on with the next one.
async fn the_leader_dies_while_a_learner_catches_up() {
    let scene = Scene::new().await;
    let (leader, [first, _]) = (scene.leader, scene.followers);
    let cluster = &scene.mesh.cluster;
    // Where the new server is, is said in the first entry about it.
    scene
        .way
        .stall_at(scene.way.address().to_string().as_bytes());
    let add = scene.add();
    let dies = async {
        cluster.servers[leader]
            .until_logged("a replica was added as a learner")
            .await;
        scene.way.stalled().await;
        scene.signal(leader, Signal::KILL);
        cluster.leader_seen_by(first, Some(leader)).await;
        scene.flows();
    };
    tokio::join!(cluster.change(first, &add), dies);
    scene.all_is_well(leader, &[0, 1, 2, 3]).await;
}

/// Only the leader, and perhaps the new server, know that the voters change, when the leader dies: it may have been for
/// nothing.
async fn the_leader_dies_before_another_voter_knows_of_the_change() {
    let scene = Scene::new().await;
    let (leader, [first, second]) = (scene.leader, scene.followers);
    let (cluster, network) = (&scene.mesh.cluster, &scene.mesh.network);
    for follower in [first, second] {
        let way = network.way(leader, follower);
        way.stall_at(&joint(&[0, 1, 2], &[0, 1, 2, 3]));
    }
    let add = scene.add();
    let dies = async {
        network.way(leader, first).stalled().await;
        scene.signal(leader, Signal::KILL);
    };
    let ((done, text), ()) = tokio::join!(cluster.command(leader, &add), dies);
    assert!(!done, "{text}");
    scene.flows();
    cluster.leader_seen_by(first, Some(leader)).await;
    cluster.change(first, &add).await;
    scene.all_is_well(leader, &[0, 1, 2, 3]).await;
}

/// One of the other voters knows that the voters change, too few for it to be decided, when the leader dies: the next
/// leader ends it, and the command finds nothing to do.
async fn the_next_leader_ends_the_change() {
    let scene = Scene::new().await;
    let (leader, [_, second]) = (scene.leader, scene.followers);
    let cluster = &scene.mesh.cluster;
    scene.hold_back_from_two();
    let add = scene.add();
    let dies = async {
        scene.one_follower_knows().await;
        scene.signal(leader, Signal::KILL);
    };
    let ((done, text), ()) = tokio::join!(cluster.command(leader, &add), dies);
    assert!(!done, "{text}");
    scene.signal(second, Signal::CONT);
    scene.flows();
    let ended = "ended a change of the replicas that another leader began";
    // The new server may be the next one: what was on its way to it has come.
    let next = cluster.leader_seen_by(second, Some(leader)).await;
    cluster.servers[next].until_logged(ended).await;
    cluster.change(second, &add).await;
    scene.all_is_well(leader, &[0, 1, 2, 3]).await;
}

/// The new server dies when it has caught up, and all but it know that it shall vote: it does when it is back.
async fn the_new_server_dies_when_it_shall_vote() {
    let scene = Scene::new().await;
    let (leader, [_, second]) = (scene.leader, scene.followers);
    let cluster = &scene.mesh.cluster;
    scene.hold_back_from_two();
    let add = scene.add();
    let dies = async {
        scene.one_follower_knows().await;
        scene.signal(scene.new, Signal::KILL);
        scene.signal(second, Signal::CONT);
    };
    tokio::join!(cluster.change(leader, &add), dies);
    scene.flows();
    cluster.change(second, &add).await;
    let new = scene.new;
    scene.all_is_well(new, &[0, 1, 2, 3]).await;
}

#[tokio::test]
async fn a_server_that_is_added_may_die_and_so_may_the_leader_in_the_middle_of_it() {
    tokio::join!(
        the_leader_dies_while_a_learner_catches_up(),
        the_leader_dies_before_another_voter_knows_of_the_change(),
        the_next_leader_ends_the_change(),
        the_new_server_dies_when_it_shall_vote(),
    );
}

/// Only the server that is removed knows of it beside the leader, which dies: it is the only one that can lead then, ends
/// its own removal, and goes.
#[tokio::test]
async fn a_server_that_is_removed_goes_although_the_leader_dies_in_the_middle_of_it() {
    let mut scene = Scene::new().await;
    let (leader, [stays, goes]) = (scene.leader, scene.followers);
    let add = scene.add();
    scene.mesh.cluster.change(leader, &add).await;
    let voters: Vec<usize> = (0..4).filter(|at| *at != goes).collect();
    for server in 0..4 {
        scene.mesh.cluster.voters(server, 4).await;
    }
    let entry = joint(&[0, 1, 2, 3], &voters);
    let (cluster, network) = (&scene.mesh.cluster, &scene.mesh.network);
    assert_eq!(cluster.leader().await, leader);
    scene.way.stall_at(&entry);
    network.way(leader, stays).stall_at(&entry);
    let remove = format!("remove {}", goes + 1);
    let dies = async {
        network.way(leader, goes).carried(&entry).await;
        network.way(leader, stays).stalled().await;
        scene.way.stalled().await;
        scene.signal(leader, Signal::KILL);
    };
    let ((done, text), ()) = tokio::join!(cluster.command(leader, &remove), dies);
    assert!(!done, "{text}");
    scene.flows();
    let removed = &mut scene.mesh.cluster.servers[goes];
    assert_eq!(removed.ended().await.code(), Some(1), "{}", removed.log());
    assert!(removed.logged("this replica was removed from the cluster"));
    let cluster = &scene.mesh.cluster;
    cluster.leader_seen_by(stays, Some(goes)).await;
    // Nothing is left to do.
    let why = cluster.refusal(stays, &remove).await;
    assert!(why.contains("there is no replica"), "{why}");
    scene.all_is_well(leader, &voters).await;
}
