//! The rows of this client's share, page after page: when to ask for the next page, and where.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use tokio::sync::watch;

use super::driver::{Driver, Head};
use super::fetch::{Page, Place, Plan, fetch};
use super::key::Key;
use super::pace::{Idle, Trouble, pending_or};
use super::session::Session;
use super::statements::Statements;
use crate::client::Client;
use crate::observe::Status;
use crate::work::Work;

/// After a query that found the end of the rows, so many times as long as it took is waited at least.
const THRIFT: u32 = 10;

/// See the module.
pub(super) struct Pages<D: Driver> {
    client: Client,
    shares: watch::Receiver<Status>,
    statements: Arc<Statements>,
    /// How long a query may take.
    limit: Duration,
    longest_idle: Duration,
    place: Place,
    /// Rows were left behind: begin anew at the oldest one.
    rewind: bool,
    idle: Idle,
    /// Of queries.
    pub(super) trouble: Trouble,
    /// When to ask next.
    next: Instant,
    asking: Option<BoxFuture<'static, Answer<D>>>,
    /// The newest rows of this client, kept so that their end is seen.
    work: Option<Arc<Work>>,
    recalled: Option<BoxFuture<'static, ()>>,
    stopped: bool,
}

/// What was asked for.
enum Answer<D: Driver> {
    /// This client has rows again, or is closed.
    Rows {
        closed: bool,
    },
    Page(Box<Fetched<D>>),
    Failed(String),
}

/// A page, to be taken in.
pub(super) struct Fetched<D: Driver> {
    work: Arc<Work>,
    plan: Plan,
    pub(super) page: Page<D>,
    session: Session<D>,
}

/// What there is to be told.
pub(super) enum News<D: Driver> {
    Page(Box<Fetched<D>>),
    /// A query has failed, and is tried again after that time.
    Failed(String, Duration),
    /// The share has changed.
    Moved,
    /// The client is closed.
    Closed,
}

impl<D: Driver> Pages<D> {
    pub(super) fn new(
        client: Client,
        statements: Arc<Statements>,
        limit: Duration,
        longest_idle: Duration,
    ) -> Self {
        Self {
            shares: client.shares(),
            client,
            statements,
            limit,
            longest_idle,
            place: Place::new(),
            rewind: false,
            idle: Idle::new(longest_idle),
            trouble: Trouble::default(),
            next: env::now(),
            asking: None,
            work: None,
            recalled: None,
            stopped: false,
        }
    }

    /// The epoch of the present share.
    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.shares.borrow().epoch
    }

    /// Whether a page is to be asked for now.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.is_asking() && !self.stopped && now >= self.next && !self.trouble.lasts(now)
    }

    /// Whether a query is under way.
    pub(super) fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Asks for about so many `rows` beside those that are `known`. While this client has none it waits for them first, and
    /// the connection comes back: marks may need it before there can be any.
    pub(super) fn ask<'k>(
        &mut self,
        rows: usize,
        known: impl Iterator<Item = &'k Key>,
        mut session: Session<D>,
    ) -> Option<Session<D>> {
        // Anew for each page: the rows of an older one leave it, but never come.
        let Some(Ok(work)) = self.client.acquire().now_or_never() else {
            let client = self.client.clone();
            self.asking = Some(Box::pin(async move {
                Answer::Rows {
                    closed: client.acquire().await.is_err(),
                }
            }));
            return Some(session);
        };
        if std::mem::take(&mut self.rewind) {
            self.place.rewind();
        }
        let (share, epoch) = (work.share(), work.epoch());
        let plan = self.place.plan(&self.statements, share, epoch, rows, known);
        let (statements, limit) = (Arc::clone(&self.statements), self.limit);
        self.asking = Some(Box::pin(async move {
            let asked = fetch(&mut session.connection, &statements, &plan);
            match env::timeout(limit, asked).await {
                Ok(Ok(page)) => Answer::Page(Box::new(Fetched {
                    work: Arc::new(work),
                    plan,
                    page,
                    session,
                })),
                Ok(Err(error)) => Answer::Failed(error.to_string()),
                Err(elapsed) => {
                    session.connection.close_on_drop();
                    Answer::Failed(elapsed.to_string())
                }
            }
        }));
        None
    }

    /// Waits for news; for ever once it is stopped.
    pub(super) async fn news(&mut self) -> News<D> {
        if self.stopped {
            return std::future::pending().await;
        }
        let closed = tokio::select! {
            biased;
            answer = pending_or(&mut self.asking) => {
                self.asking = None;
                match answer {
                    Answer::Page(fetched) => return News::Page(fetched),
                    Answer::Failed(error) => return News::Failed(error, self.trouble.note(env::now())),
                    Answer::Rows { closed } => closed,
                }
            }
            () = pending_or(&mut self.recalled) => {
                self.recalled = None;
                false
            }
            changed = self.shares.changed() => changed.is_err(),
        };
        if closed {
            return News::Closed;
        }
        // There may be other rows.
        self.rewind = true;
        self.next = env::now();
        News::Moved
    }

    /// Takes a page in: each row of this client is given to `take`, which tells whether it is new. What the query used.
    pub(super) fn turn(
        &mut self,
        fetched: Fetched<D>,
        mut take: impl FnMut(&Arc<Work>, Head, D::Row) -> bool,
    ) -> Session<D> {
        let Fetched {
            work,
            plan,
            mut page,
            session,
        } = fetched;
        let now = env::now();
        let mut found = false;
        for (head, row) in page.rows {
            let is_own = match &plan.filter {
                Some(own) => own.contains((&head.key).into()),
                None => true,
            };
            found |= is_own && take(&work, head, row);
        }
        let more = self.place.advance(&plan, &mut page.extent);
        let mut wait = self.idle.wait(found, more);
        if !more {
            // What finds nothing shall not keep the database busy.
            wait = wait.max((page.extent.took * THRIFT).min(self.longest_idle));
        }
        self.next = now + wait;
        self.recalled = Some(Box::pin(work.recalled()));
        self.work = Some(work);
        session
    }

    /// Rows were left behind: the next page begins at the oldest one.
    pub(super) fn rewind(&mut self) {
        self.rewind = true;
    }

    /// The next page is not to be asked for later than that.
    pub(super) fn ask_by(&mut self, at: Instant) {
        self.next = self.next.min(at);
    }

    /// When the next page is due, if none was asked for.
    pub(super) fn due_at(&self, now: Instant) -> Option<Instant> {
        let due = self.trouble.until(now).unwrap_or(now).max(self.next);
        (!self.is_asking() && !self.stopped && now < due).then_some(due)
    }

    /// No more pages.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.asking = None;
        self.recalled = None;
        self.work = None;
    }
}
