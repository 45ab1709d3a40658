//! Who leads. A new leader's own first entry is proposed here, and it is this replica's leadership only once
//! that is applied (rule L1).

use openraft::ServerState;
use openraft::async_runtime::WatchReceiver as _;
use skyschedule_common::env;
use std::time::Duration;
use tokio::sync::watch;

use super::proposals::Proposer;
use super::raft::Raft;
use super::{ProposeError, error};
use crate::state::Command;

/// Pause before a proposal is repeated that found no room.
const RETRY: Duration = Duration::from_millis(10);

/// Who leads, as far as this replica knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Leadership {
    /// Counts leaderships.
    pub term: u64,
    /// The leader.
    pub leader: Option<u16>,
    /// This replica leads: what its own [`Command::Ready`] of this leadership says.
    pub own: Option<u64>,
}

/// Follows who leads, until openraft has ended.
pub(super) async fn follow(
    raft: Raft,
    proposer: Proposer,
    tell: watch::Sender<Leadership>,
    mut lost: watch::Receiver<u64>,
) {
    let mut metrics = raft.metrics();
    let mut known_lost = *lost.borrow_and_update();
    loop {
        let (term, leader, leads) = {
            let metrics = metrics.borrow_watched();
            let leads = metrics.state == ServerState::Leader;
            (metrics.current_term, metrics.current_leader, leads)
        };
        let present = *tell.borrow();
        // A leadership in which a proposal was lost is over: what follows would build on it.
        let now_lost = *lost.borrow_and_update();
        let was_lost = std::mem::replace(&mut known_lost, now_lost) != now_lost;
        let same = present.own.is_some() && present.term == term && !was_lost;
        let own = match (leads, same) {
            (false, _) => None,
            (true, true) => present.own,
            (true, false) => Some(env::rng::u64()),
        };
        let next = Leadership {
            term,
            leader: leader.and_then(|leader| u16::try_from(leader).ok()),
            own,
        };
        if next != present {
            tell.send_replace(next);
        }
        if let Some(leader) = own.filter(|_| !same)
            && !propose_ready(&proposer, leader).await
        {
            return;
        }
        tokio::select! {
            biased;
            changed = metrics.changed() => if changed.is_err() { return },
            changed = lost.changed() => if changed.is_err() { return },
        }
    }
}

/// False when nothing can be proposed any more.
async fn propose_ready(proposer: &Proposer, leader: u64) -> bool {
    loop {
        match proposer.propose(&[Command::Ready { leader }]) {
            Ok(()) => return true,
            Err(ProposeError::Busy) => env::sleep(RETRY).await,
            Err(error::ProposeError::TooLarge { .. } | error::ProposeError::Stopped) => {
                return false;
            }
        }
    }
}
