//! Three servers over a bad network: between each two of them, and between each of them and a client.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::cluster::Cluster;
use crate::member::Options;
use crate::proxy::{Direction, Flow, Proxy};
use crate::server::Server;

/// How many servers there are.
pub const SERVERS: usize = 3;

/// What servers tell clients about where they are: nowhere, so that a client that is cut off finds no way around.
const NOWHERE: &str = "127.0.0.1:9";

/// A cluster of which each server reaches each other one through a proxy of its own. Clients connect directly, or
/// through [`Doors`].
#[derive(Debug)]
pub struct Mesh {
    /// The servers.
    pub cluster: Cluster,
    /// The network between them.
    pub network: Network,
}

/// The network between the servers of a [`Mesh`].
#[derive(Debug)]
pub struct Network(BTreeMap<(usize, usize), Proxy>);

impl Mesh {
    /// Three servers that lead and follow over a good network.
    pub async fn start() -> Self {
        let mut servers: Vec<Server> = (0..SERVERS).map(|_| Server::prepared()).collect();
        let mut proxies = BTreeMap::new();
        for from in 0..SERVERS {
            let mut peers = Vec::new();
            for (to, server) in servers.iter().enumerate() {
                let mut address = server.address();
                if to != from {
                    let proxy = Proxy::start(address).await;
                    address = proxy.address();
                    proxies.insert((from, to), proxy);
                }
                peers.push(format!("{}={address}", to + 1));
            }
            let server = &mut servers[from];
            server.flag("--replica-id", &(from + 1).to_string());
            server.flag("--peers", &peers.join(","));
            server.flag("--advertise", NOWHERE);
            server.launch();
        }
        let mut cluster = Cluster { servers };
        cluster.ready().await;
        Self {
            cluster,
            network: Network(proxies),
        }
    }
}

impl Mesh {
    /// One more server, which is started and waits to be added: its place, and the way on which all others reach it.
    pub async fn newcomer(&mut self) -> (usize, Proxy) {
        let (at, mut server) = (self.cluster.servers.len(), Server::prepared());
        let way = Proxy::start(server.address()).await;
        let others = (1..).zip(&self.cluster.servers);
        let others = others.map(|(id, other)| format!("{id}={}", other.address()));
        let own = format!("{}={}", at + 1, way.address());
        let peers: Vec<String> = others.chain([own]).collect();
        server.flag("--replica-id", &(at + 1).to_string());
        server.flag("--peers", &peers.join(","));
        server.flag("--advertise", NOWHERE);
        server.launch();
        self.cluster.servers.push(server);
        self.cluster.waits_to_be_added(at).await;
        (at, way)
    }
}

impl Network {
    /// The way of what the server at `from` asks the one at `to`.
    pub fn way(&self, from: usize, to: usize) -> &Proxy {
        &self.0[&(from, to)]
    }

    /// Whether what the server at `from` says comes to the one at `to`; until it does, it waits.
    pub fn carries(&self, from: usize, to: usize, carries: bool) {
        let flow = if carries { Flow::Pass } else { Flow::Stall };
        // Each of the two keeps a connection for what it asks.
        self.0[&(from, to)].set(Direction::ToServer, flow);
        self.0[&(to, from)].set(Direction::ToClient, flow);
    }

    /// The same for both ways between two servers.
    pub fn connects(&self, one: usize, other: usize, connects: bool) {
        self.carries(one, other, connects);
        self.carries(other, one, connects);
    }

    /// The same for all ways from and to a server.
    pub fn reaches(&self, server: usize, reaches: bool) {
        for other in (0..SERVERS).filter(|other| *other != server) {
            self.connects(server, other, reaches);
        }
    }

    /// Ends all connections between two servers.
    pub fn reset(&self, one: usize, other: usize) {
        for pair in [(one, other), (other, one)] {
            for link in self.0[&pair].links() {
                link.reset();
            }
        }
    }
}

/// A client's own ways to the servers of a [`Mesh`], in their order.
#[derive(Debug)]
pub struct Doors(Vec<Proxy>);

impl Doors {
    /// Open ones.
    pub async fn to(cluster: &Cluster) -> Self {
        let mut doors = Vec::new();
        for server in &cluster.servers {
            doors.push(Proxy::start(server.address()).await);
        }
        Self(doors)
    }

    /// Where the client connects.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.iter().map(Proxy::address).collect()
    }

    /// A `test-client` behind them.
    pub fn member(&self, group: &str, id: &str) -> Options {
        let options = Options::new(self.0[0].address(), group, id);
        let others = self.0[1..].iter();
        others.fold(options, |options, door| options.server(door.address()))
    }

    /// What happens to what comes through the door to this server.
    pub fn set(&self, server: usize, direction: Direction, flow: Flow) {
        self.0[server].set(direction, flow);
    }

    /// The same, both ways.
    pub fn set_both(&self, server: usize, flow: Flow) {
        self.set(server, Direction::ToServer, flow);
        self.set(server, Direction::ToClient, flow);
    }

    /// Ends all connections to this server.
    pub fn reset(&self, server: usize) {
        for link in self.0[server].links() {
            link.reset();
        }
    }
}
