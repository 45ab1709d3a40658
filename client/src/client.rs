//! The handle that users hold.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName};
use skyschedule_common::protocol::MAX_WEIGHT;
use skyschedule_common::share::{RowKey, Share};
use tokio::sync::{oneshot, watch};

use crate::builder::Builder;
use crate::config::Config;
use crate::driver::{Driver, Joined};
use crate::error::{Closed, ConnectError, NoGoodbye, WeightTooLarge};
use crate::membership::{Drain, Farewell};
use crate::observe::{ConnectionState, Inspection, Status};
use crate::permit::Stage;
use crate::shared::Shared;
use crate::work::Work;

/// A member of a group, or one that tries to become it. Clones are handles to the same client.
///
/// [`close`](Self::close) ends it in good order. When the last handle is dropped without that, the connections
/// are reset, all its [`Work`] and [`Row`](crate::Row)s are revoked, and the servers give its rows to others when its
/// lease is over.
#[derive(Clone)]
pub struct Client(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
    group: GroupName,
    client: ClientId,
}

/// Dropped with the last handle.
impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.request(|requests| requests.abandoned = true);
    }
}

impl Client {
    /// Sets a client up.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(crate) fn start(
        config: Config,
        limit: Option<Duration>,
    ) -> Result<(Self, oneshot::Receiver<Joined>), ConnectError> {
        let shared = Shared::new();
        let handle = Handle {
            shared: Arc::clone(&shared),
            group: config.group.clone(),
            client: config.client.clone(),
        };
        let joined = Driver::start(config, shared, limit)?;
        Ok((Self(Arc::new(handle)), joined))
    }

    /// The group.
    pub fn group(&self) -> &GroupName {
        &self.0.group
    }

    /// The client's name in its group.
    pub fn client_id(&self) -> &ClientId {
        &self.0.client
    }

    /// Waits until there are rows that this client may start now.
    ///
    /// It may wait long: a client may have no share at present (a handover, more clients than rows, weight 0), or
    /// no lease. It is cancel safe.
    ///
    /// # Errors
    /// When the client is closed or closes, or [has ended by itself](Self::ended).
    pub async fn acquire(&self) -> Result<Work, Closed> {
        let shared = &self.0.shared;
        shared
            .wait_for(|| {
                shared.now(|permit, now| {
                    if permit.stage() > Stage::Open {
                        return Some(Err(shared.closed()));
                    }
                    permit.acquire(now).map(Ok)
                })
            })
            .await
            .map(|granted| Work::new(Arc::clone(shared), granted))
    }

    /// `(total, number)`: the rows with `id % total = number` are this client's. `None` unless it has one number
    /// of a modulo group, and while it works on without any server with rows of several numberings.
    ///
    /// For programs that take their share as the reference system gives it. It says nothing about leases and
    /// handovers: [`acquire`](Self::acquire) does.
    pub fn node(&self) -> Option<(u32, u32)> {
        self.0.shared.status.borrow().node
    }

    /// The present share, and each change of it.
    pub fn shares(&self) -> watch::Receiver<Status> {
        self.0.shared.status.subscribe()
    }

    /// The connections, the membership and the last refusal, and each change of them.
    pub fn state(&self) -> watch::Receiver<ConnectionState> {
        self.0.shared.state.subscribe()
    }

    /// Asks a server for the present share, as clients of the reference system do every few seconds. Not
    /// needed: each change is pushed at once. Waits while no server serves the client.
    ///
    /// # Errors
    /// When the client is closed.
    pub async fn pull(&self) -> Result<(Epoch, Share), Closed> {
        let mut pulled = self.0.shared.pulled.subscribe();
        let ticket = self.0.shared.request(|requests| {
            requests.pulls += 1;
            requests.pulls
        });
        let mut farewell = self.0.shared.farewell.subscribe();
        tokio::select! {
            biased;
            answer = pulled.wait_for(|(answered, ..)| *answered >= ticket) => {
                let answer = answer.map_err(|_| self.0.shared.closed())?;
                Ok((answer.1, answer.2.clone()))
            }
            _ = farewell.wait_for(Option::is_some) => Err(self.0.shared.closed()),
        }
    }

    /// Changes the client's part of the whole, at most 1,000; with 0 it owns nothing. It is told to the server at the next
    /// opportunity; the new share follows.
    ///
    /// # Errors
    /// When the weight is too large.
    pub fn update_weight(&self, weight: u32) -> Result<(), WeightTooLarge> {
        if weight > MAX_WEIGHT {
            return Err(WeightTooLarge(weight));
        }
        self.0
            .shared
            .request(|requests| requests.wishes.weight = Some(weight));
        Ok(())
    }

    /// Lets the client's share move away while it stays connected, or takes that back: also where an operator
    /// drained it.
    pub fn drain(&self, away: bool) {
        self.0.shared.request(|requests| {
            let call = requests.wishes.drain.map_or(1, |drain| drain.call + 1);
            requests.wishes.drain = Some(Drain { away, call });
        });
    }

    /// Ends the client in good order: no new rows; waits until every [`Row`](crate::Row) is dropped; releases, says
    /// goodbye, and others get its rows at once.
    ///
    /// It waits as long as the rows take. If the future is dropped before, closing goes on as long as a handle lives.
    ///
    /// # Errors
    /// When no server was there for a whole lease to hear the goodbye. The client is closed all the same.
    pub async fn close(&self) -> Result<(), NoGoodbye> {
        let shared = &self.0.shared;
        shared.permit().begin_closing();
        shared.announce();
        shared.wake_driver();
        let mut farewell = shared.farewell.subscribe();
        let said = farewell
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|farewell| *farewell);
        if said == Some(Farewell::Said) {
            Ok(())
        } else {
            Err(NoGoodbye)
        }
    }

    /// Why the client has ended by itself: its group was deleted while it was away, and made again with another promise
    /// than it relies on ([`consistency`](crate::Builder::consistency)). `None` while it lives, and where its user closed it.
    pub fn ended(&self) -> Option<Closed> {
        self.0.shared.expelled().cloned()
    }

    /// Whether a [`Work`] acquired now could begin the row now.
    pub fn may_begin(&self, id: impl Into<RowKey>) -> bool {
        self.may_begin_at(id, env::now())
    }

    /// As [`may_begin`](Self::may_begin), at an instant of this machine's clock.
    pub fn may_begin_at(&self, id: impl Into<RowKey>, now: Instant) -> bool {
        self.0.shared.permit().may_begin(id.into(), now)
    }

    /// Whether the client holds the row: it may begin it, or works on it, under a lease that is not over (or,
    /// in an available group, because no server answers).
    pub fn holds(&self, id: impl Into<RowKey>) -> bool {
        self.holds_at(id, env::now())
    }

    /// As [`holds`](Self::holds), at an instant of this machine's clock.
    pub fn holds_at(&self, id: impl Into<RowKey>, now: Instant) -> bool {
        self.0.shared.permit().holds(id.into(), now)
    }

    /// The inside of the client at this instant.
    pub fn inspect(&self) -> Inspection {
        self.inspect_at(env::now())
    }

    /// As [`inspect`](Self::inspect), at an instant of this machine's clock.
    pub fn inspect_at(&self, now: Instant) -> Inspection {
        self.0.shared.permit().inspect(now)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("group", &self.0.group)
            .field("client", &self.0.client)
            .finish_non_exhaustive()
    }
}
