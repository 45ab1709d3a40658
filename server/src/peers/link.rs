//! The connection to one other replica, made anew when it breaks.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::SplitStream;
use skyschedule_common::env;
use skyschedule_common::env::net::{self, Stream};
use tokio::sync::{mpsc, oneshot, watch};

use super::frame::{Frames, Outgoing, Parts, PeerFrame, write_all};
use super::handshake::{self, HandshakeError};
use super::{AskError, Roster, Service};

/// Requests that wait to be written; more wait with those who ask.
const QUEUE: usize = 64;

/// From the first packet to the end of the handshake.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(1);

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LONGEST_RETRY: Duration = Duration::from_secs(1);

/// A connection on which nothing came for so long while something was asked is half-open.
const SILENCE: Duration = Duration::from_secs(1);

type Pending = Arc<Mutex<BTreeMap<u64, oneshot::Sender<Result<Bytes, AskError>>>>>;

/// Asks one other replica.
#[derive(Debug, Clone)]
pub(super) struct Link {
    id: u16,
    addresses: Vec<String>,
    requests: mpsc::Sender<Request>,
    connected: watch::Receiver<bool>,
    trouble: watch::Receiver<Option<String>>,
}

#[derive(Debug)]
struct Request {
    service: Service,
    body: Bytes,
    answer: oneshot::Sender<Result<Bytes, AskError>>,
}

impl Link {
    pub(super) fn start(roster: &Roster, id: u16, addresses: Vec<String>) -> Self {
        let (requests, queue) = mpsc::channel(QUEUE);
        let (tell, connected) = watch::channel(false);
        let (complain, trouble) = watch::channel(None);
        let dialer = Dialer {
            roster: roster.clone(),
            id,
            addresses: addresses.clone(),
            connected: tell,
            trouble: complain,
        };
        env::spawn(dialer.run(queue));
        Self {
            id,
            addresses,
            requests,
            connected,
            trouble,
        }
    }

    /// Where the other replica may be.
    pub(super) fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Why the last attempt to connect failed.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.borrow().clone()
    }

    pub(super) fn is_connected(&self) -> bool {
        *self.connected.borrow()
    }

    pub(super) async fn ask(&self, service: Service, body: Bytes) -> Result<Bytes, AskError> {
        let unreachable = AskError::Unreachable(self.id);
        if !self.is_connected() {
            return Err(unreachable);
        }
        let (answer, answered) = oneshot::channel();
        let request = Request {
            service,
            body,
            answer,
        };
        self.requests
            .send(request)
            .await
            .map_err(|_| unreachable.clone())?;
        answered.await.unwrap_or(Err(unreachable))
    }
}

struct Dialer {
    roster: Roster,
    id: u16,
    addresses: Vec<String>,
    connected: watch::Sender<bool>,
    trouble: watch::Sender<Option<String>>,
}

impl Dialer {
    async fn run(self, mut queue: mpsc::Receiver<Request>) {
        let mut wait = FIRST_RETRY;
        let mut complained = false;
        let mut failures = 0;
        loop {
            // Which address is right is known only from who answers there: after a failure, the next one is tried.
            let at = failures % self.addresses.len().max(1);
            let Some(address) = self.addresses.get(at) else {
                return;
            };
            let connecting = env::timeout(CONNECT_LIMIT, self.connect(address));
            match refusing(&mut queue, self.id, connecting).await {
                None => return,
                Some(Ok(Ok(frames))) => {
                    tracing::info!(replica = self.id, "connected to another replica");
                    complained = false;
                    wait = FIRST_RETRY;
                    self.trouble.send_replace(None);
                    self.connected.send_replace(true);
                    let ended = converse(frames, &mut queue, self.id).await;
                    self.connected.send_replace(false);
                    if ended.is_none() {
                        return;
                    }
                    tracing::info!(
                        replica = self.id,
                        "the connection to another replica has ended"
                    );
                }
                Some(failed) => {
                    failures += 1;
                    let why = match failed {
                        Ok(Err(error)) => error.to_string(),
                        _ => "no answer in time".into(),
                    };
                    self.trouble.send_replace(Some(why.clone()));
                    // Once: it may be away for days.
                    if !std::mem::replace(&mut complained, true) {
                        tracing::warn!(
                            replica = self.id,
                            address,
                            why,
                            "cannot talk to another replica"
                        );
                    }
                }
            }
            let pause = env::sleep(env::rng::jitter(wait, 0.5));
            if refusing(&mut queue, self.id, pause).await.is_none() {
                return;
            }
            wait = (wait * 2).min(LONGEST_RETRY);
        }
    }

    async fn connect(&self, address: &str) -> Result<Frames, ConnectError> {
        let stream = connect(address).await?;
        Ok(handshake::dial(stream, &self.roster, self.id).await?)
    }
}

/// Names are asked for anew each time.
pub(super) async fn connect(address: &str) -> io::Result<Stream> {
    let mut last = None;
    for address in net::resolve(address).await? {
        match Stream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// Waits for `future`; who asks meanwhile learns that there is no connection. None: nobody can ask any more.
async fn refusing<F: Future>(
    queue: &mut mpsc::Receiver<Request>,
    id: u16,
    future: F,
) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    loop {
        tokio::select! {
            biased;
            output = &mut future => return Some(output),
            request = queue.recv() => {
                // Who asked may have gone.
                let _ = request?.answer.send(Err(AskError::Unreachable(id)));
            }
        }
    }
}

/// Carries requests and answers until the connection breaks. None: nobody can ask any more.
async fn converse(frames: Frames, queue: &mut mpsc::Receiver<Request>, id: u16) -> Option<()> {
    let (sink, stream) = frames.split();
    let (outgoing, to_write) = mpsc::channel(QUEUE);
    let pending = Pending::default();
    tokio::select! {
        biased;
        () = read(stream, &pending, id) => Some(()),
        () = write_all(sink, to_write) => Some(()),
        () = take(queue, &pending, outgoing) => None,
    }
}

async fn take(
    queue: &mut mpsc::Receiver<Request>,
    pending: &Pending,
    outgoing: mpsc::Sender<Outgoing>,
) {
    let mut next = 0;
    while let Some(request) = queue.recv().await {
        next += 1;
        {
            let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
            // Those that nobody waits for any more.
            pending.retain(|_, answer| !answer.is_closed());
            pending.insert(next, request.answer);
        }
        let service = request.service as u8;
        let body = request.body;
        let request = Outgoing::Request {
            id: next,
            service,
            body,
        };
        if outgoing.send(request).await.is_err() {
            return;
        }
    }
}

async fn read(mut stream: SplitStream<Frames>, pending: &Pending, replica: u16) {
    let mut parts = Parts::default();
    loop {
        let answers = || pending.lock().unwrap_or_else(PoisonError::into_inner);
        let frame = match env::timeout(SILENCE, stream.next()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(_) => return,
            Err(_) if answers().is_empty() => continue,
            Err(_) => {
                tracing::info!(replica, "another replica is silent");
                return;
            }
        };
        let (id, answer) = match frame {
            PeerFrame::Answer { id, last, part } => match parts.take(id, last, part) {
                Ok(None) => continue,
                Ok(Some(body)) => (id, Ok(body)),
                Err(error) => {
                    tracing::error!(replica, %error, "another replica breaks the rules");
                    return;
                }
            },
            PeerFrame::Failure { id, text } => {
                (id, Err(AskError::Refused(replica, text.into_inner())))
            }
            _ => return,
        };
        if let Some(asked) = answers().remove(&id) {
            // It may wait no longer.
            let _ = asked.send(answer);
        }
    }
}
