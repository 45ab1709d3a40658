//! Who worked on which row when: the promises about rows, checked on what clients did.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::member::{Event, Member};

/// One row, worked on once. Times are those of [`Event`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Execution {
    /// The row.
    pub key: i64,
    /// When it was begun.
    pub from: u64,
    /// When it was given back, or its client could do nothing more.
    pub to: u64,
    /// Who worked on it.
    pub client: String,
    /// Under which epoch, as text.
    pub epoch: String,
}

/// What several clients did.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Vec<Execution>);

impl Ledger {
    /// Takes in all that a client did. From each of the `stops` on it could do nothing until it was let go on:
    /// what it was working on counts as ended then. What was revoked ended with the lease, as far as that was known
    /// when the row was begun: the process says so a moment later.
    pub fn add(&mut self, member: &Member, stops: &[u64]) {
        let mut open: BTreeMap<i64, (Execution, u64)> = BTreeMap::new();
        for event in member.events() {
            match event {
                Event::Begun {
                    at,
                    key,
                    epoch: Some(epoch),
                    lease_left,
                } => {
                    let client = member.id().to_owned();
                    let begun = Execution {
                        key,
                        from: at,
                        to: u64::MAX,
                        client,
                        epoch,
                    };
                    assert_eq!(
                        open.insert(key, (begun, at.saturating_add(lease_left))),
                        None,
                        "{key} is begun twice; {member}"
                    );
                }
                Event::Ended { at, key, revoked } => {
                    let (mut ended, lease) = open.remove(&key).expect("what ends was begun");
                    ended.to = if revoked { at.min(lease) } else { at };
                    self.0.push(ended);
                }
                _ => (),
            }
        }
        self.0
            .extend(open.into_values().map(|(execution, _)| execution));
        for execution in &mut self.0 {
            let own = execution.client == member.id();
            let stop = stops
                .iter()
                .filter(|stop| own && (execution.from..execution.to).contains(*stop))
                .min();
            execution.to = stop.copied().unwrap_or(execution.to);
        }
    }

    /// How many rows were worked on.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nobody did anything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Pairs of executions of one row at the same time.
    pub fn overlaps(&self) -> Vec<(Execution, Execution)> {
        let mut sorted = self.0.clone();
        sorted.sort_by_key(|execution| (execution.key, execution.from));
        sorted
            .windows(2)
            .filter(|pair| pair[0].key == pair[1].key && pair[1].from < pair[0].to)
            .map(|pair| (pair[0].clone(), pair[1].clone()))
            .collect()
    }

    /// Rows whose later execution by another client has an epoch that is not greater: the epoch would be no
    /// fencing token.
    pub fn epochs_that_go_back(&self) -> Vec<(Execution, Execution)> {
        let epoch = |execution: &Execution| {
            execution
                .epoch
                .parse::<u64>()
                .expect("an epoch of a quorum")
        };
        let mut sorted = self.0.clone();
        sorted.sort_by_key(|execution| (execution.key, execution.from));
        sorted
            .windows(2)
            .filter(|pair| pair[0].key == pair[1].key && pair[0].client != pair[1].client)
            .filter(|pair| epoch(&pair[1]) <= epoch(&pair[0]))
            .map(|pair| (pair[0].clone(), pair[1].clone()))
            .collect()
    }

    /// The longest time between `from` and `to` in which nobody worked on one of the rows `0..keys`.
    pub fn longest_idle(&self, keys: i64, from: u64, to: u64) -> Duration {
        let longest = |key: i64| {
            let mut own: Vec<&Execution> = self
                .0
                .iter()
                .filter(|execution| execution.key == key)
                .collect();
            own.sort_by_key(|execution| execution.from);
            let mut idle = 0;
            let mut last = from;
            for execution in own
                .into_iter()
                .filter(|execution| execution.to > from && execution.from < to)
            {
                idle = idle.max(execution.from.saturating_sub(last));
                last = last.max(execution.to);
            }
            idle.max(to.saturating_sub(last))
        };
        Duration::from_nanos((0..keys).map(longest).max().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn execution(client: &str, key: i64, from: u64, to: u64, epoch: u64) -> Execution {
        Execution {
            key,
            from,
            to,
            client: client.to_owned(),
            epoch: epoch.to_string(),
        }
    }

    #[test]
    fn two_workers_of_one_row_are_found() {
        let mut ledger = Ledger(vec![
            execution("a", 1, 0, 10, 5),
            execution("b", 1, 10, 20, 6),
            execution("b", 2, 0, 20, 6),
        ]);
        assert_eq!(ledger.overlaps(), []);
        ledger.0.push(execution("c", 1, 19, 30, 7));
        assert_eq!(ledger.overlaps().len(), 1);
        // It holds what it has not given back.
        ledger.0.push(execution("d", 3, 0, u64::MAX, 7));
        ledger.0.push(execution("e", 3, 1_000, 1_001, 8));
        assert_eq!(ledger.overlaps().len(), 2);
    }

    #[test]
    fn an_epoch_that_goes_back_is_found() {
        let executions = |epoch| {
            Ledger(vec![
                execution("a", 1, 0, 10, 5),
                execution("b", 1, 10, 20, epoch),
            ])
        };
        assert_eq!(executions(6).epochs_that_go_back(), []);
        assert_eq!(executions(5).epochs_that_go_back().len(), 1);
    }

    #[test]
    fn a_row_that_was_left_alone_is_found() {
        let ledger = Ledger(vec![
            execution("a", 0, 0, 100, 5),
            execution("a", 1, 0, 40, 5),
            execution("b", 1, 60, 100, 6),
        ]);
        assert_eq!(ledger.longest_idle(2, 0, 100), Duration::from_nanos(20));
        assert_eq!(ledger.longest_idle(2, 0, 150), Duration::from_nanos(50));
        assert_eq!(ledger.longest_idle(3, 0, 100), Duration::from_nanos(100));
    }
}
