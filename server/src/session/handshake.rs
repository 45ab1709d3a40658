//! Version, authentication, login: all within one deadline, in frames that are small.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use skyschedule_common::auth::{AuthError, Nonce, ServerExchange, nonce};
use skyschedule_common::env;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::protocol::bounded::BoundedString;
use skyschedule_common::protocol::codec::{CodecError, MAX_FRAME};
use skyschedule_common::protocol::messages::{
    AuthMethod, ClientHello, ClientMessage, Code, Login, PeerHello, Refusal, ServerHello,
    ServerMessage,
};
use skyschedule_common::protocol::{MAGIC, MAX_WEIGHT, MIN_VERSION, VERSION, features};

use super::places::Place;
use super::throttle::Throttle;
use super::{Frames, Users};
use crate::peers::Peers;

/// Counters above this come from no honest client: half of all that there are.
const MAX_COUNTER: u64 = 1 << 63;

/// Who is at the other end.
#[derive(Debug)]
pub(super) enum Caller {
    /// A client that has logged in.
    Client {
        login: Login,
        /// Bits of optional features that both ends know.
        features: u64,
        /// Another replica carries its bytes.
        relayed: bool,
    },
    /// A client that has proven itself, and wants to be carried on to the leader.
    Traveller,
    /// Another replica, which has not proven itself yet.
    Replica(PeerHello),
}

/// Why a connection ends before its login is complete.
#[derive(Debug)]
pub(super) enum Failure {
    /// The peer ended it.
    Closed,
    /// The peer sent what it should not.
    Protocol(String),
    /// The request is refused.
    Refused {
        refusal: Refusal,
        reason: &'static str,
    },
}

impl From<CodecError> for Failure {
    fn from(error: CodecError) -> Self {
        match error {
            CodecError::Io(_) => Self::Closed,
            error => Self::Protocol(error.to_string()),
        }
    }
}

fn refused(code: Code, text: &str, retry_after: Option<Duration>, reason: &'static str) -> Failure {
    Failure::Refused {
        refusal: Refusal::new(code, text, retry_after),
        reason,
    }
}

/// Leads a new connection to its login, or finds that a replica is at the other end.
pub(super) async fn shake(
    frames: &mut Frames,
    peer: SocketAddr,
    users: &Users,
    throttle: &Throttle,
    place: &mut Place,
    peers: Option<&Peers>,
) -> Result<Caller, Failure> {
    let mut first = next(frames).await?;
    let relayed = matches!(first, ClientMessage::Relayed { .. });
    if let ClientMessage::Relayed { by } = first {
        // It counts apart from others of its address, so that not everybody may say so.
        if !peers.is_some_and(|peers| peers.is_at(by, peer.ip())) {
            let text = format!(
                "replica {by} is said to carry this connection, and has not proven itself from this address to the leader: look whether \
                 its connection to the leader works, and that both take the same way"
            );
            let later = Some(Duration::from_secs(1));
            return Err(refused(Code::NO_RELAY, &text, later, "relay"));
        }
        if !place.is_relayed() {
            let text = "the server between has as many connections to this one as it may; try another, or later";
            let later = Some(Duration::from_secs(1));
            return Err(refused(Code::TOO_MANY, text, later, "too_many"));
        }
        first = next(frames).await?;
    }
    let features = match first {
        ClientMessage::Hello(said) => hello(frames, users, said).await?,
        ClientMessage::Peer(said) if !relayed => return Ok(Caller::Replica(said)),
        _ => return Err(out_of_turn("Hello")),
    };
    let user = if users.are_required() {
        Some(authenticate(frames, peer, users, throttle).await?)
    } else {
        None
    };
    // A login may name many handlers.
    frames.codec_mut().set_max_frame(MAX_FRAME);
    let login = match next(frames).await? {
        ClientMessage::Login(login) => login,
        ClientMessage::Relay if !relayed => return Ok(Caller::Traveller),
        ClientMessage::Relay => {
            let text = "this connection is relayed already, and is not relayed again";
            return Err(refused(Code::NO_RELAY, text, None, "relay"));
        }
        _ => return Err(out_of_turn("Login")),
    };
    check(&login).map_err(Failure::Protocol)?;
    if !users.may_use(user.as_deref(), &login.group) {
        let text = format!(
            "this user may not use group {}; allow it in the server's configuration",
            login.group
        );
        return Err(refused(Code::FORBIDDEN, &text, None, "forbidden"));
    }
    let login = *login;
    Ok(Caller::Client {
        login,
        features,
        relayed,
    })
}

