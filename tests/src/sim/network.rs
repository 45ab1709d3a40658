//! The network: each client's machine has a link to each server's, and so have the servers' among each other. A link
//! keeps, delays or loses what is sent.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;
use turmoil::{Protocol, Segment, SentRef, Sim};

/// What a link does at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Link {
    /// It carries.
    #[default]
    Clear,
    /// It loses what is sent. Connections that lost something are stuck for ever.
    Cut(Way),
    /// It keeps what is sent until it is clear again.
    Stalled(Way, Kept),
}

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the client, or from the server of the higher number.
    ToServer,
    /// Towards it.
    Back,
    /// Both ways.
    Both,
}

impl Way {
    /// The same, seen from the other end.
    #[must_use]
    pub fn reversed(self) -> Self {
        match self {
            Self::ToServer => Self::Back,
            Self::Back => Self::ToServer,
            Self::Both => Self::Both,
        }
    }
}

/// What is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Everything.
    All,
    /// The ends of connections.
    Ends,
    /// What belongs to connections from ports up to this one.
    Old(u16),
}

/// The port of the servers.
pub const PORT: u16 = 9991;

/// A machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Of a client.
    Client(usize),
    /// Of a server.
    Server(usize),
}

/// Names a link: from a client, or from the server of the higher number, to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Between {
    /// The one end.
    pub from: Place,
    /// The other end.
    pub server: usize,
}

impl Between {
    /// The link of a client to a server.
    pub fn client(client: usize, server: usize) -> Self {
        Self {
            from: Place::Client(client),
            server,
        }
    }

    /// The link of two servers.
    pub fn servers(one: usize, other: usize) -> Self {
        Self {
            from: Place::Server(one.max(other)),
            server: one.min(other),
        }
    }

    /// Whether the link ends there.
    pub fn touches(self, place: Place) -> bool {
        self.from == place || Place::Server(self.server) == place
    }
}

#[derive(Debug)]
struct Cable {
    from: IpAddr,
    server: IpAddr,
    link: Link,
    /// Since when it does this.
    since: Duration,
    /// The newest port that a connection had.
    port: u16,
    /// Counts what was done to it.
    changes: u64,
}

/// All links.
#[derive(Debug, Default)]
pub struct Network {
    cables: BTreeMap<Between, Cable>,
    /// The same, by the addresses, in order.
    by_pair: BTreeMap<(IpAddr, IpAddr), Between>,
}

impl Network {
    /// A link that carries.
    pub fn add(&mut self, between: Between, from: IpAddr, server: IpAddr) {
        self.by_pair.insert(pair(from, server), between);
        let cable = Cable {
            from,
            server,
            link: Link::Clear,
            since: Duration::ZERO,
            port: 0,
            changes: 0,
        };
        self.cables.insert(between, cable);
    }

    /// What a link does.
    pub fn link(&self, between: Between) -> Link {
        self.cables
            .get(&between)
            .map_or(Link::Clear, |cable| cable.link)
    }

    /// Since when a link carries, if it does.
    pub fn clear_since(&self, between: Between) -> Option<Duration> {
        let cable = self.cables.get(&between)?;
        (cable.link == Link::Clear).then_some(cable.since)
    }

    /// How often a link was changed by [`change`](Self::change).
    pub fn changes(&self, between: Between) -> u64 {
        self.cables.get(&between).map_or(0, |cable| cable.changes)
    }

    /// The newest port that a connection over this link had.
    pub fn port(&self, between: Between) -> u16 {
        self.cables.get(&between).map_or(0, |cable| cable.port)
    }

    /// The links of a machine.
    pub fn of(&self, place: Place) -> Vec<Between> {
        let all = self.cables.keys().copied();
        all.filter(|between| between.touches(place)).collect()
    }

    /// All links.
    pub fn all(&self) -> Vec<Between> {
        self.cables.keys().copied().collect()
    }

    /// Whether all links of a machine carry.
    pub fn is_clear(&self, place: Place) -> bool {
        let mut cables = self.cables.iter();
        cables.all(|(between, cable)| !between.touches(place) || cable.link == Link::Clear)
    }

    /// Whether each of them carries.
    pub fn are_clear(&self, mut links: impl Iterator<Item = Between>) -> bool {
        links.all(|between| self.link(between) == Link::Clear)
    }

    /// The links of a machine that carry, by their addresses.
    pub fn clear_of(&self, place: Place) -> Vec<(IpAddr, IpAddr)> {
        let cables = self.cables.iter();
        cables
            .filter(|(between, cable)| between.touches(place) && cable.link == Link::Clear)
            .map(|(_, cable)| (cable.from, cable.server))
            .collect()
    }

    /// Sets what a link does, and counts that.
    pub fn change(&mut self, sim: &Sim<'_>, between: Between, new: Link) -> u64 {
        self.set(sim, between, new);
        let Some(cable) = self.cables.get_mut(&between) else {
            return 0;
        };
        cable.changes += 1;
        cable.changes
    }

    /// Sets what a link does.
    pub fn set(&mut self, sim: &Sim<'_>, between: Between, new: Link) {
        let Some(cable) = self.cables.get_mut(&between) else {
            return;
        };
        let (from, server) = (cable.from, cable.server);
        match cable.link {
            Link::Clear => {}
            Link::Cut(_) => sim.repair(from, server),
            Link::Stalled(..) => sim.release(from, server),
        }
        match new {
            Link::Clear => {}
            Link::Cut(Way::Both) => sim.partition(from, server),
            Link::Cut(Way::ToServer) => sim.partition_oneway(from, server),
            Link::Cut(Way::Back) => sim.partition_oneway(server, from),
            Link::Stalled(..) => sim.hold(from, server),
        }
        cable.link = new;
        cable.since = sim.elapsed();
    }

    /// Lets pass what stalled links do not keep, and learns the newest ports.
    pub fn carry(&mut self, sim: &Sim<'_>) {
        sim.links(|all| {
            for link in all {
                let (a, b) = link.pair();
                let between = self.by_pair.get(&pair(a, b));
                let Some(cable) = between.and_then(|between| self.cables.get_mut(between)) else {
                    continue;
                };
                for sent in link {
                    cable.see(sent);
                }
            }
        });
    }
}

impl Cable {
    fn see(&mut self, sent: SentRef<'_>) {
        let (from, to) = sent.pair();
        let port = if to.port() == PORT {
            from.port()
        } else {
            to.port()
        };
        self.port = self.port.max(port);
        let Link::Stalled(way, kept) = self.link else {
            return;
        };
        let this_way = match way {
            Way::ToServer => to.ip() == self.server,
            Way::Back => to.ip() != self.server,
            Way::Both => true,
        };
        let keeps = this_way
            && match kept {
                Kept::All => true,
                Kept::Ends => {
                    matches!(
                        sent.protocol(),
                        Protocol::Tcp(Segment::Fin(_) | Segment::Rst)
                    )
                }
                Kept::Old(newest) => port <= newest,
            };
        if !keeps {
            sent.deliver();
        }
    }
}

fn pair(a: IpAddr, b: IpAddr) -> (IpAddr, IpAddr) {
    (a.min(b), a.max(b))
}
