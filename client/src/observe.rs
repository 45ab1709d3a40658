//! What can be seen of a client: its share, its connections, and the inside of its permit.

use std::fmt;
use std::time::Duration;

use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::share::{RowKey, Share, ShareUnion};

/// How far a client may trust its share at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// It is no member.
    #[default]
    Outside,
    /// Its lease runs: it works.
    Leased,
    /// Its lease is over, or has not begun: it asks a server first, and begins no row meanwhile.
    Asking,
    /// No server answers: a client of an available group works on with all that it may still own.
    Autonomous,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Outside => "outside",
            Self::Leased => "leased",
            Self::Asking => "asking",
            Self::Autonomous => "autonomous",
        })
    }
}

/// The rows of a client, as `Client::shares` shows each change of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// Orders the shares; `None` while the client is no member.
    pub epoch: Option<Epoch>,
    /// The rows that are its own. Several shares only while it works on without any server.
    pub rows: ShareUnion,
    /// `(total, number)` in a modulo group where the client has one number.
    pub node: Option<(u32, u32)>,
    /// Whether the whole group had taken this numbering when a server was last heard.
    pub settled: bool,
    /// How far the rows may be trusted.
    pub mode: Mode,
}

/// As the example consumer logs it: `share total=3 numbers=1 epoch=17`.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("share")?;
        if self.rows.is_empty() {
            f.write_str(" none")?;
        }
        for share in self.rows.shares() {
            write!(f, " total={} numbers={}", share.total(), share.numbers())?;
        }
        if let Some(epoch) = self.epoch {
            write!(f, " epoch={epoch}")?;
        }
        if self.mode == Mode::Autonomous {
            f.write_str(" (no server answers)")?;
        }
        Ok(())
    }
}

/// How the connection to one server stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// There is none; it is tried again after a while.
    Down,
    /// It is being made.
    Connecting,
    /// The server knows the user; the client is not logged in to its group yet.
    Connected,
    /// Logged in, and ready to take over.
    Standby,
    /// This server serves the client.
    Attached,
    /// It carries the client on to the server that leads, which serves it but is not reached directly.
    Relaying,
}

/// One server, as a client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerState {
    /// Its address as it was given.
    pub address: String,
    /// How the connection stands.
    pub link: Link,
    /// Why the last attempt failed or the last connection ended, since the last success.
    pub trouble: Option<String>,
}

/// The connections of a client, as `Client::state` shows each change of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConnectionState {
    /// Each server.
    pub servers: Vec<ServerState>,
    /// The membership, while there is one.
    pub membership: Option<Membership>,
    /// The last refusal since the client became a member: what is wrong and what to do.
    pub refusal: Option<String>,
    /// Whether the client is closed.
    pub closed: bool,
}

/// The inside of a client at one instant, for tests and for the curious.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    /// The membership, while there is one.
    pub membership: Option<Membership>,
    /// The newest epoch that it was told.
    pub epoch: Option<Epoch>,
    /// How far the share may be trusted.
    pub mode: Mode,
    /// The newest share that it was told.
    pub share: Share,
    /// What a client of an available group falls back to when every server is gone, beside the share.
    pub base: ShareUnion,
    /// All rows that it may begin at this instant.
    pub rows: ShareUnion,
    /// What is left of the lease.
    pub lease_left: Duration,
    /// Keys of the rows that are being worked on: the `Row`s that are out.
    pub running: Vec<RowKey>,
    /// How many of them are not in the share any more; the release waits for them.
    pub running_outside: usize,
}
