//! Lines of the log that strangers can cause: at most one in a while for each address and matter, with the count of
//! those that were left out.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use skyschedule_common::env::{self, Instant};

/// Time between two lines about one address and matter.
const EVERY: Duration = Duration::from_secs(10);

/// Addresses and matters that are told apart; all others are told as one.
const MOST: usize = 100;

/// Stands for all addresses that are not told apart.
const OTHERS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// What was told of strangers of late.
#[derive(Debug, Default)]
pub(crate) struct Strangers(Mutex<BTreeMap<(IpAddr, &'static str), Told>>);

#[derive(Debug)]
struct Told {
    at: Instant,
    /// Lines that were left out since.
    left_out: u64,
}

impl Strangers {
    /// Whether a line about this address and matter is due: with how many were left out since the last one.
    pub(crate) fn tell(&self, address: IpAddr, matter: &'static str) -> Option<u64> {
        let now = env::now();
        let is_old = |told: &Told| now.saturating_duration_since(told.at) >= EVERY;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = (address, matter);
        if !known.contains_key(&key) && known.len() >= MOST {
            known.retain(|_, told| !is_old(told));
            if known.len() >= MOST {
                key = (OTHERS, matter);
            }
        }
        match known.get_mut(&key) {
            Some(told) if !is_old(told) => {
                told.left_out = told.left_out.saturating_add(1);
                None
            }
            Some(told) => {
                told.at = now;
                Some(std::mem::take(&mut told.left_out))
            }
            None => {
                let told = Told {
                    at: now,
                    left_out: 0,
                };
                known.insert(key, told);
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_a_while_and_the_rest_is_counted() {
        let strangers = Strangers::default();
        let [a, b] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        assert_eq!(strangers.tell(a, "password"), Some(0));
        for _ in 0..5 {
            assert_eq!(strangers.tell(a, "password"), None);
        }
        assert_eq!(strangers.tell(a, "garbage"), Some(0));
        assert_eq!(strangers.tell(b, "password"), Some(0));
        strangers.age(EVERY);
        assert_eq!(strangers.tell(a, "password"), Some(5));
        assert_eq!(strangers.tell(a, "password"), None);
    }

    #[test]
    fn a_crowd_of_addresses_gets_no_more_lines_than_some() {
        let strangers = Strangers::default();
        let addresses = (0..5_000_u32).map(|at| IpAddr::from(at.to_be_bytes()));
        let lines = addresses.filter(|at| strangers.tell(*at, "garbage").is_some());
        assert!(lines.count() <= MOST + 1);
        assert!(strangers.0.lock().unwrap().len() <= MOST + 1);
    }

    impl Strangers {
        /// All was told so much earlier.
        fn age(&self, by: Duration) {
            let mut known = self.0.lock().unwrap();
            for told in known.values_mut() {
                told.at = told.at - by;
            }
        }
    }
}
