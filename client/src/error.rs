//! What can go wrong, and what to do then.

use std::sync::Arc;

use skyschedule_common::auth::AuthError;
use skyschedule_common::env::IoThreadError;
use skyschedule_common::ids::InvalidName;
use skyschedule_common::protocol::messages::{Code, Refusal};

/// A setting of the builder that cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No server was named.
    #[error("no servers: name at least one, as host:port")]
    NoServers,
    /// More servers than a client connects to.
    #[error("{0} servers: name at most {max}", max = crate::config::MAX_SERVERS)]
    TooManyServers(usize),
    /// An address without host or port.
    #[error("server {0:?} is no host:port: write for example sky-1:9991")]
    Address(String),
    /// No group was named.
    #[error("no group: name the group of clients that share the task table")]
    NoGroup,
    /// The name of the group, the client or a handler breaks its rule.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// User or password cannot be one.
    #[error(transparent)]
    Credentials(#[from] AuthError),
    /// The weight is too large.
    #[error("weight {0} is above {max}", max = skyschedule_common::protocol::MAX_WEIGHT)]
    Weight(u32),
    /// A text of the login is too long.
    #[error("the ring key is longer than 256 bytes: shorten it")]
    RingKey,
    /// Too many handlers.
    #[error("{0} handlers: register at most {max}", max = skyschedule_common::protocol::messages::MAX_HANDLERS)]
    Handlers(usize),
}

/// Why a client did not become a member.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Settings are wrong; all of them are named.
    #[error("{}", listed(.0))]
    Config(Vec<ConfigError>),
    /// A server said no, and time alone does not change that; or it said "not yet" until the time was up.
    #[error("refused by {server} ({code}): {text}")]
    Refused {
        /// Which.
        server: String,
        /// For programs.
        code: Code,
        /// For people.
        text: String,
    },
    /// The login cannot succeed as client and server are set up.
    #[error("no login to {server}: {reason}")]
    Login {
        /// Which server.
        server: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// No server served this client in time.
    #[error("no server serves this client: {}. Check the addresses, or give it more time (connect_timeout)", .servers.join("; "))]
    Unavailable {
        /// Each server with its trouble.
        servers: Vec<String>,
    },
    /// The thread for the connections cannot be started.
    #[error(transparent)]
    Thread(#[from] IoThreadError),
    /// The client was closed before it was a member.
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl ConnectError {
    pub(crate) fn refused(server: &str, refusal: &Refusal) -> Self {
        Self::Refused {
            server: server.to_owned(),
            code: refusal.code,
            text: refusal.text.to_string(),
        }
    }
}

fn listed(errors: &[ConfigError]) -> String {
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// The client is closed or closing: it gives no more rows.
///
/// Nearly always because its user closed it. It ends by itself, and says why here, when its group was deleted and made
/// again with another promise than the client relies on.
#[derive(Debug, Clone, Default, PartialEq, Eq, thiserror::Error)]
#[error("the client is closed: {}", .why.as_deref().unwrap_or("it gives no more rows"))]
pub struct Closed {
    why: Option<Arc<str>>,
}

impl Closed {
    pub(crate) fn because(why: &ConnectError) -> Self {
        Self {
            why: Some(why.to_string().into()),
        }
    }
}

/// The client is closed, but no server heard its goodbye: its rows are free when its lease is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "no server was there to hear the goodbye: the rows of this client are free when its lease is over"
)]
pub struct NoGoodbye;

/// The weight is above the largest that the protocol knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("weight {0} is above {max}", max = skyschedule_common::protocol::MAX_WEIGHT)]
pub struct WeightTooLarge(pub u32);
