//! No two processes are one replica: they would vote twice, and each would undo what the other one does.
//!
//! Whichever is where the others find this replica is the right one: each looks there again and again, and ends where it
//! finds another process than itself.

use std::collections::BTreeSet;
use std::time::Duration;

use skyschedule_common::env;
use tokio::sync::watch;

use super::error::ConsensusError;
use crate::peers::Peers;

/// How often it looks.
const EVERY: Duration = Duration::from_secs(5);

/// Resolves when another process is this replica.
pub(super) async fn watch(
    replica: u16,
    peers: Peers,
    mut own: watch::Receiver<BTreeSet<String>>,
) -> ConsensusError {
    loop {
        let addresses = own.borrow_and_update().clone();
        for address in addresses {
            if peers.has_twin_at(&address).await {
                return ConsensusError::Twin { replica, address };
            }
        }
        // Whoever tells ends together with this.
        let _ = env::timeout(EVERY, own.changed()).await;
    }
}
