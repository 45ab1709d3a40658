//! Who may connect: accepts connections, within limits.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::SinkExt as _;
use skyschedule_common::env;
use skyschedule_common::env::net::{Stream, TcpListener};
use skyschedule_common::protocol::codec::FrameCodec;
use skyschedule_common::protocol::messages::{Code, Refusal, ServerMessage};
use tokio::sync::{mpsc, watch};

use super::places::{Kind, Limits, Places};
use super::relay::Relays;
use super::throttle::Throttle;
use super::{ConnectionId, Frames, SessionEvent, Users, connection};
use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::strangers::Strangers;

/// Pause after a failed accept, which is usually a shortage of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// For lines that are about no address.
const NOBODY: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Connections that the system keeps ready to be accepted.
pub(crate) const BACKLOG: u32 = 4_096;

/// What all sessions of a server share.
#[derive(Debug)]
pub(super) struct Shared {
    /// From accept to login.
    pub(super) login_deadline: Duration,
    places: Arc<Places>,
    pub(super) users: Users,
    pub(super) throttle: Throttle,
    pub(super) events: mpsc::Sender<SessionEvent>,
    pub(super) metrics: Metrics,
    /// None: this replica is alone.
    pub(super) peers: Option<Peers>,
    pub(super) strangers: Strangers,
    pub(super) relays: Relays,
}

/// Accepts connections and starts a session for each.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    shared: Arc<Shared>,
}

impl Listener {
    pub(crate) fn new(
        socket: TcpListener,
        (limits, login_deadline): (Limits, Duration),
        users: Users,
        events: mpsc::Sender<SessionEvent>,
        metrics: Metrics,
        peers: Option<Peers>,
        relays: Relays,
    ) -> Self {
        let shared = Shared {
            login_deadline,
            places: Places::new(limits),
            users,
            throttle: Throttle::default(),
            events,
            metrics,
            peers,
            strangers: Strangers::default(),
            relays,
        };
        Self {
            socket,
            shared: Arc::new(shared),
        }
    }

    /// Runs until `stop` changes.
    pub(crate) async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut next = 0;
        loop {
            let accepted = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return,
                accepted = self.socket.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    next += 1;
                    self.start(stream, peer, ConnectionId(next));
                }
                Err(error) => {
                    if let Some(left_out) = self.shared.strangers.tell(NOBODY, "accept") {
                        tracing::error!(%error, left_out, "cannot accept connections; raise the limit of open descriptors (ulimit -n) if it is exhausted");
                    }
                    env::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    fn start(&self, stream: Stream, peer: SocketAddr, id: ConnectionId) {
        let shared = self.shared.clone();
        let Some(place) = shared.places.take(Kind::From(peer.ip())) else {
            shared.metrics.connection_refused("too_many");
            if let Some(left_out) = shared.strangers.tell(peer.ip(), "too many") {
                tracing::warn!(%peer, left_out, "too many connections; raise max_connections or max_connections_per_address if they are honest");
            }
            env::spawn(async move {
                let mut frames = Frames::with_capacity(stream, FrameCodec::new(), 64);
                let text = "this server has as many connections as it may; try another, or later";
                let refusal = Refusal::new(Code::TOO_MANY, text, Some(Duration::from_secs(1)));
                // It is closed either way.
                let _ =
                    env::timeout(ACCEPT_RETRY, frames.send(ServerMessage::Refused(refusal))).await;
            });
            return;
        };
        let open = shared.metrics.connection();
        env::spawn(connection::serve(stream, id, shared, place, open));
    }
}
