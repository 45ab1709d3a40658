//! The operator: he wants settings, servers and a leader, and asks whichever server leads until it is so.

use skyschedule_common::env;
use skyschedule_common::ids::GroupName;
use skyschedule_server::consensus::{ChangeError, Consensus, Removed};
use skyschedule_server::coordinator::{ConfigureError, Handle};
use skyschedule_server::state::Settings;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use super::server::{Process, address, replica_id};
use super::worker::GROUP;

/// Pause before he asks again.
const RETRY: Duration = Duration::from_millis(50);

/// What the operator wants.
#[derive(Debug, Clone)]
pub struct Wishes {
    /// The settings of the group.
    pub settings: Settings,
    /// The servers of the cluster.
    pub servers: BTreeSet<usize>,
    /// Those that he removes, until he is told that they are gone.
    pub leaving: BTreeSet<usize>,
    /// Another leader: this one, or any.
    pub leader: Option<Option<usize>>,
}

/// Something to ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Add(usize),
    Remove(usize),
    Transfer(Option<usize>),
}

/// Sees to it that the group has the settings that are wanted.
///
/// # Errors
/// When the server refuses them.
pub async fn configure(
    process: &Process,
    consensus: &Consensus,
    handle: &Handle,
) -> Result<Infallible, ConfigureError> {
    let group = GroupName::new(GROUP).unwrap();
    let mut leadership = consensus.watch_leadership();
    let alone = process.setup.peers.len() == 1;
    loop {
        let wanted = process.setup.wishes.lock().unwrap().settings.clone();
        let is = consensus.read(|state| state.group(&group).map(|known| known.settings().clone()));
        let may = alone || leadership.borrow_and_update().own.is_some();
        if is.as_ref() != Some(&wanted) && may {
            match handle.configure(group.clone(), wanted).await {
                Ok(_) => {}
                Err(ConfigureError::Ask(_)) => env::sleep(RETRY).await,
                Err(error) => return Err(error),
            }
            continue;
        }
        tokio::select! {
            biased;
            () = process.configure.notified() => {}
            Ok(()) = leadership.changed() => {}
        }
    }
}

/// Sees to it that the cluster has the servers that are wanted, and the leader.
pub async fn change_servers(process: &Process, consensus: &Consensus) -> Infallible {
    let mut leadership = consensus.watch_leadership();
    let mut turn = 0;
    loop {
        let leads = leadership.borrow_and_update().own.is_some();
        let deeds = if leads {
            deeds(process, consensus)
        } else {
            Vec::new()
        };
        // In turn: one that cannot be done now must not keep the others from being done.
        let Some(deed) = deeds.get(turn % deeds.len().max(1)) else {
            tokio::select! {
                biased;
                () = process.change.notified() => {}
                Ok(()) = leadership.changed() => {}
            }
            continue;
        };
        turn += 1;
        // Whether it is done shows by itself.
        match *deed {
            Deed::Add(at) => {
                let _ = consensus.add(replica_id(at), &address(at)).await;
            }
            Deed::Remove(at) => {
                let removed = consensus.remove(replica_id(at), false).await;
                if matches!(removed, Ok(Removed::Done) | Err(ChangeError::Unknown(_))) {
                    process.setup.wishes.lock().unwrap().leaving.remove(&at);
                }
            }
            Deed::Transfer(to) => {
                let _ = consensus.transfer(to.map(replica_id)).await;
                process.setup.wishes.lock().unwrap().leader = None;
            }
        }
        env::sleep(RETRY).await;
    }
}

fn deeds(process: &Process, consensus: &Consensus) -> Vec<Deed> {
    let wishes = process.setup.wishes.lock().unwrap();
    let replicas = consensus.replicas();
    let votes = |at: usize| replicas.get(&replica_id(at)).is_some_and(|it| it.voter);
    let missing = wishes.servers.iter().copied().filter(|at| !votes(*at));
    if wishes.servers.len() == 1 {
        return Vec::new();
    }
    // What was asked for may be decided later than he was told that it is not.
    let known = replicas.keys().map(|id| usize::from(*id) - 1);
    let surplus: BTreeSet<usize> = known
        .filter(|at| !wishes.servers.contains(at))
        .chain(wishes.leaving.iter().copied())
        .collect();
    let surplus = surplus.into_iter();
    let transfer = wishes.leader.map(Deed::Transfer);
    let changes = missing.map(Deed::Add).chain(surplus.map(Deed::Remove));
    changes.chain(transfer).collect()
}
