//! One connection: bytes become events for the coordinator, and its messages become bytes.
//!
//! A session decides nothing about shares. It keeps the deadlines and limits of its own connection,
//! authenticates the peer, and says how the connection ended.
//!
//! | file | one idea |
//! |---|---|
//! | `listener` | who may connect |
//! | `handshake` | version, authentication, login |
//! | `connection` | the exchange after the login |
//! | `allowance` | floods are slowed down |
//! | `users` | who may log in, to which groups |
//! | `throttle` | wrong passwords cost time |
//! | `places` | how many connections there may be |
//! | `relay` | a client that cannot reach the leader is carried on to it |

mod allowance;
mod connection;
mod handshake;
mod listener;
mod places;
mod relay;
mod throttle;
mod users;

use std::net::SocketAddr;
use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::env::net::{Ending, Stream};
use skyschedule_common::protocol::codec::FrameCodec;
use skyschedule_common::protocol::messages::{ClientMessage, Login, ServerMessage};
use tokio::sync::mpsc;
use tokio_util::codec::Framed;

pub(crate) use listener::{BACKLOG, Listener};
pub(crate) use places::Limits;
pub(crate) use relay::Relays;
pub(crate) use users::Users;

/// Messages that wait to be written to one client; one that lets more pile up is dropped.
const OUTBOX: usize = 64;

type Frames = Framed<Stream, FrameCodec<ClientMessage, ServerMessage>>;

/// Tells the connections of one process apart; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(pub(crate) u64);

/// What the coordinator learns from sessions.
#[derive(Debug)]
pub(crate) enum SessionEvent {
    /// A client has authenticated itself and named its group.
    LoggedIn(Box<LoggedIn>),
    /// A later message, and when it was read from the socket.
    Message {
        connection: ConnectionId,
        read_at: Instant,
        message: ClientMessage,
    },
    /// The connection is over.
    Ended {
        connection: ConnectionId,
        ending: Ending,
    },
}

/// A connection whose client is known.
#[derive(Debug)]
pub(crate) struct LoggedIn {
    pub(crate) connection: ConnectionId,
    pub(crate) login: Login,
    /// Bits of optional features that both ends know.
    pub(crate) features: u64,
    pub(crate) peer: SocketAddr,
    /// No proxy between: both ends are those that the client sees, so that a FIN is its own.
    pub(crate) direct: bool,
    pub(crate) outbox: Outbox,
}

/// What a session is asked to do.
///
/// Small, since a queue has room for many from the beginning, and there are many queues.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Send(Box<ServerMessage>),
    /// Close the connection when nothing was read for so long.
    IdleLimit(Duration),
}

/// The sending end of a session's queue. Dropping it closes the connection, after what is queued.
#[derive(Debug)]
pub(crate) struct Outbox(mpsc::Sender<Outgoing>);

/// The client does not read what it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooSlow;

impl Outbox {
    fn new() -> (Self, mpsc::Receiver<Outgoing>) {
        let (sender, receiver) = mpsc::channel(OUTBOX);
        (Self(sender), receiver)
    }

    /// Queues a message. A session that has ended takes it and forgets it.
    pub(crate) fn send(&self, message: ServerMessage) -> Result<(), TooSlow> {
        self.put(Outgoing::Send(Box::new(message)))
    }

    /// Sets how long the client may be silent.
    pub(crate) fn idle_limit(&self, limit: Duration) -> Result<(), TooSlow> {
        self.put(Outgoing::IdleLimit(limit))
    }

    fn put(&self, item: Outgoing) -> Result<(), TooSlow> {
        match self.0.try_send(item) {
            Err(mpsc::error::TrySendError::Full(_)) => Err(TooSlow),
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
        }
    }
}
