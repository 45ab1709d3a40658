//! Which connections there are, and which one gives way when there are too many: a crowd of callers that ask
//! nothing must not keep out one that asks.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use tokio::sync::Notify;

/// Most connections at a time.
const MOST: usize = 512;

/// Most connections at a time from one address.
const MOST_OF_ONE: usize = 256;

/// So long each connection keeps its place: its first call follows at once, and must be seen.
const FIRST_CALL: Duration = Duration::from_millis(50);

/// There is no place for another connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    /// One will give way after so long.
    For(Duration),
    /// All are being answered.
    Busy,
}

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
    next: u64,
    by_id: BTreeMap<u64, Entry>,
}

struct Entry {
    address: IpAddr,
    /// Calls that are being answered.
    calls: usize,
    /// When it came, or its last call ended.
    idle_since: Instant,
    give_way: Arc<Notify>,
}

impl Open {
    /// The connection that has asked nothing for longest, of those from `address` or of all.
    fn longest_idle(&self, address: Option<IpAddr>) -> Option<u64> {
        let idle = self.by_id.iter().filter(|(_, entry)| {
            entry.calls == 0 && address.is_none_or(|address| entry.address == address)
        });
        idle.min_by_key(|(id, entry)| (entry.idle_since, **id))
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

    /// Makes room for a connection from `address`.
    fn make_room(&mut self, address: IpAddr, now: Instant) -> Result<(), Full> {
        let gives_way = if self.of(address) >= MOST_OF_ONE {
            self.longest_idle(Some(address))
        } else if self.by_id.len() >= MOST {
            // A crowd from one address makes room first.
            let busiest = self.busiest();
            self.longest_idle(busiest)
                .or_else(|| self.longest_idle(None))
        } else {
            return Ok(());
        };
        let id = gives_way.ok_or(Full::Busy)?;
        let entry = self.by_id.get(&id).ok_or(Full::Busy)?;
        let idle = now.saturating_duration_since(entry.idle_since);
        if idle < FIRST_CALL {
            return Err(Full::For(FIRST_CALL - idle));
        }
        entry.give_way.notify_one();
        self.by_id.remove(&id);
        Ok(())
    }
}

impl Places {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more connection, for which another one may have to give way.
    pub(super) fn enter(&self, address: IpAddr, now: Instant) -> Result<Place, Full> {
        let mut open = self.open();
        open.make_room(address, now)?;
        let id = open.next;
        open.next += 1;
        let give_way = Arc::new(Notify::new());
        let entry = Entry {
            address,
            calls: 0,
            idle_since: now,
            give_way: Arc::clone(&give_way),
        };
        open.by_id.insert(id, entry);
        Ok(Place {
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
        if let Some(entry) = open.by_id.get_mut(&self.id) {
            entry.calls = entry.calls.saturating_sub(1);
            entry.idle_since = env::now();
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

    /// So many connections from an address, and a time at which all of them have kept their places long enough.
    fn crowd(places: &Places, count: usize) -> (Vec<Place>, Instant) {
        let now = env::now();
        let crowd = (0..count).map(|_| places.enter(address(1), now).unwrap());
        (crowd.collect(), now + Duration::from_secs(1))
    }

    #[test]
    fn the_longest_idle_of_the_same_address_gives_way() {
        let places = Places::default();
        let (full, later) = crowd(&places, MOST_OF_ONE);
        // The oldest is being answered, and the next one was a moment ago.
        let answering = full[0].call();
        drop(full[1].call());
        let another = places.enter(address(1), later).unwrap();
        assert!(gives_way(&full[2]));
        assert!(!gives_way(&full[0]) && !gives_way(&full[1]) && !gives_way(&another));
        drop(answering);
    }

    #[test]
    fn who_came_a_moment_ago_keeps_its_place_for_its_first_call() {
        let places = Places::default();
        let (full, _) = crowd(&places, MOST_OF_ONE);
        let now = env::now();
        let Err(Full::For(wait)) = places.enter(address(1), now) else {
            panic!("there is no room yet");
        };
        assert!(!full.iter().any(gives_way));
        assert!(places.enter(address(1), now + wait).is_ok());
    }

    #[test]
    fn a_crowd_from_one_address_makes_room_for_others() {
        let places = Places::default();
        let (crowd, later) = crowd(&places, MOST_OF_ONE);
        let others: Vec<Place> = (0..MOST - MOST_OF_ONE)
            .map(|at| address(u8::try_from(at % 200 + 2).unwrap()))
            .map(|address| places.enter(address, env::now()).unwrap())
            .collect();
        let probe = places.enter(address(250), later).unwrap();
        assert!(gives_way(&crowd[0]));
        assert!(!gives_way(&probe) && !others.iter().any(gives_way));
    }

    #[test]
    fn who_is_being_answered_keeps_its_place() {
        let places = Places::default();
        let (full, later) = crowd(&places, MOST_OF_ONE);
        let calls: Vec<Call> = full.iter().map(Place::call).collect();
        let refused = |address| places.enter(address, later).err();
        assert_eq!(refused(address(1)), Some(Full::Busy));
        assert_eq!(refused(address(2)), None);
        drop(calls);
        assert!(places.enter(address(1), later + FIRST_CALL).is_ok());
    }
}
