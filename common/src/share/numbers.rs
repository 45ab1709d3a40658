//! Sets of numbers, kept as sorted ranges.

use std::fmt;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

use crate::protocol::bounded::BoundedVec;

/// Most ranges that a set may have on the wire: every second of 65,536 slots.
const MAX_RANGES: usize = 32_768;

/// A set of numbers: inclusive ranges, sorted, neither touching nor overlapping.
///
/// ```
/// use skyschedule_common::share::Numbers;
/// let numbers: Numbers = [4, 0, 5].into_iter().collect();
/// assert_eq!(numbers.to_string(), "0,4-5");
/// ```
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Numbers(Vec<(u32, u32)>);

/// Ranges that do not make a set of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NumbersError {
    /// A range ends before it begins.
    #[error("range {0}-{1} ends before it begins")]
    Reversed(u32, u32),
    /// Ranges are not in order, or touch each other.
    #[error("ranges are not sorted, or touch each other")]
    Unordered,
}

impl Numbers {
    /// The empty set.
    pub const EMPTY: Self = Self(Vec::new());

    /// The numbers from `first` to `last`, both included; empty when `last < first`.
    pub fn range(first: u32, last: u32) -> Self {
        if first <= last {
            Self(vec![(first, last)])
        } else {
            Self::EMPTY
        }
    }

    /// All numbers below `total`.
    pub fn below(total: u32) -> Self {
        total
            .checked_sub(1)
            .map_or(Self::EMPTY, |last| Self::range(0, last))
    }

    /// Inclusive ranges, which must be sorted and apart, as a set.
    ///
    /// # Errors
    /// When they are not.
    pub fn from_ranges(ranges: Vec<(u32, u32)>) -> Result<Self, NumbersError> {
        let mut previous: Option<u32> = None;
        for &(first, last) in &ranges {
            if last < first {
                return Err(NumbersError::Reversed(first, last));
            }
            if previous.is_some_and(|end| end.saturating_add(1) >= first) {
                return Err(NumbersError::Unordered);
            }
            previous = Some(last);
        }
        Ok(Self(ranges))
    }

    /// Inclusive ranges in any order, overlapping or not, as a set.
    fn from_any_ranges(mut ranges: Vec<(u32, u32)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match merged.last_mut() {
                Some(end) if end.1.saturating_add(1) >= first => end.1 = end.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    /// The inclusive ranges, ascending.
    pub fn ranges(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(|&(first, last)| first..=last)
    }

    /// How many numbers there are.
    pub fn len(&self) -> u64 {
        self.0
            .iter()
            .map(|&(first, last)| u64::from(last - first) + 1)
            .sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The smallest number.
    pub fn first(&self) -> Option<u32> {
        self.0.first().map(|range| range.0)
    }

    /// The largest number.
    pub fn last(&self) -> Option<u32> {
        self.0.last().map(|range| range.1)
    }

    /// Whether `number` is in the set.
    pub fn contains(&self, number: u32) -> bool {
        let after = self.0.partition_point(|range| range.0 <= number);
        after
            .checked_sub(1)
            .is_some_and(|at| number <= self.0[at].1)
    }

    /// Numbers of either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        if other.is_empty() {
            return self.clone();
        }
        Self::from_any_ranges(self.0.iter().chain(&other.0).copied().collect())
    }

    /// Numbers of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let (mut left, mut right) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(&&a), Some(&&b)) = (left.peek(), right.peek()) {
            let (first, last) = (a.0.max(b.0), a.1.min(b.1));
            if first <= last {
                both.push((first, last));
            }
            if a.1 < b.1 {
                left.next()
            } else {
                right.next()
            };
        }
        Self(both)
    }

    /// Numbers of this set that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut rest = Vec::new();
        let mut cuts = other.0.iter().peekable();
        'ranges: for &(mut first, last) in &self.0 {
            while let Some(&&(from, to)) = cuts.peek() {
                if to < first {
                    cuts.next();
                    continue;
                }
                if last < from {
                    break;
                }
                if first < from {
                    rest.push((first, from - 1));
                }
                if last <= to {
                    continue 'ranges;
                }
                first = to + 1;
            }
            rest.push((first, last));
        }
        Self(rest)
    }

    /// Whether every number of this set is in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.difference(other).is_empty()
    }

    /// Whether the sets have a number in common.
    pub fn meets(&self, other: &Self) -> bool {
        !self.intersection(other).is_empty()
    }

    /// The numbers modulo `modulus`, which is not 0.
    pub(super) fn modulo(&self, modulus: u32) -> Self {
        let mut ranges = Vec::with_capacity(self.0.len() + 1);
        for &(first, last) in &self.0 {
            if last - first >= modulus - 1 {
                return Self::below(modulus);
            }
            let (first, last) = (first % modulus, last % modulus);
            if first <= last {
                ranges.push((first, last));
            } else {
                ranges.extend([(first, modulus - 1), (0, last)]);
            }
        }
        Self::from_any_ranges(ranges)
    }

    /// Adds one number.
    pub fn insert(&mut self, number: u32) {
        let at = self.0.partition_point(|range| range.0 <= number);
        if at > 0 && number <= self.0[at - 1].1 {
            return;
        }
        let joins_left = at > 0 && self.0[at - 1].1 + 1 == number;
        let joins_right = at < self.0.len() && number + 1 == self.0[at].0;
        match (joins_left, joins_right) {
            (true, true) => self.0[at - 1].1 = self.0.remove(at).1,
            (true, false) => self.0[at - 1].1 = number,
            (false, true) => self.0[at].0 = number,
            (false, false) => self.0.insert(at, (number, number)),
        }
    }
}

