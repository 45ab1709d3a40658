//! Several shares at once.

use std::fmt;

use super::{Dialect, KeyKind, RowKey, Share};

/// More totals than this in one union are replaced by every row: wide, never wrong for coverage.
const MAX_SHARES: usize = 16;

/// A union of shares, at most one for each total.
///
/// Usually a single share. A client of an available group that has lost every server works on with
/// all that it was told since the last settled numbering, which may mix totals.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct ShareUnion(Vec<Share>);

impl ShareUnion {
    /// No rows.
    pub const NONE: Self = Self(Vec::new());

    /// Adds the rows of `share`.
    pub fn add(&mut self, share: &Share) {
        if share.is_empty() {
            return;
        }
        if let Some(same) = self
            .0
            .iter_mut()
            .find(|other| other.total() == share.total())
        {
            let numbers = same.numbers().union(share.numbers());
            if let Ok(union) = Share::new(same.total(), numbers) {
                *same = union;
            }
        } else if self.0.len() == MAX_SHARES {
            self.0 = vec![Share::everything()];
        } else {
            self.0.push(share.clone());
            self.0.sort_by_key(Share::total);
        }
    }

    /// Keeps only what is also within `share`.
    pub fn retain(&mut self, share: &Share) {
        for own in &mut self.0 {
            *own = own.retained(share);
        }
        self.0.retain(|own| !own.is_empty());
    }

    /// The shares, by ascending total.
    pub fn shares(&self) -> &[Share] {
        &self.0
    }

    /// The only share, when there is exactly one.
    pub fn single(&self) -> Option<&Share> {
        if let [share] = self.0.as_slice() {
            Some(share)
        } else {
            None
        }
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the row is in one of the shares.
    pub fn contains(&self, key: RowKey) -> bool {
        self.0.iter().any(|share| share.contains(key))
    }

    /// The SQL condition on the integer column or expression `column` that holds for exactly these rows.
    ///
    /// ```
    /// use skyschedule_common::share::{Dialect, Numbers, Share, ShareUnion};
    /// let mut rows = ShareUnion::from(Share::new(2, Numbers::range(0, 0)).unwrap());
    /// rows.add(&Share::new(3, Numbers::range(1, 1)).unwrap());
    /// assert_eq!(rows.predicate(Dialect::Sqlite, "id"), "(((id % 2) + 2) % 2 = 0 OR ((id % 3) + 3) % 3 = 1)");
    /// ```
    pub fn predicate(&self, dialect: Dialect, column: &str) -> String {
        either(
            &self
                .0
                .iter()
                .map(|share| share.predicate(dialect, column))
                .collect::<Vec<_>>(),
        )
    }

    /// The condition for a key of this kind; `None` where the database cannot hash text (SQLite).
    pub fn predicate_for(&self, dialect: Dialect, column: &str, kind: KeyKind) -> Option<String> {
        Some(either(
            &self
                .0
                .iter()
                .map(|share| share.predicate_for(dialect, column, kind))
                .collect::<Option<Vec<_>>>()?,
        ))
    }
}

fn either(conditions: &[String]) -> String {
    match conditions {
        [] => "1 = 0".to_owned(),
        [only] => only.clone(),
        several => format!("({})", several.join(" OR ")),
    }
}

impl From<Share> for ShareUnion {
    fn from(share: Share) -> Self {
        let mut union = Self::NONE;
        union.add(&share);
        union
    }
}

impl fmt::Debug for ShareUnion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::Numbers;

    #[test]
    fn the_union_has_the_rows_of_all_and_stays_bounded() {
        let mut union = ShareUnion::NONE;
        for total in 2..40 {
            union.add(&Share::new(total, Numbers::range(1, 1)).unwrap());
            assert!(union.contains(1.into()) && union.shares().len() <= MAX_SHARES);
        }
    }

    #[test]
    fn equal_totals_are_one_share() {
        let mut union = ShareUnion::from(Share::new(4, Numbers::range(0, 0)).unwrap());
        union.add(&Share::new(4, Numbers::range(2, 2)).unwrap());
        assert_eq!(union.single().unwrap().numbers().to_string(), "0,2");
    }
}
