//! When a row is held, as log lines of the target `held`: `RUST_LOG=info,held=trace` shows them to who wants to check that
//! no two processes hold one row.

use skyschedule_client::Client;
use skyschedule_client::sql::Key;
use skyschedule_common::env;
use tracing::Level;

/// A row while its handler runs. Times are microseconds of the clock that counts suspend, which is the same for all
/// processes of a machine.
#[derive(Debug)]
pub(super) struct Held(Option<Key>);

impl Held {
    /// The handler begins. Its process holds the row until this is dropped, at most until its lease is over; what is left
    /// of the lease now is the least that it can be.
    pub(super) fn begin(client: &Client, key: &Key) -> Self {
        if !tracing::enabled!(target: "held", Level::TRACE) {
            return Self(None);
        }
        let (at_us, left) = (now_us(), client.inspect().lease_left.as_micros());
        tracing::trace!(target: "held", task = %key, at_us, lease_left_us = left, "begins");
        Self(Some(key.clone()))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(key) = &self.0 {
            tracing::trace!(target: "held", task = %key, at_us = now_us(), "ends");
        }
    }
}

fn now_us() -> u64 {
    env::now().as_nanos() / 1_000
}