impl FromIterator<u32> for Numbers {
    fn from_iter<I: IntoIterator<Item = u32>>(numbers: I) -> Self {
        Self::from_any_ranges(numbers.into_iter().map(|number| (number, number)).collect())
    }
}

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let ranges = BoundedVec::<(u32, u32), MAX_RANGES>::deserialize(deserializer)?;
        Self::from_ranges(ranges.into_inner()).map_err(D::Error::custom)
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, &(first, last)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn sets() -> impl Strategy<Value = BTreeSet<u32>> {
        proptest::collection::btree_set(0..40u32, 0..30)
    }

    fn numbers(set: &BTreeSet<u32>) -> Numbers {
        set.iter().copied().collect()
    }

    proptest! {
        #[test]
        fn algebra_is_that_of_sets(a in sets(), b in sets(), modulus in 1..50u32, number in 0..41u32) {
            let (x, y) = (numbers(&a), numbers(&b));
            prop_assert_eq!(x.union(&y), numbers(&(&a | &b)));
            prop_assert_eq!(x.intersection(&y), numbers(&(&a & &b)));
            prop_assert_eq!(x.difference(&y), numbers(&(&a - &b)));
            prop_assert_eq!(x.is_subset(&y), a.is_subset(&b));
            prop_assert_eq!(x.meets(&y), !a.is_disjoint(&b));
            prop_assert_eq!(x.modulo(modulus), numbers(&a.iter().map(|n| n % modulus).collect()));
            prop_assert_eq!(x.contains(number), a.contains(&number));
            prop_assert_eq!(x.len(), a.len() as u64);
            prop_assert_eq!(x.iter().collect::<Vec<_>>(), a.iter().copied().collect::<Vec<_>>());
            let mut z = x.clone();
            z.insert(number);
            prop_assert_eq!(z, numbers(&(&a | &BTreeSet::from([number]))));
            prop_assert!(Numbers::from_ranges(x.ranges().to_vec()).is_ok());
        }
    }

    #[test]
    fn unsorted_touching_and_reversed_ranges_are_refused() {
        assert!(Numbers::from_ranges(vec![(0, 1), (2, 3)]).is_err());
        assert!(Numbers::from_ranges(vec![(5, 6), (0, 1)]).is_err());
        assert!(Numbers::from_ranges(vec![(3, 2)]).is_err());
        assert!(Numbers::from_ranges(vec![(0, u32::MAX), (4, 5)]).is_err());
    }
}
