//! Another replica leads in place of this one, because this one stops, or because its operator wants it.

use std::sync::PoisonError;
use std::time::Duration;

use futures_util::future::select_ok;
use openraft::async_runtime::WatchReceiver as _;
use skyschedule_common::env;

use super::identity::Standing;
use super::wire::{Reply, Request};
use super::{ChangeError, Consensus, Leadership};

/// How long another replica may take to take the leadership over.
const HAND_OVER: Duration = Duration::from_secs(1);

/// How long an operator waits, once another replica was asked to lead, to learn who does: some elections fit in.
const ELECTED: Duration = Duration::from_secs(3);

/// How often is looked whether a follower has caught up.
const LOOK: Duration = Duration::from_millis(5);

/// How long a replica may take to show that it is there. Longer than it is silent while its processor is busy, and short
/// enough for another one to be found in time.
const ALIVE: Duration = Duration::from_millis(700);

/// Why no other replica is known to lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NotPassed {
    /// None that could was asked: this replica leads on.
    NoHeir,
    /// One was asked, and this replica leads no more, as far as it knows.
    NoLeader,
}

impl Consensus {
    /// Has the follower that knows most lead in place of this replica, if this one leads and can find one.
    pub async fn hand_over(&self) {
        if self.leadership().own.is_none() {
            return;
        }
        match self.pass_to(None, HAND_OVER).await {
            Ok(leader) => tracing::info!(leader, "handed the leadership over"),
            Err(_) if self.replicas().len() > 1 => {
                tracing::warn!("no other replica took the leadership over; one will be elected");
            }
            Err(_) => {}
        }
    }

    /// Has another replica lead, the one that knows most unless it is named. Answers who leads then.
    ///
    /// # Errors
    /// When this replica does not lead, or the other one cannot, or a third one leads in its place.
    pub async fn transfer(&self, to: Option<u16>) -> Result<u16, ChangeError> {
        let known = self.leads()?;
        if let Some(to) = to {
            if to == self.id {
                return Ok(to);
            }
            match known.places.get(&to) {
                None => return Err(ChangeError::Unknown(to)),
                Some(_) if !known.voters.contains(&to) => {
                    return Err(ChangeError::Conflict(format!(
                        "replica {to} does not vote yet, so it cannot lead: wait until it has caught up"
                    )));
                }
                Some(_) => {}
            }
        }
        let wanted = to.map_or("another replica".to_owned(), |to| format!("replica {to}"));
        let id = self.id;
        let unavailable = |why: String| Err(ChangeError::Unavailable(why));
        match self.pass_to(to, ELECTED).await {
            Ok(leader) if to.is_none_or(|to| to == leader) && leader != id => {
                tracing::info!(leader, "transferred the leadership, as an operator asked");
                Ok(leader)
            }
            Ok(leader) => unavailable(format!(
                "{wanted} was asked to lead and did not; replica {leader} was elected, and leads now. See with `skyschedule cluster` \
                 that {wanted} is reachable, then ask again"
            )),
            Err(NotPassed::NoHeir) => unavailable(format!(
                "{wanted} did not take the leadership over, and replica {id} leads on: it does not answer, or has not caught up. \
                 See with `skyschedule cluster` that it is reachable and what it lags"
            )),
            Err(NotPassed::NoLeader) => unavailable(format!(
                "{wanted} was asked to lead, and nobody is known to lead yet: `skyschedule cluster` shows who is elected"
            )),
        }
    }

    /// Who leads afterwards, which may be another one than was asked, once that is known.
    async fn pass_to(&self, only: Option<u16>, patience: Duration) -> Result<u16, NotPassed> {
        let until = env::now() + patience;
        let heir = env::timeout(HAND_OVER, self.heir(only)).await;
        let heir = heir.ok().flatten().ok_or(NotPassed::NoHeir)?;
        let mut leadership = self.leadership.clone();
        let term = leadership.borrow().term;
        let asked = self.raft.0.trigger().transfer_leader(heir).await;
        asked.map_err(|_| NotPassed::NoHeir)?;
        let is_next = |now: &Leadership| match now.leader {
            Some(leader) if leader == self.id => now.term > term,
            leader => leader.is_some(),
        };
        let left = until.saturating_duration_since(env::now());
        let next = env::timeout(left, leadership.wait_for(is_next)).await;
        let next = next.ok().and_then(Result::ok);
        let next = next.and_then(|now| now.leader);
        next.ok_or(NotPassed::NoLeader)
    }

    /// Waits until a voter that is there has all entries.
    async fn heir(&self, only: Option<u16>) -> Option<u64> {
        loop {
            let voters = self.members.effective()?.voters;
            let known: Vec<u64> = {
                let statuses = self.statuses.lock().unwrap_or_else(PoisonError::into_inner);
                let full = statuses.iter().filter(|(id, status)| {
                    status.standing == Standing::Full
                        && voters.contains(id)
                        && only.is_none_or(|only| only == **id)
                });
                full.map(|(id, _)| u64::from(*id)).collect()
            };
            if known.is_empty() {
                return None;
            }
            let caught_up: Vec<u64> = {
                let metrics = self.raft.0.metrics();
                let metrics = metrics.borrow_watched();
                let progress = metrics.replication.as_ref()?.iter();
                let caught_up = progress.filter(|(id, log_id)| {
                    known.contains(id)
                        && log_id.map(|log_id| log_id.index) >= metrics.last_log_index
                });
                caught_up.map(|(id, _)| *id).collect()
            };
            if !caught_up.is_empty() {
                return self.first_alive(caught_up).await;
            }
            env::sleep(LOOK).await;
        }
    }

    /// The first of these to answer now: whoever has stopped a moment ago looks as if it had all entries, and without an heir
    /// any other one may be elected, once this one has given the leadership up.
    async fn first_alive(&self, replicas: Vec<u64>) -> Option<u64> {
        let asked = replicas.into_iter().map(|id| {
            Box::pin(async move {
                match self.network.call(id, Request::Status, ALIVE).await {
                    Ok(Reply::Status(status)) if status.standing == Standing::Full => Ok(id),
                    _ => Err(()),
                }
            })
        });
        let (id, _) = select_ok(asked).await.ok()?;
        Some(id)
    }
}
