//! What a user works with: rows that may be fetched, and rows that are being worked on.

use std::fmt;
use std::sync::Arc;

use skyschedule_common::env::Instant;
use skyschedule_common::epoch::Epoch;
use skyschedule_common::share::{RowKey, ShareUnion};

use crate::permit::{Begun, Granted, Permit};
use crate::shared::Shared;

/// Rows that this client may work on, as they were when it was acquired: what to fetch.
///
/// Rows that leave the client leave every `Work` that is alive, and never come back to it: another client may
/// have worked on them meanwhile, so what was fetched is stale. Acquire again for each batch; that is cheap.
pub struct Work {
    shared: Arc<Shared>,
    granted: Granted,
}

impl Work {
    pub(crate) fn new(shared: Arc<Shared>, granted: Granted) -> Self {
        Self { shared, granted }
    }

    /// The rows to fetch; see [`ShareUnion::predicate`]. One share, but for a client that works on
    /// while every server is gone.
    pub fn share(&self) -> &ShareUnion {
        &self.granted.rows
    }

    /// The epoch of the share when this was acquired.
    pub fn epoch(&self) -> Epoch {
        self.granted.epoch
    }

    /// Begins the row with this key: `None` if it is no longer this client's, if the lease is over, or if
    /// the client closes. The clock is read anew each time, so that a process that was stopped or suspended
    /// begins nothing that is not its own any more.
    ///
    /// Call it right before the work on the row, not when the row is fetched.
    pub fn begin(&self, id: impl Into<RowKey>) -> Option<Row> {
        let key = id.into();
        let begun = self
            .shared
            .now(|permit, now| permit.begin(self.granted.tenure, key, now))?;
        Some(Row {
            shared: Arc::clone(&self.shared),
            key,
            begun,
        })
    }

    /// Whether all that came of this must stop: the membership is over, or the lease in an exclusive group, or
    /// the client. It stays so, even if the client gets the same rows again.
    pub fn is_revoked(&self) -> bool {
        is_revoked(&self.shared, self.granted.revocation)
    }

    /// Ends when [`is_revoked`](Self::is_revoked) is true. Drop the work on all rows then.
    pub fn revoked(&self) -> impl Future<Output = ()> + Send + use<> {
        revoked(Arc::clone(&self.shared), self.granted.revocation)
    }

    /// Ends when some of the rows have left, or the client closes: finish the rows that are begun, and acquire
    /// again instead of fetching more.
    pub fn recalled(&self) -> impl Future<Output = ()> + Send + use<> {
        let (shared, tenure) = (Arc::clone(&self.shared), self.granted.tenure);
        async move { wait_until(&shared, |permit, now| permit.is_recalled(tenure, now)).await }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.shared.permit().end_tenure(self.granted.tenure);
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("epoch", &self.granted.epoch)
            .field("share", &self.granted.rows)
            .finish_non_exhaustive()
    }
}

/// A row that is being worked on. While it lives, no other client is given the row (an exclusive group), or none
/// before `drain_timeout` (an available one); dropping it is the release.
///
/// Also a handler that was told to stop must drop it: the client is no member again before that.
pub struct Row {
    shared: Arc<Shared>,
    key: RowKey,
    begun: Begun,
}

impl Row {
    /// The fencing token: greater than that of every earlier owner of the row, as far as servers were there
    /// to decide. Two epochs of different memberships compare; store it with what the work writes.
    pub fn epoch(&self) -> Epoch {
        self.begun.epoch
    }

    /// The key that the row was begun with.
    pub fn key(&self) -> RowKey {
        self.key
    }

    /// Whether the work on the row must stop: the membership is over, or the lease in an exclusive group, or
    /// the client. A row that merely moves to another client is finished, not stopped.
    pub fn is_revoked(&self) -> bool {
        is_revoked(&self.shared, self.begun.revocation)
    }

    /// Ends when [`is_revoked`](Self::is_revoked) is true: the future to select on beside the handler.
    pub fn revoked(&self) -> impl Future<Output = ()> + Send + use<> {
        revoked(Arc::clone(&self.shared), self.begun.revocation)
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        let release_may_be_due = self.shared.permit().finish_row(self.begun.guard);
        if release_may_be_due {
            self.shared.wake_driver();
        }
    }
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Row")
            .field("key", &self.key)
            .field("epoch", &self.begun.epoch)
            .finish_non_exhaustive()
    }
}

fn is_revoked(shared: &Shared, revocation: u64) -> bool {
    shared.now(|permit, now| permit.is_revoked(revocation, now))
}

async fn revoked(shared: Arc<Shared>, revocation: u64) {
    wait_until(&shared, |permit, now| permit.is_revoked(revocation, now)).await;
}

async fn wait_until(shared: &Shared, mut over: impl FnMut(&mut Permit, Instant) -> bool) {
    shared
        .wait_for(|| shared.now(&mut over).then_some(()))
        .await;
}
