//! One connection to one server: connect, agree on the version, authenticate, then carry messages.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use skyschedule_common::auth::{Challenge, ClientExchange, Credentials, nonce};
use skyschedule_common::env::net::{Stream, resolve};
use skyschedule_common::env::{self, rng};
use skyschedule_common::protocol::bounded::BoundedString;
use skyschedule_common::protocol::codec::{CodecError, FrameCodec, MAX_FRAME};
use skyschedule_common::protocol::messages::{
    AuthMethod, ClientHello, ClientMessage, ServerMessage,
};
use skyschedule_common::protocol::{MAGIC, MIN_VERSION, VERSION, features};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio_util::codec::Framed;

use crate::membership::{ConnectionId, End, Event};

/// Longest wait for one address of a server to accept.
const CONNECT: Duration = Duration::from_secs(2);

/// Most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 8;

/// Longest wait for the server to end its side after the goodbye.
const LINGER: Duration = Duration::from_secs(2);

/// Initial size of each buffer.
const BUFFER: usize = 1_024;

type Frames = Framed<Stream, FrameCodec<ServerMessage, ClientMessage>>;

/// Where to connect, and as whom.
pub(crate) struct Dial {
    pub(crate) address: String,
    /// Have that server carry the connection on to the one that leads.
    pub(crate) relay: bool,
    pub(crate) credentials: Option<Credentials>,
}

/// What is to be sent.
pub(crate) enum Outgoing {
    /// A message.
    Frame(ClientMessage),
    /// Nothing more: the goodbye was said.
    Finish,
}

/// Lives as long as the connection. Dropped, it resets it. Whether it ended after a goodbye, with the server's consent.
pub(crate) async fn run(
    id: ConnectionId,
    dial: Dial,
    outgoing: mpsc::Receiver<Outgoing>,
    events: mpsc::Sender<(ConnectionId, Event)>,
) -> bool {
    let Err(end) = carry(id, dial, outgoing, &events).await else {
        return true;
    };
    // The client is gone: then nobody needs to know.
    let _ = events.send((id, Event::Closed(end))).await;
    false
}

/// Ends without an error only after the goodbye.
async fn carry(
    id: ConnectionId,
    dial: Dial,
    mut outgoing: mpsc::Receiver<Outgoing>,
    events: &mpsc::Sender<(ConnectionId, Event)>,
) -> Result<(), End> {
    let stream = connect(&dial.address).await?;
    let mut ends = stream.local_addr().ok().zip(stream.peer_addr().ok());
    let peer = ends.map(|ends| ends.1);
    let mut frames = Framed::with_capacity(stream, FrameCodec::new(), BUFFER);
    let mut features = log_in(&mut frames, dial.credentials.clone(), peer).await?;
    if dial.relay {
        go_on(&mut frames, features).await?;
        // Now the one that leads is at the other end, and has to prove itself as well.
        features = log_in(&mut frames, dial.credentials, peer).await?;
        ends = None;
    }
    frames.codec_mut().set_max_frame(MAX_FRAME);
    let report = |event| async {
        events
            .send((id, event))
            .await
            .map_err(|_| lost("the client is closed"))
    };
    report(Event::Ready { ends, features }).await?;
    loop {
        tokio::select! {
            biased;
            message = next(&mut frames) => report(Event::Message(message?)).await?,
            first = outgoing.recv() => {
                let mut message = first;
                loop {
                    match message {
                        Some(Outgoing::Frame(message)) => frames.feed(message).await.map_err(failed)?,
                        Some(Outgoing::Finish) => return finish(frames).await,
                        None => return Err(lost("closed by this client")),
                    }
                    match outgoing.try_recv() {
                        Ok(more) => message = Some(more),
                        Err(_) => break,
                    }
                }
                frames.flush().await.map_err(failed)?;
            }
        }
    }
}

async fn connect(address: &str) -> Result<Stream, End> {
    let resolved = env::timeout(CONNECT, resolve(address)).await;
    let resolved = resolved.map_err(|_| lost("its name cannot be resolved: no answer"))?;
    let addresses =
        resolved.map_err(|error| End::Failed(format!("its name cannot be resolved: {error}")))?;
    let mut trouble = "its name has no address".to_owned();
    for address in addresses.into_iter().take(MAX_ADDRESSES) {
        match env::timeout(CONNECT, Stream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => trouble = format!("cannot connect to {address}: {error}"),
            Err(_) => trouble = format!("cannot connect to {address}: no answer"),
        }
    }
    Err(End::Failed(trouble))
}

