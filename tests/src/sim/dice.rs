//! The randomness of a simulation's driver: everything that is drawn follows from the seed.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::time::Duration;

/// Draws what happens.
#[derive(Debug)]
pub struct Dice(SmallRng);

impl Dice {
    /// The same seed draws the same.
    pub fn new(seed: u64) -> Self {
        Self(SmallRng::seed_from_u64(seed))
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        let product = u128::from(self.0.next_u64()) * u128::from(bound);
        u64::try_from(product >> 64).unwrap_or(0)
    }

    /// An index into something of this length.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Whole milliseconds from `least` to `most`, both included.
    pub fn millis(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(least + self.below(most.saturating_sub(least) + 1))
    }

    /// An index, each as often as its weight says; `None` if all are 0.
    pub fn weighted(&mut self, weights: &[u32]) -> Option<usize> {
        let sum: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
        let mut drawn = self.below(sum);
        weights.iter().position(|weight| {
            let weight = u64::from(*weight);
            let found = drawn < weight;
            drawn = drawn.saturating_sub(weight);
            found
        })
    }
}
