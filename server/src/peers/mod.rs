//! Connections between replicas: requests with answers, many at a time, over one authenticated stream.
//!
//! Each replica keeps a connection of its own to each other one, for what *it* asks. Who asks what is none
//! of this module's business: a body is bytes, and a [`Service`] takes it. A large body travels in parts
//! between those of others, so that a snapshot delays no heartbeat.
//!
//! | file | one idea |
//! |---|---|
//! | `frame` | what is on the wire, and bodies in parts |
//! | `handshake` | both ends prove that they know the cluster's secret |
//! | `link` | the connection to one other replica, made anew when it breaks |
//! | `incoming` | what others ask |

mod frame;
mod handshake;
mod incoming;
mod link;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use skyschedule_common::auth::ClusterKey;
use skyschedule_common::env;
use skyschedule_common::env::net::Stream;
use skyschedule_common::protocol::messages::PeerHello;
use tokio::sync::mpsc;

use self::handshake::Probes;
use self::link::Link;
use crate::strangers::Strangers;

/// Version of what replicas say to each other.
pub(crate) const VERSION: u16 = 2;

/// Addresses that are kept of each of the others.
const CAME_FROM: usize = 4;

/// Connections of others that wait to be served.
const WAITING: usize = 64;

/// Who takes a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Service {
    /// Votes, entries, snapshots, and how a cluster forms.
    Consensus = 1,
    /// What a replica learns of clients that another one serves.
    Reports = 2,
    /// Calls of the admin interface that the leader must answer.
    Admin = 3,
}

/// The answer to a request, or why there is none.
pub(crate) type Answering = Pin<Box<dyn Future<Output = Result<Bytes, String>> + Send>>;

/// What counts a connection while it lives.
pub(crate) type Counted = Box<dyn Send>;

/// Takes the requests of one service: who asks, and what.
pub(crate) type Handler = Arc<dyn Fn(u16, Bytes) -> Answering + Send + Sync>;

/// No answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    /// There is no connection.
    #[error("replica {0} cannot be reached")]
    Unreachable(u16),
    /// It did not answer in time.
    #[error("replica {0} did not answer in time")]
    Late(u16),
    /// It refuses.
    #[error("replica {0} refuses: {1}")]
    Refused(u16, String),
}

/// Who this replica is.
#[derive(Debug, Clone)]
pub(crate) struct Roster {
    /// This replica.
    pub(crate) id: u16,
    /// What they prove to each other.
    pub(crate) key: ClusterKey,
}

/// The other replicas. A clone is the same.
#[derive(Clone)]
pub(crate) struct Peers(Arc<Inner>);

struct Inner {
    roster: Roster,
    links: RwLock<BTreeMap<u16, Link>>,
    handlers: RwLock<BTreeMap<u8, Handler>>,
    incoming: mpsc::Sender<Incoming>,
    strangers: Strangers,
    probes: Probes,
    /// Where those that proved themselves came from of late, the newest last.
    came_from: RwLock<BTreeMap<u16, Vec<IpAddr>>>,
}

/// A connection of another replica, of which the first message was read.
struct Incoming {
    stream: Stream,
    /// What was read beyond that message.
    read: BytesMut,
    hello: PeerHello,
    counted: Counted,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers")
            .field("roster", &self.0.roster)
            .finish_non_exhaustive()
    }
}

impl Peers {
    /// Takes connections of others, on the present runtime. It ends when all clones are gone.
    pub(crate) fn start(roster: Roster) -> Self {
        let (incoming, waiting) = mpsc::channel(WAITING);
        let peers = Self(Arc::new(Inner {
            roster,
            links: RwLock::default(),
            handlers: RwLock::default(),
            incoming,
            strangers: Strangers::default(),
            probes: Probes::default(),
            came_from: RwLock::default(),
        }));
        env::spawn(incoming::accept(Arc::downgrade(&peers.0), waiting));
        peers
    }

