//! What other replicas ask.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt as _;
use skyschedule_common::env;
use tokio::sync::{Semaphore, mpsc};

use super::frame::{Frames, Outgoing, Parts, PeerFrame, write_all};
use super::handshake::{self, HANDSHAKE_LIMIT, HandshakeError};
use super::{Incoming, Inner, Service};

/// Requests of one replica that are worked on at a time; more wait in its connection.
const AT_ONCE: usize = 64;

/// Answers that wait to be written.
const QUEUE: usize = 64;

/// A replica that says nothing for so long is gone; it asks for more than once a second.
const SILENCE: Duration = Duration::from_secs(10);

/// Serves connections on the present runtime, until all handles are gone.
pub(super) async fn accept(peers: Weak<Inner>, mut waiting: mpsc::Receiver<Incoming>) {
    while let Some(mut incoming) = waiting.recv().await {
        let Some(peers) = peers.upgrade() else { return };
        if let Err(error) = incoming.stream.move_here() {
            tracing::error!(%error, "cannot serve another replica; raise the limit of open descriptors (ulimit -n)");
            continue;
        }
        let from = incoming.stream.peer_addr().ok();
        let says = incoming.hello.from;
        env::spawn(async move {
            let shaking = handshake::accept(incoming, &peers.roster, &peers.probes);
            match env::timeout(HANDSHAKE_LIMIT, shaking).await {
                Ok(Ok((replica, frames, _counted))) => {
                    if let Some(from) = from {
                        peers.note_address(replica, from.ip());
                    }
                    let weak = Arc::downgrade(&peers);
                    drop(peers);
                    serve(frames, replica, weak).await;
                }
                Ok(Err(HandshakeError::Oneself)) => {}
                Ok(Err(error @ HandshakeError::Twin(_))) => {
                    tracing::error!(from = from.map(tracing::field::display), %error, "turned away another process of this replica's id");
                }
                Ok(Err(error)) => turned_away(&peers, from, says, &error.to_string()),
                Err(_) => turned_away(&peers, from, says, "it proves nothing in time"),
            }
        });
    }
}

fn turned_away(peers: &Inner, from: Option<SocketAddr>, says: u16, error: &str) {
    let from = from.map(|from| from.ip());
    if let Some(left_out) = from.and_then(|from| peers.strangers.tell(from, "replica")) {
        tracing::warn!(
            from = from.map(tracing::field::display),
            says,
            error,
            left_out,
            "turned away what says to be a replica"
        );
    }
}

async fn serve(frames: Frames, replica: u16, peers: Weak<Inner>) {
    let (sink, stream) = frames.split();
    let (answers, to_write) = mpsc::channel(QUEUE);
    tokio::select! {
        biased;
        () = read(stream, replica, peers, answers) => {}
        () = write_all(sink, to_write) => {}
    }
}

async fn read(
    mut stream: futures_util::stream::SplitStream<Frames>,
    replica: u16,
    peers: Weak<Inner>,
    answers: mpsc::Sender<Outgoing>,
) {
    let mut parts = Parts::default();
    let room = Arc::new(Semaphore::new(AT_ONCE));
    while let Ok(Some(Ok(frame))) = env::timeout(SILENCE, stream.next()).await {
        let PeerFrame::Request {
            id,
            service,
            last,
            part,
        } = frame
        else {
            return;
        };
        let body = match parts.take(id, last, part) {
            Ok(None) => continue,
            Ok(Some(body)) => body,
            Err(error) => {
                tracing::error!(replica, %error, "another replica breaks the rules");
                return;
            }
        };
        let Some(peers) = peers.upgrade() else { return };
        if service != Service::Consensus as u8 && !peers.knows(replica) {
            let text = format!(
                "replica {replica} is not in this cluster; `skyschedule cluster add {replica} HOST:PORT` adds it"
            );
            if answers.send(Outgoing::Failure { id, text }).await.is_err() {
                return;
            }
            continue;
        }
        let Some(handler) = peers.handler(service) else {
            let text = format!("service {service} is not there yet, or needs a newer version");
            if answers.send(Outgoing::Failure { id, text }).await.is_err() {
                return;
            }
            continue;
        };
        let Ok(place) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        let answers = answers.clone();
        env::spawn(async move {
            let answer = match handler(replica, body).await {
                Ok(body) => Outgoing::Answer { id, body },
                Err(text) => Outgoing::Failure { id, text },
            };
            // The connection may have ended.
            let _ = answers.send(answer).await;
            drop(place);
        });
    }
}
