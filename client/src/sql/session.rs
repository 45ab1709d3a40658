//! Connections that are kept in hand while statements follow each other at once.
//!
//! A connection that goes back to its pool is tested there, which is one more way to the database for each statement. Where
//! handlers take their time, or may want connections of the same pool, each goes back after its statement.

use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use sqlx::Pool;
use sqlx::pool::PoolConnection;

use super::driver::Driver;

/// How long a connection in hand may be idle.
const IDLE: Duration = Duration::from_millis(5);

/// How long a connection stays in hand at most: the pool has an eye on its age, and others may want it.
const LONGEST: Duration = Duration::from_secs(1);

/// A connection, on loan from the pool.
pub(super) struct Session<D: Driver> {
    pub(super) connection: PoolConnection<D>,
    since: Instant,
    idle_since: Instant,
}

/// See the module.
pub(super) struct Sessions<D: Driver> {
    pool: Pool<D>,
    in_hand: Vec<Session<D>>,
    /// Those that statements use.
    lent: usize,
}

/// A connection that is in hand, or a place in the queue of the pool.
pub(super) enum Loan<D: Driver> {
    InHand(Session<D>),
    Wanted(Pool<D>),
}

impl<D: Driver> Loan<D> {
    pub(super) async fn take(self) -> Result<Session<D>, sqlx::Error> {
        match self {
            Self::InHand(session) => Ok(session),
            Self::Wanted(pool) => {
                let connection = pool.acquire().await?;
                let now = env::now();
                Ok(Session {
                    connection,
                    since: now,
                    idle_since: now,
                })
            }
        }
    }
}

impl<D: Driver> Sessions<D> {
    pub(super) fn new(pool: Pool<D>) -> Self {
        Self {
            pool,
            in_hand: Vec::new(),
            lent: 0,
        }
    }

    /// Whether there is one more than those that are lent, in hand or in the pool.
    pub(super) fn has_one(&self) -> bool {
        let most = self.pool.options().get_max_connections();
        !self.in_hand.is_empty() || self.lent < usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Lends one; [`back`](Self::back) or [`lost`](Self::lost) must follow.
    pub(super) fn loan(&mut self) -> Loan<D> {
        self.lent += 1;
        match self.in_hand.pop() {
            Some(session) => Loan::InHand(session),
            None => Loan::Wanted(self.pool.clone()),
        }
    }

    /// It has served, and is kept in hand or goes back to the pool.
    pub(super) fn back(&mut self, mut session: Session<D>, keep: bool, now: Instant) {
        self.lost();
        if keep && now < session.since + LONGEST {
            session.idle_since = now;
            self.in_hand.push(session);
        }
    }

    /// It is closed, or was given up.
    pub(super) fn lost(&mut self) {
        self.lent = self.lent.saturating_sub(1);
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
