//! The loop: find rows, hand them to transactions, count what became of them.
//!
//! Rows are found by the same queries as elsewhere, without locks, and each is claimed in the transaction that works
//! on it. So nothing depends on what the query saw.

use std::collections::{HashMap, HashSet, VecDeque};
use std::marker::PhantomData;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use skyschedule_common::env::{self, Instant, rng};
use skyschedule_common::share::Dialect;
use sqlx::{FromRow, Pool};
use tokio::sync::watch;

use super::super::consumer::Settings;
use super::super::driver::Driver;
use super::super::key::Key;
use super::super::metrics::Metrics;
use super::super::pace::Trouble;
use super::super::pages::{Fetched, News, Pages};
use super::super::session::Sessions;
use super::super::statements::{Mark, Statements};
use super::super::task::Failure;
use super::lane::{Fate, Found, Lane, Report};
use super::{TransactionHandler, Transactions, Tx};
use crate::client::Client;

/// How long a row is left alone that was locked or rolled back, at first and at most.
const ASIDE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How long a row is left alone whose mark the database refuses.
const REFUSED: Duration = Duration::from_secs(60);

/// How long it is remembered how often a row was left alone.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Most rows that are remembered.
const MAX_ASIDE: usize = 10_000;

/// See the module.
pub(in super::super) struct Engine<D: Driver, R, H> {
    pool: Pool<D>,
    statements: Arc<Statements>,
    settings: Settings,
    handler: Arc<H>,
    metrics: watch::Sender<Metrics>,
    row: PhantomData<fn() -> R>,

    pages: Pages<D>,
    /// For queries.
    sessions: Sessions<D>,
    /// Of transactions.
    away: Trouble,

    queue: VecDeque<Found>,
    lanes: FuturesUnordered<Running>,
    most_lanes: usize,
    /// Tells the transactions that were begun until now to come to their end.
    hurry: Arc<AtomicBool>,
    /// In the queue or in a transaction.
    in_flight: HashSet<Key>,
    aside: HashMap<Key, Aside>,
    stopping: bool,
}

/// A row that is left alone.
struct Aside {
    until: Instant,
    times: u32,
    /// It is tried again in a transaction of its own.
    alone: bool,
}

/// A transaction that goes on; it is rolled back when this is dropped.
struct Running {
    keys: Vec<Key>,
    task: env::JoinHandle<Report>,
}

impl Future for Running {
    type Output = (Vec<Key>, Result<Report, env::JoinError>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = ready!(Pin::new(&mut self.task).poll(context));
        Poll::Ready((mem::take(&mut self.keys), ended))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<D, R, H> Engine<D, R, H>
where
    D: Driver,
    R: for<'r> FromRow<'r, D::Row> + Send + 'static,
    H: TransactionHandler<R, Tx<D>>,
{
    pub(in super::super) fn new(
        client: Client,
        pool: Pool<D>,
        statements: Arc<Statements>,
        settings: Settings,
        handler: H,
        metrics: watch::Sender<Metrics>,
    ) -> Self {
        let connections = usize::try_from(pool.options().get_max_connections()).unwrap_or(2);
        let most_lanes = match D::DIALECT {
            // More would wait for the one lock.
            Dialect::Sqlite => 1,
            // One connection is left for the queries.
            _ => settings
                .concurrency
                .min(connections.saturating_sub(1))
                .max(1),
        };
        let limit = settings.database_timeout;
        // What is in rows is read when they are claimed.
        let keys_only = Arc::new(statements.keys_only());
        Self {
            pages: Pages::new(client, keys_only, limit, settings.longest_idle),
            sessions: Sessions::new(pool.clone(), limit),
            pool,
            statements,
            settings,
            handler: Arc::new(handler),
            metrics,
            row: PhantomData,
            away: Trouble::default(),
            queue: VecDeque::new(),
            lanes: FuturesUnordered::new(),
            most_lanes,
            hurry: Arc::default(),
            in_flight: HashSet::new(),
            aside: HashMap::new(),
            stopping: false,
        }
    }

    pub(in super::super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        loop {
            let now = env::now();
            self.begin_transactions(now);
            self.begin_fetch(now);
            self.sessions.tidy(now);
            self.show();
            if self.stopping && self.lanes.is_empty() {
                break;
            }
            let wake = self.wake(now);
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop), if !self.stopping => self.stop(),
                Some((keys, report)) = self.lanes.next() => self.take_report(&keys, report),
                come = self.sessions.come() => if let Err(error) = come {
                    let retry_in = self.pages.trouble.note(env::now());
                    self.note_trouble("there is no connection to the database", &error, retry_in);
                },
                news = self.pages.news() => self.take_news(news),
                () = env::sleep_until(wake) => {}
            }
        }
    }

