//! Who held which row when, as the consumers' logs say: the promise of exclusive groups is about this.
//!
//! A consumer logs when a handler begins, with what is left of its lease, and when it ends, be it that it was dropped.
//! A process that is killed or paused in a handler holds the row on until its lease is over, as far as this was known
//! when the handler began (a lease never gets shorter); nobody else may begin before. What a process still executes after a pause, when its
//! lease has run out, it holds no more: that it changes nothing is seen in the table (see `judge`).

use std::collections::BTreeMap;
use std::path::Path;

/// One row held by one process. Times are microseconds of the clock that counts suspend, the same for all processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) task: i64,
    pub(crate) from: i64,
    pub(crate) to: i64,
    /// Whose.
    pub(crate) process: String,
}

/// What a process held, from its log.
pub(crate) fn read(log: &Path) -> Vec<Hold> {
    let process = log.file_name().unwrap().to_string_lossy();
    parse(&process, &std::fs::read_to_string(log).unwrap())
}

fn parse(process: &str, log: &str) -> Vec<Hold> {
    let mut open: BTreeMap<i64, Hold> = BTreeMap::new();
    let mut holds = Vec::new();
    for line in log.lines().filter(|line| line.contains(" held: ")) {
        let field = |name: &str| {
            let (_, rest) = line.split_once(name)?;
            rest.split(' ').next()?.parse::<i64>().ok()
        };
        // The last line of a killed process may be cut short.
        let (Some(task), Some(at)) = (field(" task="), field(" at_us=")) else {
            continue;
        };
        if line.contains(" begins ") {
            let Some(left) = field(" lease_left_us=") else {
                continue;
            };
            let hold = Hold {
                task,
                from: at,
                to: at + left,
                process: process.to_owned(),
            };
            assert_eq!(
                open.insert(task, hold),
                None,
                "{process} began {task} twice"
            );
        } else {
            let mut hold = open.remove(&task).expect("what ends was begun");
            hold.to = hold.to.min(at);
            holds.push(hold);
        }
    }
    holds.extend(open.into_values());
    holds
}

/// Pairs of holds of one row by two processes at the same time.
pub(crate) fn overlaps(holds: &[Hold]) -> Vec<(Hold, Hold)> {
    let mut sorted: Vec<&Hold> = holds.iter().collect();
    sorted.sort_by_key(|hold| (hold.task, hold.from));
    let mut overlaps = Vec::new();
    let mut last: Option<&Hold> = None;
    for hold in sorted {
        // Of all that began before, the one that ends last.
        match last.filter(|last| last.task == hold.task) {
            Some(before) => {
                if hold.from < before.to && hold.process != before.process {
                    overlaps.push((before.clone(), hold.clone()));
                }
                if hold.to > before.to {
                    last = Some(hold);
                }
            }
            None => last = Some(hold),
        }
    }
    overlaps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(lines: &[(&str, i64, i64, i64)]) -> String {
        let line = |(what, task, at, left): &(&str, i64, i64, i64)| {
            format!(
                "2026-11-30T00:00:00.000000Z TRACE held: {what} task={task} at_us={at} lease_left_us={left}\n"
            )
        };
        lines.iter().map(line).collect()
    }

    #[test]
    fn a_row_is_held_until_its_handler_ends_or_the_lease_does() {
        let log = lines(&[
            ("begins", 1, 100, 500),
            ("ends", 1, 150, 0),
            ("begins", 2, 200, 500),
            ("ends", 2, 900, 0),
            ("begins", 3, 1_000, 500),
        ]);
        let ends: Vec<_> = parse("a.0", &log)
            .iter()
            .map(|hold| (hold.task, hold.to))
            .collect();
        assert_eq!(ends, [(1, 150), (2, 700), (3, 1_500)]);
        // Killed while it wrote.
        let cut = &lines(&[("begins", 1, 100, 500)])[..60];
        assert_eq!(parse("a.0", cut), []);
    }

    #[test]
    fn two_processes_that_hold_one_row_are_found() {
        let hold = |process: &str, task, from, to| Hold {
            task,
            from,
            to,
            process: process.to_owned(),
        };
        let mut holds = vec![
            hold("a.0", 1, 0, 10),
            hold("b.0", 1, 10, 20),
            hold("a.0", 2, 0, 30),
            hold("a.0", 2, 5, 8),
        ];
        assert_eq!(overlaps(&holds), []);
        holds.push(hold("b.0", 2, 20, 25));
        holds.push(hold("a.1", 1, 19, 20));
        assert_eq!(overlaps(&holds).len(), 2);
    }
}
