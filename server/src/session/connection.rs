//! The exchange after the login.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use skyschedule_common::env::{self, net::Ending, net::Stream};
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::MAX_WEIGHT;
use skyschedule_common::protocol::codec::{CodecError, FrameCodec};
use skyschedule_common::protocol::messages::{ClientMessage, Code, Refusal, ServerMessage};
use tokio::sync::mpsc;
use tokio_util::codec::FramedParts;

use super::allowance::{Allowance, Flood};
use super::handshake::{self, Caller, Failure, check_counter, check_epoch};
use super::listener::Shared;
use super::places::Place;
use super::{ConnectionId, Frames, LoggedIn, Outbox, Outgoing, SessionEvent};
use crate::metrics::OpenConnection;

/// How long one write may take before the client counts as one that does not read.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// How long a refusal may take to go out.
const REFUSAL_LIMIT: Duration = Duration::from_secs(1);

/// How long a client may be silent until the coordinator says otherwise.
const FIRST_IDLE_LIMIT: Duration = Duration::from_secs(30);

/// First size of the read buffer in bytes: heartbeats are small, and there are many connections.
const READ_BUFFER: usize = 512;

/// Serves one connection to its end.
pub(super) async fn serve(
    stream: Stream,
    connection: ConnectionId,
    shared: Arc<Shared>,
    mut place: Place,
    open: OpenConnection,
) {
    let Ok(peer) = stream.peer_addr() else { return };
    let local = stream.local_addr().ok();
    let mut frames = Frames::with_capacity(stream, FrameCodec::new(), READ_BUFFER);
    // Boxed: the connection shall not keep the room that its login took.
    let shaking = Box::pin(handshake::shake(
        &mut frames,
        peer,
        &shared.users,
        &shared.throttle,
        &mut place,
        shared.peers.as_ref(),
    ));
    let shaken = env::timeout(shared.login_deadline, shaking).await;
    let (login, features, relayed) = match shaken {
        Ok(Ok(Caller::Client {
            login,
            features,
            relayed,
        })) => (login, features, relayed),
        Ok(Ok(Caller::Traveller)) => {
            let who = (connection, peer);
            return Box::pin(shared.relays.serve(frames, who, &place, &shared)).await;
        }
        Ok(Ok(Caller::Replica(hello))) => {
            return match &shared.peers {
                Some(peers) => {
                    let FramedParts { io, read_buf, .. } = frames.into_parts();
                    peers.take(io, read_buf, hello, Box::new((place, open)));
                }
                None => {
                    let text =
                        "this server is alone, and in no cluster; give all replicas the same peers";
                    let refusal = Refusal::new(Code::PROTOCOL, text, None);
                    close(&mut frames, refusal).await;
                }
            };
        }
        Ok(Err(failure)) => {
            return turn_away(&mut frames, connection, peer, failure, &shared).await;
        }
        Err(_) => {
            let text = "the login took too long; check the network and that the client is one of SkySchedule's";
            let refusal = Refusal::new(Code::DEADLINE, text, None);
            let failure = Failure::Refused {
                refusal,
                reason: "deadline",
            };
            return turn_away(&mut frames, connection, peer, failure, &shared).await;
        }
    };
    shared.metrics.login("ok");
    let same_ends = |ends| Some(ends) == local.map(|local| (peer, local));
    let direct = !relayed && login.ends.is_some_and(same_ends);
    let (outbox, queue) = Outbox::new();
    let logged_in = LoggedIn {
        connection,
        login,
        features,
        peer,
        direct,
        outbox,
    };
    if shared
        .events
        .send(SessionEvent::LoggedIn(Box::new(logged_in)))
        .await
        .is_err()
    {
        return;
    }
    let mut ending = converse(&mut frames, connection, queue, &shared).await;
    if relayed {
        ending = Ending::Silence;
    }
    // The coordinator may have stopped: then there is nobody to tell.
    let _ = shared
        .events
        .send(SessionEvent::Ended { connection, ending })
        .await;
}

/// Tells the peer why it is not served, as far as it listens.
async fn turn_away(
    frames: &mut Frames,
    connection: ConnectionId,
    peer: std::net::SocketAddr,
    failure: Failure,
    shared: &Shared,
) {
    let refusal = match failure {
        Failure::Closed => return,
        Failure::Protocol(what) => {
            shared.metrics.protocol_error();
            if let Some(left_out) = shared.strangers.tell(peer.ip(), "protocol") {
                tracing::info!(%peer, connection = connection.0, what, left_out, "closed a connection that does not follow the protocol");
            }
            Refusal::new(Code::PROTOCOL, &what, None)
        }
        Failure::Refused { refusal, reason } => {
            shared.metrics.login(reason);
            if let Some(left_out) = shared.strangers.tell(peer.ip(), reason) {
                tracing::warn!(%peer, connection = connection.0, reason, text = refusal.text.as_str(), left_out, "refused a login");
            }
            refusal
        }
    };
    close(frames, refusal).await;
}

async fn close(frames: &mut Frames, refusal: Refusal) {
    // The peer may be gone, or may not read: it is closed either way.
    let _ = env::timeout(REFUSAL_LIMIT, frames.send(ServerMessage::Refused(refusal))).await;
}

