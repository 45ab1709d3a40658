//! Which leaderships a log has seen. Two logs that have seen others are not one, even where their entries have the same
//! terms and indexes: after copies of different moments ran together, one term may have had two leaders, of which neither
//! log tells by its numbers.
//!
//! Every leadership begins with a [`Command::Ready`] that has a random number of its own, and nothing else decides anything
//! before it, so that these numbers tell histories apart.

use std::collections::BTreeMap;

use openraft::EntryPayload;
use serde::{Deserialize, Serialize};

use super::raft::Entry;
use crate::state::Command;

/// So many are kept, the newest.
const MOST: usize = 64;

/// A `Ready` is its batch alone, and that small.
const READY_BYTES: usize = 32;

/// A leadership that began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Began {
    /// Its `Ready` is this entry,
    index: u64,
    /// of this term,
    term: u64,
    /// and says this.
    leader: u64,
}

impl Began {
    fn of(entry: &Entry) -> Option<Self> {
        let EntryPayload::Normal(batch) = &entry.payload else {
            return None;
        };
        if batch.len() > READY_BYTES {
            return None;
        }
        match batch.commands().ok()?.as_slice() {
            [Command::Ready { leader }] => Some(Self {
                index: entry.log_id.index,
                term: entry.log_id.leader_id.term,
                leader: *leader,
            }),
            _ => None,
        }
    }
}

impl std::fmt::Display for Began {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            index,
            term,
            leader,
        } = self;
        write!(
            f,
            "leadership {leader:016x} of term {term} at entry {index}"
        )
    }
}

/// What a leader says of its log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seen {
    /// Its last entry when it said so: it may be read much later.
    pub(super) upto: u64,
    /// The newest leaderships up to there, in order.
    pub(super) began: Vec<Began>,
}

/// Leaderships whose entries are in the log no more, as they are kept: all from the first one on, up to an entry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    upto: u64,
    began: Vec<Began>,
}

/// All that a log has seen, of late.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    known: Known,
    /// Of entries that are in the log, and may be taken back.
    logged: BTreeMap<u64, Began>,
}

