//! The check at the end: what the table and the ledger say, whatever the demo itself believes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// One execution, as its consumer wrote it into the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Execution {
    pub(super) task: i64,
    pub(super) client: String,
    pub(super) finished_us: i64,
}

/// What must be explained by the kill.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    /// Every task.
    pub(super) ids: &'a RangeInclusive<i64>,
    /// The consumer that was killed.
    pub(super) killed: Option<&'a str>,
    /// What it may have executed without marking it.
    pub(super) batch: u16,
    /// Whether every task must be done.
    pub(super) complete: bool,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Audit {
    /// Tasks that were executed at least once.
    pub(super) executed: u64,
    /// Tasks that nobody has executed, though they are marked as done, or vanished, or all should be done.
    pub(super) lost: u64,
    /// Tasks that are still due, in a demo that was stopped early.
    pub(super) left: u64,
    /// Tasks that are marked as failed: no task of the demo fails.
    pub(super) failed: u64,
    /// Tasks that were executed more than once.
    pub(super) twice: u64,
    /// Those of them that the kill explains: once by the killed consumer, which had no time to mark it, and once by
    /// another; at most a batch.
    pub(super) twice_allowed: u64,
    /// Executions by client.
    pub(super) by_client: BTreeMap<String, u64>,
}

impl Audit {
    pub(super) fn of(
        statuses: &[(i64, i64)],
        ledger: &[Execution],
        expected: Expected<'_>,
    ) -> Self {
        let mut audit = Self::default();
        let statuses: BTreeMap<i64, i64> = statuses.iter().copied().collect();
        let mut executions: BTreeMap<i64, Vec<&Execution>> = BTreeMap::new();
        for execution in ledger {
            executions
                .entry(execution.task)
                .or_default()
                .push(execution);
            *audit.by_client.entry(execution.client.clone()).or_default() += 1;
        }
        let mut allowed = 0;
        for id in expected.ids.clone() {
            let status = statuses.get(&id).copied();
            let by: &[&Execution] = executions.get(&id).map_or(&[], Vec::as_slice);
            audit.executed += u64::from(!by.is_empty());
            match status {
                Some(0) if expected.complete => audit.lost += 1,
                Some(0) => audit.left += 1,
                Some(1) if !by.is_empty() => {}
                Some(2) => audit.failed += 1,
                _ => audit.lost += 1,
            }
            if by.len() > 1 {
                audit.twice += 1;
                allowed += u64::from(is_explained(by, expected.killed));
            }
        }
        audit.twice_allowed = allowed.min(u64::from(expected.batch));
        audit
    }

    /// Whether nothing was lost, and nothing was executed twice but for the kill.
    pub(super) fn is_good(&self) -> bool {
        self.lost == 0 && self.failed == 0 && self.twice == self.twice_allowed
    }
}

/// First by the killed consumer, then by one other.
fn is_explained(by: &[&Execution], killed: Option<&str>) -> bool {
    let clients: BTreeSet<&str> = by
        .iter()
        .map(|execution| execution.client.as_str())
        .collect();
    let first = by.iter().min_by_key(|execution| execution.finished_us);
    by.len() == 2
        && clients.len() == 2
        && killed.is_some()
        && first.map(|execution| execution.client.as_str()) == killed
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: RangeInclusive<i64> = -2..=1;

    fn ledger(rows: &[(i64, &str, i64)]) -> Vec<Execution> {
        let execution = |&(task, client, finished_us): &(i64, &str, i64)| Execution {
            task,
            client: client.to_owned(),
            finished_us,
        };
        rows.iter().map(execution).collect()
    }

    fn audit(statuses: [i64; 4], rows: &[(i64, &str, i64)], complete: bool) -> Audit {
        let statuses: Vec<_> = IDS.zip(statuses).collect();
        let expected = Expected {
            ids: &IDS,
            killed: Some("killed"),
            batch: 1,
            complete,
        };
        Audit::of(&statuses, &ledger(rows), expected)
    }

    const ALL: [(i64, &str, i64); 4] = [(-2, "a", 1), (-1, "b", 1), (0, "a", 2), (1, "killed", 2)];

    #[test]
    fn each_task_executed_once_is_good() {
        let audit = audit([1; 4], &ALL, true);
        assert!(audit.is_good(), "{audit:?}");
        assert_eq!(
            (audit.executed, audit.twice, audit.by_client["a"]),
            (4, 0, 2)
        );
    }

    #[test]
    fn a_task_marked_without_execution_is_lost() {
        let audit = audit([1; 4], &ALL[1..], true);
        assert!(!audit.is_good());
        assert_eq!((audit.executed, audit.lost), (3, 1));
    }

    #[test]
    fn a_task_that_vanished_is_lost() {
        let statuses: Vec<_> = IDS.skip(1).map(|id| (id, 1)).collect();
        let expected = Expected {
            ids: &IDS,
            killed: None,
            batch: 1,
            complete: true,
        };
        assert_eq!(Audit::of(&statuses, &ledger(&ALL), expected).lost, 1);
    }

    #[test]
    fn a_task_still_due_is_lost_only_if_all_should_be_done() {
        assert_eq!(audit([0, 1, 1, 1], &ALL, true).lost, 1);
        let stopped = audit([0, 1, 1, 1], &ALL, false);
        assert_eq!((stopped.lost, stopped.left), (0, 1));
        assert!(stopped.is_good());
    }

    #[test]
    fn a_failed_task_is_not_good() {
        assert!(!audit([2, 1, 1, 1], &ALL, true).is_good());
    }

    #[test]
    fn twice_is_allowed_only_after_the_killed_consumer_and_within_its_batch() {
        let with = |more: &[(i64, &str, i64)]| audit([1; 4], &[&ALL[..], more].concat(), true);
        let explained = with(&[(1, "a", 9)]);
        assert!(explained.is_good());
        assert_eq!((explained.twice, explained.twice_allowed), (1, 1));
        for unexplained in [
            &[(1, "killed", 9)][..],
            &[(1, "a", 1)],
            &[(0, "b", 9)],
            &[(1, "a", 9), (1, "b", 9)],
            &[(1, "a", 9), (0, "killed", 1)],
        ] {
            assert!(!with(unexplained).is_good(), "{unexplained:?}");
        }
    }
}
