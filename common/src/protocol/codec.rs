//! Frames: a length of 4 bytes, big-endian, then one value in bincode.
//!
//! What a peer sends can cost no more memory than it sent: lengths of 0 or above the limit are refused
//! before anything is allocated, a frame's buffer grows as its bytes arrive, and no length *inside* a
//! frame makes the decoder reserve memory (see `codec/cautious.rs`).
//!
//! bincode's own limit is not used: it counts a small integer, one byte on the wire, as up to sixteen, and
//! would refuse frames that were encoded without complaint. The frame itself is the limit.

mod cautious;

use std::fmt;
use std::io;
use std::marker::PhantomData;

use bincode::config::Configuration;
use bincode::enc::write::Writer;
use bincode::error::{DecodeError, EncodeError};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::codec::{Decoder, Encoder};

/// The largest frame in bytes, its header not counted, once a peer is logged in.
pub const MAX_FRAME: usize = 1024 * 1024;

/// The largest frame in bytes, its header not counted, before a peer is logged in.
pub const MAX_FRAME_BEFORE_LOGIN: usize = 4 * 1024;

const HEADER: usize = size_of::<u32>();

const MAX_REASON: usize = 200;

/// Changing this changes every byte on the wire and on disk.
const CONFIG: Configuration = bincode::config::standard();

/// Why bytes are no value, or a value gives no bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// A frame, or stored value, of no bytes.
    #[error(
        "empty frame: the peer does not speak this protocol; check that address and port are SkySchedule's"
    )]
    Empty,
    /// A length above the limit was announced.
    #[error(
        "a frame of {length} bytes where at most {limit} are allowed: either the peer does not speak this protocol \
         (check address, port and TLS), or it sends a message that is too large"
    )]
    TooLong {
        /// Bytes announced.
        length: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The stream ended within a frame.
    #[error(
        "the connection ended within a frame, {bytes} bytes after its beginning: connect again"
    )]
    Truncated {
        /// Bytes of the frame that came, its header included.
        bytes: usize,
    },
    /// The bytes are not a value of the expected type.
    #[error(
        "bytes that are no valid message ({reason}): use versions of client and server that work together"
    )]
    Malformed {
        /// What is wrong with them.
        reason: String,
    },
    /// Bytes were left over after the value.
    #[error(
        "{bytes} bytes too many after a message: use versions of client and server that work together"
    )]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// The value to send is larger than a frame may be.
    #[error("a message of more than {limit} bytes cannot be sent: make it smaller or split it")]
    TooLarge {
        /// Bytes allowed.
        limit: usize,
    },
    /// The value cannot be written in this format.
    #[error(
        "a message cannot be encoded ({reason}): this is a fault of the program, please report it"
    )]
    Unencodable {
        /// What stands in the way.
        reason: String,
    },
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

/// Reads frames that hold an `In`, writes frames that hold an `Out`.
pub struct FrameCodec<In, Out> {
    max_frame: usize,
    types: PhantomData<fn(Out) -> In>,
}

impl<In, Out> FrameCodec<In, Out> {
    /// A codec for a peer that is not logged in yet: frames of at most [`MAX_FRAME_BEFORE_LOGIN`] bytes.
    pub const fn new() -> Self {
        Self {
            max_frame: MAX_FRAME_BEFORE_LOGIN,
            types: PhantomData,
        }
    }

    /// The largest frame in bytes, its header not counted, in both directions.
    pub const fn max_frame(&self) -> usize {
        self.max_frame
    }

    /// Sets the largest frame in bytes; [`MAX_FRAME`] is the most that can be set.
    pub const fn set_max_frame(&mut self, bytes: usize) {
        self.max_frame = if bytes < MAX_FRAME { bytes } else { MAX_FRAME };
    }
}

impl<In, Out> Default for FrameCodec<In, Out> {
    fn default() -> Self {
        Self::new()
    }
}

impl<In, Out> fmt::Debug for FrameCodec<In, Out> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameCodec")
            .field("max_frame", &self.max_frame)
            .finish_non_exhaustive()
    }
}

impl<In: DeserializeOwned, Out> Decoder for FrameCodec<In, Out> {
    type Item = In;
    type Error = CodecError;