/// Agrees on a version, and on the features that it answers.
async fn hello(frames: &mut Frames, users: &Users, said: ClientHello) -> Result<u64, Failure> {
    let ClientHello {
        magic,
        min_version,
        max_version,
        agent,
        features,
    } = said;
    if magic != MAGIC {
        return Err(Failure::Protocol(
            "the first message is not from a SkySchedule client".to_owned(),
        ));
    }
    let version = VERSION.min(max_version);
    if version < MIN_VERSION || version < min_version {
        let text = format!(
            "this server speaks versions {MIN_VERSION} to {VERSION} of the protocol, the client {min_version} to \
             {max_version}: update the older of the two"
        );
        return Err(refused(Code::VERSION, &text, None, "version"));
    }
    tracing::debug!(agent = agent.as_str(), version, "client said hello");
    let auth = if users.are_required() {
        AuthMethod::ScramSha256
    } else {
        AuthMethod::None
    };
    let agent = BoundedString::truncated(concat!("skyschedule/", env!("CARGO_PKG_VERSION")));
    let features = features & features::ALL;
    send(
        frames,
        ServerMessage::Hello(ServerHello {
            version,
            features,
            auth,
            agent,
        }),
    )
    .await?;
    Ok(features)
}

/// The SCRAM exchange; answers with the name of the user.
async fn authenticate(
    frames: &mut Frames,
    peer: SocketAddr,
    users: &Users,
    throttle: &Throttle,
) -> Result<String, Failure> {
    let ClientMessage::AuthFirst {
        user,
        nonce: client_nonce,
    } = next(frames).await?
    else {
        return Err(out_of_turn("AuthFirst"));
    };
    let malformed = |error: AuthError| Failure::Protocol(error.to_string());
    let (challenge, exchange) = ServerExchange::challenge(
        users.stored(&user),
        users.decoys(),
        &user,
        &client_nonce,
        &server_nonce(),
    )
    .map_err(malformed)?;
    let (nonce, salt, iterations) = (challenge.nonce, challenge.salt, challenge.iterations);
    send(
        frames,
        ServerMessage::AuthChallenge {
            nonce,
            salt,
            iterations,
        },
    )
    .await?;
    let ClientMessage::AuthProof { proof } = next(frames).await? else {
        return Err(out_of_turn("AuthProof"));
    };
    match exchange.verify(&proof) {
        Ok(signature) => {
            send(frames, ServerMessage::AuthDone { signature }).await?;
            Ok(user.into_inner())
        }
        Err(error) => {
            env::sleep(throttle.failed(peer.ip())).await;
            Err(refused(
                Code::CREDENTIALS,
                &error.to_string(),
                None,
                "credentials",
            ))
        }
    }
}

fn server_nonce() -> Nonce {
    let mut random = [0; 18];
    env::rng::fill(&mut random);
    nonce(random)
}

/// What the types do not check.
pub(super) fn check(login: &Login) -> Result<(), String> {
    if login.weight > MAX_WEIGHT {
        return Err(format!(
            "a weight of {} is above {MAX_WEIGHT}",
            login.weight
        ));
    }
    check_epoch(login.epoch)?;
    login
        .membership
        .map_or(Ok(()), |membership| check_counter(membership.number))
}

/// Refuses epochs that no server gave.
pub(super) fn check_epoch(epoch: Epoch) -> Result<(), String> {
    check_counter(epoch.quorum)
}

/// Refuses counters that no server gave.
pub(super) fn check_counter(counter: u64) -> Result<(), String> {
    if counter > MAX_COUNTER {
        Err(format!("{counter} is no number that a server gave"))
    } else {
        Ok(())
    }
}

fn out_of_turn(expected: &str) -> Failure {
    Failure::Protocol(format!(
        "a message out of turn, where {expected} was expected"
    ))
}

async fn next(frames: &mut Frames) -> Result<ClientMessage, Failure> {
    match frames.next().await {
        None => Err(Failure::Closed),
        Some(message) => Ok(message?),
    }
}

async fn send(frames: &mut Frames, message: ServerMessage) -> Result<(), Failure> {
    Ok(frames.send(message).await?)
}
