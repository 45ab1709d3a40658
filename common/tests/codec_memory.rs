//! Decoding never costs more memory than was sent. One test, so that nothing else allocates meanwhile.

#![allow(
    clippy::unwrap_used,
    reason = "a helper of a test may fail like the test itself"
)]

use std::alloc::System;
use std::collections::{BTreeMap, HashMap};

use bytes::{BufMut, BytesMut};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use serde::de::DeserializeOwned;
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::codec::{self, CodecError, FrameCodec, MAX_FRAME};
use skyschedule_common::protocol::messages::{ClientMessage, ServerMessage};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio_util::codec::Decoder as _;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// For the text of an error, and for the first elements of a list that has begun to arrive.
const SLACK: usize = 2 * 1024;

/// Memory for a byte of an element: one byte can be a string of 24 bytes, and lists double.
const PER_BYTE: usize = 64;

/// Lengths as bincode writes them, from a little more than what follows to the largest.
const HOSTILE_LENGTHS: [&[u8]; 5] = [
    &[60],
    &[0xfb, 0xff, 0xff],
    &[0xfc, 0, 0, 0x40, 0],
    &[0xfc, 0xff, 0xff, 0xff, 0xff],
    &[0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
];

#[test]
fn memory_follows_what_was_sent_and_not_what_was_announced() {
    the_counter_counts();
    a_header_alone_costs_nothing();
    lengths_inside_a_frame_cost_nothing();
    text_costs_its_own_length();
    any_bytes_cost_at_most_their_share();
}

/// All bytes that `action` allocated, freed or not.
fn allocated<R>(action: impl FnOnce() -> R) -> (usize, R) {
    let region = Region::new(ALLOCATOR);
    let result = action();
    (region.change().bytes_allocated, result)
}

/// Without our deserializer the same bytes cost a megabyte: the test can fail.
fn the_counter_counts() {
    let bytes = [0xfc, 0, 0, 0x40, 0, 1, 2, 3];
    let config = bincode::config::standard();
    let (cost, result) =
        allocated(|| bincode::serde::decode_from_slice::<Vec<u64>, _>(&bytes, config));
    assert!(result.is_err());
    assert!(cost >= MAX_FRAME, "{cost}");
}

fn a_header_alone_costs_nothing() {
    for length in [0, 1, 4_096, 1_048_576, 1_048_577, u32::MAX] {
        let mut codec = FrameCodec::<String, String>::new();
        codec.set_max_frame(MAX_FRAME);
        let mut bytes = BytesMut::with_capacity(64);
        bytes.put_u32(length);
        bytes.extend_from_slice(&[0; 10]);
        let (cost, result) = allocated(|| codec.decode(&mut bytes));
        assert_eq!(cost, 0, "for a header of {length}");
        assert!(bytes.capacity() <= 64);
        match length {
            0 => assert!(matches!(result, Err(CodecError::Empty))),
            1 => assert_eq!(result.unwrap().as_deref(), Some("")),
            4_096 | 1_048_576 => assert!(matches!(result, Ok(None))),
            _ => assert!(matches!(result, Err(CodecError::TooLong { .. }))),
        }
    }
}

fn lengths_inside_a_frame_cost_nothing() {
    hostile::<String>();
    hostile::<Vec<u8>>();
    hostile::<Vec<u64>>();
    hostile::<Vec<[u64; 16]>>();
    hostile::<Vec<String>>();
    hostile::<Vec<Vec<Vec<u64>>>>();
    hostile::<HashMap<u64, String>>();
    hostile::<BTreeMap<u64, Vec<u8>>>();
    hostile::<Option<Box<Vec<(u64, String)>>>>();
    hostile::<BoundedString<1_000_000>>();
    hostile::<BoundedVec<u64, 1_000_000>>();
    hostile::<BoundedVec<BoundedString<64>, 1_000_000>>();
}

fn hostile<T: DeserializeOwned>() {
    for length in HOSTILE_LENGTHS {
        // The length outermost, and one level in.
        for start in [&[][..], &[1], &[1, 1]] {
            let bytes = [start, length, &[7; 40]].concat();
            let (cost, result) = allocated(|| codec::decode::<T>(&bytes, MAX_FRAME).map(drop));
            assert!(
                result.is_err(),
                "{} from {bytes:?}",
                std::any::type_name::<T>()
            );
            assert!(
                cost <= SLACK,
                "{cost} bytes for {} from {bytes:?}",
                std::any::type_name::<T>()
            );
        }
    }
}

fn text_costs_its_own_length() {
    let text = "x".repeat(MAX_FRAME - 10);
    let bytes = codec::encode(&text, MAX_FRAME).unwrap();
    let (cost, decoded) = allocated(|| codec::decode::<String>(&bytes, MAX_FRAME).unwrap());
    assert_eq!((cost, decoded), (text.len(), text));
}

fn any_bytes_cost_at_most_their_share() {
    let config = Config {
        cases: 5_000,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..Config::default()
    };
    // A small first byte picks a variant that exists.
    let bytes = (0..20_u8, prop::collection::vec(any::<u8>(), 0..600));
    TestRunner::new(config)
        .run(&bytes, |(first, mut bytes)| {
            bytes.insert(0, first);
            let bound = SLACK + PER_BYTE * bytes.len();
            let (client, _) =
                allocated(|| codec::decode::<ClientMessage>(&bytes, MAX_FRAME).map(drop));
            let (server, _) =
                allocated(|| codec::decode::<ServerMessage>(&bytes, MAX_FRAME).map(drop));
            prop_assert!(
                client <= bound && server <= bound,
                "{client} or {server} bytes for {}",
                bytes.len()
            );
            Ok(())
        })
        .unwrap();
}
