//! Several servers that form one cluster.

use std::time::Duration;

use serde_json::{Value, json};
use skyschedule_common::env;
use tempfile::TempDir;

use crate::member::{Member, Options};
use crate::numbering::{all, settled};
use crate::server::Server;

/// How long servers may take for what takes a second.
const PATIENCE: Duration = Duration::from_secs(30);

/// Three servers with the same list of peers. The first is replica 1.
#[derive(Debug)]
pub struct Cluster {
    /// The servers.
    pub servers: Vec<Server>,
}

fn peers(servers: &[Server]) -> String {
    let peers: Vec<String> = (1..)
        .zip(servers)
        .map(|(id, server)| format!("{id}={}", server.address()))
        .collect();
    peers.join(",")
}

impl Cluster {
    /// Three servers that have addresses but do not run yet.
    pub fn prepared() -> Self {
        let servers: Vec<Server> = (0..3).map(|_| Server::prepared()).collect();
        let mut cluster = Self { servers };
        cluster.list_peers();
        cluster
    }

    /// Gives all servers the list of all, for their next starts.
    pub fn list_peers(&mut self) {
        let peers = self.peers();
        for (id, server) in (1..).zip(&mut self.servers) {
            server.flag("--replica-id", &format!("{id}"));
            server.flag("--peers", &peers);
        }
    }

    /// The list of peers that all have.
    pub fn peers(&self) -> String {
        peers(&self.servers)
    }

    /// Three servers that lead and follow.
    pub async fn start() -> Self {
        let mut cluster = Self::prepared();
        for server in &mut cluster.servers {
            server.launch();
        }
        cluster.ready().await;
        cluster
    }

    /// A cluster with so many members of a group that have settled; their leases are so long, in milliseconds.
    pub async fn with_members(group: &str, count: usize, lease: u32) -> (Self, Vec<Member>) {
        let cluster = Self::start().await;
        let leader = cluster.leader().await;
        let settings = json!({ "lease_ms": lease, "drain_timeout_ms": 1_000 });
        let admin = cluster.servers[leader].admin();
        admin.configure(group, &settings).await;
        let members = cluster.members(group, count);
        settled(&all(&members)).await;
        (cluster, members)
    }

    /// One more server, which is started and waits to be added; its place.
    pub async fn newcomer(&mut self) -> usize {
        let at = self.servers.len();
        self.servers.push(Server::prepared());
        let peers = self.peers();
        let new = &mut self.servers[at];
        new.flag("--replica-id", &format!("{}", at + 1));
        new.flag("--peers", &peers);
        new.launch();
        self.waits_to_be_added(at).await;
        at
    }

    /// Waits until the server at this place has found the cluster, in which it is not yet.
    pub async fn waits_to_be_added(&self, at: usize) {
        let new = &self.servers[at];
        new.until_logged("it is not in the cluster of the others")
            .await;
    }

