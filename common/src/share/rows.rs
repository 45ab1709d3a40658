//! One share.

use std::fmt;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

use super::{Numbers, RowKey};

/// Largest total of a share. The most scattered share below it, every second number, still fits into a
/// message and into a snapshot.
pub const MAX_TOTAL: u32 = 1 << 16;

/// The rows with `id mod total ∈ numbers`, for every id: positive, negative, zero.
///
/// A share without numbers may have total 0: there is nothing to divide.
///
/// ```
/// use skyschedule_common::share::{Dialect, Numbers, Share};
/// let share = Share::new(3, Numbers::range(1, 1)).unwrap();
/// assert!(share.contains((-2i64).into()));
/// assert_eq!(share.predicate(Dialect::Postgres, "id"), "((id % 3) + 3) % 3 = 1");
/// ```
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Share {
    total: u32,
    numbers: Numbers,
}

/// A pair that is no share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// A number is not below the total.
    #[error("number {number} is not below the total {total}")]
    OutOfRange {
        /// The largest number.
        number: u32,
        /// The total.
        total: u32,
    },
    /// The total is above [`MAX_TOTAL`].
    #[error("total {0} is above {MAX_TOTAL}")]
    TotalTooLarge(u32),
}

impl Share {
    /// No rows at all.
    pub const NONE: Self = Self {
        total: 0,
        numbers: Numbers::EMPTY,
    };

    /// The rows with `id mod total ∈ numbers`.
    ///
    /// # Errors
    /// When a number is not below the total, or the total is above [`MAX_TOTAL`].
    pub fn new(total: u32, numbers: Numbers) -> Result<Self, ShareError> {
        if total > MAX_TOTAL {
            return Err(ShareError::TotalTooLarge(total));
        }
        match numbers.last() {
            Some(number) if number >= total => Err(ShareError::OutOfRange { number, total }),
            _ => Ok(Self { total, numbers }),
        }
    }

    /// Every row.
    pub fn everything() -> Self {
        Self {
            total: 1,
            numbers: Numbers::below(1),
        }
    }

    /// No rows, of `total` numbers.
    pub fn none_of(total: u32) -> Self {
        Self {
            total,
            numbers: Numbers::EMPTY,
        }
    }

    /// The divisor; 0 only when there are no numbers.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// The remainders that are in the share.
    pub fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Whether the row is in the share.
    pub fn contains(&self, key: RowKey) -> bool {
        self.total > 0 && self.numbers.contains(key.modulo(self.total))
    }

    /// Whether some row is in both shares, whatever their totals.
    ///
    /// A row can have remainder `a` modulo `t` and `b` modulo `u` exactly when `a` and `b` agree
    /// modulo `gcd(t, u)` (Chinese remainder theorem).
    pub fn meets(&self, other: &Self) -> bool {
        if self.is_empty() || other.is_empty() {
            return false;
        }
        if self.total == other.total {
            return self.numbers.meets(&other.numbers);
        }
        let gcd = gcd(self.total, other.total);
        self.numbers.modulo(gcd).meets(&other.numbers.modulo(gcd))
    }

    /// Whether every row of this share is in `other`, whatever their totals.
    pub fn is_within(&self, other: &Self) -> bool {
        if self.is_empty() {
            return true;
        }
        if self.total == other.total {
            return self.numbers.is_subset(&other.numbers);
        }
        !self.meets(&other.complement())
    }

    /// The rows that are not in the share.
    fn complement(&self) -> Self {
        if self.total == 0 {
            return Self::everything();
        }
        Self {
            total: self.total,
            numbers: Numbers::below(self.total).difference(&self.numbers),
        }
    }

    /// The rows that are in both shares, when their totals are equal or the answer is empty or whole;
    /// otherwise none: rows that cannot be written as one share are given up.
    #[must_use]
    pub fn retained(&self, other: &Self) -> Self {
        if self.total == other.total {
            Self {
                total: self.total,
                numbers: self.numbers.intersection(&other.numbers),
            }
        } else if self.is_within(other) {
            self.clone()
        } else {
            Self::none_of(self.total)
        }
    }

    /// This share without every number of it that has a row in common with `other`, whatever their totals.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        if self.is_empty() || other.is_empty() {
            return self.clone();
        }
        let numbers = if self.total == other.total {
            self.numbers.difference(&other.numbers)
        } else {
            let gcd = gcd(self.total, other.total);
            let taken = other.numbers.modulo(gcd);
            self.numbers
                .iter()
                .filter(|number| !taken.contains(number % gcd))
                .collect()
        };
        Self {
            total: self.total,
            numbers,
        }
    }
}

fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (total, numbers) = <(u32, Numbers)>::deserialize(deserializer)?;
        Self::new(total, numbers).map_err(D::Error::custom)
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{}", self.numbers, self.total)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares() -> impl Strategy<Value = Share> {
        (1..13u32).prop_flat_map(|total| {
            proptest::collection::vec(0..total, 0..5)
                .prop_map(move |numbers| Share::new(total, numbers.into_iter().collect()).unwrap())
        })
    }

    /// Every remainder modulo every total up to 12 occurs among these.
    fn rows() -> impl Iterator<Item = RowKey> {
        (-27_720i64..27_720).map(RowKey::from)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn comparisons_across_totals_are_those_of_the_rows(a in shares(), b in shares()) {
            prop_assert_eq!(a.meets(&b), rows().any(|row| a.contains(row) && b.contains(row)));
            prop_assert_eq!(a.is_within(&b), rows().all(|row| !a.contains(row) || b.contains(row)));
            let without = a.without(&b);
            prop_assert!(without.is_within(&a) && !without.meets(&b));
            let retained = a.retained(&b);
            prop_assert!(retained.is_within(&a) && retained.is_within(&b));
        }
    }

    #[test]
    fn extreme_ids_have_one_owner() {
        for id in [i64::MIN, -1, 0, 1, i64::MAX] {
            let owners = (0..7)
                .filter(|&n| {
                    Share::new(7, Numbers::range(n, n))
                        .unwrap()
                        .contains(id.into())
                })
                .count();
            assert_eq!(owners, 1, "{id}");
        }
    }

    #[test]
    fn the_most_scattered_share_fits_into_a_frame() {
        use crate::protocol::codec::{MAX_FRAME, decode, encode};
        let share = Share::new(MAX_TOTAL, (0..MAX_TOTAL).step_by(2).collect()).unwrap();
        let bytes = encode(&share, MAX_FRAME).unwrap();
        assert_eq!(decode::<Share>(&bytes, MAX_FRAME).unwrap(), share);
    }

    #[test]
    fn numbers_outside_the_total_are_refused() {
        assert!(Share::new(3, Numbers::range(1, 3)).is_err());
        assert!(Share::new(0, Numbers::range(0, 0)).is_err());
        assert!(Share::new(MAX_TOTAL + 1, Numbers::EMPTY).is_err());
    }
}
