//! How many connections there may be: in all, from one address, and relayed.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bounds on connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// All that are open, those to other servers for relays included.
    pub(crate) total: usize,
    /// Those of one address.
    pub(crate) per_address: usize,
    /// Those that this server carries on to the leader, half of them at most for one address; and those that one other
    /// server carries to this one.
    pub(crate) relays: usize,
}

/// What a connection is counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// It comes from there.
    From(IpAddr),
    /// A server at this address carries it. It counts apart: clients that another server relays take no room from that
    /// server and from whoever else shares its address, and these none from them.
    RelayedBy(IpAddr),
    /// Made by this server, to carry one that it accepted from this address on to the leader.
    CarriedFor(IpAddr),
}

/// Counts open connections.
#[derive(Debug)]
pub(super) struct Places {
    limits: Limits,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    total: usize,
    by_kind: BTreeMap<Kind, usize>,
}

/// Counts one connection while it lives.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    kind: Kind,
}

impl Places {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            open: Mutex::default(),
        })
    }

    /// None: there are as many as there may be.
    pub(super) fn take(self: &Arc<Self>, kind: Kind) -> Option<Place> {
        let mut open = self.open();
        if open.total >= self.limits.total || !open.add(kind, &self.limits) {
            return None;
        }
        open.total += 1;
        Some(Place {
            places: Arc::clone(self),
            kind,
        })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn add(&mut self, kind: Kind, limits: &Limits) -> bool {
        let most = match kind {
            Kind::From(_) => limits.per_address,
            Kind::RelayedBy(_) => limits.relays,
            Kind::CarriedFor(_) if self.carried() >= limits.relays => 0,
            Kind::CarriedFor(_) => limits.relays.div_ceil(2),
        };
        let same = self.by_kind.get(&kind).copied().unwrap_or(0);
        if same < most {
            self.by_kind.insert(kind, same + 1);
        }
        same < most
    }

    fn carried(&self) -> usize {
        let is_carried = |kind: &Kind| matches!(kind, Kind::CarriedFor(_));
        let carried = self.by_kind.iter().filter(|(kind, _)| is_carried(kind));
        carried.map(|(_, count)| count).sum()
    }

    fn remove(&mut self, kind: Kind) {
        if let Some(count) = self.by_kind.get_mut(&kind) {
            *count -= 1;
            if *count == 0 {
                self.by_kind.remove(&kind);
            }
        }
    }
}

impl Place {
    /// It turns out to be a relayed one; false when there are as many of these as there may be.
    pub(super) fn is_relayed(&mut self) -> bool {
        let Kind::From(address) = self.kind else {
            return false;
        };
        let mut open = self.places.open();
        let kind = Kind::RelayedBy(address);
        let has_room = open.add(kind, &self.places.limits);
        if has_room {
            open.remove(self.kind);
            self.kind = kind;
        }
        has_room
    }

    /// One more, for the other end of what is carried.
    pub(super) fn carry(&self) -> Option<Self> {
        let Kind::From(address) = self.kind else {
            return None;
        };
        self.places.take(Kind::CarriedFor(address))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.places.open();
        open.total = open.total.saturating_sub(1);
        open.remove(self.kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        total: 7,
        per_address: 2,
        relays: 3,
    };

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn no_address_takes_more_than_its_part_and_all_not_more_than_there_are() {
        let places = Places::new(LIMITS);
        let take = |last| places.take(Kind::From(address(last)));
        let taken: Vec<Option<Place>> = [1, 1, 2, 2, 3, 3, 4].into_iter().map(take).collect();
        assert!(taken.iter().all(Option::is_some));
        assert!(take(5).is_none(), "all are taken");
        drop(taken);
        let (_one, _two) = (take(1).unwrap(), take(1).unwrap());
        assert!(take(1).is_none(), "this address has its part");
        assert!(take(2).is_some());
    }

    #[test]
    fn relayed_clients_and_the_address_of_their_relay_take_no_room_from_each_other() {
        let places = Places::new(LIMITS);
        let take = || places.take(Kind::From(address(1))).unwrap();
        let mut relayed: Vec<Place> = Vec::new();
        for _ in 0..3 {
            let mut place = take();
            assert!(place.is_relayed());
            assert!(!place.is_relayed(), "once is enough");
            relayed.push(place);
        }
        let mut own = take();
        assert!(!own.is_relayed(), "there are as many relayed as may be");
        let _own = take();
        assert!(places.take(Kind::From(address(1))).is_none());
        relayed.pop();
        assert!(own.is_relayed());
    }

    #[test]
    fn what_is_carried_on_counts_twice_and_has_a_bound_of_its_own() {
        let places = Places::new(LIMITS);
        let [one, two] = [1, 2].map(|last| places.take(Kind::From(address(last))).unwrap());
        let mut carried: Vec<Place> = (0..3).filter_map(|_| one.carry()).collect();
        assert_eq!(carried.len(), 2, "half, rounded up, for one address");
        carried.extend(two.carry());
        assert_eq!(carried.len(), 3);
        assert!(two.carry().is_none(), "there are as many as may be");
        let others: Vec<_> = (3..9)
            .map(|last| places.take(Kind::From(address(last))))
            .collect();
        assert_eq!(others.iter().flatten().count(), 2, "seven in all");
        carried.clear();
        assert!(two.carry().is_some());
    }
}
