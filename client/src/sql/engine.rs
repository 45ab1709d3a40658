//! The loop: fetch, run, mark, give back.
//!
//! One task owns all the state. A query for rows, a batch of marks and the handlers go on at the same time. A row's
//! guard is dropped only after its mark is committed, so that no other client executes what this one did.

mod marks;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use skyschedule_common::env::{self, Instant};
use skyschedule_common::share::ShareUnion;
use sqlx::{FromRow, Pool};
use tokio::sync::{mpsc, watch};

use super::consumer::Settings;
use super::driver::Driver;
use super::fetch::{Page, Place, Plan, fetch};
use super::group::{Begun, Groups, Report, Running};
use super::key::Key;
use super::mark::{Finished, Marked};
use super::metrics::Metrics;
use super::pace::{Idle, Trouble};
use super::session::{Session, Sessions};
use super::statements::{Mark, Statements};
use super::task::{Failure, Handler, Outcome, Task};
use crate::client::Client;
use crate::work::Work;

/// How long a row is left alone whose mark the database refuses.
const SET_ASIDE: Duration = Duration::from_secs(60);

/// Most rows that are left alone at a time.
const MAX_SET_ASIDE: usize = 10_000;

/// For about so long rows are fetched ahead where handlers are quick, in pages of a batch at least.
const AHEAD: Duration = Duration::from_millis(100);

/// After a query that found the end of the rows, so many times as long as it took is waited at least.
const THRIFT: u32 = 10;

/// Most batches of a page, and most rows where a batch is not larger.
const LARGEST_PAGE: (usize, usize) = (10, 1_000);

/// How long a consumer that stops tries to mark what it has executed.
const LAST_MARKS: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Engine<D: Driver, R, H> {
    client: Client,
    sessions: Sessions<D>,
    statements: Arc<Statements>,
    settings: Settings,
    counts: Metrics,
    /// What others see of the counts.
    metrics: watch::Sender<Metrics>,

    place: Place,
    /// Rows were left behind: begin anew at the oldest one.
    rewind: bool,
    idle: Idle,
    trouble: Trouble,
    next_poll: Instant,
    /// Asks for rows.
    fetching: Option<BoxFuture<'static, Result<Fetched<D>, FetchError>>>,
    /// Rows of the newest page that was asked for, at most.
    page: usize,
    /// When that was, and how many tasks had been started by then.
    asked: (Instant, u64),
    /// The newest rows of this client, kept so that their end is seen.
    work: Option<Arc<Work>>,
    recalled: Option<BoxFuture<'static, ()>>,

    /// Rows that wait for their turn.
    queue: VecDeque<Queued<R>>,
    /// How many handlers run.
    running: usize,
    groups: Groups<H>,
    /// The tasks that handlers run in: of groups, and of single ones.
    together: HashMap<u64, Running>,
    apart: HashMap<Key, Running>,
    reports: mpsc::Receiver<Report>,
    /// Executed, and to be marked.
    finished: Vec<Finished>,
    marking: FuturesUnordered<BoxFuture<'static, MarkResult<D>>>,
    /// Those whose marks may have been committed although an error came back.
    uncertain: HashSet<Key>,

    /// Everything from the queue to the mark.
    in_flight: HashSet<Key>,
    /// What was marked while a query was under way: the query may have seen it as new.
    marked_meanwhile: HashSet<Key>,
    set_aside: HashMap<Key, Instant>,
    /// Since when it stops.
    stopping: Option<Instant>,
}

struct Queued<R> {
    work: Arc<Work>,
    key: Key,
    attempts: i64,
    row: Result<R, String>,
}

struct Fetched<D: Driver> {
    work: Arc<Work>,
    plan: Plan,
    page: Page<D>,
    place: Place,
    session: Session<D>,
}

enum FetchError {
    Closed,
    Database(Place, String),
}

type MarkResult<D> = (Vec<Finished>, Result<(Marked, Session<D>), String>);

