use serde::{Deserialize, Serialize};

use super::*;

type Texts = FrameCodec<String, String>;

fn frame(body: &[u8]) -> BytesMut {
    let mut bytes = BytesMut::new();
    bytes.put_u32(u32::try_from(body.len()).unwrap());
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn a_frame_is_a_big_endian_length_and_bincode() {
    let mut bytes = BytesMut::new();
    Texts::new().encode("moon".to_owned(), &mut bytes).unwrap();
    assert_eq!(&bytes[..], b"\x00\x00\x00\x05\x04moon");
}

#[test]
fn frames_come_out_one_by_one_as_their_bytes_arrive() {
    let mut codec = Texts::new();
    let mut sent = BytesMut::new();
    for text in ["one", "", "three"] {
        codec.encode(text.to_owned(), &mut sent).unwrap();
    }
    let mut received = BytesMut::new();
    let mut texts = Vec::new();
    for byte in sent {
        received.put_u8(byte);
        texts.extend(codec.decode(&mut received).unwrap());
    }
    assert_eq!(texts, ["one", "", "three"]);
    assert!(codec.decode_eof(&mut received).unwrap().is_none());
}

#[test]
fn lengths_of_zero_and_above_the_limit_are_refused_on_sight() {
    let mut codec = Texts::new();
    let mut empty = BytesMut::from(&[0, 0, 0, 0][..]);
    assert!(matches!(codec.decode(&mut empty), Err(CodecError::Empty)));
    let mut huge = BytesMut::from(&[0xff; 4][..]);
    assert!(matches!(
        codec.decode(&mut huge),
        Err(CodecError::TooLong {
            limit: MAX_FRAME_BEFORE_LOGIN,
            ..
        })
    ));
    assert!(
        huge.capacity() < 100,
        "the buffer must not grow for what was only announced"
    );
}

#[test]
fn the_limit_is_small_until_it_is_raised_and_holds_in_both_directions() {
    let mut codec = Texts::new();
    let text = "x".repeat(5_000);
    let mut bytes = BytesMut::from("before");
    assert!(matches!(
        codec.encode(text.clone(), &mut bytes),
        Err(CodecError::TooLarge { limit: 4_096 })
    ));
    assert_eq!(
        bytes, "before",
        "what cannot be sent must not be sent in part"
    );

    codec.set_max_frame(MAX_FRAME);
    let mut bytes = BytesMut::new();
    codec.encode(text.clone(), &mut bytes).unwrap();
    assert!(matches!(
        Texts::new().decode(&mut bytes.clone()),
        Err(CodecError::TooLong { .. })
    ));
    assert_eq!(codec.decode(&mut bytes).unwrap(), Some(text));

    codec.set_max_frame(usize::MAX);
    assert_eq!(codec.max_frame(), MAX_FRAME);
}

#[test]
fn a_frame_of_exactly_the_limit_passes() {
    let text = "x".repeat(MAX_FRAME_BEFORE_LOGIN - 3);
    let mut bytes = BytesMut::new();
    Texts::new().encode(text.clone(), &mut bytes).unwrap();
    assert_eq!(bytes.len(), HEADER + MAX_FRAME_BEFORE_LOGIN);
    assert_eq!(Texts::new().decode(&mut bytes).unwrap(), Some(text));
}

#[test]
fn every_byte_of_a_frame_must_be_used() {
    let mut bytes = frame(b"\x04moon!");
    assert!(matches!(
        Texts::new().decode(&mut bytes),
        Err(CodecError::Trailing { bytes: 1 })
    ));
    let mut bytes = frame(b"\x05moon");
    assert!(matches!(
        Texts::new().decode(&mut bytes),
        Err(CodecError::Malformed { .. })
    ));
}

#[test]
fn a_stream_that_ends_within_a_frame_says_so() {
    for part in [&b"\x00\x00"[..], b"\x00\x00\x00\x05\x04mo"] {
        let mut bytes = BytesMut::from(part);
        assert!(
            matches!(Texts::new().decode_eof(&mut bytes), Err(CodecError::Truncated { bytes }) if bytes == part.len())
        );
    }
}

#[test]
fn values_without_bytes_are_refused_when_written_and_when_read() {
    assert!(matches!(
        encode(&(), 10),
        Err(CodecError::Unencodable { .. })
    ));
    assert!(matches!(decode::<()>(&[], 10), Err(CodecError::Empty)));
}

#[test]
fn stored_values_have_a_limit_of_their_own() {
    let bytes = encode(&"moon", 5).unwrap();
    assert_eq!(decode::<String>(&bytes, 5).unwrap(), "moon");
    assert!(matches!(
        encode(&"moon", 4),
        Err(CodecError::TooLarge { limit: 4 })
    ));
    assert!(matches!(
        decode::<String>(&bytes, 4),
        Err(CodecError::TooLong {
            length: 5,
            limit: 4
        })
    ));
}

/// Read one by one, 2^64 of them would keep a processor busy for centuries.
#[test]
fn elements_without_bytes_cannot_be_announced_for_ever() {
    let announced = [&[0xfd][..], &[0xff; 8]].concat();
    assert!(matches!(
        decode::<Vec<()>>(&announced, 100),
        Err(CodecError::Malformed { .. })
    ));
}

/// bincode's own limit would count each of these small integers as eight bytes.
#[test]
fn a_frame_full_of_small_numbers_is_read_as_it_was_written() {
    let numbers = vec![1_u64; MAX_FRAME - 8];
    let bytes = encode(&numbers, MAX_FRAME).unwrap();
    assert_eq!(decode::<Vec<u64>>(&bytes, MAX_FRAME).unwrap(), numbers);
}

#[test]
fn a_refusal_does_not_repeat_what_the_peer_sent() {
    #[derive(Debug, Deserialize)]
    #[serde(try_from = "String")]
    struct Never;

    impl TryFrom<String> for Never {
        type Error = String;

        fn try_from(text: String) -> Result<Self, String> {
            Err(text)
        }
    }

    let bytes = encode(&"x".repeat(100_000), MAX_FRAME).unwrap();
    let refused = decode::<Never>(&bytes, MAX_FRAME).unwrap_err().to_string();
    assert!(refused.len() < 500, "{} bytes", refused.len());
}

/// Every kind of value that serde derives goes through the cautious deserializer unchanged.
#[test]
fn all_shapes_of_data_survive() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Newtype(i64);

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Shape {
        Unit,
        Newtype(Newtype),
        Tuple(u8, String),
        Struct {
            list: Vec<Option<Box<Shape>>>,
            map: std::collections::BTreeMap<String, (bool, char, [u8; 3])>,
        },
    }

    let value = Shape::Struct {
        list: vec![
            None,
            Some(Box::new(Shape::Unit)),
            Some(Box::new(Shape::Newtype(Newtype(-7)))),
            Some(Box::new(Shape::Tuple(9, "text".to_owned()))),
        ],
        map: [("key".to_owned(), (true, 'é', [1, 2, 3]))].into(),
    };
    let bytes = encode(&value, 1_000).unwrap();
    assert_eq!(
        bytes,
        bincode::serde::encode_to_vec(&value, CONFIG).unwrap()
    );
    assert_eq!(decode::<Shape>(&bytes, 1_000).unwrap(), value);
}
