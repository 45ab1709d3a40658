//! What is finished is marked, many rows at a time, and only then leaves the consumer's hands.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::share::Dialect;
use sqlx::FromRow;

use super::super::driver::Driver;
use super::super::key::Key;
use super::super::mark::{Finished, Marked, mark};
use super::super::session::Session;
use super::super::statements::Mark;
use super::super::task::Handler;
use super::{Engine, MAX_SET_ASIDE, SET_ASIDE};

const MARK_ROWS: usize = 100;

/// Most marks under way at a time, and the rows of each: with fewer, two cost more than they gain.
const LANES: usize = 2;

/// How long half a batch, or what others wait for, may wait to be marked: fast handlers get one mark for a whole batch.
const MARK_SOON: Duration = Duration::from_millis(2);

impl<D, R, H> Engine<D, R, H>
where
    D: Driver,
    R: for<'r> FromRow<'r, D::Row> + Send + 'static,
    H: Handler<R>,
{
    /// Marks what is finished, when waiting for more would gain nothing or hold somebody up.
    pub(super) fn begin_marks(&mut self, now: Instant) {
        let epoch = self.pages.epoch();
        while !self.finished.is_empty() && !self.trouble.lasts(now) && self.has_lane() {
            let most = self.settings.batch.div_ceil(self.lanes());
            // Nothing that runs could be added.
            let complete = self.running == 0 || self.finished.len() >= most;
            let old = self.mark_at().is_some_and(|at| now >= at);
            // Another client may be waiting for these rows.
            let moving = self
                .finished
                .iter()
                .any(|one| epoch != Some(one.guard.epoch()));
            if !(complete || old || moving || self.stopping.is_some()) {
                return;
            }
            let Some(session) = self.sessions.take() else {
                return;
            };
            let rest = self.finished.split_off(self.finished.len().min(most));
            let finished = std::mem::replace(&mut self.finished, rest);
            self.begin_mark(finished, session);
        }
    }

    /// How many marks may be under way: while one is committed, the next is on its way.
    fn lanes(&self) -> usize {
        // SQLite has one writer at a time.
        if self.groups.are_quick() && self.statements.dialect() != Dialect::Sqlite {
            (self.settings.batch / MARK_ROWS).clamp(1, LANES)
        } else {
            1
        }
    }

    /// Whether one more mark may be under way.
    fn has_lane(&self) -> bool {
        self.marking.len() < self.lanes()
    }

    fn begin_mark(&mut self, finished: Vec<Finished>, mut session: Session<D>) {
        let statements = Arc::clone(&self.statements);
        let limit = self.settings.database_timeout;
        self.marking.push(Box::pin(async move {
            let marking = mark(&mut session.connection, &statements, &finished);
            let marked = match env::timeout(limit, marking).await {
                Ok(Ok(marked)) => Ok((marked, session)),
                Ok(Err(error)) => Err(error.to_string()),
                Err(elapsed) => {
                    session.connection.close_on_drop();
                    Err(elapsed.to_string())
                }
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

    /// When marks are to be looked after, if nothing happens before.
    pub(super) fn marks_due_at(&self, now: Instant) -> Option<Instant> {
        let at = self.trouble.until(now).or_else(|| self.mark_at())?;
        (now < at && self.has_lane()).then_some(at)
    }

    pub(super) fn take_marked(
        &mut self,
        mut finished: Vec<Finished>,
        marked: Result<(Marked, Session<D>), String>,
    ) {
        let (marked, session) = match marked {
            Ok(marked) => marked,
            Err(error) => {
                // It may have been committed all the same.
                self.uncertain
                    .extend(finished.iter().map(|one| one.key.clone()));
                finished.append(&mut self.finished);
                self.finished = finished;
                let retry_in = self.trouble.note(env::now());
                return self.note_trouble("tasks cannot be marked", &error, retry_in);
            }
        };
        self.sessions
            .back(session, self.groups.are_quick(), env::now());
        // Where marks are written, rows can be read.
        if self.trouble.end() | self.pages.trouble.end() {
            self.note_success();
        }
        let known = self.uncertain.len();
        if known > 0 {
            self.uncertain
                .retain(|key| !finished.iter().any(|one| one.key == *key));
        }
        let lost = if self.uncertain.len() < known {
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
        let counts = &mut self.counts;
        counts.lost_marks += lost;
        for one in finished.iter().filter(|one| !refused.contains(&one.key)) {
            match one.mark {
                Mark::Done => counts.done += 1,
                Mark::Failed => counts.failed += 1,
                Mark::Again { .. } => counts.retried += 1,
            }
        }
        // Most marks say done; a lost one is counted there.
        counts.done = counts.done.saturating_sub(lost);
        counts.refused_marks += u64::try_from(refused.len()).unwrap_or(0);
        let under_way = self.pages.is_asking();
        for one in finished {
            self.in_flight.remove(&one.key);
            if under_way {
                self.marked_meanwhile.insert(one.key);
            }
            // Here the guard is dropped: the mark is committed.
        }
    }
}
