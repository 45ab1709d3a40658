//! Both ends of a connection prove that they know the cluster's secret.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use skyschedule_common::auth::{Introduction, Role};
use skyschedule_common::env;
use skyschedule_common::env::net::Stream;
use skyschedule_common::protocol::MAGIC;
use skyschedule_common::protocol::codec::{CodecError, FrameCodec, MAX_FRAME};
use skyschedule_common::protocol::messages::{ClientMessage, PeerHello, ServerMessage};
use tokio_util::codec::{Framed, FramedParts};

use super::frame::{Frames, PeerFrame, Text};
use super::{Counted, Incoming, Roster, VERSION};

/// How long it may take.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(1);

/// Why two replicas do not talk.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The connection failed.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The other end closed it.
    #[error("it closed the connection; it may be stopping")]
    Closed,
    /// The other end says why.
    #[error("it refuses: {0}")]
    Refused(String),
    /// The other end does not know the secret.
    #[error("it does not know this cluster's secret; give all replicas the same cluster_secret")]
    Secret,
    /// The other end has seen this replica's proof, and goes away without its own.
    #[error(
        "it ended the connection when it saw this replica's proof; if it has another cluster_secret, give all replicas the same"
    )]
    Unproven,
    /// Something else than expected.
    #[error("it does not speak as a replica does; check its address, and its version")]
    Protocol,
    /// The wrong replica, or the wrong version.
    #[error("{0}")]
    Wrong(String),
    /// It knows the secret, and is this replica, too.
    #[error(
        "two processes run as replica {0}, this one and the one that introduces itself here: start the one that is wrong with a \
         --replica-id of its own, or not at all"
    )]
    Twin(u16),
    /// This process has reached itself.
    #[error("this is the process that asks")]
    Oneself,
}

/// Introductions of this process to whoever has its own address, while they last.
pub(super) type Probes = Mutex<BTreeSet<[u8; 32]>>;

/// Introduces this replica to the one at the other end.
pub(super) async fn dial(
    stream: Stream,
    roster: &Roster,
    to: u16,
) -> Result<Frames, HandshakeError> {
    let mut frames = introduce(stream, roster, to, nonce()).await?;
    match next(&mut frames).await? {
        PeerFrame::Accepted => {}
        PeerFrame::Refused { text } => return Err(HandshakeError::Refused(text.into_inner())),
        _ => return Err(HandshakeError::Protocol),
    }
    frames.codec_mut().set_max_frame(MAX_FRAME);
    Ok(frames)
}

/// Whether another process than this one is at the other end, knows the secret, and is this replica, too.
pub(super) async fn is_twin(stream: Stream, roster: &Roster, probes: &Probes) -> bool {
    let nonce = nonce();
    let probes = || probes.lock().unwrap_or_else(PoisonError::into_inner);
    probes().insert(nonce);
    let introduced = introduce(stream, roster, roster.id, nonce);
    let introduced = env::timeout(HANDSHAKE_LIMIT, introduced).await;
    probes().remove(&nonce);
    matches!(introduced, Ok(Ok(_)))
}

/// Both ends have proven that they know the secret; whether this replica is taken is not said yet.
async fn introduce(
    stream: Stream,
    roster: &Roster,
    to: u16,
    dialer_nonce: [u8; 32],
) -> Result<Frames, HandshakeError> {
    let mut first = Framed::new(stream, FrameCodec::<ServerMessage, ClientMessage>::new());
    first
        .send(ClientMessage::Peer(PeerHello {
            magic: MAGIC,
            version: VERSION,
            from: roster.id,
            to,
            nonce: dialer_nonce,
        }))
        .await?;
    let FramedParts { io, .. } = first.into_parts();
    let mut frames = Frames::new(io, FrameCodec::new());
    let (acceptor_nonce, proof) = match next(&mut frames).await? {
        PeerFrame::Welcome { nonce, proof } => (nonce, proof),
        PeerFrame::Refused { text } => return Err(HandshakeError::Refused(text.into_inner())),
        _ => return Err(HandshakeError::Protocol),
    };
    let introduction = Introduction {
        from: roster.id,
        to,
        dialer_nonce,
        acceptor_nonce,
    };
    if !roster.key.verify(Role::Acceptor, &introduction, &proof) {
        return refuse(&mut frames, HandshakeError::Secret).await;
    }
    let proof = roster.key.prove(Role::Dialer, &introduction);
    frames.send(PeerFrame::Proof { proof }).await?;
    Ok(frames)
}

