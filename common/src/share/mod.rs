//! Shares: which rows of a task table belong to a member.
//!
//! A [`Share`] is a pair `(total, numbers)`: the rows with `id mod total ∈ numbers`. The same type
//! serves both numberings, shares of different totals can be compared, and a share writes its own SQL.

mod key;
mod numbers;
mod predicate;
mod rows;
mod union;

pub use key::RowKey;
pub use numbers::{Numbers, NumbersError};
pub use predicate::{Dialect, KeyKind};
pub use rows::{MAX_TOTAL, Share, ShareError};
pub use union::ShareUnion;
