//! What the ledger says, judged by the guarantees.
//!
//! *Available groups*: a task may run twice when one of its two owners was killed, paused, overtaken or cut off at the
//! time. The first three may cost at most the batch that the owner had in work. One that is cut off from all that could
//! number it works on for as long as that lasts (rule C8), others have its rows meanwhile, and both begin with the oldest: at each moment
//! what both have in work may run twice. So it is where a replica without a quorum numbers whom it reaches.

use std::collections::BTreeMap;

use skyschedule_client::sql::Database;

use crate::DRAIN_TIMEOUT_MS;
use crate::common::place::Place;
use crate::story::{Fault, Kind};

/// So long before a fault something may have been executed and not yet be marked, in microseconds: marks go out after
/// 50 ms at most, and then the machine may be busy.
const UNMARKED_US: i64 = 1_000_000;

/// So long after a pause its process may still finish what it was at when it was stopped.
const AFTER_PAUSE_US: i64 = 1_000_000;

/// So long after its network is whole again a client may be without a server: it tries again every third of a lease.
const AFTER_CUT_US: i64 = 3_000_000;

/// One execution, as its process wrote it down when it was finished. Times are microseconds of the wall clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Execution {
    pub(crate) client: String,
    pub(crate) epoch: String,
    pub(crate) started: i64,
    pub(crate) finished: i64,
}

/// Each task's executions, in the order of their starts.
pub(crate) type Executions = BTreeMap<i64, Vec<Execution>>;

/// Reads the ledger.
pub(crate) async fn executions(place: &Place) -> Executions {
    const SQL: &str = "SELECT task_id, client_id, epoch, started_us, finished_us FROM task_log ORDER BY started_us";
    let rows: Vec<(i64, String, String, i64, i64)> = match &place.database {
        Database::Postgres(pool) => sqlx::query_as(SQL).fetch_all(pool).await,
        Database::MySql(pool) => sqlx::query_as(SQL).fetch_all(pool).await,
        Database::Sqlite(pool) => sqlx::query_as(SQL).fetch_all(pool).await,
    }
    .unwrap();
    let mut executions = Executions::new();
    for (task, client, epoch, started, finished) in rows {
        executions.entry(task).or_default().push(Execution {
            client,
            epoch,
            started,
            finished,
        });
    }
    executions
}

/// What ran twice.
#[derive(Debug, Default)]
pub(crate) struct Twice {
    /// How often each fault explains it.
    pub(crate) explained: Vec<(Fault, usize)>,
    /// How often one of the two was numbered by a replica without a quorum.
    pub(crate) degraded: usize,
    /// What nothing explains: the task and both executions.
    pub(crate) unexplained: Vec<(i64, Execution, Execution)>,
}

impl Twice {
    pub(crate) fn of(executions: &Executions, faults: &[Fault]) -> Self {
        let mut counts = vec![0; faults.len()];
        let (mut unexplained, mut degraded) = (Vec::new(), 0);
        for (task, executions) in executions {
            for pair in executions.windows(2) {
                let [first, second] = pair else { continue };
                let explanation = faults
                    .iter()
                    .position(|fault| explains(fault, first, second))
                    .or_else(|| faults.iter().position(|fault| covers(fault, second)));
                let by_degraded = pair.iter().any(|execution| execution.epoch.contains('~'));
                match explanation {
                    _ if by_degraded => degraded += 1,
                    Some(fault) => counts[fault] += 1,
                    None => unexplained.push((*task, first.clone(), second.clone())),
                }
            }
        }
        let counted = faults.iter().cloned().zip(counts);
        Self {
            explained: counted.filter(|(_, count)| *count > 0).collect(),
            degraded,
            unexplained,
        }
    }

    /// Faults that cost more than they may.
    pub(crate) fn beyond(&self, batch: usize) -> Vec<&(Fault, usize)> {
        let bounded = |kind| matches!(kind, Kind::Killed | Kind::Paused | Kind::Overtaken);
        let all = self.explained.iter();
        all.filter(|(fault, count)| bounded(fault.kind) && *count > batch)
            .collect()
    }

    pub(crate) fn count(&self, kind: Kind) -> usize {
        let of_kind = self
            .explained
            .iter()
            .filter(|(fault, _)| fault.kind == kind);
        of_kind.map(|(_, count)| count).sum()
    }
}