impl<D, R, H> Engine<D, R, H>
where
    D: Driver,
    R: for<'r> FromRow<'r, D::Row> + Send + 'static,
    H: Handler<R>,
{
    pub(super) fn new(
        client: Client,
        pool: Pool<D>,
        statements: Arc<Statements>,
        settings: Settings,
        handler: H,
        metrics: watch::Sender<Metrics>,
    ) -> Self {
        let (reporter, reports) = mpsc::channel(settings.concurrency);
        let now = env::now();
        Self {
            idle: Idle::new(settings.longest_idle),
            groups: Groups::new(handler, settings.timeout, reporter),
            page: settings.batch,
            asked: (now, 0),
            client,
            sessions: Sessions::new(pool),
            statements,
            settings,
            counts: Metrics::default(),
            metrics,
            place: Place::new(),
            rewind: false,
            trouble: Trouble::default(),
            next_poll: now,
            fetching: None,
            work: None,
            recalled: None,
            queue: VecDeque::new(),
            running: 0,
            together: HashMap::new(),
            apart: HashMap::new(),
            reports,
            finished: Vec::new(),
            marking: FuturesUnordered::new(),
            uncertain: HashSet::new(),
            in_flight: HashSet::new(),
            marked_meanwhile: HashSet::new(),
            set_aside: HashMap::new(),
            stopping: None,
        }
    }

    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut shares = self.client.shares();
        loop {
            let now = env::now();
            self.begin_tasks(now);
            self.begin_fetch(now);
            self.begin_marks(now, &shares.borrow());
            self.sessions.tidy(now);
            let is_over = self.is_over(now);
            self.show();
            if is_over {
                break;
            }
            let wake = self.wake(now);
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop), if self.stopping.is_none() => self.stop(),
                Some(report) = self.reports.recv() => self.take_report(report),
                Some((finished, marked)) = self.marking.next() => self.take_marked(finished, marked),
                fetched = pending_or(&mut self.fetching) => {
                    self.fetching = None;
                    self.take_fetched(fetched);
                }
                () = pending_or(&mut self.recalled) => {
                    self.recalled = None;
                    self.look_anew();
                }
                changed = shares.changed(), if self.stopping.is_none() => match changed {
                    Ok(()) => self.look_anew(),
                    Err(_) => self.stop(),
                },
                () = env::sleep_until(wake) => {}
            }
            // All that have ended, so that they are marked together.
            while let Ok(report) = self.reports.try_recv() {
                self.take_report(report);
            }
        }
    }

    // Tasks.

    /// Executed and running, but not yet marked: what a kill would have executed again.
    fn unmarked(&self) -> usize {
        self.in_flight.len() - self.queue.len()
    }

    fn begin_tasks(&mut self, now: Instant) {
        let room = self.settings.concurrency.min(self.settings.batch);
        let mut tasks = Vec::new();
        while self.running < room
            && self.unmarked() < self.settings.batch
            // What it would execute now it could not mark either.
            && !self.trouble.lasts(now)
            && let Some(queued) = self.queue.pop_front()
        {
            tasks.extend(self.begin_task(queued, now));
            if tasks.len() >= self.groups.size() {
                self.start(std::mem::take(&mut tasks));
            }
        }
        if !tasks.is_empty() {
            self.start(tasks);
        }
    }

    fn begin_task(&mut self, queued: Queued<R>, now: Instant) -> Option<Task<R>> {
        let Queued {
            work,
            key,
            attempts,
            row,
        } = queued;
        let Some(guard) = work.begin(&key) else {
            self.in_flight.remove(&key);
            self.rewind = true;
            self.counts.dropped += 1;
            return None;
        };
        let guard = Arc::new(guard);
        let row = match row {
            Ok(row) => row,
            Err(error) => {
                let failure = Failure::Unreadable(error);
                let begun = Begun {
                    key,
                    attempts,
                    guard,
                };
                self.settle(begun, Outcome::Failed(failure), now);
                return None;
            }
        };
        self.running += 1;
        self.counts.started += 1;
        Some(Task {
            row,
            key,
            attempts,
            guard,
        })
    }

    fn start(&mut self, tasks: Vec<Task<R>>) {
        let (group, running) = self.groups.start(tasks);
        self.together.insert(group, running);
    }

    fn take_report(&mut self, report: Report) {
        let ended = match report {
            Report::Ended(ended) => ended,
            Report::Waits(row, rest) => {
                let key = row.key.clone();
                self.apart.insert(key, self.groups.go_on(row, rest));
                return;
            }
            Report::Over { group, ended, pace } => {
                self.together.remove(&group);
                self.groups.learn(pace);
                if !self.groups.are_quick() {
                    self.sessions.give_all_back();
                }
                ended
            }
        };
        let now = env::now();
        for (row, outcome) in ended {
            self.running -= 1;
            if !self.apart.is_empty() {
                self.apart.remove(&row.key);
            }
            self.settle(row, outcome, now);
        }
    }

    /// Decides what becomes of a task that was executed.
    fn settle(&mut self, begun: Begun, outcome: Outcome, now: Instant) {
        let Begun {
            key,
            attempts,
            guard,
        } = begun;
        let failure = match outcome {
            Outcome::Done => None,
            // The next owner may be at it: this failure is not to take one of its attempts.
            Outcome::Interrupted => return self.interrupted(&key),
            Outcome::Failed(_) if guard.is_revoked() => return self.interrupted(&key),
            Outcome::Failed(failure) => Some(failure),
        };
        let mark = match &failure {
            None => Mark::Done,
            Some(failure) => {
                match failure {
                    Failure::Panic(_) => self.counts.panicked += 1,
                    Failure::Timeout(_) => self.counts.timed_out += 1,
                    Failure::Error(_) | Failure::Conflict(_) | Failure::Unreadable(_) => {}
                }
                let mark = self.statements.mark_of_failure(attempts);
                tracing::warn!(task = %key, attempt = attempts + 1, last = mark == Mark::Failed, %failure, "a task failed");
                mark
            }
        };
        self.finished.push(Finished {
            key,
            mark,
            guard,
            at: now,
        });
    }

    fn interrupted(&mut self, key: &Key) {
        self.in_flight.remove(key);
        self.rewind = true;
        self.counts.interrupted += 1;
    }

    // Rows.

    fn begin_fetch(&mut self, now: Instant) {
        let enough = self.queue.len() > self.page / 2;
        if self.fetching.is_some()
            || self.stopping.is_some()
            || enough
            || now < self.next_poll
            || self.trouble.lasts(now)
            || !self.sessions.has_one()
        {
            return;
        }
        self.page = self.next_page(now);
        self.set_aside.retain(|_, until| now < *until);
        self.marked_meanwhile.clear();
        let client = self.client.clone();
        let statements = Arc::clone(&self.statements);
        let mut place = std::mem::replace(&mut self.place, Place::new());
        if std::mem::take(&mut self.rewind) {
            place.rewind();
        }
        let (page, limit) = (self.page, self.settings.database_timeout);
        let mut known = HashSet::new();
        if place.wants_known(now) {
            known.clone_from(&self.in_flight);
            known.extend(self.set_aside.keys().cloned());
        }
        let loan = self.sessions.loan();
        self.fetching = Some(Box::pin(async move {
            // Anew for each page: the rows of an older one leave it, but never come.
            let Ok(work) = client.acquire().await else {
                return Err(FetchError::Closed);
            };
            let plan = place.plan(&statements, work.share(), work.epoch(), page, &known);
            let fetched = env::timeout(limit, async {
                let mut session = loan.take().await?;
                let page = fetch(&mut session.connection, &statements, &plan).await?;
                Ok::<_, sqlx::Error>((page, session))
            });
            let error = match fetched.await {
                Ok(Ok((page, session))) => {
                    return Ok(Fetched {
                        work: Arc::new(work),
                        plan,
                        page,
                        place,
                        session,
                    });
                }
                Ok(Err(error)) => error.to_string(),
                Err(elapsed) => elapsed.to_string(),
            };
            Err(FetchError::Database(place, error))
        }));
    }

    /// As many rows as were worked through in some time, where that is more than a batch: fewer and larger pages.
    fn next_page(&mut self, now: Instant) -> usize {
        let (asked, started) = std::mem::replace(&mut self.asked, (now, self.counts.started));
        let rows = u128::from(self.counts.started - started);
        let ahead =
            rows * AHEAD.as_nanos() / now.saturating_duration_since(asked).as_nanos().max(1);
        let (batch, (batches, rows)) = (self.settings.batch, LARGEST_PAGE);
        usize::try_from(ahead)
            .unwrap_or(usize::MAX)
            .min(batch.saturating_mul(batches).min(rows))
            .max(batch)
    }

    fn take_fetched(&mut self, fetched: Result<Fetched<D>, FetchError>) {
        self.counts.polls += 1;
        let fetched = match fetched {
            Ok(fetched) => fetched,
            Err(FetchError::Closed) => return self.stop(),
            Err(FetchError::Database(place, error)) => {
                self.sessions.lost();
                self.place = place;
                return self.note_trouble("rows cannot be fetched", &error);
            }
        };
        self.note_success();
        let Fetched {
            work,
            plan,
            mut page,
            place,
            session,
        } = fetched;
        let now = env::now();
        self.sessions.back(session, self.groups.are_quick(), now);
        self.place = place;
        let before = self.queue.len();
        for (head, row) in page.rows {
            let key = head.key;
            let elsewhere = |own: &ShareUnion| !own.contains((&key).into());
            if plan.filter.as_ref().is_some_and(elsewhere)
                || self.marked_meanwhile.contains(&key)
                || self.set_aside.contains_key(&key)
                || !self.in_flight.insert(key.clone())
            {
                continue;
            }
            self.queue.push_back(Queued {
                work: Arc::clone(&work),
                key,
                attempts: head.attempts,
                row: R::from_row(&row).map_err(|error| error.to_string()),
            });
        }
        let found = self.queue.len() > before;
        let more = self.place.advance(&plan, &mut page.extent);
        let mut wait = self.idle.wait(found, more);
        if !more {
            // What finds nothing shall not keep the database busy.
            wait = wait.max((page.extent.took * THRIFT).min(self.settings.longest_idle));
        }
        self.next_poll = now + wait;
        self.recalled = Some(Box::pin(work.recalled()));
        self.work = Some(work);
        self.counts.unreadable += page.unreadable;
        self.counts.lag = page.lag;
    }

    /// The share has changed: there may be other rows.
    fn look_anew(&mut self) {
        self.rewind = true;
        self.next_poll = env::now();
    }

    // Marks.

    // The database's state, and the end.

    fn note_trouble(&mut self, what: &str, error: &str) {
        let wait = self.trouble.note(env::now());
        tracing::warn!(%error, retry_in = ?wait, "{what}");
        self.counts.database_errors += 1;
        self.counts.trouble = Some(error.to_owned());
    }

    fn note_success(&mut self) {
        if self.trouble.end() {
            tracing::info!("the database answers again");
            self.counts.trouble = None;
        }
    }

    /// No new rows; what waits goes back.
    fn stop(&mut self) {
        self.stopping.get_or_insert_with(env::now);
        for queued in self.queue.drain(..) {
            self.in_flight.remove(&queued.key);
        }
        if self.fetching.take().is_some() {
            self.sessions.lost();
        }
        self.recalled = None;
        self.work = None;
    }

    fn is_over(&mut self, now: Instant) -> bool {
        let Some(since) = self.stopping else {
            return false;
        };
        if self.running > 0 {
            // The time for the last marks begins with the last handler's end.
            self.stopping = Some(now);
            return false;
        }
        if self.finished.is_empty() && self.marking.is_empty() {
            return true;
        }
        let given_up = now >= since + LAST_MARKS;
        if given_up {
            let unmarked = self.unmarked();
            tracing::error!(
                tasks = unmarked,
                "executed tasks could not be marked: they will be executed again"
            );
            self.counts.unmarked += u64::try_from(unmarked).unwrap_or(0);
        }
        given_up
    }

    /// When there is something to do, if nothing happens before.
    fn wake(&self, now: Instant) -> Instant {
        const LONGEST: Duration = Duration::from_secs(1);
        let mut wake = now + LONGEST;
        if let Some(until) = self.trouble.until(now) {
            return wake.min(until);
        }
        if self.fetching.is_none() && self.stopping.is_none() && now < self.next_poll {
            wake = wake.min(self.next_poll);
        }
        if let Some(at) = self.mark_at()
            && self.marking.is_empty()
        {
            wake = wake.min(at);
        }
        if let Some(at) = self.sessions.idle_at() {
            wake = wake.min(at);
        }
        wake
    }

    fn show(&mut self) {
        (self.counts.running, self.counts.waiting) = (self.running, self.queue.len());
        self.metrics.send_if_modified(|metrics| {
            let changed = *metrics != self.counts;
            if changed {
                metrics.clone_from(&self.counts);
            }
            changed
        });
    }
}

/// The future's answer, or none ever.
pub(super) async fn pending_or<T>(future: &mut Option<BoxFuture<'static, T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
