//! A client's settings, checked.

use std::time::Duration;

use skyschedule_common::auth::Credentials;
use skyschedule_common::ids::{ClientId, GroupName, HandlerName};
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::messages::{Consistency, MAX_HANDLERS};

/// Most servers that a client connects to.
pub(crate) const MAX_SERVERS: usize = 16;

/// See [`crate::Builder`], which makes one.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) servers: Vec<String>,
    pub(crate) group: GroupName,
    pub(crate) client: ClientId,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) consistency: Option<Consistency>,
    pub(crate) weight: u32,
    pub(crate) ring_key: Option<BoundedString<256>>,
    pub(crate) handlers: BoundedVec<HandlerName, MAX_HANDLERS>,
    pub(crate) degraded_after: Duration,
}

/// Whether the text looks like `host:port`.
pub(crate) fn is_address(text: &str) -> bool {
    text.len() <= 256
        && text.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty()
                && host.bytes().all(|b| b.is_ascii_graphic())
                && port.parse::<u16>().is_ok_and(|port| port > 0)
        })
}
