//! What was done to whom, and when.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use skyschedule_common::env;

/// What is done to a process or its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// SIGKILL.
    Killed,
    /// SIGSTOP, then SIGCONT.
    Paused,
    /// SIGTERM, and a new process afterwards.
    Restarted,
    /// Some of what it says, or of what is said to it, does not arrive.
    CutOff,
    /// It did not release its rows in time, and others went on (as the servers logged).
    Overtaken,
    /// No server answered it, and it worked on with all that it might still own (as it logged).
    Alone,
}

/// One fault. Times are microseconds of the wall clock, as in the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) who: String,
    pub(crate) kind: Kind,
    pub(crate) from: i64,
    pub(crate) to: i64,
}

/// All faults of a run. A clone is the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Story(Arc<Mutex<Vec<Fault>>>);

impl Story {
    /// Notes what began at `from` and ends now.
    pub(crate) fn note(&self, who: &str, kind: Kind, from: i64) {
        self.0.lock().unwrap().push(Fault {
            who: who.to_owned(),
            kind,
            from,
            to: env::unix_micros(),
        });
    }

    pub(crate) fn faults(&self) -> Vec<Fault> {
        self.0.lock().unwrap().clone()
    }
}

/// How many of each kind there were.
impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts: BTreeMap<(bool, Kind), usize> = BTreeMap::new();
        for fault in self.faults() {
            let replica = fault.who.starts_with("replica");
            *counts.entry((replica, fault.kind)).or_default() += 1;
        }
        let texts = counts.into_iter().map(|((replica, kind), count)| {
            let who = if replica { "replicas" } else { "consumers" };
            format!("{who} {kind:?} {count} times")
        });
        f.write_str(&texts.collect::<Vec<_>>().join(", "))
    }
}