/// Has the server carry this connection on to the one that leads.
async fn go_on(frames: &mut Frames, features: u64) -> Result<(), End> {
    if features & features::RELAY == 0 {
        let text = "it cannot carry this client on to the server that leads: update it";
        return Err(End::Unfit(text.to_owned()));
    }
    send(frames, ClientMessage::Relay).await?;
    match next(frames).await? {
        ServerMessage::Relaying => Ok(()),
        _ => Err(unexpected()),
    }
}

/// Hello and SCRAM; the server proves that it knows the user, too. The features that both ends know.
async fn log_in(
    frames: &mut Frames,
    credentials: Option<Credentials>,
    peer: Option<SocketAddr>,
) -> Result<u64, End> {
    let hello = ClientHello {
        magic: MAGIC,
        min_version: MIN_VERSION,
        max_version: VERSION,
        features: features::ALL,
        agent: BoundedString::truncated(concat!("skyschedule-client ", env!("CARGO_PKG_VERSION"))),
    };
    send(frames, ClientMessage::Hello(hello)).await?;
    let ServerMessage::Hello(hello) = next(frames).await? else {
        return Err(unexpected());
    };
    if !(MIN_VERSION..=VERSION).contains(&hello.version) {
        return Err(End::Unfit(format!(
            "it chose version {} of the protocol, which was not offered",
            hello.version
        )));
    }
    let features = hello.features;
    match (hello.auth, credentials) {
        (AuthMethod::None, None) => Ok(features),
        // A server without users listens on loopback only: another one that asks for nothing is an impostor.
        (AuthMethod::None, Some(_)) if peer.is_some_and(|peer| peer.ip().is_loopback()) => Ok(features),
        (AuthMethod::None, Some(_)) => Err(End::Unfit(
            "it does not prove that it knows this user: set a user up there, or give the client no credentials".to_owned(),
        )),
        (AuthMethod::ScramSha256, None) => {
            Err(End::Unfit("it asks for user and password: give them by Builder::credentials".to_owned()))
        }
        (AuthMethod::ScramSha256, Some(credentials)) => {
            authenticate(frames, &credentials).await?;
            Ok(features)
        }
    }
}

async fn authenticate(frames: &mut Frames, credentials: &Credentials) -> Result<(), End> {
    let unfit = |error: skyschedule_common::auth::AuthError| End::Unfit(error.to_string());
    let mut random = [0; 18];
    rng::fill(&mut random);
    let exchange = ClientExchange::new(credentials, nonce(random)).map_err(unfit)?;
    let first = ClientMessage::AuthFirst {
        user: exchange.user().clone(),
        nonce: exchange.nonce().clone(),
    };
    send(frames, first).await?;
    let ServerMessage::AuthChallenge {
        nonce,
        salt,
        iterations,
    } = next(frames).await?
    else {
        return Err(unexpected());
    };
    let challenge = Challenge {
        nonce,
        salt,
        iterations,
    };
    let response = if exchange.knows_key(&challenge) {
        exchange.respond(&challenge)
    } else {
        // Deriving the key takes long, and heartbeats of other connections do not wait for it.
        let derived = env::blocking(move || exchange.respond(&challenge)).await;
        derived.map_err(|error| End::Failed(error.to_string()))?
    };
    let (proof, check) = response.map_err(unfit)?;
    send(frames, ClientMessage::AuthProof { proof }).await?;
    let ServerMessage::AuthDone { signature } = next(frames).await? else {
        return Err(unexpected());
    };
    check.verify(&signature).map_err(unfit)
}

/// The end after the goodbye (F3).
async fn finish(mut frames: Frames) -> Result<(), End> {
    frames.flush().await.map_err(failed)?;
    let mut stream = frames.into_inner();
    stream.end_with_fin();
    let ended = async {
        stream.shutdown().await?;
        // A close with unread bytes would be a reset.
        let mut rest = [0; BUFFER];
        while stream.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    match env::timeout(LINGER, ended).await {
        Ok(ended) => ended.map_err(|error| failed(error.into())),
        Err(_) => Err(lost("it did not end its side after the goodbye")),
    }
}

async fn send(frames: &mut Frames, message: ClientMessage) -> Result<(), End> {
    frames.send(message).await.map_err(failed)
}

/// The next message; a refusal is the end.
async fn next(frames: &mut Frames) -> Result<ServerMessage, End> {
    match frames.next().await {
        Some(Ok(ServerMessage::Refused(refusal))) => Err(End::Refused(refusal)),
        Some(Ok(message)) => Ok(message),
        Some(Err(error)) => Err(failed(error)),
        None => Err(lost("the server ended it")),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: CodecError) -> End {
    End::Failed(error.to_string())
}

fn lost(reason: &str) -> End {
    End::Failed(reason.to_owned())
}

fn unexpected() -> End {
    End::Failed("an answer that does not belong there: check that it is a SkySchedule server of this version".to_owned())
}
