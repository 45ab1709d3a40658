//! The client's side of the protocol by hand, for what no honest client would do.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::{BufMut as _, BytesMut};
use futures_util::{SinkExt as _, StreamExt as _};
use skyschedule_common::auth::{Challenge, ClientExchange, Credentials, nonce};
use skyschedule_common::env::{self, net::Stream};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{Incarnation, Membership};
use skyschedule_common::protocol::bounded::BoundedVec;
use skyschedule_common::protocol::codec::{self, FrameCodec, MAX_FRAME};
use skyschedule_common::protocol::messages::{
    AuthMethod, ClientHello, ClientMessage, Login, Refusal, ServerMessage,
};
use skyschedule_common::protocol::{MAGIC, MIN_VERSION, VERSION};
use skyschedule_common::share::Share;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio_util::codec::{Decoder, Framed};

use crate::server::{PASSWORD, USER};

/// How long a server may take to answer, where a test says nothing else.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A connection on which a test speaks the protocol.
#[derive(Debug)]
pub struct Peer<S = Stream>(Framed<S, FrameCodec<ServerMessage, ClientMessage>>);

/// What a server says to the first `Attach` that it grants.
#[derive(Debug, Clone)]
pub struct Welcomed {
    /// The membership.
    pub membership: Membership,
    /// Epoch of the share.
    pub epoch: Epoch,
    /// The share.
    pub share: Share,
    /// Length of the lease.
    pub lease: Duration,
}

impl Peer {
    /// Connects, and says nothing.
    pub async fn connect(to: SocketAddr) -> Self {
        let stream = Stream::connect(to)
            .await
            .expect("the server accepts connections");
        Self::over(stream)
    }

    /// Connects and logs in as an honest client would, up to and without `Login`.
    pub async fn authenticated(to: SocketAddr) -> Self {
        let mut peer = Self::connect(to).await;
        peer.authenticate(USER, PASSWORD)
            .await
            .expect("the credentials are right");
        peer
    }

    /// Connects and logs in as an honest client would, up to and with `Login`.
    pub async fn logged_in(to: SocketAddr, group: &str, client: &str) -> Self {
        let mut peer = Self::authenticated(to).await;
        peer.send(ClientMessage::Login(Box::new(login(group, client))))
            .await;
        peer
    }