    // Transactions.

    fn begin_transactions(&mut self, now: Instant) {
        while self.lanes.len() < self.most_lanes
            && !self.stopping
            && !self.away.lasts(now)
            && !self.queue.is_empty()
        {
            let rows = self.next_rows();
            let keys = rows.iter().map(|row| row.key.clone()).collect();
            let lane = Lane {
                pool: self.pool.clone(),
                statements: Arc::clone(&self.statements),
                handler: Arc::clone(&self.handler),
                settings: self.settings.clone(),
                metrics: self.metrics.clone(),
                hurry: Arc::clone(&self.hurry),
                row: self.row,
            };
            let task = env::spawn(lane.run(rows));
            self.lanes.push(Running { keys, task });
        }
    }

    /// The rows of the next transaction.
    fn next_rows(&mut self) -> Vec<Found> {
        let most = match self.settings.transactions {
            Transactions::PerTask => 1,
            Transactions::PerBatch => {
                // For all that have nothing to do.
                let free = self.most_lanes - self.lanes.len();
                self.queue.len().div_ceil(free).min(self.settings.batch)
            }
        };
        let mut rows = Vec::with_capacity(most);
        while rows.len() < most
            && let Some(next) = self.queue.front()
        {
            let alone = self.aside.get(&next.key).is_some_and(|aside| aside.alone);
            if alone && !rows.is_empty() {
                break;
            }
            rows.extend(self.queue.pop_front());
            if alone {
                break;
            }
        }
        rows
    }

    fn take_report(&mut self, keys: &[Key], report: Result<Report, env::JoinError>) {
        for key in keys {
            self.in_flight.remove(key);
        }
        let report = match report {
            Ok(report) => report,
            Err(error) => {
                tracing::error!(%error, "a transaction was broken off");
                for key in keys {
                    self.set_aside(key, true);
                }
                return;
            }
        };
        self.metrics.send_modify(|metrics| {
            metrics.lost_marks += report.lost;
            metrics.unanswered_commits += u64::from(report.asked);
        });
        if report.lost > 0 {
            tracing::warn!(
                rows = report.lost,
                "marks changed nothing: handlers have changed the status of their rows themselves"
            );
        }
        let mut lost = report.lost;
        let mut away = None;
        for (key, fate) in report.fates {
            match fate {
                // Its handler has marked it otherwise.
                Fate::Marked(Mark::Done, _) if lost > 0 => lost -= 1,
                Fate::Marked(mark, failure) => self.take_mark(&key, mark, failure.as_ref()),
                Fate::Dropped => {
                    self.pages.rewind();
                    self.count(|metrics| metrics.dropped += 1);
                }
                Fate::Interrupted => {
                    self.pages.rewind();
                    self.count(|metrics| metrics.interrupted += 1);
                }
                Fate::Locked => {
                    self.count(|metrics| metrics.locked += 1);
                    self.set_aside(&key, false);
                }
                Fate::Again(error) => {
                    tracing::info!(task = %key, %error, "a task was rolled back: it is tried again");
                    self.count(|metrics| metrics.rolled_back += 1);
                    self.pages.rewind();
                    self.set_aside(&key, true);
                }
                Fate::Refused(error) => {
                    tracing::error!(task = %key, %error, "the database refuses the mark of a task; it is left alone for a minute");
                    self.count(|metrics| metrics.refused_marks += 1);
                    self.set_aside(&key, true);
                    if let Some(aside) = self.aside.get_mut(&key) {
                        aside.until = env::now() + REFUSED;
                    }
                }
                Fate::Away(error) => {
                    self.pages.rewind();
                    away = Some(error);
                }
                Fate::Left => self.pages.rewind(),
                Fate::Gone => {}
            }
        }
        match away {
            Some(error) => {
                let wait = self.away.note(env::now());
                self.note_trouble("tasks cannot be claimed", &error, wait);
            }
            None if self.away.end() => self.note_success(),
            None => {}
        }
    }

    fn take_mark(&mut self, key: &Key, mark: Mark, failure: Option<&Failure>) {
        self.aside.remove(key);
        if let Some(failure) = failure {
            tracing::warn!(task = %key, last = mark == Mark::Failed, %failure, "a task failed");
        }
        self.count(|metrics| {
            match failure {
                Some(Failure::Panic(_)) => metrics.panicked += 1,
                Some(Failure::Timeout(_)) => metrics.timed_out += 1,
                _ => {}
            }
            match mark {
                Mark::Done => metrics.done += 1,
                Mark::Failed => metrics.failed += 1,
                Mark::Again { .. } => metrics.retried += 1,
            }
        });
    }

