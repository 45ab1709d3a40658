//! Frames of the bare loops: as long as most of the real ones, and with a length that `Framed` understands.

/// Bytes of a frame.
pub(crate) const FRAME: usize = 32;

/// A frame.
pub(crate) type Frame = [u8; FRAME];

/// Kind of a frame that its receiver does not answer: it is an answer, or a heartbeat's echo.
pub(crate) const BEAT: u8 = 1;

const LENGTH: usize = 4;

/// A frame of this kind.
pub(crate) fn frame(kind: u8) -> Frame {
    let mut frame = [0; FRAME];
    frame[LENGTH - 1] = const { (FRAME - LENGTH) as u8 };
    frame[LENGTH] = kind;
    frame
}

/// Its kind.
pub(crate) fn kind(frame: &Frame) -> u8 {
    frame[LENGTH]
}