/// Whether the fault kept the owner of `first` from marking what it executed before `second` began.
fn explains(fault: &Fault, first: &Execution, second: &Execution) -> bool {
    match fault.kind {
        Kind::Killed => {
            fault.who == first.client
                && (fault.from - UNMARKED_US..=fault.to).contains(&first.finished)
                && second.started >= fault.from
        }
        _ => covers(fault, first),
    }
}

/// Whether the owner of this execution was not itself at the time, and lived.
fn covers(fault: &Fault, execution: &Execution) -> bool {
    let after = match fault.kind {
        Kind::Killed | Kind::Restarted => return false,
        Kind::Paused | Kind::Overtaken | Kind::Alone => AFTER_PAUSE_US,
        Kind::CutOff => AFTER_CUT_US,
    };
    // It was asked to release that much earlier, and what it had executed by then was not marked.
    let asked = match fault.kind {
        Kind::Overtaken => fault.from - DRAIN_TIMEOUT_MS * 1_000,
        _ => fault.from,
    };
    fault.who == execution.client
        && execution.finished >= asked - UNMARKED_US
        && execution.started <= fault.to + after
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execution(client: &str, started: i64) -> Execution {
        Execution {
            client: client.to_owned(),
            epoch: "1".to_owned(),
            started,
            finished: started + 10_000,
        }
    }

    fn fault(who: &str, kind: Kind, from: i64, to: i64) -> Fault {
        Fault {
            who: who.to_owned(),
            kind,
            from,
            to,
        }
    }

    fn unexplained(first: Execution, second: Execution, fault: Fault) -> usize {
        let executions = Executions::from([(7, vec![first, second])]);
        let twice = Twice::of(&executions, &[fault]);
        assert_eq!(twice.explained.len() + twice.unexplained.len(), 1);
        twice.unexplained.len()
    }

    const S: i64 = 1_000_000;

    #[test]
    fn only_a_kill_of_the_first_owner_between_execution_and_repetition_explains_it() {
        let kill = |who: &str, at| fault(who, Kind::Killed, at, at + 1_000);
        let pair = |kill| unexplained(execution("a", 5 * S), execution("b", 9 * S), kill);
        assert_eq!(pair(kill("a", 5 * S + 100_000)), 0);
        assert_eq!(pair(kill("b", 5 * S + 100_000)), 1, "of the wrong one");
        assert_eq!(pair(kill("a", 4 * S)), 1, "before the execution");
        assert_eq!(pair(kill("a", 8 * S)), 1, "long after it");
        assert_eq!(pair(kill("a", 9 * S + 100_000)), 1, "after the second one");
    }

    #[test]
    fn a_pause_of_either_owner_explains_what_was_in_work_at_the_time() {
        let pause = |who: &str, from, to| fault(who, Kind::Paused, from, to);
        let pair = |pause| unexplained(execution("a", 5 * S), execution("b", 9 * S), pause);
        assert_eq!(pair(pause("a", 5 * S + 5_000, 10 * S)), 0);
        assert_eq!(pair(pause("b", 2 * S, 8 * S + S / 2)), 0);
        assert_eq!(pair(pause("c", 2 * S, 12 * S)), 1, "of another one");
        assert_eq!(pair(pause("a", 7 * S, 12 * S)), 1, "long marked by then");
        assert_eq!(pair(pause("b", S, 3 * S)), 1, "long over");
    }

    /// The numbers of a run in which marks were late: executed at 0.12 s, asked at 0.18 s, overtaken at 1.18 s.
    #[test]
    fn who_is_overtaken_was_asked_a_drain_timeout_before() {
        let overtaken = |at| fault("a", Kind::Overtaken, at, at);
        let pair = |at| unexplained(execution("a", 5 * S), execution("b", 9 * S), overtaken(at));
        assert_eq!(pair(6 * S + 60_000), 0);
        assert_eq!(pair(7 * S), 0, "executed shortly before it was asked");
        assert_eq!(pair(7 * S + S / 10), 1, "long marked when it was asked");
        assert_eq!(pair(3 * S), 1, "overtaken long before");
    }
}
