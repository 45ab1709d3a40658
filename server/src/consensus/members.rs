//! Who the replicas are at present, and where: as the log says, and before there is one, as the configuration says.
//!
//! A change counts for a replica as soon as the entry is in its log, decided or not; that a replica is no more in the
//! cluster counts only once it is decided.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use openraft::async_runtime::WatchReceiver as _;
use tokio::sync::{Notify, watch};

use super::raft::{Raft, StoredMembership};
use super::wire::Known;

/// The replicas. A clone is the same.
#[derive(Clone)]
pub(super) struct Members {
    id: u16,
    raft: Raft,
    decided: watch::Receiver<StoredMembership>,
    /// Every replica's `host:port`, as this one's operator wrote.
    configured: Arc<BTreeMap<u16, String>>,
    /// Those that are about to be taken in.
    guests: Arc<Mutex<BTreeMap<u16, String>>>,
    invited: Arc<Notify>,
}

impl std::fmt::Debug for Members {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Members").finish_non_exhaustive()
    }
}

impl Members {
    pub(super) fn new(
        id: u16,
        raft: Raft,
        decided: watch::Receiver<StoredMembership>,
        configured: BTreeMap<u16, String>,
    ) -> Self {
        Self {
            id,
            raft,
            decided,
            configured: Arc::new(configured),
            guests: Arc::default(),
            invited: Arc::default(),
        }
    }

    /// Waits until openraft shows the membership that was on the disk when it was started.
    pub(super) async fn known_to_openraft(&self) -> Result<(), String> {
        let stored = self.raft.with_raft_state(|state| {
            let effective = state.membership_state.effective();
            *effective.log_id()
        });
        let stored = stored.await.map_err(|error| error.to_string())?;
        let mut metrics = self.raft.metrics();
        while *metrics.borrow_watched().membership_config.log_id() < stored {
            let changed = metrics.changed().await;
            changed.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// What the configuration lists, this replica included; empty: it is alone.
    pub(super) fn configured(&self) -> &BTreeMap<u16, String> {
        &self.configured
    }

    /// As decided.
    pub(super) fn decided(&self) -> Option<Known> {
        Known::of(&self.decided.borrow(), true)
    }

    /// As the newest entry says, which may be taken back.
    pub(super) fn effective(&self) -> Option<Known> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        Known::of(&metrics.membership_config, false)
    }

    /// Whether the voters are being changed.
    pub(super) fn is_joint(&self) -> bool {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        metrics.membership_config.get_joint_config().len() > 1
    }

    /// Whether it is decided that this replica is a member.
    pub(super) fn is_decided(&self, id: u64) -> bool {
        self.decided.borrow().get_node(&id).is_some()
    }

    /// From here on this replica, which is no member yet, is asked at this address, too.
    pub(super) fn invite(&self, id: u16, address: &str) {
        self.guests().insert(id, address.to_owned());
        self.invited.notify_one();
    }

    /// It is a member by now, or will be none.
    pub(super) fn uninvite(&self, id: u16) {
        self.guests().remove(&id);
        self.invited.notify_one();
    }

    fn guests(&self) -> std::sync::MutexGuard<'_, BTreeMap<u16, String>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The others, and where each may be: as the configuration says, which may differ from replica to replica. The log
    /// says where those are that it does not list. Where one was added while the cluster ran, both are tried, since the
    /// configuration may be older or newer than that; who answers proves who it is. `found` is what a replica that
    /// knows nothing itself heard from others.
    pub(super) fn routes(&self, found: Option<&Known>) -> BTreeMap<u16, Vec<String>> {
        let (effective, decided) = (self.effective(), self.decided());
        let own = || effective.iter().chain(&decided);
        let is_member = |id: &u16| own().any(|known| known.places.contains_key(id));
        let is_new = own().next().is_none();
        let configured = self.configured.iter();
        let configured = configured.filter(|(id, _)| is_new || is_member(id));
        let known = own().chain(found).flat_map(|known| &known.places);
        let known = known.filter(|(id, place)| place.added || !self.configured.contains_key(id));
        let known = known.map(|(id, place)| (id, &place.address));
        let guests = self.guests();
        let mut routes: BTreeMap<u16, Vec<String>> = BTreeMap::new();
        for (id, address) in configured.chain(known).chain(guests.iter()) {
            let addresses = routes.entry(*id).or_default();
            if !addresses.contains(address) {
                addresses.push(address.clone());
            }
        }
        routes.remove(&self.id);
        routes
    }

    /// Where this replica is, as its configuration and the log say; `found` as above.
    pub(super) fn own_addresses(&self, found: Option<&Known>) -> BTreeSet<String> {
        let (effective, decided) = (self.effective(), self.decided());
        let known = effective.iter().chain(&decided).chain(found);
        let known = known.filter_map(|known| known.places.get(&self.id));
        let known = known.map(|place| &place.address);
        let configured = self.configured.get(&self.id);
        known.chain(configured).cloned().collect()
    }

    /// Resolves when who the replicas are may have changed.
    pub(super) async fn changed(&mut self) {
        let invited = Arc::clone(&self.invited);
        tokio::select! {
            biased;
            () = invited.notified() => {}
            changed = self.decided.changed() => {
                if changed.is_err() {
                    // It has ended, and so will whoever asks.
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}
