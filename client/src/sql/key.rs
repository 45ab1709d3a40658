//! Keys of rows, as values.

use std::fmt;

use skyschedule_common::share::RowKey;

/// The id of a task.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A signed integer.
    Integer(i64),
    /// An unsigned integer (MariaDB, MySQL).
    Unsigned(u64),
    /// A text, or a UUID as the database writes it.
    Text(String),
}

impl From<&Key> for RowKey {
    fn from(key: &Key) -> Self {
        match key {
            Key::Integer(id) => (*id).into(),
            Key::Unsigned(id) => (*id).into(),
            Key::Text(id) => id.as_str().into(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(id) => id.fmt(f),
            Self::Unsigned(id) => id.fmt(f),
            Self::Text(id) => id.fmt(f),
        }
    }
}
