//! One transaction: claim, handlers, marks, commit. The lease is asked for before the claim, at each step of a
//! handler, and right before the commit.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use skyschedule_common::env;
use skyschedule_common::share::Dialect;
use sqlx::{FromRow, Pool};
use tokio::sync::watch;

use super::super::consumer::Settings;
use super::super::driver::{Driver, Head};
use super::super::key::Key;
use super::super::mark::{Finished, plan};
use super::super::metrics::Metrics;
use super::super::pace::Trouble;
use super::super::statements::{Lock, Mark, Statements};
use super::super::task::{Failure, Outcome, Task, execute};
use super::problem::{Kind, Problem, is_conflict, within};
use super::transaction::{Lent, Open};
use super::{TransactionHandler, Tx};
use crate::work::{Row, Work};

/// A batch is committed after so long: until then its rows are locked.
const LONGEST_BATCH: Duration = Duration::from_secs(1);

/// For how long it is asked what became of a commit.
const ASK_FOR: Duration = Duration::from_secs(30);

/// A row that was found.
pub(super) struct Found {
    pub(super) work: Arc<Work>,
    pub(super) key: Key,
}

/// What became of a row.
#[derive(Debug)]
pub(super) enum Fate {
    /// Its mark is committed, with the effects of its handler, or, after a failure, without.
    Marked(Mark, Option<Failure>),
    /// It was no longer this client's when its turn came.
    Dropped,
    /// It was revoked while it was worked on, and is rolled back.
    Interrupted,
    /// Another transaction has it.
    Locked,
    /// It is not new any more, or not due.
    Gone,
    /// Its turn did not come before the batch was committed.
    Left,
    /// It is rolled back, and to be tried again.
    Again(String),
    /// The database refuses its mark.
    Refused(String),
    /// The database is away; nothing was done.
    Away(String),
}

/// What became of all rows of a transaction.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) fates: Vec<(Key, Fate)>,
    /// Marks that changed nothing.
    pub(super) lost: u64,
    /// Whether the table had to be asked what became of the commit.
    pub(super) asked: bool,
}

impl Report {
    fn add(&mut self, key: &Key, fate: Fate) {
        self.fates.push((key.clone(), fate));
    }
}

/// Why a transaction did not come to its end.
enum Broken {
    NotBegun(String),
    Revoked,
    /// Nothing speaks against trying all of it again, row by row.
    Again(String),
    /// One row that has failed in such a way that the transaction could not go on.
    By(Executed, Failure),
    /// The only row's mark is refused.
    Refused(String),
    /// No answer to the commit.
    Unknown(Vec<Executed>),
}

impl From<Problem> for Broken {
    fn from(problem: Problem) -> Self {
        Self::Again(problem.text)
    }
}

/// A row that was executed.
struct Executed {
    key: Key,
    /// Failed attempts before.
    attempts: i64,
    failure: Option<Failure>,
}

type Guards = HashMap<Key, Arc<Row>>;

/// See the module.
pub(super) struct Lane<D: Driver, R, H> {
    pub(super) pool: Pool<D>,
    pub(super) statements: Arc<Statements>,
    pub(super) handler: Arc<H>,
    pub(super) settings: Settings,
    pub(super) metrics: watch::Sender<Metrics>,
    /// Others may be waiting for rows of this client.
    pub(super) hurry: Arc<AtomicBool>,
    pub(super) row: PhantomData<fn() -> R>,
}

