//! What the log tells of a server's trouble: what lasts, and once.

use std::time::Duration;

use skyschedule_common::env::Instant;
use tracing::{debug, info, warn};

/// Trouble that is over sooner is not worth a warning: servers are restarted.
const LASTS: Duration = Duration::from_secs(3);

/// Since when a server is not there for this client, and what was told of it.
#[derive(Debug, Default)]
pub(super) struct Outage {
    since: Option<Instant>,
    /// That it lasts was told.
    told: bool,
    /// The refusal that was told.
    refusal: Option<String>,
}

impl Outage {
    /// An attempt to connect failed, or a connection ended.
    pub(super) fn failed(&mut self, address: &str, reason: &str, now: Instant) {
        let since = *self.since.get_or_insert(now);
        if !self.told && now.saturating_duration_since(since) >= LASTS {
            self.told = true;
            warn!(
                server = address,
                "this server cannot be reached, and is tried again and again: {reason}"
            );
        } else {
            debug!(server = address, "no connection: {reason}");
        }
    }

    /// The server and this client are not made for each other, as one of them says.
    pub(super) fn refused(&mut self, address: &str, text: &str) {
        if self.refusal.as_deref() == Some(text) {
            debug!(server = address, "{text}");
        } else {
            warn!(server = address, "{text}");
            self.refusal = Some(text.to_owned());
        }
    }

    /// The server takes this client's login.
    pub(super) fn over(&mut self, address: &str) {
        if self.told || self.refusal.is_some() {
            info!(server = address, "this server is reached");
        }
        *self = Self::default();
    }

    #[cfg(test)]
    pub(super) fn was_told(&self) -> bool {
        self.told
    }
}
