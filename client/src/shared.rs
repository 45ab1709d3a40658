//! What the user's threads and the driver share.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::share::{Share, ShareUnion};
use tokio::sync::{Notify, watch};

use crate::error::{Closed, ConnectError};
use crate::membership::{Farewell, Wishes};
use crate::observe::{ConnectionState, Link, Mode, Status};
use crate::permit::Permit;

/// What users want of the driver. Only the newest of each kind counts, so it needs no queue.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Requests {
    pub(crate) wishes: Wishes,
    /// Queries of the present share so far.
    pub(crate) pulls: u64,
    /// The last handle is dropped.
    pub(crate) abandoned: bool,
}

/// See the module. Neither lock is held across a wait, nor while the other is.
#[derive(Debug)]
pub(crate) struct Shared {
    permit: Mutex<Permit>,
    requests: Mutex<Requests>,
    /// Something may have changed for those who wait for rows, or for the end of rows.
    changed: Notify,
    /// The driver has something to do.
    driver: Notify,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) state: watch::Sender<ConnectionState>,
    /// Queries of the present share that are answered, and with what.
    pub(crate) pulled: watch::Sender<(u64, Epoch, Share)>,
    pub(crate) farewell: watch::Sender<Option<Farewell>>,
    /// Why the client ended by itself.
    expelled: OnceLock<Closed>,
}

impl Shared {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            permit: Mutex::new(Permit::new()),
            requests: Mutex::default(),
            changed: Notify::new(),
            driver: Notify::new(),
            status: watch::Sender::default(),
            state: watch::Sender::default(),
            pulled: watch::Sender::new((0, Epoch::ZERO, Share::NONE)),
            farewell: watch::Sender::default(),
            expelled: OnceLock::new(),
        })
    }

    pub(crate) fn permit(&self) -> MutexGuard<'_, Permit> {
        self.permit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the permit with the present time, read while nothing can change it (C1).
    pub(crate) fn now<T>(&self, ask: impl FnOnce(&mut Permit, Instant) -> T) -> T {
        let mut permit = self.permit();
        let now = env::now();
        ask(&mut permit, now)
    }

    pub(crate) fn requests(&self) -> Requests {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what is wanted, and tells the driver.
    pub(crate) fn request<T>(&self, change: impl FnOnce(&mut Requests) -> T) -> T {
        let answer = change(&mut self.requests.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake_driver();
        answer
    }

    pub(crate) fn wake_driver(&self) {
        self.driver.notify_one();
    }

    /// Until the driver has something to do.
    pub(crate) async fn driver_woken(&self) {
        self.driver.notified().await;
    }

    /// Those who wait look again.
    pub(crate) fn announce(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until `look` finds something; it is asked now, and whenever something may have changed.
    pub(crate) async fn wait_for<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(found) = look() {
                return found;
            }
            changed.await;
        }
    }

    /// The client ends by itself, for this reason.
    pub(crate) fn expel(&self, why: &ConnectError) {
        let _ = self.expelled.set(Closed::because(why));
    }

    /// Why the client ended by itself.
    pub(crate) fn expelled(&self) -> Option<&Closed> {
        self.expelled.get()
    }

    /// Why a client that is closed, or closing, gives no more rows.
    pub(crate) fn closed(&self) -> Closed {
        self.expelled().cloned().unwrap_or_default()
    }

    /// The end, also when the driver is dropped with its runtime: what was given is revoked, nobody waits for ever.
    pub(crate) fn end(&self, farewell: Farewell) {
        self.permit().end();
        self.publish_status(Status::default());
        self.state.send_modify(|state| {
            state.closed = true;
            state.membership = None;
            state
                .servers
                .iter_mut()
                .for_each(|server| server.link = Link::Down);
        });
        self.farewell
            .send_if_modified(|known| known.replace(farewell) != Some(farewell));
        self.announce();
    }

    pub(crate) fn publish_status(&self, status: Status) {
        self.status.send_if_modified(|known| {
            let changed = *known != status;
            if changed {
                *known = status;
            }
            changed
        });
    }
}

/// The rows as observers see them.
pub(crate) fn status(permit: &Permit, now: Instant) -> Status {
    let Some(holding) = permit.holding() else {
        return Status::default();
    };
    let mode = holding.mode(now);
    let autonomous = mode == Mode::Autonomous;
    let rows = if autonomous {
        holding.widest()
    } else {
        ShareUnion::from(holding.share.clone())
    };
    // In mixed mode no single number says which rows are this client's.
    let node = holding
        .node()
        .filter(|_| rows.single() == Some(&holding.share));
    Status {
        epoch: Some(holding.epoch),
        rows,
        node,
        settled: holding.settled,
        mode,
    }
}