impl<D, R, H> Lane<D, R, H>
where
    D: Driver,
    R: for<'r> FromRow<'r, D::Row> + Send + 'static,
    H: TransactionHandler<R, Tx<D>>,
{
    /// Works on these rows. They are held until all is committed or rolled back.
    pub(super) async fn run(self, rows: Vec<Found>) -> Report {
        let mut report = Report::default();
        let mut keys = Vec::with_capacity(rows.len());
        let mut guards = Guards::with_capacity(rows.len());
        for Found { work, key } in rows {
            match work.begin(&key) {
                Some(guard) => {
                    guards.insert(key.clone(), Arc::new(guard));
                    keys.push(key);
                }
                None => report.add(&key, Fate::Dropped),
            }
        }
        if keys.is_empty() {
            return report;
        }
        let Err(broken) = self.transact(&keys, &guards, &mut report).await else {
            return report;
        };
        let all = |report: &mut Report, fate: &dyn Fn() -> Fate| {
            // Of what the transaction had decided already, nothing is.
            for key in &keys {
                if !report.fates.iter().any(|(known, _)| known == key) {
                    report.add(key, fate());
                }
            }
        };
        match broken {
            Broken::NotBegun(error) => all(&mut report, &|| Fate::Away(error.clone())),
            Broken::Revoked => all(&mut report, &|| Fate::Interrupted),
            Broken::Again(error) => all(&mut report, &|| Fate::Again(error.clone())),
            Broken::Refused(error) => all(&mut report, &|| Fate::Refused(error.clone())),
            Broken::By(executed, failure) => {
                let key = executed.key.clone();
                let fate = self.fail_alone(executed, failure, &guards).await;
                report.add(&key, fate);
                let reason = "another task of its batch broke the transaction";
                all(&mut report, &|| Fate::Again(reason.to_owned()));
            }
            Broken::Unknown(executed) => self.find_out(executed, &guards, &mut report).await,
        }
        report
    }

    async fn transact(
        &self,
        keys: &[Key],
        guards: &Guards,
        report: &mut Report,
    ) -> Result<(), Broken> {
        let limit = self.settings.database_timeout;
        let begun = within(limit, Open::begin(&self.pool, self.settings.timeout)).await;
        let mut open = begun.map_err(|problem| Broken::NotBegun(problem.text))?;
        let claimed = match self.claim(&mut open, keys, report).await {
            Ok(claimed) => claimed,
            Err(problem) if problem.kind == Kind::Conflict => return Err(problem.into()),
            Err(problem) => return Err(Broken::NotBegun(problem.text)),
        };
        if claimed.is_empty() {
            self.roll_back(&mut open).await;
            return Ok(());
        }
        let lent = Lent::new(open);
        let executed = self.execute_all(&lent, claimed, guards, report).await?;
        let Some(mut open) = lent.take(limit).await else {
            return Err(Broken::Again(KEPT.to_owned()));
        };
        let lost = self.mark(&mut open, &executed, guards).await?;
        if is_revoked(guards) {
            self.roll_back(&mut open).await;
            return Err(Broken::Revoked);
        }
        match within(limit, open.commit()).await {
            Ok(()) => {}
            Err(problem) if problem.kind == Kind::Conflict => return Err(problem.into()),
            Err(problem) if problem.kind == Kind::Row => {
                return Err(match single(executed) {
                    Ok(only) => Broken::By(only, Failure::Error(problem.text)),
                    Err(_) => problem.into(),
                });
            }
            Err(_) => return Err(Broken::Unknown(executed)),
        }
        // Its failure costs the connection, no more.
        let _ = within(limit, open.restore()).await;
        report.lost = lost;
        for one in executed {
            let mark = self.mark_of(&one);
            report.add(&one.key, Fate::Marked(mark, one.failure));
        }
        Ok(())
    }

    /// Locks the rows that are still new and due; those that are locked already are left out.
    async fn claim(
        &self,
        open: &mut Open<D>,
        keys: &[Key],
        report: &mut Report,
    ) -> Result<Vec<(Head, D::Row)>, Problem> {
        let limit = self.settings.database_timeout;
        let statement = self.statements.claim(keys, Lock::Skip);
        let rows = within(limit, open.fetch(&statement)).await?;
        let mut claimed = self.heads(rows);
        // The database may have found them in any order.
        let place: HashMap<&Key, usize> = keys.iter().zip(0..).collect();
        claimed.sort_by_key(|(head, _)| place.get(&head.key).copied());
        let missing: Vec<Key> = keys
            .iter()
            .filter(|key| !claimed.iter().any(|(head, _)| head.key == **key))
            .cloned()
            .collect();
        if !missing.is_empty() {
            let statement = self.statements.claim(&missing, Lock::No);
            let rows = within(limit, open.fetch(&statement)).await?;
            let there: Vec<Key> = self
                .heads(rows)
                .into_iter()
                .map(|(head, _)| head.key)
                .collect();
            for key in &missing {
                let locked = there.contains(key);
                report.add(key, if locked { Fate::Locked } else { Fate::Gone });
            }
        }
        Ok(claimed)
    }

    fn heads(&self, rows: Vec<D::Row>) -> Vec<(Head, D::Row)> {
        let key_type = self.statements.key_type();
        // A key that cannot be read was not fetched in the first place.
        rows.into_iter()
            .filter_map(|row| Some((D::head(&row, key_type).ok()?, row)))
            .collect()
    }

    async fn execute_all(
        &self,
        lent: &Lent<D>,
        claimed: Vec<(Head, D::Row)>,
        guards: &Guards,
        report: &mut Report,
    ) -> Result<Vec<Executed>, Broken> {
        let until = env::now() + LONGEST_BATCH;
        let mut executed = Vec::with_capacity(claimed.len());
        for (head, row) in claimed {
            let Some(guard) = guards.get(&head.key) else {
                continue;
            };
            let late = env::now() >= until || self.hurry.load(Ordering::Relaxed);
            if late && !executed.is_empty() {
                report.add(&head.key, Fate::Left);
                continue;
            }
            let mut one = Executed {
                key: head.key,
                attempts: head.attempts,
                failure: None,
            };
            one.failure = match R::from_row(&row) {
                Err(error) => Some(Failure::Unreadable(error.to_string())),
                Ok(row) => match self.execute(lent, &one, row, guard).await? {
                    Ended::Kept => None,
                    Ended::Undone(failure) => Some(failure),
                    Ended::Broken(failure) => return Err(Broken::By(one, failure)),
                },
            };
            executed.push(one);
        }
        Ok(executed)
    }

    /// Runs the handler; what it did is kept or undone.
    async fn execute(
        &self,
        lent: &Lent<D>,
        one: &Executed,
        row: R,
        guard: &Arc<Row>,
    ) -> Result<Ended, Broken> {
        let limit = self.settings.database_timeout;
        let Some(mut open) = lent.take(limit).await else {
            return Err(Broken::Again(KEPT.to_owned()));
        };
        within(limit, open.set_savepoint()).await?;
        let task = Task {
            row,
            key: one.key.clone(),
            attempts: one.attempts,
            guard: Arc::clone(guard),
        };
        self.metrics.send_modify(|metrics| metrics.started += 1);
        let handler = Arc::clone(&self.handler);
        let work = async move {
            let ended = handler.handle(task, Tx(open)).await;
            ended.map_err(|error| match is_conflict(error.as_ref()) {
                true => Failure::Conflict(error.to_string()),
                false => Failure::Error(error.to_string()),
            })
        };
        let outcome = execute(guard, self.settings.timeout, work).await;
        let kept = lent.is_kept();
        let Some(mut open) = lent.take(limit).await else {
            return Ok(Ended::Broken(Failure::Error(KEPT.to_owned())));
        };
        let (failure, returned) = match outcome {
            Outcome::Done if kept => (Failure::Error(KEPT.to_owned()), false),
            Outcome::Interrupted => {
                self.roll_back(&mut open).await;
                return Err(Broken::Revoked);
            }
            Outcome::Failed(Failure::Conflict(error)) => {
                self.roll_back(&mut open).await;
                return Err(Broken::Again(error));
            }
            Outcome::Done if open.is_nested() => {
                return Ok(Ended::Broken(Failure::Error(NESTED.to_owned())));
            }
            Outcome::Done => match within(limit, open.keep()).await {
                Ok(()) => return Ok(Ended::Kept),
                Err(problem) if problem.kind == Kind::Lost => return Err(problem.into()),
                Err(problem) => {
                    let text = format!("{SWALLOWED}: {}", problem.text);
                    (Failure::Error(text), false)
                }
            },
            Outcome::Failed(failure) => {
                let returned = matches!(failure, Failure::Error(_));
                (failure, returned)
            }
        };
        let mut undone = within(limit, open.undo()).await;
        if undone
            .as_ref()
            .is_err_and(|problem| problem.kind != Kind::Lost)
        {
            // That may have been the answer to the last statement of a handler that did not wait for it.
            undone = within(limit, open.undo()).await;
        }
        match undone {
            Ok(()) => Ok(Ended::Undone(failure)),
            // A statement that does not end, or the handler has lost the connection.
            Err(problem) if problem.kind == Kind::Lost && returned => Err(problem.into()),
            // There is no such savepoint: a deadlock has ended the transaction, and the handler's error does not
            // show it.
            Err(problem) if D::DIALECT == Dialect::MySql && returned => Err(problem.into()),
            Err(_) => Ok(Ended::Broken(failure)),
        }
    }

    /// Marks all that was executed; how many marks changed nothing.
    async fn mark(
        &self,
        open: &mut Open<D>,
        executed: &[Executed],
        guards: &Guards,
    ) -> Result<u64, Broken> {
        let finished: Vec<Finished> = executed
            .iter()
            .filter_map(|one| {
                Some(Finished {
                    key: one.key.clone(),
                    mark: self.mark_of(one),
                    guard: Arc::clone(guards.get(&one.key)?),
                    at: env::now(),
                })
            })
            .collect();
        let limit = self.settings.database_timeout;
        let mut lost = 0;
        for (statement, expected) in plan(&self.statements, &finished) {
            match within(limit, open.execute(&statement)).await {
                Ok(changed) => lost += expected.saturating_sub(changed),
                Err(problem)
                    if matches!(problem.kind, Kind::Row | Kind::Refused) && executed.len() == 1 =>
                {
                    self.roll_back(open).await;
                    return Err(Broken::Refused(problem.text));
                }
                Err(problem) => return Err(problem.into()),
            }
        }
        Ok(lost)
    }

    fn mark_of(&self, one: &Executed) -> Mark {
        match &one.failure {
            None => Mark::Done,
            Some(_) => self.statements.mark_of_failure(one.attempts),
        }
    }

    /// Notes a failure in a transaction of its own, unless the row is locked or not as it was.
    async fn fail_alone(&self, mut one: Executed, failure: Failure, guards: &Guards) -> Fate {
        let limit = self.settings.database_timeout;
        one.failure = Some(failure);
        let mut seen = Report::default();
        let tried = async {
            let mut open = within(limit, Open::begin(&self.pool, None)).await?;
            let claimed = self
                .claim(&mut open, std::slice::from_ref(&one.key), &mut seen)
                .await?;
            if claimed
                .iter()
                .any(|(head, _)| head.attempts == one.attempts)
            {
                self.mark(&mut open, std::slice::from_ref(&one), guards)
                    .await?;
                if is_revoked(guards) {
                    return Err(Broken::Revoked);
                }
                within(limit, open.commit()).await?;
            } else {
                within(limit, open.roll_back()).await?;
            }
            // As above.
            let _ = within(limit, open.restore()).await;
            Ok(!claimed.is_empty())
        };
        match tried.await {
            Ok(true) => Fate::Marked(self.mark_of(&one), one.failure),
            Ok(false) => {
                let fate = seen.fates.pop().map_or(Fate::Gone, |(_, fate)| fate);
                tracing::error!(task = %one.key, failure = one.failure.as_ref().map(tracing::field::display),
                    "the failure of a task cannot be noted, since its row is locked or changed: it is executed again");
                fate
            }
            Err(Broken::Revoked) => Fate::Interrupted,
            Err(Broken::Again(error) | Broken::NotBegun(error) | Broken::Refused(error)) => {
                Fate::Again(error)
            }
            Err(Broken::By(..) | Broken::Unknown(_)) => Fate::Again(String::new()),
        }
    }

    /// Reads what became of a commit that was not answered, before the rows are given back.
    ///
    /// What this finds is counted, no more depends on it: if the commit is still under way, the next claim meets
    /// its locks, or its marks.
    async fn find_out(&self, executed: Vec<Executed>, guards: &Guards, report: &mut Report) {
        report.asked = true;
        let keys: Vec<Key> = executed.iter().map(|one| one.key.clone()).collect();
        let statement = self.statements.claim(&keys, Lock::No);
        let limit = self.settings.database_timeout;
        let begun = env::now();
        let mut trouble = Trouble::default();
        let new = loop {
            let asked = within(limit, async {
                let mut connection = self.pool.acquire().await?;
                let rows = D::fetch(&mut connection, &statement).await;
                if rows.is_err() {
                    connection.close_on_drop();
                }
                rows
            });
            match asked.await {
                Ok(rows) => break self.heads(rows),
                Err(problem) if begun.elapsed() >= ASK_FOR || is_revoked(guards) => {
                    for key in &keys {
                        report.add(key, Fate::Away(problem.text.clone()));
                    }
                    return;
                }
                Err(_) => env::sleep(trouble.note(env::now())).await,
            }
        };
        for one in executed {
            let unchanged = new
                .iter()
                .any(|(head, _)| head.key == one.key && head.attempts == one.attempts);
            let key = one.key.clone();
            if unchanged {
                report.add(
                    &key,
                    Fate::Again("the connection was lost in its commit".to_owned()),
                );
            } else {
                report.add(&key, Fate::Marked(self.mark_of(&one), one.failure));
            }
        }
    }

    async fn roll_back(&self, open: &mut Open<D>) {
        let limit = self.settings.database_timeout;
        // Where it fails the connection is closed, which rolls back, too.
        let _ = within(limit, async {
            open.roll_back().await?;
            open.restore().await
        })
        .await;
    }
}

/// How a handler ended.
enum Ended {
    Kept,
    /// It has failed, and its effects are undone.
    Undone(Failure),
    /// It has failed, and the transaction cannot go on.
    Broken(Failure),
}

const KEPT: &str = "the handler keeps its transaction: let it drop Tx before it ends";
const NESTED: &str =
    "the handler left a transaction of its own open: let it commit each that it begins";
const SWALLOWED: &str = "the handler ended well although a statement of it had failed, or has ended the transaction itself";

fn is_revoked(guards: &Guards) -> bool {
    guards.values().any(|guard| guard.is_revoked())
}

fn single<T>(mut all: Vec<T>) -> Result<T, Vec<T>> {
    match (all.pop(), all.is_empty()) {
        (Some(only), true) => Ok(only),
        (last, _) => {
            all.extend(last);
            Err(all)
        }
    }
}
