//! The loop: fetch, run, mark, give back.
//!
//! One task owns all the state. A query for rows, a batch of marks and the handlers go on at the same time. A row's
//! guard is dropped only after its mark is committed, so that no other client executes what this one did.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use skyschedule_common::env::{self, Instant};
use sqlx::{FromRow, Pool};
use tokio::sync::{mpsc, watch};

use super::consumer::Settings;
use super::driver::{Driver, Head};
use super::fetch::{Place, Plan, Rows, fetch};
use super::key::Key;
use super::mark::{Finished, Marked, mark};
use super::metrics::Metrics;
use super::pace::{Idle, Trouble};
use super::statements::{Mark, Statements};
use super::task::{Failure, Handler, Outcome, Task, execute};
use crate::client::Client;
use crate::observe::Status;
use crate::work::{Row, Work};

/// How long a row is left alone whose mark the database refuses.
const SET_ASIDE: Duration = Duration::from_secs(60);

/// Most rows that are left alone at a time.
const MAX_SET_ASIDE: usize = 10_000;

/// How long half a batch, or what others wait for, may wait to be marked: fast handlers get one mark for a whole batch.
const MARK_SOON: Duration = Duration::from_millis(2);

/// How long a consumer that stops tries to mark what it has executed.
const LAST_MARKS: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Engine<D: Driver, R, H> {
    client: Client,
    pool: Pool<D>,
    statements: Arc<Statements>,
    settings: Settings,
    handler: Arc<H>,
    metrics: watch::Sender<Metrics>,

    place: Place,
    /// Rows were left behind: begin anew at the oldest one.
    rewind: bool,
    idle: Idle,
    trouble: Trouble,
    next_poll: Instant,
    /// Asks for rows.
    fetching: Option<BoxFuture<'static, Result<Fetched<D>, FetchError>>>,
    /// The newest rows of this client, kept so that their end is seen.
    work: Option<Arc<Work>>,
    recalled: Option<BoxFuture<'static, ()>>,

    /// Rows that wait for their turn.
    queue: VecDeque<Queued<R>>,
    /// Handlers that run.
    running: HashMap<Key, Running>,
    ended: (mpsc::Sender<Ended>, mpsc::Receiver<Ended>),
    /// Executed, and to be marked.
    finished: Vec<Finished>,
    marking: Option<BoxFuture<'static, (Vec<Finished>, MarkResult)>>,
    /// Some marks may have been committed although an error came back.
    uncertain: bool,

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

/// A handler's task, which ends with this.
struct Running {
    guard: Arc<Row>,
    attempts: i64,
    task: env::JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Ended {
    key: Key,
    outcome: Outcome,
}

struct Fetched<D: Driver> {
    work: Arc<Work>,
    plan: Plan,
    rows: Rows<D>,
    unreadable: u64,
    place: Place,
}

enum FetchError {
    Closed,
    Database(Place, String),
}

type MarkResult = Result<Marked, String>;

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
        Self {
            idle: Idle::new(settings.longest_idle),
            ended: mpsc::channel(settings.concurrency),
            client,
            pool,
            statements,
            settings,
            handler: Arc::new(handler),
            metrics,
            place: Place::new(),
            rewind: false,
            trouble: Trouble::default(),
            next_poll: env::now(),
            fetching: None,
            work: None,
            recalled: None,
            queue: VecDeque::new(),
            running: HashMap::new(),
            finished: Vec::new(),
            marking: None,
            uncertain: false,
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
            self.begin_mark(now, &shares.borrow());
            self.show();
            if self.is_over(now) {
                break;
            }
            let wake = self.wake(now);
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop), if self.stopping.is_none() => self.stop(),
                Some(ended) = self.ended.1.recv() => self.take_ended(ended),
                (finished, marked) = pending_or(&mut self.marking) => {
                    self.marking = None;
                    self.take_marked(finished, marked);
                }
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
            while let Ok(ended) = self.ended.1.try_recv() {
                self.take_ended(ended);
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
        while self.running.len() < room
            && self.unmarked() < self.settings.batch
            // What it would execute now it could not mark either.
            && !self.trouble.lasts(now)
            && let Some(queued) = self.queue.pop_front()
        {
            self.begin_task(queued);
        }
    }

    fn begin_task(&mut self, queued: Queued<R>) {
        let Queued {
            work,
            key,
            attempts,
            row,
        } = queued;
        let Some(guard) = work.begin(&key) else {
            self.in_flight.remove(&key);
            self.rewind = true;
            self.metrics.send_modify(|metrics| metrics.dropped += 1);
            return;
        };
        let guard = Arc::new(guard);
        let row = match row {
            Ok(row) => row,
            Err(error) => {
                let failure = Failure::Unreadable(error);
                return self.settle(key, guard, attempts, Outcome::Failed(failure));
            }
        };
        let task = Task {
            row,
            key: key.clone(),
            attempt: u32::try_from(attempts.saturating_add(1)).unwrap_or(1),
            guard: Arc::clone(&guard),
        };
        let (handler, ended) = (Arc::clone(&self.handler), self.ended.0.clone());
        let (limit, own) = (self.settings.timeout, key.clone());
        let task = env::spawn(async move {
            let guard = Arc::clone(&task.guard);
            // The call itself is inside: what it does before its first wait may panic too.
            let work = async { handler.handle(task).await.map_err(Failure::Error) };
            let outcome = execute(&guard, limit, work).await;
            drop(guard);
            // Nobody listens once the consumer is dropped.
            let _ = ended.send(Ended { key: own, outcome }).await;
        });
        let running = Running {
            guard,
            attempts,
            task,
        };
        self.running.insert(key, running);
        self.metrics.send_modify(|metrics| metrics.started += 1);
    }

    fn take_ended(&mut self, ended: Ended) {
        if let Some(running) = self.running.remove(&ended.key) {
            let guard = Arc::clone(&running.guard);
            self.settle(ended.key, guard, running.attempts, ended.outcome);
        }
    }

    /// Decides what becomes of a task that was executed.
    fn settle(&mut self, key: Key, guard: Arc<Row>, attempts: i64, outcome: Outcome) {
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
                self.metrics.send_modify(|metrics| match failure {
                    Failure::Panic(_) => metrics.panicked += 1,
                    Failure::Timeout(_) => metrics.timed_out += 1,
                    Failure::Error(_) | Failure::Conflict(_) | Failure::Unreadable(_) => {}
                });
                let mark = self.statements.mark_of_failure(attempts);
                tracing::warn!(task = %key, attempt = attempts + 1, last = mark == Mark::Failed, %failure, "a task failed");
                mark
            }
        };
        self.finished.push(Finished {
            key,
            mark,
            guard,
            at: env::now(),
        });
    }

    fn interrupted(&mut self, key: &Key) {
        self.in_flight.remove(key);
        self.rewind = true;
        self.metrics.send_modify(|metrics| metrics.interrupted += 1);
    }

    // Rows.

    fn begin_fetch(&mut self, now: Instant) {
        let enough = self.queue.len() > self.settings.batch / 2;
        if self.fetching.is_some()
            || self.stopping.is_some()
            || enough
            || now < self.next_poll
            || self.trouble.lasts(now)
        {
            return;
        }
        self.set_aside.retain(|_, until| now < *until);
        self.marked_meanwhile.clear();
        let (client, pool) = (self.client.clone(), self.pool.clone());
        let statements = Arc::clone(&self.statements);
        let mut place = std::mem::replace(&mut self.place, Place::new());
        if std::mem::take(&mut self.rewind) {
            place.rewind();
        }
        let (batch, limit) = (self.settings.batch, self.settings.database_timeout);
        let mut known = self.in_flight.clone();
        known.extend(self.set_aside.keys().cloned());
        let metrics = self.metrics.clone();
        self.fetching = Some(Box::pin(async move {
            // Anew for each batch: the rows of an older one leave it, but never come.
            let Ok(work) = client.acquire().await else {
                return Err(FetchError::Closed);
            };
            let plan = place.plan(&statements, work.share(), work.epoch(), batch, &known);
            metrics.send_modify(|metrics| metrics.polls += 1);
            match env::timeout(limit, fetch(&pool, &statements, &plan.statement)).await {
                Ok(Ok((rows, unreadable))) => Ok(Fetched {
                    work: Arc::new(work),
                    plan,
                    rows,
                    unreadable,
                    place,
                }),
                Ok(Err(error)) => Err(FetchError::Database(place, error.to_string())),
                Err(elapsed) => Err(FetchError::Database(place, elapsed.to_string())),
            }
        }));
    }

    fn take_fetched(&mut self, fetched: Result<Fetched<D>, FetchError>) {
        let fetched = match fetched {
            Ok(fetched) => fetched,
            Err(FetchError::Closed) => return self.stop(),
            Err(FetchError::Database(place, error)) => {
                self.place = place;
                return self.note_trouble("rows cannot be fetched", &error);
            }
        };
        self.note_success();
        let Fetched {
            work,
            plan,
            rows,
            unreadable,
            place,
        } = fetched;
        self.place = place;
        let lag = rows
            .iter()
            .map(|(head, _)| head.lag)
            .fold(0.0_f64, f64::max);
        let (heads, rows): (Vec<Head>, Vec<D::Row>) = rows.into_iter().unzip();
        let before = self.queue.len();
        for (head, row) in heads.iter().zip(rows) {
            let key = &head.key;
            let elsewhere = |own: &skyschedule_common::share::ShareUnion| !own.contains(key.into());
            if plan.filter.as_ref().is_some_and(elsewhere)
                || self.in_flight.contains(key)
                || self.marked_meanwhile.contains(key)
                || self.set_aside.contains_key(key)
            {
                continue;
            }
            self.in_flight.insert(key.clone());
            self.queue.push_back(Queued {
                work: Arc::clone(&work),
                key: key.clone(),
                attempts: head.attempts,
                row: R::from_row(&row).map_err(|error| error.to_string()),
            });
        }
        let found = self.queue.len() > before;
        let more = self.place.advance(&plan, &heads, found);
        self.next_poll = env::now() + self.idle.wait(found, more);
        self.recalled = Some(Box::pin(work.recalled()));
        self.work = Some(work);
        self.metrics.send_modify(|metrics| {
            metrics.unreadable += unreadable;
            metrics.lag = Duration::try_from_secs_f64(lag).unwrap_or(Duration::ZERO);
        });
    }

    /// The share has changed: there may be other rows.
    fn look_anew(&mut self) {
        self.rewind = true;
        self.next_poll = env::now();
    }

    // Marks.

    /// Marks what is finished, when waiting for more would gain nothing or hold somebody up.
    fn begin_mark(&mut self, now: Instant, share: &Status) {
        if self.marking.is_some() || self.finished.is_empty() || self.trouble.lasts(now) {
            return;
        }
        // Nothing that runs could be added.
        let complete = self.running.is_empty() || self.finished.len() >= self.settings.batch;
        let old = self.mark_at().is_some_and(|at| now >= at);
        // Another client may be waiting for these rows.
        let moving = self
            .finished
            .iter()
            .any(|one| share.epoch != Some(one.guard.epoch()));
        if !(complete || old || moving || self.stopping.is_some()) {
            return;
        }
        let finished = std::mem::take(&mut self.finished);
        let (pool, statements) = (self.pool.clone(), Arc::clone(&self.statements));
        let limit = self.settings.database_timeout;
        self.marking = Some(Box::pin(async move {
            let marked = match env::timeout(limit, mark(&pool, &statements, &finished)).await {
                Ok(Ok(marked)) => Ok(marked),
                Ok(Err(error)) => Err(error.to_string()),
                Err(elapsed) => Err(elapsed.to_string()),
            };
            (finished, marked)
        }));
    }

    /// When what is finished has waited for long enough.
    fn mark_at(&self) -> Option<Instant> {
        let half = self.finished.len() >= self.settings.batch.div_ceil(2);
        let holds_up = self.unmarked() >= self.settings.batch;
        let wait = if half || holds_up {
            self.settings.mark_within.min(MARK_SOON)
        } else {
            self.settings.mark_within
        };
        Some(self.finished.first()?.at + wait)
    }

    fn take_marked(&mut self, mut finished: Vec<Finished>, marked: MarkResult) {
        let marked = match marked {
            Ok(marked) => marked,
            Err(error) => {
                // It may have been committed all the same.
                self.uncertain = true;
                finished.append(&mut self.finished);
                self.finished = finished;
                return self.note_trouble("tasks cannot be marked", &error);
            }
        };
        self.note_success();
        let lost = if std::mem::take(&mut self.uncertain) {
            0
        } else {
            marked.lost
        };
        if lost > 0 {
            tracing::warn!(
                rows = lost,
                "marks changed nothing: somebody else has marked these rows meanwhile"
            );
        }
        for (key, error) in &marked.refused {
            tracing::error!(task = %key, %error, "the database refuses the mark of a task; it is left alone for a minute");
            if self.set_aside.len() < MAX_SET_ASIDE {
                self.set_aside.insert(key.clone(), env::now() + SET_ASIDE);
            }
        }
        let refused: HashSet<&Key> = marked.refused.iter().map(|(key, _)| key).collect();
        self.metrics.send_modify(|metrics| {
            metrics.lost_marks += lost;
            for one in finished.iter().filter(|one| !refused.contains(&one.key)) {
                match one.mark {
                    Mark::Done => metrics.done += 1,
                    Mark::Failed => metrics.failed += 1,
                    Mark::Again { .. } => metrics.retried += 1,
                }
            }
            // Most marks say done; a lost one is counted there.
            metrics.done = metrics.done.saturating_sub(lost);
            metrics.refused_marks += u64::try_from(refused.len()).unwrap_or(0);
        });
        let under_way = self.fetching.is_some();
        for one in finished {
            self.in_flight.remove(&one.key);
            if under_way {
                self.marked_meanwhile.insert(one.key);
            }
            // Here the guard is dropped: the mark is committed.
        }
    }

    // The database's state, and the end.

    fn note_trouble(&mut self, what: &str, error: &str) {
        let wait = self.trouble.note(env::now());
        tracing::warn!(%error, retry_in = ?wait, "{what}");
        self.metrics.send_modify(|metrics| {
            metrics.database_errors += 1;
            metrics.trouble = Some(error.to_owned());
        });
    }

    fn note_success(&mut self) {
        if self.trouble.end() {
            tracing::info!("the database answers again");
            self.metrics.send_modify(|metrics| metrics.trouble = None);
        }
    }

    /// No new rows; what waits goes back.
    fn stop(&mut self) {
        self.stopping.get_or_insert_with(env::now);
        for queued in self.queue.drain(..) {
            self.in_flight.remove(&queued.key);
        }
        self.fetching = None;
        self.recalled = None;
        self.work = None;
    }

    fn is_over(&mut self, now: Instant) -> bool {
        let Some(since) = self.stopping else {
            return false;
        };
        if !self.running.is_empty() {
            // The time for the last marks begins with the last handler's end.
            self.stopping = Some(now);
            return false;
        }
        if self.finished.is_empty() && self.marking.is_none() {
            return true;
        }
        let given_up = now >= since + LAST_MARKS;
        if given_up {
            let unmarked = self.unmarked();
            tracing::error!(
                tasks = unmarked,
                "executed tasks could not be marked: they will be executed again"
            );
            self.metrics.send_modify(|metrics| {
                metrics.unmarked += u64::try_from(unmarked).unwrap_or(0);
            });
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
            && self.marking.is_none()
        {
            wake = wake.min(at);
        }
        wake
    }

    fn show(&self) {
        self.metrics.send_if_modified(|metrics| {
            let (running, waiting) = (self.running.len(), self.queue.len());
            let changed = (metrics.running, metrics.waiting) != (running, waiting);
            (metrics.running, metrics.waiting) = (running, waiting);
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
