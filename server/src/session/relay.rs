//! A client that reaches this server, but not the one that leads, is carried on to it: as bytes, of which nothing is
//! understood here. What the client and the leader say to each other they prove to each other.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::SinkExt as _;
use skyschedule_common::env;
use skyschedule_common::env::net::{Stream, resolve};
use skyschedule_common::protocol::codec::FrameCodec;
use skyschedule_common::protocol::messages::{ClientMessage, Code, Refusal, ServerMessage};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::sync::watch;
use tokio_util::codec::{Encoder as _, FramedParts};

use super::listener::Shared;
use super::places::Place;
use super::{ConnectionId, Frames};
use crate::consensus::Consensus;
use crate::state::Settings;

/// How long connecting to the leader may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// How long one write may take before its reader counts as one that does not read.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// How long the leader may go on after the client has ended its side, to read its last words.
const LINGER: Duration = Duration::from_secs(2);

/// How long the leader may take to read what is left when a relay has ended. Until then it counts the connection, and so
/// does this server: else relays that are over would keep others out.
const LEFTOVERS: Duration = Duration::from_secs(15);

/// A relay is over when nothing came, either way, for so many leases, the longest that there are.
const IDLE_LEASES: u32 = 3;

/// Bytes on their way in each direction.
const BUFFER: usize = 4 * 1_024;

/// When to ask again where there is no way at present.
const RETRY: Duration = Duration::from_secs(1);

/// The way to whoever leads.
#[derive(Debug)]
pub(crate) struct Relays {
    consensus: Consensus,
    stop: watch::Receiver<bool>,
}

/// Where the leader may be.
struct Leader {
    id: u16,
    addresses: Vec<String>,
}

impl Relays {
    /// They end when `stop` changes.
    pub(crate) fn new(consensus: Consensus, stop: watch::Receiver<bool>) -> Self {
        Self { consensus, stop }
    }

    /// Carries a client's connection on to the leader until either side ends, or tells the client why that cannot be.
    pub(super) async fn serve(
        &self,
        mut frames: Frames,
        (connection, peer): (ConnectionId, SocketAddr),
        place: &Place,
        shared: &Shared,
    ) {
        let opened = async {
            let leader = self.leader()?;
            let carried = place.carry().ok_or_else(too_many)?;
            Ok::<_, Refusal>((leader.id, self.connect(&leader).await?, carried))
        };
        let (leader, to_leader, _carried) = match opened.await {
            Ok(opened) => opened,
            Err(refusal) => {
                shared.metrics.connection_refused("relay");
                if let Some(left_out) = shared.strangers.tell(peer.ip(), "relay refused") {
                    let text = refusal.text.as_str();
                    tracing::info!(%peer, connection = connection.0, text, left_out, "cannot carry a client on to the leader");
                }
                let refused = frames.send(ServerMessage::Refused(refusal));
                // It is closed either way.
                let _ = env::timeout(WRITE_LIMIT, refused).await;
                return;
            }
        };
        let _counted = shared.metrics.relay();
        if let Some(left_out) = shared.strangers.tell(peer.ip(), "relay") {
            tracing::info!(
                %peer, connection = connection.0, leader, left_out,
                "carries a client on to the leader, which it cannot reach itself; check the network between the two"
            );
        }
        let begun = env::now();
        let ended = tokio::select! {
            biased;
            () = self.stopped() => Ok(()),
            ended = self.carry(frames, to_leader) => ended,
        };
        let why = ended.err().map(|error| error.to_string());
        tracing::debug!(%peer, connection = connection.0, lasted_ms = begun.elapsed().as_millis(), why, "carries it no more");
    }

    fn leader(&self) -> Result<Leader, Refusal> {
        let Some(peers) = self.consensus.peers() else {
            let text = "this server is alone, and in no cluster: log in here";
            return Err(Refusal::new(Code::NO_RELAY, text, None));
        };
        if *self.stop.borrow() {
            let text = "this server stops; try another one";
            return Err(Refusal::new(Code::STOPPING, text, Some(RETRY)));
        }
        let id = self.consensus.leadership().leader;
        let Some(id) = id.filter(|id| *id != self.consensus.id()) else {
            let text = match id {
                Some(_) => "this server leads itself: log in here",
                None => "this server knows of none that leads at present; try again in a moment",
            };
            return Err(Refusal::new(Code::NO_RELAY, text, Some(RETRY)));
        };
        // The way that the servers themselves take: clients and servers have one port.
        let addresses = peers.addresses(id);
        Ok(Leader { id, addresses })
    }