    /// Connects, logs in and becomes a member as an honest client would.
    pub async fn member(to: SocketAddr, group: &str, client: &str) -> (Self, Welcomed) {
        let mut peer = Self::logged_in(to, group, client).await;
        let welcomed = peer.attach().await;
        (peer, welcomed)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Peer<S> {
    /// Speaks over this connection.
    pub fn over(stream: S) -> Self {
        let mut codec = FrameCodec::new();
        codec.set_max_frame(MAX_FRAME);
        Self(codec.framed(stream))
    }

    /// Sends a message, which must reach the system.
    pub async fn send(&mut self, message: ClientMessage) {
        assert!(self.try_send(message).await, "the server takes messages");
    }

    /// Sends a message; false when the connection is over, or the server has not taken it in time.
    pub async fn try_send(&mut self, message: ClientMessage) -> bool {
        matches!(
            env::timeout(PATIENCE, self.0.send(message)).await,
            Ok(Ok(()))
        )
    }

    /// Sends bytes as they are.
    pub async fn send_bytes(&mut self, bytes: &[u8]) {
        assert!(self.try_send_bytes(bytes).await, "the server takes bytes");
    }

    /// Sends bytes as they are; false when the connection is over, or the server has not taken them in time.
    pub async fn try_send_bytes(&mut self, bytes: &[u8]) -> bool {
        let write = self.0.get_mut().write_all(bytes);
        matches!(env::timeout(3 * PATIENCE, write).await, Ok(Ok(())))
    }

    /// Reads and forgets what has come so far.
    pub async fn skip(&mut self) {
        while let Ok(Some(Ok(_))) = env::timeout(Duration::from_micros(10), self.0.next()).await {}
    }

    /// The server's next message; `None` when it ended the connection.
    pub async fn receive(&mut self) -> Option<ServerMessage> {
        self.receive_within(PATIENCE).await
    }

    /// The server's next message, which must come within `limit`, or `None` when the connection ended.
    pub async fn receive_within(&mut self, limit: Duration) -> Option<ServerMessage> {
        let next = env::timeout(limit, self.0.next()).await;
        let next = next.unwrap_or_else(|_| panic!("the server says nothing for {limit:?}"));
        next.and_then(Result::ok)
    }

    /// The first message for which `wanted` has an answer; others are passed over. The connection must last.
    pub async fn until<T>(&mut self, wanted: impl Fn(ServerMessage) -> Option<T>) -> T {
        let deadline = env::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(env::now());
            let message = self
                .receive_within(left)
                .await
                .expect("the connection lasts");
            if let Some(found) = wanted(message) {
                return found;
            }
        }
    }

    /// `Hello` and the SCRAM exchange; the refusal where the server refuses.
    pub async fn authenticate(&mut self, user: &str, password: &str) -> Result<(), Refusal> {
        self.send(ClientMessage::Hello(hello())).await;
        let method = match self.receive().await {
            Some(ServerMessage::Hello(hello)) => hello.auth,
            Some(ServerMessage::Refused(refusal)) => return Err(refusal),
            other => panic!("{other:?} where the server should say hello"),
        };
        if method == AuthMethod::None {
            return Ok(());
        }
        let exchange = exchange(user, password);
        self.send(ClientMessage::AuthFirst {
            user: exchange.user().clone(),
            nonce: exchange.nonce().clone(),
        })
        .await;
        let challenge = self.challenge().await;
        let (proof, check) = exchange
            .respond(&challenge)
            .expect("the challenge is sound");
        self.send(ClientMessage::AuthProof { proof }).await;
        match self.receive().await {
            Some(ServerMessage::AuthDone { signature }) => {
                check.verify(&signature).expect("the server proves itself");
                Ok(())
            }
            Some(ServerMessage::Refused(refusal)) => Err(refusal),
            other => panic!("{other:?} in answer to a proof"),
        }
    }

    /// The server's challenge, which must come next.
    pub async fn challenge(&mut self) -> Challenge {
        match self.receive().await {
            Some(ServerMessage::AuthChallenge {
                nonce,
                salt,
                iterations,
            }) => Challenge {
                nonce,
                salt,
                iterations,
            },
            other => panic!("{other:?} where a challenge was expected"),
        }
    }

    /// Asks to become a member until the server grants it.
    pub async fn attach(&mut self) -> Welcomed {
        self.send(ClientMessage::Attach {
            membership: None,
            epoch: Epoch::ZERO,
        })
        .await;
        self.until(|message| match message {
            ServerMessage::Welcome {
                membership,
                epoch,
                share,
                lease,
                ..
            } => Some(Welcomed {
                membership,
                epoch,
                share,
                lease: lease.duration(),
            }),
            ServerMessage::Wait(refusal) | ServerMessage::Refused(refusal) => {
                panic!("not let in: {refusal:?}")
            }
            _ => None,
        })
        .await
    }

    /// Sends a heartbeat and waits for its answer.
    pub async fn heartbeat(&mut self, membership: Membership, seq: u64, epoch: Epoch) {
        self.send(ClientMessage::Heartbeat {
            membership,
            seq,
            epoch,
            load: None,
        })
        .await;
        self.until(|message| match message {
            ServerMessage::Alive { seq: answered, .. } if answered == seq => Some(()),
            _ => None,
        })
        .await;
    }

    /// Waits for the server to end the connection, and gives what it said before; it must do so within `limit`.
    pub async fn ended_within(mut self, limit: Duration) -> Vec<ServerMessage> {
        let deadline = env::now() + limit;
        let mut said = Vec::new();
        loop {
            let next = env::timeout_at(deadline, self.0.next()).await;
            match next.unwrap_or_else(|_| panic!("still open after {limit:?}; it said {said:?}")) {
                Some(Ok(message)) => said.push(message),
                Some(Err(_)) | None => return said,
            }
        }
    }
}

/// What a client of this version says first.
pub fn hello() -> ClientHello {
    ClientHello {
        magic: MAGIC,
        min_version: MIN_VERSION,
        max_version: VERSION,
        features: 0,
        agent: "a test".try_into().expect("it is short"),
    }
}

/// Begins a SCRAM exchange.
pub fn exchange(user: &str, password: &str) -> ClientExchange {
    let mut random = [0; 18];
    env::rng::fill(&mut random);
    let credentials = Credentials::new(user, password).expect("these can be credentials");
    ClientExchange::new(&credentials, nonce(random)).expect("the nonce is sound")
}

/// A frame with this body.
pub fn frame(body: &[u8]) -> BytesMut {
    let mut frame = BytesMut::new();
    frame.put_u32(u32::try_from(body.len()).expect("it fits in a frame"));
    frame.put_slice(body);
    frame
}

/// The frame of a message.
pub fn message(message: &ClientMessage) -> BytesMut {
    frame(&codec::encode(message, MAX_FRAME).expect("a client could send it"))
}

/// A login that asks for a new membership and says no more than it must.
pub fn login(group: &str, client: &str) -> Login {
    let random = u128::from(env::rng::u64()) << 64 | u128::from(env::rng::u64());
    Login {
        group: group.parse().expect("a name of a group"),
        client: client.parse().expect("a name of a client"),
        incarnation: Incarnation(random),
        membership: None,
        epoch: Epoch::ZERO,
        consistency: None,
        weight: 1,
        ends: None,
        ring_key: None,
        handlers: BoundedVec::new(),
    }
}

/// A plain connection that comes from `source`; `None` where the system or the server refuses it.
pub async fn connect_from(source: IpAddr, to: SocketAddr) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().ok()?;
    socket.bind((source, 0).into()).ok()?;
    socket.connect(to).await.ok()
}

/// Reads until the server ends the connection, which it must do within `limit`; gives what came.
pub async fn read_to_end(stream: &mut (impl AsyncRead + Unpin), limit: Duration) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = env::timeout(limit, stream.read_to_end(&mut bytes)).await;
    match read {
        Err(_) => panic!("the server keeps the connection for more than {limit:?}"),
        // A reset ends it, too.
        Ok(_) => bytes,
    }
}
