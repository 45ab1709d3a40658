//! Rows that cannot be granted yet: somebody works on them who shall give them up.

use std::collections::BTreeMap;

use skyschedule_common::share::{Numbers, Share};

/// Held shares, of whatever totals, as seen by the numbers of one total.
#[derive(Debug)]
pub(super) struct Obstacles {
    /// Remainders that are held, by modulus.
    held: Vec<(u32, Numbers)>,
}

impl Obstacles {
    /// What `shares` are to the numbers below `total`.
    ///
    /// A row can have remainder `a` modulo `t` and `b` modulo `u` exactly when `a` and `b` agree modulo
    /// `gcd(t, u)` (Chinese remainder theorem).
    pub(super) fn new<'a>(total: u32, shares: impl Iterator<Item = &'a Share>) -> Self {
        let mut remainders: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for share in shares.filter(|share| !share.is_empty()) {
            let modulus = gcd(total, share.total());
            let numbers = share.numbers().iter().map(|number| number % modulus);
            remainders.entry(modulus).or_default().extend(numbers);
        }
        let held = remainders.into_iter();
        Self {
            held: held
                .map(|(modulus, numbers)| (modulus, numbers.into_iter().collect()))
                .collect(),
        }
    }

    /// The numbers of `share` of which no row is held.
    pub(super) fn free_of(&self, share: &Share) -> Share {
        if self.held.is_empty() {
            return share.clone();
        }
        let blocked = |number: u32| {
            let mut held = self.held.iter();
            held.any(|(modulus, held)| held.contains(number % modulus))
        };
        let free = share.numbers().iter().filter(|&number| !blocked(number));
        Share::new(share.total(), free.collect()).unwrap_or_else(|_| Share::none_of(share.total()))
    }
}

fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares() -> impl Strategy<Value = Share> {
        (1..13u32).prop_flat_map(|total| {
            let numbers = proptest::collection::vec(0..total, 0..5);
            numbers
                .prop_map(move |numbers| Share::new(total, numbers.into_iter().collect()).unwrap())
        })
    }

    proptest! {
        #[test]
        fn free_is_what_meets_no_held_share(target in shares(), held in proptest::collection::vec(shares(), 0..4)) {
            let free = Obstacles::new(target.total(), held.iter()).free_of(&target);
            let expected = held.iter().fold(target, |free, held| free.without(held));
            prop_assert_eq!(free, expected);
        }
    }
}
