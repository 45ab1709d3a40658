//! What each of the others has acknowledged. A disk that holds less than that later is an older copy, or lost writes: what
//! it had promised counts nowhere any more.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse};

use super::raft::{LogId, TypeConfig};

/// Of each of the others, the last decided entry that it acknowledged to this leader. Only these: what is not decided may be
/// taken back. A clone is the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Acknowledged(Arc<Mutex<BTreeMap<u64, u64>>>);

/// What of a request must be known when its answer comes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    previous: Option<u64>,
    last: Option<u64>,
    committed: Option<u64>,
}

impl Sent {
    pub(super) fn of(request: &AppendEntriesRequest<TypeConfig>) -> Self {
        let index = |id: LogId| id.index;
        let last = request.entries.last().map(|entry| entry.log_id);
        Self {
            previous: request.prev_log_id.map(index),
            last: last.or(request.prev_log_id).map(index),
            committed: request.leader_commit.map(index),
        }
    }
}

impl Acknowledged {
    fn known(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what the replica has up to here.
    pub(super) fn note(&self, replica: u64, decided: Option<u64>) {
        if let Some(index) = decided {
            let mut known = self.known();
            let last = known.entry(replica).or_insert(index);
            *last = index.max(*last);
        }
    }

    /// Takes an answer. The last entry that the replica had acknowledged, if it does not know that one any more; it is told
    /// once.
    pub(super) fn take(
        &self,
        replica: u64,
        sent: Sent,
        answer: &AppendEntriesResponse<TypeConfig>,
    ) -> Option<u64> {
        let has = match answer {
            AppendEntriesResponse::Success => sent.last,
            AppendEntriesResponse::PartialSuccess(last) => last.map(|last| last.index),
            AppendEntriesResponse::HigherVote(_) => None,
            AppendEntriesResponse::Conflict => {
                let mut known = self.known();
                let had = known.get(&replica).copied();
                let forgotten = had.filter(|had| sent.previous <= Some(*had));
                if forgotten.is_some() {
                    known.remove(&replica);
                }
                return forgotten;
            }
        };
        self.note(replica, has.min(sent.committed));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: Sent = Sent {
        previous: Some(7),
        last: Some(9),
        committed: Some(8),
    };

    #[test]
    fn who_forgets_what_is_decided_is_found_once() {
        let acknowledged = Acknowledged::default();
        let take = |sent, answer| acknowledged.take(2, sent, &answer);
        assert_eq!(take(SENT, AppendEntriesResponse::Success), None);
        // Entry 9 is not decided: a new leader may have another one in its place.
        let other = Sent {
            previous: Some(9),
            ..SENT
        };
        assert_eq!(take(other, AppendEntriesResponse::Conflict), None);
        assert_eq!(
            acknowledged.take(3, SENT, &AppendEntriesResponse::Conflict),
            None,
            "another replica"
        );
        assert_eq!(take(SENT, AppendEntriesResponse::Conflict), Some(8));
        assert_eq!(take(SENT, AppendEntriesResponse::Conflict), None);
    }
}
