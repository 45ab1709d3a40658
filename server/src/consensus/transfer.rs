//! Another replica leads in place of this one, because this one stops, or because its operator wants it.

use std::sync::PoisonError;
use std::time::Duration;

use openraft::async_runtime::WatchReceiver as _;
use skyschedule_common::env;

use super::identity::Standing;
use super::{ChangeError, Consensus};

/// How long another replica may take to take the leadership over.
const HAND_OVER: Duration = Duration::from_secs(1);

/// How often is looked whether a follower has caught up.
const LOOK: Duration = Duration::from_millis(5);

impl Consensus {
    /// Has the follower that knows most lead in place of this replica, if this one leads and can find one.
    pub async fn hand_over(&self) {
        if self.leadership().own.is_none() {
            return;
        }
        match self.pass_to(None).await {
            Some(leader) => tracing::info!(leader, "handed the leadership over"),
            None if self.replicas().len() > 1 => {
                tracing::warn!("no other replica took the leadership over; one will be elected");
            }
            None => {}
        }
    }

    /// Has another replica lead, the one that knows most unless it is named. Answers who leads then.
    ///
    /// # Errors
    /// When this replica does not lead, or the other one cannot.
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
        let leader = self.pass_to(to).await.ok_or_else(|| {
            ChangeError::Unavailable(format!(
                "{wanted} did not take the leadership over: it cannot be reached, or has not caught up"
            ))
        })?;
        if to.is_some_and(|to| to != leader) {
            return Err(ChangeError::Unavailable(format!(
                "replica {leader} leads now, and not {wanted}"
            )));
        }
        tracing::info!(leader, "transferred the leadership, as an operator asked");
        Ok(leader)
    }

    /// None: nobody took it in time.
    async fn pass_to(&self, only: Option<u16>) -> Option<u16> {
        let mut leadership = self.leadership.clone();
        let handing = async {
            let heir = self.heir(only).await?;
            self.raft.0.trigger().transfer_leader(heir).await.ok()?;
            let id = self.id;
            let other = leadership
                .wait_for(|now| now.leader.is_some_and(|leader| leader != id))
                .await;
            other.ok()?.leader
        };
        env::timeout(HAND_OVER, handing).await.ok().flatten()
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
            {
                let metrics = self.raft.0.metrics();
                let metrics = metrics.borrow_watched();
                let caught_up = metrics.replication.as_ref()?.iter().find(|(id, log_id)| {
                    known.contains(id)
                        && log_id.map(|log_id| log_id.index) >= metrics.last_log_index
                });
                if let Some((heir, _)) = caught_up {
                    return Some(*heir);
                }
            }
            env::sleep(LOOK).await;
        }
    }
}
