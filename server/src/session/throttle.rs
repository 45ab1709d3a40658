//! Wrong passwords cost time: each failure of an address doubles the wait before it is told.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use skyschedule_common::env::{self, Instant};

const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(3);
/// Failures are forgotten after this time without another.
const MEMORY: Duration = Duration::from_secs(60);
/// Addresses that are remembered; the longest quiet one makes room.
const ADDRESSES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Throttle(Mutex<BTreeMap<IpAddr, (u32, Instant)>>);

impl Throttle {
    /// Counts a failure, and says how long to wait before the peer is told.
    pub(super) fn failed(&self, address: IpAddr) -> Duration {
        let now = env::now();
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() >= ADDRESSES && !failures.contains_key(&address) {
            failures.retain(|_, (_, last)| now.saturating_duration_since(*last) < MEMORY);
            let oldest = failures
                .iter()
                .min_by_key(|(_, (_, last))| *last)
                .map(|(address, _)| *address);
            if let Some(oldest) = oldest.filter(|_| failures.len() >= ADDRESSES) {
                failures.remove(&oldest);
            }
        }
        let (count, last) = failures.entry(address).or_insert((0, now));
        if now.saturating_duration_since(*last) >= MEMORY {
            *count = 0;
        }
        *last = now;
        *count = count.saturating_add(1);
        FIRST_DELAY
            .saturating_mul(1 << (*count - 1).min(10))
            .min(LONGEST_DELAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_bound_and_addresses_are_apart() {
        let throttle = Throttle::default();
        let [a, b] = [[127, 0, 0, 1], [127, 0, 0, 2]].map(IpAddr::from);
        let delays: Vec<u128> = (0..8).map(|_| throttle.failed(a).as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1_600, 3_000, 3_000, 3_000]);
        assert_eq!(throttle.failed(b), FIRST_DELAY);
    }

    #[test]
    fn memory_is_bounded() {
        let throttle = Throttle::default();
        for address in 0..20_000u32 {
            throttle.failed(IpAddr::from(address.to_be_bytes()));
        }
        assert_eq!(throttle.0.lock().unwrap().len(), ADDRESSES);
    }
}