/// Answers a replica that introduced itself.
pub(super) async fn accept(
    incoming: Incoming,
    roster: &Roster,
    probes: &Probes,
) -> Result<(u16, Frames, Counted), HandshakeError> {
    let Incoming {
        stream,
        read,
        hello,
        counted,
    } = incoming;
    let mut parts = FramedParts::new::<PeerFrame>(stream, FrameCodec::new());
    parts.read_buf = read;
    let mut frames = Frames::from_parts(parts);
    if let Err(text) = check(&hello, roster) {
        return refuse(&mut frames, HandshakeError::Wrong(text)).await;
    }
    let is_own = |probes: &Probes| {
        let probes = probes.lock().unwrap_or_else(PoisonError::into_inner);
        probes.contains(&hello.nonce)
    };
    if hello.from == roster.id && is_own(probes) {
        return refuse(&mut frames, HandshakeError::Oneself).await;
    }
    let acceptor_nonce = nonce();
    let introduction = Introduction {
        from: hello.from,
        to: hello.to,
        dialer_nonce: hello.nonce,
        acceptor_nonce,
    };
    let proof = roster.key.prove(Role::Acceptor, &introduction);
    frames
        .send(PeerFrame::Welcome {
            nonce: acceptor_nonce,
            proof,
        })
        .await?;
    let proof = match next(&mut frames).await {
        Ok(PeerFrame::Proof { proof }) => proof,
        Ok(PeerFrame::Refused { text }) => return Err(HandshakeError::Refused(text.into_inner())),
        Ok(_) => return Err(HandshakeError::Protocol),
        Err(HandshakeError::Closed | HandshakeError::Codec(CodecError::Io(_))) => {
            return Err(HandshakeError::Unproven);
        }
        Err(error) => return Err(error),
    };
    if !roster.key.verify(Role::Dialer, &introduction, &proof) {
        return refuse(&mut frames, HandshakeError::Secret).await;
    }
    if hello.from == roster.id {
        return refuse(&mut frames, HandshakeError::Twin(roster.id)).await;
    }
    frames.send(PeerFrame::Accepted).await?;
    frames.codec_mut().set_max_frame(MAX_FRAME);
    Ok((hello.from, frames, counted))
}

fn check(hello: &PeerHello, roster: &Roster) -> Result<(), String> {
    let PeerHello {
        magic,
        version,
        from,
        to,
        ..
    } = *hello;
    if magic != MAGIC {
        return Err("the first message is not from a replica of SkySchedule".into());
    }
    if version != VERSION {
        return Err(format!(
            "replica {} speaks version {VERSION} between replicas, and replica {from} version {version}; update the older",
            roster.id
        ));
    }
    if to != roster.id {
        return Err(format!(
            "this is replica {}, and replica {from} looks for replica {to} here: if this should be replica {to}, start it with \
             --replica-id {to}; else correct the address of replica {to} in the peers of replica {from}",
            roster.id
        ));
    }
    // Whoever knows the secret may ask; what it may ask depends on whether it is in the cluster.
    if from == 0 {
        return Err("replicas count from 1".into());
    }
    Ok(())
}

async fn refuse<T>(frames: &mut Frames, why: HandshakeError) -> Result<T, HandshakeError> {
    let text = match &why {
        HandshakeError::Secret => {
            "this cluster's secret is another one; give all replicas the same cluster_secret".into()
        }
        other => other.to_string(),
    };
    let text = Text::truncated(&text);
    // It may be gone.
    let _ = frames.send(PeerFrame::Refused { text }).await;
    Err(why)
}

async fn next(frames: &mut Frames) -> Result<PeerFrame, HandshakeError> {
    match frames.next().await {
        None => Err(HandshakeError::Closed),
        Some(frame) => Ok(frame?),
    }
}

fn nonce() -> [u8; 32] {
    let mut nonce = [0; 32];
    env::rng::fill(&mut nonce);
    nonce
}