impl Lineage {
    /// As it was kept, and the log.
    pub(super) fn new<'a>(known: Known, entries: impl Iterator<Item = &'a Entry>) -> Self {
        let mut lineage = Self {
            known,
            logged: BTreeMap::new(),
        };
        entries.for_each(|entry| lineage.append(entry));
        lineage
    }

    /// An entry is appended.
    pub(super) fn append(&mut self, entry: &Entry) {
        if let Some(began) = Began::of(entry) {
            self.logged.insert(began.index, began);
        }
    }

    /// Entries from here on are taken back.
    pub(super) fn truncate(&mut self, from: u64) {
        self.logged.split_off(&from);
    }

    /// Entries up to here leave the log, which has decided them: what is to be kept.
    pub(super) fn purge(&mut self, upto: u64) -> Known {
        let stay = self.logged.split_off(&upto.saturating_add(1));
        let gone = std::mem::replace(&mut self.logged, stay).into_values();
        let known = self.known.upto;
        self.known
            .began
            .extend(gone.filter(|began| began.index > known));
        self.known.upto = upto.max(known);
        let surplus = self.known.began.len().saturating_sub(MOST);
        self.known.began.drain(..surplus);
        self.known.clone()
    }

    /// A leader's snapshot is about to replace all up to an entry: what is to be kept.
    pub(super) fn adopt(&mut self, leader: &Seen, upto: u64) -> Known {
        let began = leader.began.iter().copied();
        self.known = Known {
            upto,
            began: began.filter(|began| began.index <= upto).collect(),
        };
        self.known.clone()
    }

    /// The newest ones, in order.
    pub(super) fn all(&self) -> Vec<Began> {
        let Known { upto, began } = &self.known;
        let logged = self.logged.range(upto.saturating_add(1)..);
        let logged = logged.map(|(_, began)| *began);
        let mut all: Vec<Began> = began.iter().copied().chain(logged).collect();
        let surplus = all.len().saturating_sub(MOST);
        all.drain(..surplus);
        all
    }

    /// Where these decisions, up to an entry, are not those of a leader, who must have all of them: what only one of the two
    /// knows. Nothing is said of the time before either's first one.
    pub(super) fn contradicts(&self, leader: &Seen, decided: u64) -> Option<Began> {
        let Seen {
            upto,
            began: leader,
        } = leader;
        let decided = decided.min(*upto);
        let own = self.all();
        let from = own.first()?.index.max(leader.first()?.index);
        let part = |all: &[Began]| -> Vec<Began> {
            let within = |began: &&Began| (from..=decided).contains(&began.index);
            all.iter().filter(within).copied().collect()
        };
        let (own, leader) = (part(&own), part(leader));
        let only = |one: &[Began], other: &[Began]| {
            one.iter().find(|began| !other.contains(began)).copied()
        };
        only(&own, &leader).or_else(|| only(&leader, &own))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn began(index: u64, term: u64, leader: u64) -> Began {
        Began {
            index,
            term,
            leader,
        }
    }

    fn of(all: &[Began]) -> Lineage {
        Lineage {
            known: Known::default(),
            logged: all.iter().map(|it| (it.index, *it)).collect(),
        }
    }

    fn seen(upto: u64, began: &[Began]) -> Seen {
        Seen {
            upto,
            began: began.to_vec(),
        }
    }

    #[test]
    fn logs_that_had_another_leader_in_the_same_place_are_told_apart() {
        let first = began(2, 1, 11);
        let [own, other] = [22, 23].map(|leader| began(6, 2, leader));
        let log = of(&[first, own]);
        let next = [first, own, began(9, 3, 33)];
        assert_eq!(log.contradicts(&seen(9, &next), 8), None);
        assert_eq!(log.contradicts(&seen(9, &[first, other]), 8), Some(own));
        assert_eq!(log.contradicts(&seen(9, &[first]), 8), Some(own), "missing");
        assert_eq!(log.contradicts(&seen(5, &[first]), 8), None, "said before");
        assert_eq!(
            log.contradicts(&seen(9, &[first, other]), 5),
            None,
            "not decided"
        );
        let shorter = of(&[first]);
        assert_eq!(shorter.contradicts(&seen(9, &[first, own]), 8), Some(own));
        assert_eq!(shorter.contradicts(&seen(9, &[first, own]), 5), None);
        assert_eq!(log.contradicts(&seen(9, &[]), 8), None, "it knows of none");
        assert_eq!(
            log.contradicts(&seen(9, &[began(7, 3, 4)]), 6),
            None,
            "no more"
        );
    }

    #[test]
    fn what_leaves_the_log_is_known_on_and_a_snapshot_brings_what_its_leader_knows() {
        let all: Vec<Began> = (1..=5).map(|term| began(10 * term, term, term)).collect();
        let mut log = of(&all);
        let known = log.purge(30);
        assert_eq!((known.upto, known.began.len()), (30, 3));
        log.truncate(25);
        assert_eq!(log.all(), all[..3]);
        let known = log.adopt(&seen(50, &all), 40);
        assert_eq!(log.all(), all[..4]);
        // It was written, and the snapshot was not.
        let mut again = Lineage {
            known,
            logged: BTreeMap::from([(35, began(35, 9, 9)), (50, all[4])]),
        };
        assert_eq!(again.all(), all);
        again.purge(50);
        assert_eq!(again.all(), all);
    }

    #[test]
    fn only_the_newest_are_kept() {
        let all: Vec<Began> = (1..=200).map(|at| began(at, at, at)).collect();
        let mut log = of(&all);
        assert_eq!(log.all(), all[136..]);
        assert_eq!(log.purge(190).began.len(), MOST);
        assert_eq!(log.all(), all[136..]);
        assert_eq!(log.contradicts(&seen(200, &all), 200), None);
    }
}
