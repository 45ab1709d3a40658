//! A server that says what the test wants.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use skyschedule_client::{Builder, Client, Epoch, Membership, Share};
use skyschedule_common::auth::{Decoys, MIN_ITERATIONS, ServerExchange, StoredUser, nonce};
use skyschedule_common::env;
use skyschedule_common::env::net::{Stream, TcpListener};
use skyschedule_common::protocol::bounded::BoundedString;
use skyschedule_common::protocol::codec::{CodecError, FrameCodec, MAX_FRAME};
use skyschedule_common::protocol::messages::{
    AuthMethod, ClientMessage, Code, Consistency, Millis, Numbering, Refusal, ServerHello,
    ServerMessage, Serving, Terms,
};
use tokio_util::codec::Framed;

pub(crate) const M: Membership = Membership::quorum(1);

const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn share(total: u32, numbers: &[u32]) -> Share {
    Share::new(total, numbers.iter().copied().collect()).unwrap()
}

pub(crate) fn refusal(code: Code, retry_after: Option<Duration>) -> Refusal {
    Refusal::new(code, "the reason, and what to do", retry_after)
}

pub(crate) struct Server {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into()).await
    }

    pub(crate) async fn start_at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address, 16).await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address }
    }

    pub(crate) fn client(&self) -> Builder {
        Client::builder()
            .servers([self.address.to_string()])
            .group("orders")
            .client_id("one")
    }

    /// The next connection, not a byte of it read.
    pub(crate) async fn accept(&self) -> Peer {
        let (stream, _) = env::timeout(LIMIT, self.listener.accept())
            .await
            .expect("a connection")
            .unwrap();
        let mut frames = Framed::new(stream, FrameCodec::new());
        frames.codec_mut().set_max_frame(MAX_FRAME);
        Peer {
            frames,
            told: Epoch::ZERO,
        }
    }

    /// The next connection, logged in to a server that asks for no credentials and serves by quorum.
    pub(crate) async fn accept_login(&self) -> Peer {
        let mut peer = self.accept().await;
        peer.hello(AuthMethod::None).await;
        assert!(matches!(peer.next().await, ClientMessage::Login(_)));
        peer.say(ServerMessage::Serving {
            mode: Serving::Quorum,
            hint: None,
        })
        .await;
        peer
    }

    /// The next connection, as member 1 with this share in epoch 1, its first heartbeat answered.
    pub(crate) async fn accept_member(
        &self,
        share: Share,
        consistency: Consistency,
        lease: Millis,
    ) -> Peer {
        let mut peer = self.accept_login().await;
        assert!(matches!(peer.next().await, ClientMessage::Attach { .. }));
        peer.welcome(share, consistency, lease).await;
        peer.alive(lease).await;
        peer
    }
}

/// The server's end of a connection.
pub(crate) struct Peer {
    pub(crate) frames: Framed<Stream, FrameCodec<ClientMessage, ServerMessage>>,
    told: Epoch,
}

impl Peer {
    pub(crate) async fn say(&mut self, message: ServerMessage) {
        self.frames.send(message).await.unwrap();
    }

    pub(crate) async fn hear(&mut self) -> Option<Result<ClientMessage, CodecError>> {
        env::timeout(LIMIT, self.frames.next())
            .await
            .expect("a message, or the end")
    }

    pub(crate) async fn next(&mut self) -> ClientMessage {
        self.hear().await.expect("a message").unwrap()
    }

    /// The next message that is no heartbeat, ping or release of nothing.
    pub(crate) async fn next_of_note(&mut self) -> ClientMessage {
        loop {
            match self.next().await {
                ClientMessage::Heartbeat { .. } | ClientMessage::Ping { .. } => {}
                message => return message,
            }
        }
    }

    pub(crate) async fn hello(&mut self, auth: AuthMethod) {
        assert!(matches!(self.next().await, ClientMessage::Hello(_)));
        let agent = BoundedString::truncated("scripted");
        self.say(ServerMessage::Hello(ServerHello {
            version: 1,
            features: 0,
            auth,
            agent,
        }))
        .await;
    }

    /// The whole SCRAM exchange with the user moon; whether the client's proof was right.
    pub(crate) async fn authenticate(&mut self, password: &str, honest: bool) -> bool {
        self.hello(AuthMethod::ScramSha256).await;
        let decoys = Decoys::new([7; 32], MIN_ITERATIONS);
        let user =
            StoredUser::derive(&password.into(), decoys.salt("moon"), MIN_ITERATIONS).unwrap();
        let ClientMessage::AuthFirst {
            user: name,
            nonce: client,
        } = self.next().await
        else {
            panic!("a login")
        };
        let (challenge, exchange) =
            ServerExchange::challenge(Some(&user), &decoys, &name, &client, &nonce([2; 18]))
                .unwrap();
        let (nonce, salt, iterations) = (challenge.nonce, challenge.salt, challenge.iterations);
        self.say(ServerMessage::AuthChallenge {
            nonce,
            salt,
            iterations,
        })
        .await;
        let ClientMessage::AuthProof { proof } = self.next().await else {
            panic!("a proof")
        };
        let Ok(mut signature) = exchange.verify(&proof) else {
            return false;
        };
        signature[0] ^= u8::from(!honest);
        self.say(ServerMessage::AuthDone { signature }).await;
        true
    }

    pub(crate) async fn welcome(&mut self, share: Share, consistency: Consistency, lease: Millis) {
        self.told = Epoch::quorum(self.told.quorum + 1);
        let terms = Terms {
            consistency,
            numbering: Numbering::Modulo,
            drain_timeout: Millis(5_000),
        };
        self.say(ServerMessage::Welcome {
            membership: M,
            epoch: self.told,
            share,
            terms,
            lease,
        })
        .await;
    }

    pub(crate) async fn tell(&mut self, share: Share) {
        self.told = Epoch::quorum(self.told.quorum + 1);
        self.say(ServerMessage::Told {
            membership: M,
            epoch: self.told,
            share,
        })
        .await;
    }

    /// Answers the next heartbeat.
    pub(crate) async fn alive(&mut self, lease: Millis) {
        loop {
            if let ClientMessage::Heartbeat {
                membership, seq, ..
            } = self.next().await
            {
                return self
                    .say(ServerMessage::Alive {
                        membership,
                        seq,
                        lease,
                        settled: None,
                    })
                    .await;
            }
        }
    }

    /// Answers heartbeats and pings until the client says something else.
    pub(crate) async fn serve(
        &mut self,
        lease: Millis,
    ) -> Option<Result<ClientMessage, CodecError>> {
        loop {
            match self.hear().await {
                Some(Ok(ClientMessage::Heartbeat {
                    membership, seq, ..
                })) => {
                    self.say(ServerMessage::Alive {
                        membership,
                        seq,
                        lease,
                        settled: None,
                    })
                    .await;
                }
                Some(Ok(ClientMessage::Ping { seq })) => {
                    self.say(ServerMessage::Pong { seq }).await;
                }
                other => return other,
            }
        }
    }
}
