//! Everything that the director hears of, in one channel.

use super::report::Report;

/// Happenings that wait for the director; more hold up those who tell them.
pub(super) const WAITING: usize = 1_024;

/// Something that happened.
#[derive(Debug)]
pub(super) enum Happening {
    /// A child told something.
    Told { name: String, report: Report },
    /// A child's process has ended.
    Ended {
        name: String,
        /// Whether it ended as one that was asked to.
        in_order: bool,
        /// How it ended and its last log lines.
        how: String,
    },
}