    /// Connects, and says that this connection is a relayed one.
    async fn connect(&self, leader: &Leader) -> Result<Stream, Refusal> {
        let Leader { id, addresses } = leader;
        let connecting = async {
            let mut trouble: io::Error = io::ErrorKind::NotFound.into();
            for address in addresses {
                match dial(address).await {
                    Ok(stream) => return Ok(stream),
                    Err(error) => trouble = error,
                }
            }
            Err(trouble)
        };
        let announced = async {
            let mut stream = connecting.await?;
            // Its end means nothing, and must not cut off the client's last words.
            stream.end_with_fin();
            let mut said = BytesMut::new();
            let by = self.consensus.id();
            FrameCodec::<ServerMessage, ClientMessage>::new()
                .encode(ClientMessage::Relayed { by }, &mut said)
                .map_err(io::Error::other)?;
            stream.write_all(&said).await?;
            Ok(stream)
        };
        let why = match env::timeout(CONNECT_LIMIT, announced).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => io::Error::to_string(&error),
            Err(_) => "no answer".to_owned(),
        };
        let text = format!("this server cannot reach the one that leads ({id}) either: {why}");
        Err(Refusal::new(Code::NO_RELAY, &text, Some(RETRY)))
    }

    async fn carry(&self, mut frames: Frames, to_leader: Stream) -> io::Result<()> {
        within(WRITE_LIMIT, async {
            let sent = frames.send(ServerMessage::Relaying).await;
            sent.map_err(io::Error::other)
        })
        .await?;
        let FramedParts { io, read_buf, .. } = frames.into_parts();
        let (mut from_client, mut into_client) = split(io);
        let (mut from_leader, mut into_leader) = split(to_leader);
        within(WRITE_LIMIT, into_leader.write_all(&read_buf)).await?;
        drop(read_buf);
        let ended = {
            let mut back = std::pin::pin!(self.pump(&mut from_leader, &mut into_client));
            tokio::select! {
                biased;
                ended = &mut back => ended,
                ended = self.pump(&mut from_client, &mut into_leader) => match ended {
                    Ok(()) => within(LINGER, back).await,
                    Err(error) => Err(error),
                },
            }
        };
        drop((from_client, into_client));
        // It may have gone first, and then there is nothing to wait for.
        let gone = async {
            into_leader.shutdown().await?;
            tokio::io::copy(&mut from_leader, &mut tokio::io::sink()).await
        };
        let _ = env::timeout(LEFTOVERS, gone).await;
        ended
    }

    /// Carries one direction until it ends, or is idle for too long.
    async fn pump(
        &self,
        from: &mut (impl AsyncRead + Unpin),
        into: &mut (impl AsyncWrite + Unpin),
    ) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        let mut limit = self.idle_limit();
        loop {
            let Ok(read) = env::timeout(limit, from.read(&mut buffer)).await else {
                // Leases may have become longer.
                let known = std::mem::replace(&mut limit, self.idle_limit());
                if limit > known {
                    continue;
                }
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "silent for too long",
                ));
            };
            let length = read?;
            if length == 0 {
                return within(WRITE_LIMIT, into.shutdown()).await;
            }
            within(WRITE_LIMIT, into.write_all(&buffer[..length])).await?;
        }
    }

    /// Whose group it is for is not known here, so that the longest lease of all counts.
    fn idle_limit(&self) -> Duration {
        let longest = self.consensus.read(|state| {
            let leases = state.groups().values().map(|group| group.lease());
            let usual = Settings::default().base_lease();
            leases.max().unwrap_or(usual)
        });
        longest.duration() * IDLE_LEASES
    }

    async fn stopped(&self) {
        // An error means that the server is gone.
        let _ = self.stop.clone().wait_for(|stop| *stop).await;
    }
}

fn too_many() -> Refusal {
    let text =
        "this server carries as many clients on to the leader as it may; try another one, or later";
    Refusal::new(Code::TOO_MANY, text, Some(RETRY))
}

async fn dial(address: &str) -> io::Result<Stream> {
    let mut trouble: io::Error = io::ErrorKind::NotFound.into();
    for address in resolve(address).await? {
        match Stream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => trouble = error,
        }
    }
    Err(trouble)
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the other side does not read");
    env::timeout(limit, work).await.map_err(late)?
}
