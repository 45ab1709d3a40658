//! The network between the clients' machines and the server's: it keeps, delays or loses what is sent.

use std::net::{IpAddr, SocketAddr};
use turmoil::{Protocol, Segment, Sim};

/// What the network between one client's machine and the server does at present.
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
    /// From the client.
    ToServer,
    /// To the client.
    ToClient,
    /// Both ways.
    Both,
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

/// The port of the server.
pub const PORT: u16 = 9991;

/// Sets what the network between the client `at` and `server` does.
pub fn set(sim: &Sim<'_>, link: &mut Link, new: Link, client: IpAddr, server: IpAddr) {
    match *link {
        Link::Clear => {}
        Link::Cut(_) => sim.repair(client, server),
        Link::Stalled(..) => sim.release(client, server),
    }
    match new {
        Link::Clear => {}
        Link::Cut(Way::Both) => sim.partition(client, server),
        Link::Cut(Way::ToServer) => sim.partition_oneway(client, server),
        Link::Cut(Way::ToClient) => sim.partition_oneway(server, client),
        Link::Stalled(..) => sim.hold(client, server),
    }
    *link = new;
}

/// Lets pass what a stalled link does not keep; `highest` learns the newest port of each client.
pub fn carry(sim: &Sim<'_>, links: &mut [(IpAddr, Link, u16)]) {
    sim.links(|all| {
        for link in all {
            let (a, b) = link.pair();
            let known = links.iter_mut().find(|(ip, ..)| *ip == a || *ip == b);
            let Some((_, state, highest)) = known else {
                continue;
            };
            for sent in link {
                let (from, to) = sent.pair();
                let port = if to.port() == PORT {
                    from.port()
                } else {
                    to.port()
                };
                *highest = (*highest).max(port);
                if let Link::Stalled(way, kept) = *state
                    && !keeps(way, kept, port, to, sent.protocol())
                {
                    sent.deliver();
                }
            }
        }
    });
}

fn keeps(way: Way, kept: Kept, port: u16, to: SocketAddr, what: &Protocol) -> bool {
    let to_server = to.port() == PORT;
    let this_way = match way {
        Way::ToServer => to_server,
        Way::ToClient => !to_server,
        Way::Both => true,
    };
    this_way
        && match kept {
            Kept::All => true,
            Kept::Ends => matches!(what, Protocol::Tcp(Segment::Fin(_) | Segment::Rst)),
            Kept::Old(newest) => port <= newest,
        }
}