    /// From here on these are the others, each with the addresses (`host:port`) at which it may be. Connections to those that
    /// are new are begun on the present runtime; those to others than these end.
    pub(crate) fn connect(&self, others: BTreeMap<u16, Vec<String>>) {
        let mut links = self.0.links.write().unwrap_or_else(PoisonError::into_inner);
        links.retain(|id, link| others.get(id).is_some_and(|at| at == link.addresses()));
        for (id, addresses) in others {
            let start = || Link::start(&self.0.roster, id, addresses);
            if id != self.0.roster.id {
                links.entry(id).or_insert_with(start);
            }
        }
    }

    /// Whether another process than this one runs at `address` (`host:port`) as the replica that this one is.
    pub(crate) async fn has_twin_at(&self, address: &str) -> bool {
        let looking = async {
            let stream = link::connect(address).await.ok()?;
            Some(handshake::is_twin(stream, &self.0.roster, &self.0.probes).await)
        };
        let looked = env::timeout(link::CONNECT_LIMIT, looking).await;
        looked.ok().flatten() == Some(true)
    }

    /// Whether a connection from this address may be of that replica: one of late, on which it proved itself, was.
    pub(crate) fn is_at(&self, replica: u16, address: IpAddr) -> bool {
        let came_from = self.0.came_from.read();
        let came_from = came_from.unwrap_or_else(PoisonError::into_inner);
        came_from
            .get(&replica)
            .is_some_and(|addresses| addresses.contains(&address))
    }

    /// The other replicas.
    pub(crate) fn others(&self) -> Vec<u16> {
        let links = self.0.links.read().unwrap_or_else(PoisonError::into_inner);
        links.keys().copied().collect()
    }

    /// Where another replica may be; empty: there is none of this id.
    pub(crate) fn addresses(&self, id: u16) -> Vec<String> {
        let links = self.0.links.read().unwrap_or_else(PoisonError::into_inner);
        links
            .get(&id)
            .map_or_else(Vec::new, |link| link.addresses().to_vec())
    }

    /// Why there is no connection to another replica, where that is known.
    pub(crate) fn trouble(&self, id: u16) -> Option<String> {
        let links = self.0.links.read().unwrap_or_else(PoisonError::into_inner);
        links.get(&id)?.trouble()
    }

    /// Asks another replica.
    pub(crate) async fn ask(
        &self,
        id: u16,
        service: Service,
        body: Bytes,
        limit: Duration,
    ) -> Result<Bytes, AskError> {
        let link = {
            let links = self.0.links.read().unwrap_or_else(PoisonError::into_inner);
            links.get(&id).cloned().ok_or(AskError::Unreachable(id))?
        };
        env::timeout(limit, link.ask(service, body))
            .await
            .unwrap_or(Err(AskError::Late(id)))
    }

    /// From here on `handler` takes the requests of this service.
    pub(crate) fn serve(&self, service: Service, handler: Handler) {
        self.0
            .handlers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(service as u8, handler);
    }

    /// Takes over a connection whose first message says that it comes from a replica.
    pub(crate) fn take(&self, stream: Stream, read: BytesMut, hello: PeerHello, counted: Counted) {
        // With so many waiting, it is dropped, and tried again from the other end.
        let _ = self.0.incoming.try_send(Incoming {
            stream,
            read,
            hello,
            counted,
        });
    }
}

impl Inner {
    /// A replica has proven itself on a connection from this address.
    fn note_address(&self, replica: u16, address: IpAddr) {
        let came_from = self.came_from.write();
        let mut came_from = came_from.unwrap_or_else(PoisonError::into_inner);
        let addresses = came_from.entry(replica).or_default();
        addresses.retain(|known| *known != address);
        addresses.push(address);
        let surplus = addresses.len().saturating_sub(CAME_FROM);
        addresses.drain(..surplus);
    }

    /// Whether this is a replica of the cluster, as far as this one knows.
    fn knows(&self, id: u16) -> bool {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        links.contains_key(&id)
    }

    fn handler(&self, service: u8) -> Option<Handler> {
        let handlers = self.handlers.read();
        handlers
            .unwrap_or_else(PoisonError::into_inner)
            .get(&service)
            .cloned()
    }
}
