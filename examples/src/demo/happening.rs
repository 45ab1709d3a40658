//! Everything that the director hears of, in one channel.

use std::time::Duration;

use skyschedule_server::view::ServerEvent;

use super::report::Report;

/// Happenings that wait for the director; more hold up those who tell them.
pub(super) const WAITING: usize = 1_024;

/// Something that happened.
#[derive(Debug)]
pub(super) enum Happening {
    /// A consumer told something.
    Told { name: String, report: Report },
    /// A consumer's process has ended.
    Ended {
        name: String,
        /// Whether it ended as one that was asked to.
        in_order: bool,
        /// How it ended and its last log lines.
        how: String,
    },
    /// The server told something.
    Server(ServerEvent),
    /// The server stops, and its clients have been told.
    ServerStops,
    /// The server is back, and all members with it.
    ServerIsBack {
        /// How long nobody could reach it.
        away: Duration,
        /// Whether any member has other rows than before.
        rows_moved: bool,
    },
    /// The server is in trouble.
    ServerFailed(String),
}
