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
use sqlx::{FromRow, Pool};
use tokio::sync::{mpsc, watch};

use super::consumer::Settings;
use super::driver::Driver;
use super::group::{Begun, Ended, Group, Groups, LATE, Report, Running};
use super::key::Key;
use super::mark::{Finished, Marked};
use super::metrics::Metrics;
use super::pace::Trouble;
use super::pages::{Fetched, News, Pages};
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

/// Most batches of a page, and most rows where a batch is not larger.
const LARGEST_PAGE: (usize, usize) = (10, 1_000);

/// How long a consumer that stops tries to mark what it has executed.
const LAST_MARKS: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Engine<D: Driver, R, H> {
    sessions: Sessions<D>,
    statements: Arc<Statements>,
    settings: Settings,
    counts: Metrics,
    /// What others see of the counts.
    metrics: watch::Sender<Metrics>,

    pages: Pages<D>,
    /// Rows of the newest page that was asked for, at most.
    page: usize,
    /// When that was, and how many tasks had been started by then.
    asked: (Instant, u64),

    /// Rows that wait for their turn.
    queue: VecDeque<Queued<R>>,
    /// How many handlers run.
    running: usize,
    groups: Groups<H>,
    together: HashMap<u64, Group<R>>,
    /// When each of these, if it is still there, is broken up.
    late: VecDeque<(Instant, u64)>,
    /// Handlers that were one of a group, and wait for something.
    apart: HashMap<Key, Running>,
    reports: mpsc::Receiver<Report>,
    /// Executed, and to be marked.
    finished: Vec<Finished>,
    marking: FuturesUnordered<BoxFuture<'static, MarkResult<D>>>,
    /// Of marks, or of all that is asked of the database.
    trouble: Trouble,
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
            pages: Pages::new(
                client,
                Arc::clone(&statements),
                settings.database_timeout,
                settings.longest_idle,
            ),
            groups: Groups::new(handler, settings.timeout, reporter),
            page: settings.batch,
            asked: (now, 0),
            sessions: Sessions::new(pool, settings.database_timeout),
            statements,
            settings,
            counts: Metrics::default(),
            metrics,
            queue: VecDeque::new(),
            running: 0,
            together: HashMap::new(),
            late: VecDeque::new(),
            apart: HashMap::new(),
            reports,
            finished: Vec::new(),
            marking: FuturesUnordered::new(),
            trouble: Trouble::default(),
            uncertain: HashSet::new(),
            in_flight: HashSet::new(),
            marked_meanwhile: HashSet::new(),
            set_aside: HashMap::new(),
            stopping: None,
        }
    }

    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        loop {
            let now = env::now();
            self.break_up_groups(now);
            self.begin_tasks(now);
            // First: other clients may wait for what is to be marked.
            self.begin_marks(now);
            self.begin_fetch(now);
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
                come = self.sessions.come() => if let Err(error) = come {
                    let retry_in = self.trouble.note(env::now());
                    self.note_trouble("there is no connection to the database", &error, retry_in);
                },
                news = self.pages.news() => self.take_news(news),
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
        // What it would execute now it could not mark either.
        let trouble = self.trouble.lasts(now) || self.pages.trouble.lasts(now);
        let mut tasks = VecDeque::new();
        while self.running < room
            && self.unmarked() < self.settings.batch
            && !trouble
            && let Some(queued) = self.queue.pop_front()
        {
            tasks.extend(self.begin_task(queued, now));
            if tasks.len() >= self.groups.size() {
                self.start(std::mem::take(&mut tasks), now);
            }
        }
        if !tasks.is_empty() {
            self.start(tasks, now);
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
            self.pages.rewind();
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

    fn start(&mut self, tasks: VecDeque<Task<R>>, now: Instant) {
        let is_single = tasks.len() == 1;
        let (number, group) = self.groups.start(tasks);
        self.together.insert(number, group);
        if !is_single {
            self.late.push_back((now + LATE, number));
        }
    }

    /// Goes on without groups that take too long.
    fn break_up_groups(&mut self, now: Instant) {
        while let Some((at, number)) = self.late.front() {
            if let Some(group) = self.together.get(number) {
                if now < *at {
                    return;
                }
                let (ended, rest) = group.break_up();
                self.take_ended(ended);
                for task in rest {
                    self.start(VecDeque::from([task]), now);
                }
            }
            self.late.pop_front();
        }
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
        self.take_ended(ended);
    }

    fn take_ended(&mut self, ended: Vec<Ended>) {
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
        self.pages.rewind();
        self.counts.interrupted += 1;
    }

    // Rows.

    fn begin_fetch(&mut self, now: Instant) {
        let enough = self.queue.len() > self.page / 2;
        if enough || self.trouble.lasts(now) || !self.pages.is_due(now) {
            return;
        }
        let Some(session) = self.sessions.take() else {
            return;
        };
        self.page = self.next_page(now);
        self.set_aside.retain(|_, until| now < *until);
        self.marked_meanwhile.clear();
        let known = self.in_flight.iter().chain(self.set_aside.keys());
        if let Some(session) = self.pages.ask(self.page, known, session) {
            self.sessions.back(session, true, now);
        }
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

    fn take_news(&mut self, news: News<D>) {
        match news {
            News::Page(page) => self.take_page(*page),
            News::Failed(error, retry_in) => {
                self.counts.polls += 1;
                self.note_trouble("rows cannot be fetched", &error, retry_in);
            }
            News::Moved => {}
            News::Closed => self.stop(),
        }
    }

    fn take_page(&mut self, fetched: Fetched<D>) {
        // What is being tried again may still fail.
        let nothing_waits = self.finished.is_empty() && self.trouble.end();
        if self.pages.trouble.end() | nothing_waits {
            self.note_success();
        }
        self.counts.polls += 1;
        self.counts.unreadable += fetched.page.unreadable;
        self.counts.lag = fetched.page.lag;
        let session = self.pages.turn(fetched, |work, head, row| {
            let key = head.key;
            let is_new = !self.marked_meanwhile.contains(&key)
                && !self.set_aside.contains_key(&key)
                && self.in_flight.insert(key.clone());
            if is_new {
                self.queue.push_back(Queued {
                    work: Arc::clone(work),
                    key,
                    attempts: head.attempts,
                    row: R::from_row(&row).map_err(|error| error.to_string()),
                });
            }
            is_new
        });
        let quick = self.groups.are_quick();
        self.sessions.back(session, quick, env::now());
    }

    // The database's state, and the end.

    fn note_trouble(&mut self, what: &str, error: &str, retry_in: Duration) {
        tracing::warn!(%error, ?retry_in, "{what}");
        self.counts.database_errors += 1;
        self.counts.trouble = Some(error.to_owned());
    }

    fn note_success(&mut self) {
        tracing::info!("the database answers again");
        self.counts.trouble = None;
    }

    /// No new rows; what waits goes back.
    fn stop(&mut self) {
        self.stopping.get_or_insert_with(env::now);
        for queued in self.queue.drain(..) {
            self.in_flight.remove(&queued.key);
        }
        self.pages.stop();
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
        let late = self.late.front().map(|(at, _)| *at);
        let due = [
            self.pages.due_at(now),
            self.marks_due_at(now),
            self.sessions.idle_at(),
            late,
        ];
        due.into_iter()
            .flatten()
            .min()
            .map_or(now + LONGEST, |due| due.min(now + LONGEST))
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