/// Carries messages both ways until one side ends.
async fn converse(
    frames: &mut Frames,
    connection: ConnectionId,
    mut queue: mpsc::Receiver<Outgoing>,
    shared: &Shared,
) -> Ending {
    let mut idle_limit = FIRST_IDLE_LIMIT;
    let mut heard = env::now();
    let mut allowance = Allowance::new(heard);
    // One timer that is left alone while messages come: there are many connections.
    let mut silence = pin!(env::sleep_roughly(idle_limit));
    let mut silence_limit = idle_limit;
    loop {
        if silence_limit != idle_limit {
            silence_limit = idle_limit;
            silence.set(env::sleep_roughly(idle_limit));
        }
        tokio::select! {
            biased;
            // First: one that sends without end must also be told, and closed once the coordinator drops it.
            outgoing = queue.recv() => {
                let written = match outgoing {
                    None => return Ending::Reset,
                    Some(Outgoing::IdleLimit(limit)) => { idle_limit = limit; true }
                    Some(Outgoing::Send(message)) => write(frames, message, &mut queue, &mut idle_limit).await,
                };
                if !written {
                    return too_slow(connection, shared);
                }
            }
            incoming = frames.next() => {
                let message = match incoming {
                    None => return Ending::Fin,
                    Some(Err(CodecError::Io(error))) => return Ending::of(&error),
                    Some(Err(error)) => return misbehaved(frames, connection, &error.to_string(), shared).await,
                    Some(Ok(message)) => message,
                };
                heard = env::now();
                match allowance.take(heard) {
                    Ok(Duration::ZERO) => {}
                    Ok(wait) => env::sleep(wait).await,
                    Err(Flood) => {
                        let what = "it does not stop sending more messages than any client has reason to";
                        return misbehaved(frames, connection, what, shared).await;
                    }
                }
                if let Err(what) = check(&message) {
                    return misbehaved(frames, connection, &what, shared).await;
                }
                if let ClientMessage::Ping { seq } = message {
                    let pong = Box::new(ServerMessage::Pong { seq });
                    if !write(frames, pong, &mut queue, &mut idle_limit).await {
                        return too_slow(connection, shared);
                    }
                    continue;
                }
                let event = SessionEvent::Message { connection, read_at: heard, message };
                if shared.events.send(event).await.is_err() {
                    return Ending::Reset;
                }
            }
            () = &mut silence => {
                let left = idle_limit.saturating_sub(heard.elapsed());
                if left.is_zero() {
                    tracing::info!(connection = connection.0, silent_s = idle_limit.as_secs(), "closed a silent connection");
                    return Ending::Reset;
                }
                silence.set(env::sleep_roughly(left));
            }
        }
    }
}

/// Writes a message and all that is queued behind it; false when the client does not read.
async fn write(
    frames: &mut Frames,
    message: Box<ServerMessage>,
    queue: &mut mpsc::Receiver<Outgoing>,
    idle_limit: &mut Duration,
) -> bool {
    let write = pin!(async {
        frames.feed(*message).await?;
        while let Ok(outgoing) = queue.try_recv() {
            match outgoing {
                Outgoing::Send(message) => frames.feed(*message).await?,
                Outgoing::IdleLimit(limit) => *idle_limit = limit,
            }
        }
        frames.flush().await
    });
    // A failed write is seen by the next read, which also says how the connection ended.
    env::timeout(WRITE_LIMIT, write).await.is_ok()
}

fn too_slow(connection: ConnectionId, shared: &Shared) -> Ending {
    shared.metrics.slow_reader();
    tracing::warn!(
        connection = connection.0,
        "dropped a client that does not read what it is sent; look for a blocked or overloaded process"
    );
    Ending::Reset
}

async fn misbehaved(
    frames: &mut Frames,
    connection: ConnectionId,
    what: &str,
    shared: &Shared,
) -> Ending {
    shared.metrics.protocol_error();
    tracing::warn!(
        connection = connection.0,
        what,
        "closed a connection that does not follow the protocol"
    );
    close(frames, Refusal::new(Code::PROTOCOL, what, None)).await;
    Ending::Reset
}

/// What the types do not check.
fn check(message: &ClientMessage) -> Result<(), String> {
    let member = |membership: &Membership| check_counter(membership.number);
    match message {
        ClientMessage::Hello(_)
        | ClientMessage::AuthFirst { .. }
        | ClientMessage::AuthProof { .. }
        | ClientMessage::Peer(_)
        | ClientMessage::Relay
        | ClientMessage::Relayed { .. } => Err("a message of the login after the login".to_owned()),
        ClientMessage::Login(login) => handshake::check(login),
        ClientMessage::Attach { membership, epoch }
        | ClientMessage::AttachToLeader { membership, epoch } => {
            check_epoch(*epoch)?;
            membership.as_ref().map_or(Ok(()), member)
        }
        ClientMessage::Heartbeat {
            membership, epoch, ..
        }
        | ClientMessage::Released {
            membership, epoch, ..
        } => {
            check_epoch(*epoch)?;
            member(membership)
        }
        ClientMessage::Update {
            membership, weight, ..
        } => {
            if let Some(weight) = weight.filter(|weight| *weight > MAX_WEIGHT) {
                return Err(format!("a weight of {weight} is above {MAX_WEIGHT}"));
            }
            member(membership)
        }
        ClientMessage::Detach { membership }
        | ClientMessage::Pull { membership }
        | ClientMessage::Goodbye { membership } => member(membership),
        ClientMessage::Ping { .. } => Ok(()),
    }
}
