//! What cannot be in one cluster, and is when copies of data folders of different moments run together: two leaders in one
//! term, or two logs that have decided different things. Who notices it stops before anything is overwritten, and tells the
//! others, since those that are left may lead on as if nothing had been.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use openraft::raft::AppendEntriesRequest;
use skyschedule_common::env;
use tokio::sync::watch;

use super::lineage::Seen;
use super::network::{CallError, Network};
use super::raft::{Entry, LogId, SnapshotMeta, TypeConfig, Vote};
use super::wire::Request;
use crate::peers::AskError;

/// What the operator has to do, wherever it is said.
pub(super) const REMEDY: &str = "Stop all replicas, wait for a lease, choose the folders that shall count, and go on as the \
     README says under Restore: exactly as many folders as are a majority, and empty ones for all others";

/// How long the others may take to learn it.
const TELL: Duration = Duration::from_secs(1);
/// How long the answer of one may take.
const LIMIT: Duration = Duration::from_millis(500);
/// Pause before one that could not be reached is told again.
const AGAIN: Duration = Duration::from_millis(50);

/// What was noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Split {
    /// The replica that does not fit to this one.
    pub(super) other: u16,
    /// How that shows.
    pub(super) why: String,
}

/// Rings once, and for ever. A clone is the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Alarm(Arc<watch::Sender<Option<Split>>>);

impl Alarm {
    /// The first one counts.
    pub(super) fn raise(&self, other: u64, why: String) {
        let other = u16::try_from(other).unwrap_or_default();
        self.0.send_if_modified(|split| {
            let is_first = split.is_none();
            if is_first {
                tracing::error!(
                    other,
                    why,
                    "this replica and another one have decided different things: copies of data folders of different moments \
                     ran together. This one ends, and overwrites nothing. {REMEDY}"
                );
            }
            split.get_or_insert(Split { other, why });
            is_first
        });
    }

    pub(super) fn is_raised(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// What was noticed, if anything was.
    pub(super) fn split(&self) -> Option<Split> {
        self.0.borrow().clone()
    }

    /// Resolves when it rings.
    pub(super) async fn raised(&self) -> Split {
        let mut watched = self.0.subscribe();
        let split = watched.wait_for(Option::is_some).await;
        let split = split.ok().and_then(|split| split.clone());
        match split {
            Some(split) => split,
            // It cannot: this is one end of the channel.
            None => std::future::pending().await,
        }
    }
}

/// Tells the others why this replica ends, as far as they can be reached: they have nothing else to know it by.
pub(super) async fn tell(network: &Network, split: &Split) {
    let others = network.peers.iter().flat_map(|peers| peers.others());
    let told = others.map(async |id| {
        loop {
            let Split { other, why } = split.clone();
            let request = Request::Split { other, why };
            match network.call(u64::from(id), request, LIMIT).await {
                // A connection may be about to be made.
                Err(CallError::Ask(AskError::Unreachable(_) | AskError::Late(_))) => {
                    env::sleep(AGAIN).await;
                }
                _ => return,
            }
        }
    });
    // Those that are away are not waited for.
    let _ = env::timeout(TELL, join_all(told)).await;
}

/// Another replica says that it ends.
pub(super) fn heard(from: u16, other: u16, why: &str) {
    tracing::error!(
        replica = from,
        other,
        why,
        "another replica has ended, since it and replica {other} have decided different things: copies of data folders of \
         different moments ran together, and what this replica knows may be wrong, too. {REMEDY}"
    );
}

/// Two leaders in one term: how that shows.
pub(super) fn rivals(own: &Vote, other: &Vote) -> Option<String> {
    let (mine, theirs) = (own.leader_id, other.leader_id);
    let both = own.committed && other.committed;
    (both && mine.term == theirs.term && mine.voted_for != theirs.voted_for).then(|| {
        format!(
            "replicas {} and {} both lead in term {}",
            mine.voted_for, theirs.voted_for, mine.term
        )
    })
}

/// What a leader says of its log.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    pub(super) vote: &'a Vote,
    /// Entries that it has.
    ids: Vec<LogId>,
    pub(super) entries: &'a [Entry],
    /// The leaderships that it knows of.
    pub(super) seen: &'a Seen,
}

impl<'a> Claim<'a> {
    pub(super) fn of_entries(
        request: &'a AppendEntriesRequest<TypeConfig>,
        seen: &'a Seen,
    ) -> Self {
        let entries = request.entries.iter().map(|entry| entry.log_id);
        Self {
            vote: &request.vote,
            ids: request.prev_log_id.into_iter().chain(entries).collect(),
            entries: &request.entries,
            seen,
        }
    }

    pub(super) fn of_snapshot(vote: &'a Vote, meta: &SnapshotMeta, seen: &'a Seen) -> Self {
        Self {
            vote,
            ids: meta.last_log_id.into_iter().collect(),
            entries: &[],
            seen,
        }
    }

    /// Where one of these entries is not in the log that this decided one is in: a later entry is of no earlier term.
    pub(super) fn is_out_of_order_with(&self, decided: LogId) -> Option<LogId> {
        let term = |id: &LogId| id.leader_id.term;
        let fits = |id: &&LogId| match id.index.cmp(&decided.index) {
            std::cmp::Ordering::Less => term(id) <= term(&decided),
            std::cmp::Ordering::Equal => term(id) == term(&decided),
            std::cmp::Ordering::Greater => term(id) >= term(&decided),
        };
        self.ids.iter().find(|id| !fits(id)).copied()
    }
}

#[cfg(test)]
mod tests {
    use openraft::vote::RaftVote as _;

    use super::*;

    fn vote(term: u64, replica: u64, committed: bool) -> Vote {
        let leader_id = openraft::impls::leader_id_std::LeaderId {
            term,
            voted_for: replica,
        };
        Vote::from_leader_id(leader_id, committed)
    }

    #[test]
    fn a_term_has_one_leader() {
        let own = vote(5, 1, true);
        assert_eq!(rivals(&own, &vote(5, 1, true)), None);
        assert_eq!(rivals(&own, &vote(6, 2, true)), None);
        assert_eq!(rivals(&own, &vote(5, 2, false)), None, "a candidate");
        let why = rivals(&own, &vote(5, 2, true)).unwrap();
        assert_eq!(why, "replicas 1 and 2 both lead in term 5");
    }

    #[tokio::test]
    async fn the_first_alarm_counts() {
        let alarm = Alarm::default();
        assert!(!alarm.is_raised());
        alarm.raise(2, "first".to_owned());
        alarm.clone().raise(3, "second".to_owned());
        assert!(alarm.is_raised());
        let split = alarm.raised().await;
        assert_eq!((split.other, split.why.as_str()), (2, "first"));
    }
}