    /// Runs `skyschedule cluster` with these arguments against the server at this place, which must succeed. It is told to
    /// ask again while no leader answers, as happens on a busy machine.
    pub async fn change(&self, at: usize, arguments: &str) -> String {
        let deadline = env::now() + PATIENCE;
        loop {
            let (done, text) = self.command(at, arguments).await;
            if done {
                return text;
            }
            let again = ["ask again", "try again"]
                .iter()
                .any(|it| text.contains(it));
            let log = || self.servers[at].log();
            assert!(
                again && env::now() < deadline,
                "cluster {arguments}: {text}; {}",
                log()
            );
            env::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Runs `skyschedule cluster` with these arguments against the server at this place, which must refuse, where the
    /// leader can be asked; why.
    pub async fn refusal(&self, at: usize, arguments: &str) -> String {
        let deadline = env::now() + PATIENCE;
        loop {
            let (done, text) = self.command(at, arguments).await;
            assert!(!done, "cluster {arguments}: {text}");
            if !text.contains("try again") || env::now() > deadline {
                return text;
            }
            env::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Runs `skyschedule cluster` with these arguments against the server at this place: whether it did, and what it printed.
    pub async fn command(&self, at: usize, arguments: &str) -> (bool, String) {
        let arguments: Vec<&str> = ["cluster"]
            .into_iter()
            .chain(arguments.split_whitespace())
            .collect();
        self.servers[at].command(&arguments).await
    }

    /// Has the server at this place lead, as soon as it can.
    pub async fn lead(&self, at: usize) {
        let deadline = env::now() + PATIENCE;
        let transfer = format!("transfer {}", at + 1);
        loop {
            let (done, text) = self.command(at, &transfer).await;
            if done {
                return;
            }
            assert!(env::now() < deadline, "{text}; {}", self.servers[at].log());
            env::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the server at this place sees so many voters, and reaches all of them.
    pub async fn voters(&self, at: usize, count: usize) {
        let deadline = env::now() + PATIENCE;
        loop {
            let view = self.view(at).await;
            let replicas = view["replicas"].as_array().expect("replicas");
            let is_there =
                |replica: &Value| replica["voter"] == true && replica["reachable"] == true;
            if replicas.len() == count && replicas.iter().all(is_there) {
                return;
            }
            assert!(env::now() < deadline, "{view}; {}", self.servers[at].log());
            env::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the server at this place knows that another one does not answer.
    pub async fn is_away(&self, at: usize, other: usize) {
        let deadline = env::now() + PATIENCE;
        loop {
            let view = self.view(at).await;
            let mut replicas = view["replicas"].as_array().expect("replicas").iter();
            if replicas.any(|replica| replica["id"] == other + 1 && replica["reachable"] == false) {
                return;
            }
            assert!(env::now() < deadline, "{view}; {}", self.servers[at].log());
            env::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the server at this place knows that another one votes, or is about to.
    pub async fn votes(&self, at: usize, other: usize) {
        let deadline = env::now() + PATIENCE;
        loop {
            let view = self.view(at).await;
            let mut replicas = view["replicas"].as_array().expect("replicas").iter();
            if replicas.any(|replica| replica["id"] == other + 1 && replica["voter"] == true) {
                return;
            }
            assert!(env::now() < deadline, "{view}; {}", self.servers[at].log());
            env::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until all servers that run are ready.
    pub async fn ready(&mut self) {
        for server in self.servers.iter_mut().filter(|server| server.runs()) {
            server.ready().await;
        }
    }

    /// A backup of the server at this place, as the README says: it stops, its folder is copied, and it runs again.
    pub async fn back_up(&mut self, at: usize) -> TempDir {
        self.servers[at].stop().await;
        let copy = self.servers[at].copy_disk();
        self.servers[at].restart().await;
        self.ready().await;
        copy
    }

    /// How the server at this place sees the cluster.
    pub async fn view(&self, at: usize) -> Value {
        let (status, body) = self.servers[at].admin().get("/api/v1/cluster").await;
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("the cluster is JSON")
    }

    /// The place of the leader, as the server at `at` sees it; waits until it sees one that is not `old`.
    pub async fn leader_seen_by(&self, at: usize, old: Option<usize>) -> usize {
        let deadline = env::now() + PATIENCE;
        loop {
            let view = self.view(at).await;
            let leader = view["leader"].as_u64();
            let place = leader.and_then(|id| usize::try_from(id - 1).ok());
            if let Some(place) = place.filter(|place| Some(*place) != old) {
                return place;
            }
            assert!(
                env::now() < deadline,
                "no leader: {view}; {}",
                self.servers[at].log()
            );
            env::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The place of the leader on which all servers that run agree.
    pub async fn leader(&self) -> usize {
        let deadline = env::now() + PATIENCE;
        loop {
            let mut seen = Vec::new();
            for (at, _) in self
                .servers
                .iter()
                .enumerate()
                .filter(|(_, server)| server.runs())
            {
                seen.push(self.leader_seen_by(at, None).await);
            }
            if seen.iter().all(|leader| *leader == seen[0]) {
                return seen[0];
            }
            assert!(env::now() < deadline, "they see {seen:?}");
            env::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A client that knows all servers.
    pub fn member(&self, group: &str, id: &str) -> Options {
        let [first, others @ ..] = self.servers.as_slice() else {
            panic!("a cluster has servers");
        };
        let options = Options::new(first.address(), group, id);
        others
            .iter()
            .fold(options, |options, server| options.server(server.address()))
    }

    /// So many members of a group, started.
    pub fn members(&self, group: &str, count: usize) -> Vec<Member> {
        (0..count)
            .map(|at| self.member(group, &format!("client-{at}")).start())
            .collect()
    }
}
