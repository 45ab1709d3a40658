//! What is on the wire between replicas, and bodies that travel in parts.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{Sink, SinkExt as _};
use serde::{Deserialize, Serialize};
use skyschedule_common::auth::Signature;
use skyschedule_common::env;
use skyschedule_common::env::net::Stream;
use skyschedule_common::protocol::bounded::BoundedString;
use skyschedule_common::protocol::codec::{CodecError, FrameCodec};
use tokio::sync::mpsc;
use tokio_util::codec::Framed;

/// Bytes of a body in one frame.
const PART: usize = 64 << 10;

/// Most bytes of a body: the largest snapshot, and what is around it.
const MAX_BODY: usize = (1 << 30) + 4_096;

/// Most bodies of which some parts have come.
const MAX_UNFINISHED: usize = 256;

/// How long the other end may take to read a frame.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// A connection between replicas.
pub(super) type Frames = Framed<Stream, FrameCodec<PeerFrame, PeerFrame>>;

/// A text for the log of the other end.
pub(super) type Text = BoundedString<512>;

/// One frame between replicas, after the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum PeerFrame {
    /// Answers the first message of a connection.
    Welcome {
        /// Drawn anew.
        nonce: [u8; 32],
        /// Of the accepting end.
        proof: Signature,
    },
    /// Answers `Welcome`.
    Proof {
        /// Of the dialing end.
        proof: Signature,
    },
    /// Both have proven themselves.
    Accepted,
    /// The connection ends.
    Refused {
        /// Why, and what to do.
        text: Text,
    },
    /// A part of a request.
    Request {
        /// Names the request on this connection.
        id: u64,
        /// Who takes it.
        service: u8,
        /// Whether it is complete now.
        last: bool,
        /// The bytes.
        part: Bytes,
    },
    /// A part of an answer.
    Answer {
        /// Of the request.
        id: u64,
        /// Whether it is complete now.
        last: bool,
        /// The bytes.
        part: Bytes,
    },
    /// There is no answer.
    Failure {
        /// Of the request.
        id: u64,
        /// Why.
        text: Text,
    },
}

/// Something to be written.
#[derive(Debug)]
pub(super) enum Outgoing {
    Request { id: u64, service: u8, body: Bytes },
    Answer { id: u64, body: Bytes },
    Failure { id: u64, text: String },
}

impl Outgoing {
    /// The next frame, and what is left.
    fn next(self) -> (PeerFrame, Option<Self>) {
        let split = |mut body: Bytes| {
            let part = body.split_to(PART.min(body.len()));
            (part, body)
        };
        match self {
            Self::Request { id, service, body } => {
                let (part, body) = split(body);
                let last = body.is_empty();
                let frame = PeerFrame::Request {
                    id,
                    service,
                    last,
                    part,
                };
                (
                    frame,
                    (!last).then_some(Self::Request { id, service, body }),
                )
            }
            Self::Answer { id, body } => {
                let (part, body) = split(body);
                let last = body.is_empty();
                let frame = PeerFrame::Answer { id, last, part };
                (frame, (!last).then_some(Self::Answer { id, body }))
            }
            Self::Failure { id, text } => {
                let text = Text::truncated(&text);
                (PeerFrame::Failure { id, text }, None)
            }
        }
    }
}

/// Writes what comes from the queue, a part of each in turn, until the queue or the connection ends.
pub(super) async fn write_all(
    mut sink: impl Sink<PeerFrame, Error = CodecError> + Unpin,
    mut queue: mpsc::Receiver<Outgoing>,
) {
    let mut unfinished: VecDeque<Outgoing> = VecDeque::new();
    loop {
        if unfinished.is_empty() {
            match queue.recv().await {
                Some(next) => unfinished.push_back(next),
                None => return,
            }
        }
        while unfinished.len() < MAX_UNFINISHED
            && let Ok(next) = queue.try_recv()
        {
            unfinished.push_back(next);
        }
        let write = async {
            if let Some(outgoing) = unfinished.pop_front() {
                let (frame, rest) = outgoing.next();
                unfinished.extend(rest);
                sink.feed(frame).await?;
            }
            if unfinished.is_empty() {
                sink.flush().await?;
            }
            Ok::<(), CodecError>(())
        };
        if !matches!(env::timeout(WRITE_LIMIT, write).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Puts parts together.
#[derive(Debug, Default)]
pub(super) struct Parts(BTreeMap<u64, BytesMut>);

/// The other end breaks the rules.
#[derive(Debug, thiserror::Error)]
#[error("a body of more than {MAX_BODY} bytes, or more than {MAX_UNFINISHED} unfinished ones")]
pub(super) struct TooMuch;

impl Parts {
    /// Takes a part; gives the whole body with the last one.
    pub(super) fn take(
        &mut self,
        id: u64,
        last: bool,
        part: Bytes,
    ) -> Result<Option<Bytes>, TooMuch> {
        let Some(mut body) = self.0.remove(&id) else {
            if last {
                return Ok(Some(part));
            }
            if self.0.len() >= MAX_UNFINISHED {
                return Err(TooMuch);
            }
            self.0.insert(id, BytesMut::from(part.as_ref()));
            return Ok(None);
        };
        if body.len() + part.len() > MAX_BODY {
            return Err(TooMuch);
        }
        body.extend_from_slice(&part);
        if last {
            return Ok(Some(body.freeze()));
        }
        self.0.insert(id, body);
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_of_any_length_arrives_whole() {
        for length in [0, 1, PART - 1, PART, PART + 1, 3 * PART + 7] {
            let body: Bytes = (0..length)
                .map(|at| u8::try_from(at % 251).unwrap())
                .collect();
            let mut parts = Parts::default();
            let mut next = Some(Outgoing::Answer {
                id: 7,
                body: body.clone(),
            });
            let mut whole = None;
            while let Some(outgoing) = next {
                let (frame, rest) = outgoing.next();
                let PeerFrame::Answer { id, last, part } = frame else {
                    panic!("{frame:?}");
                };
                assert!(part.len() <= PART);
                whole = parts.take(id, last, part).unwrap();
                assert_eq!(whole.is_some(), rest.is_none());
                next = rest;
            }
            assert_eq!(whole, Some(body));
        }
    }

    #[test]
    fn unfinished_bodies_are_bounded() {
        let mut parts = Parts::default();
        let part = || Bytes::from_static(b"x");
        for id in 0..MAX_UNFINISHED as u64 {
            assert!(parts.take(id, false, part()).unwrap().is_none());
        }
        assert!(parts.take(u64::MAX, false, part()).is_err());
        assert_eq!(parts.take(u64::MAX, true, part()).unwrap(), Some(part()));
    }
}
