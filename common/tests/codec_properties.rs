//! Whatever arrives, in whatever pieces: a value or an error, never a panic.

#![allow(
    clippy::unwrap_used,
    reason = "a helper of a test may fail like the test itself"
)]

use std::collections::BTreeMap;

use bytes::BytesMut;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde::{Deserialize, Serialize};
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::codec::{self, CodecError, FrameCodec, MAX_FRAME};
use skyschedule_common::protocol::messages::{ClientMessage, ServerMessage};
use tokio_util::codec::{Decoder as _, Encoder as _};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Message {
    Empty,
    Number(i64),
    Text {
        text: BoundedString<64>,
        list: BoundedVec<(u32, u32), 16>,
    },
    Nested(Option<Box<Message>>, Vec<String>, BTreeMap<u8, [u8; 4]>),
}

fn message() -> impl Strategy<Value = Message> {
    let text = ".{0,16}".prop_map(|text| BoundedString::try_from(text).unwrap());
    let list = prop::collection::vec(any::<(u32, u32)>(), 0..=16)
        .prop_map(|list| list.try_into().unwrap());
    let leaf = prop_oneof![
        Just(Message::Empty),
        any::<i64>().prop_map(Message::Number),
        (text, list).prop_map(|(text, list)| Message::Text { text, list }),
    ];
    leaf.prop_recursive(3, 8, 1, |inner| {
        let strings = prop::collection::vec(".{0,8}", 0..4);
        let map = prop::collection::btree_map(any::<u8>(), any::<[u8; 4]>(), 0..4);
        (prop::option::of(inner), strings, map)
            .prop_map(|(inner, strings, map)| Message::Nested(inner.map(Box::new), strings, map))
    })
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 1_000,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    }
}

fn frames(messages: &[Message]) -> BytesMut {
    let mut bytes = BytesMut::new();
    for message in messages {
        FrameCodec::<(), Message>::new()
            .encode(message.clone(), &mut bytes)
            .unwrap();
    }
    bytes
}

/// All that can be read; the stream ends after `bytes`.
fn read_all(
    codec: &mut FrameCodec<Message, ()>,
    bytes: &mut BytesMut,
) -> Result<Vec<Message>, CodecError> {
    let mut messages = Vec::new();
    while let Some(message) = codec.decode_eof(bytes)? {
        messages.push(message);
    }
    Ok(messages)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn frames_survive_any_fragmentation(
        messages in prop::collection::vec(message(), 0..8),
        pieces in prop::collection::vec(1..40_usize, 1..20),
    ) {
        let mut codec = FrameCodec::<Message, ()>::new();
        let mut sent = frames(&messages);
        let mut received = BytesMut::new();
        let mut read = Vec::new();
        for piece in pieces.iter().cycle() {
            while let Some(message) = codec.decode(&mut received).unwrap() {
                read.push(message);
            }
            if sent.is_empty() {
                break;
            }
            let next = sent.split_to(sent.len().min(*piece));
            received.extend_from_slice(&next);
        }
        prop_assert_eq!(read, messages);
        prop_assert!(codec.decode_eof(&mut received).unwrap().is_none());
    }

    #[test]
    fn a_cut_stream_gives_its_whole_frames_and_then_an_error(
        messages in prop::collection::vec(message(), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let bytes = frames(&messages);
        let cut = cut.index(bytes.len());
        let mut part = BytesMut::from(&bytes[..cut]);
        let mut codec = FrameCodec::<Message, ()>::new();
        let mut whole = Vec::new();
        while let Some(message) = codec.decode(&mut part).unwrap() {
            whole.push(message);
        }
        prop_assert_eq!(&messages[..whole.len()], &whole[..]);
        let ends_between_frames = frames(&whole).len() == cut;
        match codec.decode_eof(&mut part) {
            Ok(None) => prop_assert!(ends_between_frames),
            Err(CodecError::Truncated { bytes }) => prop_assert_eq!(bytes, cut - frames(&whole).len()),
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn any_bytes_are_values_or_errors(first in 0..32_u8, mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        bytes.insert(0, first);
        let _ = codec::decode::<ClientMessage>(&bytes, MAX_FRAME);
        let _ = codec::decode::<ServerMessage>(&bytes, MAX_FRAME);
        if let Ok(message) = codec::decode::<Message>(&bytes, MAX_FRAME) {
            // A value that was accepted can be sent on, and comes out the same.
            let again = codec::encode(&message, MAX_FRAME).unwrap();
            prop_assert_eq!(codec::decode::<Message>(&again, MAX_FRAME).unwrap(), message);
        }
        let _ = read_all(&mut FrameCodec::new(), &mut BytesMut::from(&bytes[..]));
    }

    #[test]
    fn flipped_bits_are_values_or_errors(
        messages in prop::collection::vec(message(), 1..4),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u8), 1..4),
    ) {
        let mut bytes = frames(&messages);
        for (index, bit) in flips {
            let index = index.index(bytes.len());
            bytes[index] ^= 1 << bit;
        }
        let _ = read_all(&mut FrameCodec::new(), &mut bytes);
    }

    #[test]
    fn what_is_cut_off_inside_a_value_is_an_error(message in message(), cut in any::<prop::sample::Index>()) {
        let bytes = codec::encode(&message, MAX_FRAME).unwrap();
        let part = &bytes[..cut.index(bytes.len())];
        prop_assert!(codec::decode::<Message>(part, MAX_FRAME).is_err());
    }

    #[test]
    fn what_follows_a_value_is_an_error(message in message(), rest in prop::collection::vec(any::<u8>(), 1..9)) {
        let bytes = [&codec::encode(&message, MAX_FRAME).unwrap()[..], &rest].concat();
        let result = codec::decode::<Message>(&bytes, MAX_FRAME);
        let left_over = matches!(result, Err(CodecError::Trailing { bytes }) if bytes == rest.len());
        prop_assert!(left_over, "{:?}", result);
    }

    #[test]
    fn values_above_the_limit_are_refused_and_leave_no_trace(message in message(), limit in 1..60_usize) {
        let size = codec::encode(&message, MAX_FRAME).unwrap().len();
        let mut codec = FrameCodec::<(), Message>::new();
        codec.set_max_frame(limit);
        let mut bytes = BytesMut::from("before");
        match codec.encode(message, &mut bytes) {
            Ok(()) => prop_assert!(size <= limit && bytes.len() == "before".len() + 4 + size),
            Err(CodecError::TooLarge { .. }) => prop_assert!(size > limit && bytes == "before"),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