    fn decode(&mut self, src: &mut BytesMut) -> Result<Option<In>, CodecError> {
        let Some(header) = src.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_be_bytes(*header)).unwrap_or(usize::MAX);
        check_length(length, self.max_frame)?;
        // No `reserve`: the buffer grows with the bytes that arrive, not with what a header promises.
        let Some(frame) = src.get(HEADER..HEADER + length) else {
            return Ok(None);
        };
        let value = decode_value(frame)?;
        src.advance(HEADER + length);
        Ok(Some(value))
    }

    fn decode_eof(&mut self, src: &mut BytesMut) -> Result<Option<In>, CodecError> {
        match self.decode(src)? {
            None if !src.is_empty() => Err(CodecError::Truncated { bytes: src.len() }),
            decoded => Ok(decoded),
        }
    }
}

impl<In, Out: Serialize> Encoder<Out> for FrameCodec<In, Out> {
    type Error = CodecError;

    /// Appends one frame to `dst`, or leaves `dst` as it was.
    fn encode(&mut self, value: Out, dst: &mut BytesMut) -> Result<(), CodecError> {
        let start = dst.len();
        dst.put_u32(0);
        let written = encode_value(&value, dst, self.max_frame).and_then(|length| {
            u32::try_from(length).map_err(|_| CodecError::TooLarge {
                limit: self.max_frame,
            })
        });
        match written {
            Ok(length) => {
                dst[start..start + HEADER].copy_from_slice(&length.to_be_bytes());
                Ok(())
            }
            Err(error) => {
                dst.truncate(start);
                Err(error)
            }
        }
    }
}

/// The bytes of `value`, at most `limit`, without a header: for the command log and snapshots.
pub fn encode<T: Serialize>(value: &T, limit: usize) -> Result<Bytes, CodecError> {
    let mut bytes = BytesMut::new();
    encode_value(value, &mut bytes, limit)?;
    Ok(bytes.freeze())
}

/// The value whose bytes, without a header, are exactly `bytes`, which may be at most `limit` long.
pub fn decode<T: DeserializeOwned>(bytes: &[u8], limit: usize) -> Result<T, CodecError> {
    check_length(bytes.len(), limit)?;
    decode_value(bytes)
}

/// A value of no bytes is refused in both directions, so that 0 can mean "not this protocol".
fn check_length(length: usize, limit: usize) -> Result<(), CodecError> {
    match length {
        0 => Err(CodecError::Empty),
        _ if length > limit => Err(CodecError::TooLong { length, limit }),
        _ => Ok(()),
    }
}

fn decode_value<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let seed = cautious::Seed::<T>::new(bytes.len());
    let (value, used) =
        bincode::serde::seed_decode_from_slice(seed, bytes, CONFIG).map_err(malformed)?;
    match bytes.len() - used {
        0 => Ok(value),
        left => Err(CodecError::Trailing { bytes: left }),
    }
}

/// Appends the bytes of `value` to `dst` and says how many they are.
fn encode_value<T: Serialize>(
    value: &T,
    dst: &mut BytesMut,
    limit: usize,
) -> Result<usize, CodecError> {
    let mut writer = Limited { dst, left: limit };
    match bincode::serde::encode_into_writer(value, &mut writer, CONFIG) {
        Ok(()) if writer.left == limit => Err(CodecError::Unencodable {
            reason: "it has no bytes".to_owned(),
        }),
        Ok(()) => Ok(limit - writer.left),
        Err(EncodeError::UnexpectedEnd) => Err(CodecError::TooLarge { limit }),
        Err(EncodeError::OtherString(reason)) => Err(CodecError::Unencodable { reason }),
        Err(other) => Err(CodecError::Unencodable {
            reason: other.to_string(),
        }),
    }
}

fn malformed(error: DecodeError) -> CodecError {
    let mut reason = match error {
        DecodeError::UnexpectedEnd { .. } => "it ends too early".to_owned(),
        DecodeError::Utf8 { .. } => "text is not UTF-8".to_owned(),
        DecodeError::Other(reason) => reason.to_owned(),
        DecodeError::OtherString(reason) => reason,
        other => other.to_string(),
    };
    // It may quote what the peer sent, at length.
    reason.truncate(reason.floor_char_boundary(MAX_REASON));
    CodecError::Malformed { reason }
}

/// Stops at the limit instead of encoding everything first and counting afterwards.
struct Limited<'a> {
    dst: &'a mut BytesMut,
    left: usize,
}

impl Writer for Limited<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        self.left = self
            .left
            .checked_sub(bytes.len())
            .ok_or(EncodeError::UnexpectedEnd)?;
        self.dst.extend_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