    fn count(&self, one_more: impl FnOnce(&mut Metrics)) {
        self.metrics.send_modify(one_more);
    }

    /// Leaves a row alone for a while, longer each time.
    fn set_aside(&mut self, key: &Key, alone: bool) {
        let now = env::now();
        if !self.aside.contains_key(key) && self.aside.len() >= MAX_ASIDE {
            // Rather all rows than none at a time.
            self.away.note(now);
            return;
        }
        let aside = self.aside.entry(key.clone()).or_insert(Aside {
            until: now,
            times: 0,
            alone: false,
        });
        let (first, longest) = ASIDE;
        let wait = first.saturating_mul(1 << aside.times.min(10)).min(longest);
        aside.until = now + rng::jitter(wait, 0.5);
        aside.times += 1;
        aside.alone |= alone;
        self.pages.ask_by(aside.until);
    }

    // Rows.

    fn begin_fetch(&mut self, now: Instant) {
        let enough = self.queue.len() > self.settings.batch / 2;
        if enough || self.away.lasts(now) || !self.pages.is_due(now) {
            return;
        }
        let Some(session) = self.sessions.take() else {
            return;
        };
        self.aside.retain(|_, aside| now < aside.until + REMEMBERED);
        let aside = self.aside.iter().filter(|(_, aside)| now < aside.until);
        let known = self.in_flight.iter().chain(aside.map(|(key, _)| key));
        if let Some(session) = self.pages.ask(self.settings.batch, known, session) {
            self.sessions.back(session, true, now);
        }
    }

    fn take_news(&mut self, news: News<D>) {
        match news {
            News::Page(page) => self.take_page(*page),
            News::Failed(error, retry_in) => {
                self.count(|metrics| metrics.polls += 1);
                self.note_trouble("rows cannot be fetched", &error, retry_in);
            }
            // Others may be waiting for some of these rows.
            News::Moved => mem::take(&mut self.hurry).store(true, Ordering::Relaxed),
            News::Closed => self.stop(),
        }
    }

    fn take_page(&mut self, fetched: Fetched<D>) {
        if self.pages.trouble.end() {
            self.note_success();
        }
        self.metrics.send_modify(|metrics| {
            metrics.polls += 1;
            metrics.unreadable += fetched.page.unreadable;
            metrics.lag = fetched.page.lag;
        });
        let now = env::now();
        let session = self.pages.turn(fetched, |work, head, _| {
            let key = head.key;
            let aside = self.aside.get(&key).is_some_and(|aside| now < aside.until);
            let is_new = !aside && self.in_flight.insert(key.clone());
            if is_new {
                let work = Arc::clone(work);
                self.queue.push_back(Found { work, key });
            }
            is_new
        });
        self.sessions.back(session, false, now);
    }

    // The database's state, and the end.

    fn note_trouble(&self, what: &str, error: &str, retry_in: Duration) {
        tracing::warn!(%error, ?retry_in, "{what}");
        self.count(|metrics| {
            metrics.database_errors += 1;
            metrics.trouble = Some(error.to_owned());
        });
    }

    fn note_success(&self) {
        tracing::info!("the database answers again");
        self.count(|metrics| metrics.trouble = None);
    }

    /// No new rows; what waits goes back.
    fn stop(&mut self) {
        self.stopping = true;
        self.hurry.store(true, Ordering::Relaxed);
        for found in self.queue.drain(..) {
            self.in_flight.remove(&found.key);
        }
        self.pages.stop();
    }

    /// When there is something to do, if nothing happens before.
    fn wake(&self, now: Instant) -> Instant {
        const LONGEST: Duration = Duration::from_secs(1);
        let due = [
            self.pages.due_at(now),
            self.away.until(now),
            self.sessions.idle_at(),
        ];
        due.into_iter()
            .flatten()
            .min()
            .map_or(now + LONGEST, |due| due.min(now + LONGEST))
    }

    fn show(&self) {
        self.metrics.send_if_modified(|metrics| {
            let (running, waiting) = (self.lanes.len(), self.queue.len());
            let changed = (metrics.running, metrics.waiting) != (running, waiting);
            (metrics.running, metrics.waiting) = (running, waiting);
            changed
        });
    }
}
