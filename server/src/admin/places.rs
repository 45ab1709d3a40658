//! Which connections there are, and which one gives way when there are too many: a crowd of callers that ask
//! nothing must not keep out one that asks.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Most connections at a time.
const MOST: usize = 512;

/// Most connections at a time from one address.
const MOST_OF_ONE: usize = 256;

/// The connections that are open. A clone is the same.
#[derive(Clone, Default)]
pub(super) struct Places(Arc<Inner>);

#[derive(Default)]
struct Inner {
    open: Mutex<Open>,
    left: Notify,
}

#[derive(Default)]
struct Open {
    /// Orders all that happens.
    clock: u64,
    by_id: BTreeMap<u64, Entry>,
}

struct Entry {
    address: IpAddr,
    /// Calls that are being answered.
    calls: usize,
    /// When it came, or its last call ended.
    idle_since: u64,
    give_way: Arc<Notify>,
}

impl Open {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The connection that has asked nothing for longest, of those from `address` or of all.
    fn longest_idle(&self, address: Option<IpAddr>) -> Option<u64> {
        let idle = self.by_id.iter().filter(|(_, entry)| {
            entry.calls == 0 && address.is_none_or(|address| entry.address == address)
        });
        idle.min_by_key(|(_, entry)| entry.idle_since)
            .map(|(id, _)| *id)
    }

    /// The address with the most connections.
    fn busiest(&self) -> Option<IpAddr> {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for entry in self.by_id.values() {
            *counts.entry(entry.address).or_default() += 1;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        most.map(|(address, _)| address)
    }

    fn of(&self, address: IpAddr) -> usize {
        let same = self.by_id.values();
        same.filter(|entry| entry.address == address).count()
    }

    fn drop_out(&mut self, id: Option<u64>) {
        if let Some(entry) = id.and_then(|id| self.by_id.remove(&id)) {
            entry.give_way.notify_one();
        }
    }
}

impl Places {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more connection, for which another one may have to give way; `None`: all are being answered.
    pub(super) fn enter(&self, address: IpAddr) -> Option<Place> {
        let mut open = self.open();
        if open.of(address) >= MOST_OF_ONE {
            let longest = open.longest_idle(Some(address));
            open.drop_out(longest);
        } else if open.by_id.len() >= MOST {
            // A crowd from one address makes room first.
            let busiest = open.busiest();
            let longest = open
                .longest_idle(busiest)
                .or_else(|| open.longest_idle(None));
            open.drop_out(longest);
        }
        if open.of(address) >= MOST_OF_ONE || open.by_id.len() >= MOST {
            return None;
        }
        let id = open.tick();
        let give_way = Arc::new(Notify::new());
        let entry = Entry {
            address,
            calls: 0,
            idle_since: id,
            give_way: Arc::clone(&give_way),
        };
        open.by_id.insert(id, entry);
        Some(Place {
            places: self.clone(),
            id,
            give_way,
        })
    }

    /// Waits until all have left.
    pub(super) async fn emptied(&self) {
        while !self.open().by_id.is_empty() {
            self.0.left.notified().await;
        }
    }
}

/// A connection's place, while it lives.
pub(super) struct Place {
    places: Places,
    id: u64,
    give_way: Arc<Notify>,
}

impl Place {
    /// Resolves when the connection must make room for another one.
    pub(super) async fn must_give_way(&self) {
        self.give_way.notified().await;
    }

    /// A call is being answered, until what this gives is dropped.
    pub(super) fn call(&self) -> Call {
        if let Some(entry) = self.places.open().by_id.get_mut(&self.id) {
            entry.calls += 1;
        }
        Call {
            places: self.places.clone(),
            id: self.id,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.open().by_id.remove(&self.id);
        self.places.0.left.notify_one();
    }
}

/// A call that is being answered.
pub(super) struct Call {
    places: Places,
    id: u64,
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut open = self.places.open();
        let now = open.tick();
        if let Some(entry) = open.by_id.get_mut(&self.id) {
            entry.calls = entry.calls.saturating_sub(1);
            entry.idle_since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn gives_way(place: &Place) -> bool {
        let mut waiting = pin!(place.must_give_way());
        let mut context = Context::from_waker(Waker::noop());
        waiting.as_mut().poll(&mut context) == Poll::Ready(())
    }

    #[test]
    fn the_longest_idle_of_the_same_address_gives_way() {
        let places = Places::default();
        let full: Vec<Place> = (0..MOST_OF_ONE)
            .map(|_| places.enter(address(1)).unwrap())
            .collect();
        // The oldest is being answered, and the next one was a moment ago.
        let answering = full[0].call();
        drop(full[1].call());
        let another = places.enter(address(1)).unwrap();
        assert!(gives_way(&full[2]));
        assert!(!gives_way(&full[0]) && !gives_way(&full[1]) && !gives_way(&another));
        drop(answering);
    }

    #[test]
    fn a_crowd_from_one_address_makes_room_for_others() {
        let places = Places::default();
        let crowd: Vec<Place> = (0..MOST_OF_ONE)
            .map(|_| places.enter(address(1)).unwrap())
            .collect();
        let others: Vec<Place> = (0..MOST - MOST_OF_ONE)
            .map(|at| {
                places
                    .enter(address(u8::try_from(at % 200 + 2).unwrap()))
                    .unwrap()
            })
            .collect();
        let probe = places.enter(address(250)).unwrap();
        assert!(gives_way(&crowd[0]));
        assert!(!gives_way(&probe) && others.iter().all(|place| !gives_way(place)));
    }

    #[test]
    fn who_is_being_answered_keeps_its_place() {
        let places = Places::default();
        let full: Vec<Place> = (0..MOST_OF_ONE)
            .map(|_| places.enter(address(1)).unwrap())
            .collect();
        let calls: Vec<Call> = full.iter().map(Place::call).collect();
        assert!(places.enter(address(1)).is_none());
        assert!(places.enter(address(2)).is_some());
        drop(calls);
        assert!(places.enter(address(1)).is_some());
    }
}
