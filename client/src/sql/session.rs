//! Connections that are kept in hand while statements follow each other at once.
//!
//! A statement begins when there is one in hand for it. Where there is none, one is asked for, and whichever comes first
//! serves: one that another statement gives back, one that is idle in the pool meanwhile, or a new one.
//!
//! A connection that goes back to its pool is tested there, which is one more way to the database for each statement. Where
//! handlers take their time, or may want connections of the same pool, each goes back after its statement.

use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use skyschedule_common::env::{self, Instant};
use sqlx::pool::PoolConnection;
use sqlx::{Connection, Pool};

use super::driver::Driver;
use super::pace::pending_or;

/// How long a connection in hand may be idle.
const IDLE: Duration = Duration::from_millis(5);

/// How long a connection stays in hand at most: the pool has an eye on its age, and others may want it.
const LONGEST: Duration = Duration::from_secs(1);

/// How often it is looked for an idle connection while a new one is opened.
const LOOK: Duration = Duration::from_millis(5);

/// How long the answer to a test of a connection is waited for.
const TEST: Duration = Duration::from_secs(1);

/// A connection, on loan from the pool.
pub(super) struct Session<D: Driver> {
    pub(super) connection: PoolConnection<D>,
    since: Instant,
    idle_since: Instant,
}

/// See the module.
pub(super) struct Sessions<D: Driver> {
    pool: Pool<D>,
    /// How long one is waited for.
    limit: Duration,
    in_hand: Vec<Session<D>>,
    /// A statement waits for one.
    wanted: bool,
    coming: Option<BoxFuture<'static, Result<PoolConnection<D>, String>>>,
}

impl<D: Driver> Sessions<D> {
    pub(super) fn new(pool: Pool<D>, limit: Duration) -> Self {
        Self {
            pool,
            limit,
            in_hand: Vec::new(),
            wanted: false,
            coming: None,
        }
    }

    /// The next one in hand. If there is none, one is asked for: see [`come`](Self::come).
    pub(super) fn take(&mut self) -> Option<Session<D>> {
        let session = self.in_hand.pop();
        self.wanted = session.is_none();
        if self.wanted && self.coming.is_none() {
            let (pool, limit) = (self.pool.clone(), self.limit);
            self.coming = Some(Box::pin(async move {
                match env::timeout(limit, first_of(&pool)).await {
                    Ok(Ok(connection)) => Ok(connection),
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(elapsed) => Err(elapsed.to_string()),
                }
            }));
        }
        session
    }

    /// Waits until one that was asked for is in hand, or cannot be had; for ever if none was.
    pub(super) async fn come(&mut self) -> Result<(), String> {
        let come = pending_or(&mut self.coming).await;
        self.coming = None;
        let now = env::now();
        self.in_hand.push(Session {
            connection: come?,
            since: now,
            idle_since: now,
        });
        Ok(())
    }

    /// It has served, and is kept in hand, for whoever waits for one at least, or goes back to the pool.
    pub(super) fn back(&mut self, mut session: Session<D>, keep: bool, now: Instant) {
        if (keep || self.wanted) && now < session.since + LONGEST {
            session.idle_since = now;
            self.in_hand.push(session);
        }
    }

    /// Gives back what was idle for too long.
    pub(super) fn tidy(&mut self, now: Instant) {
        self.in_hand
            .retain(|session| now < session.idle_since + IDLE);
    }

    /// Gives back all that is in hand.
    pub(super) fn give_all_back(&mut self) {
        self.in_hand.clear();
    }

    /// When there is something to give back.
    pub(super) fn idle_at(&self) -> Option<Instant> {
        let idle = self.in_hand.iter().map(|session| session.idle_since);
        Some(idle.min()? + IDLE)
    }
}

/// The first that comes. The pool alone, once it has begun to open a new one, waits for that, however long it takes,
/// although others are given back meanwhile; where the server takes no more connections it tries again in silence.
async fn first_of<D: Driver>(pool: &Pool<D>) -> Result<PoolConnection<D>, sqlx::Error> {
    let mut opening = Box::pin(pool.acquire());
    if let Some(at_once) = opening.as_mut().now_or_never() {
        return at_once;
    }
    // It is opened also if another one comes first: the next statement will want it.
    let mut opening = env::spawn(opening);
    loop {
        if let Ok(opened) = env::timeout(LOOK, &mut opening).await {
            return opened.unwrap_or(Err(sqlx::Error::WorkerCrashed));
        }
        if let Some(mut idle) = pool.try_acquire() {
            if is_alive(&mut *idle).await {
                return Ok(idle);
            }
            idle.close_on_drop();
        }
    }
}

/// Whether a connection that was idle still answers.
pub(super) async fn is_alive<C: Connection>(connection: &mut C) -> bool {
    matches!(env::timeout(TEST, connection.ping()).await, Ok(Ok(())))
}
