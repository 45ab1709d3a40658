//! What can go wrong before a consumer runs.

use std::time::Duration;

/// A description of a table that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// No identifier of any database.
    #[error("{0:?} is no name of a table or column: it is empty, or has a NUL")]
    Name(String),
    /// A status that no literal can express in all databases.
    #[error("the status {0:?} has a backslash or a NUL: choose another text")]
    Status(String),
    /// A task that is done would count as new.
    #[error("the status of new tasks is also that of done or failed ones: choose three values")]
    SameStatus,
    /// No number of slots.
    #[error("{0} slots: choose a power of two from 16 to 65,536")]
    Slots(u32),
    /// Nothing would ever be tried.
    #[error("0 attempts: the first one counts too, so allow at least 1")]
    NoAttempts,
}

/// Why a consumer cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The table's description is wrong; everything is named.
    #[error("the task table cannot be used: {}", listed(.0))]
    Table(Vec<TableError>),
    /// Sizes that cannot be.
    #[error("{name} is {value}: choose a number from 1 to {max}")]
    Size {
        /// Which setting.
        name: &'static str,
        /// What it was.
        value: usize,
        /// The largest one.
        max: usize,
    },
    /// No driver for the URL.
    #[error("no database is known by the URL scheme {0:?}: use postgres://, mysql:// or sqlite://")]
    Scheme(String),
    /// The type of the id column.
    #[error(
        "column {column:?} has type {kind}, which cannot be divided among clients: ids are integers, text or UUIDs"
    )]
    IdType {
        /// The column.
        column: String,
        /// Its type.
        kind: String,
    },
    /// The type of the due time.
    #[error("column {column:?} has type {kind}, which is no time{hint}")]
    DueType {
        /// The column.
        column: String,
        /// Its type.
        kind: String,
        /// What to do.
        hint: &'static str,
    },
    /// A time without zone in PostgreSQL.
    #[error(
        "column {column:?} has type {kind}, a time without zone: say which zone it is in \
         (Table::time_zone, or --time-zone), for example Asia/Shanghai or +08:00"
    )]
    NoTimeZone {
        /// The column.
        column: String,
        /// Its type.
        kind: String,
    },
    /// A zone that the database does not know.
    #[error("the database does not know the time zone {zone:?}: {hint}")]
    TimeZone {
        /// The zone.
        zone: String,
        /// What to do.
        hint: &'static str,
    },
    /// Text keys are hashed by the database.
    #[error(
        "the database's encoding is {0}: text keys can be divided only in a database with encoding UTF8"
    )]
    Encoding(String),
    /// Exactly once needs more of a database.
    #[error(
        "tasks cannot be claimed in transactions: {0}; it needs PostgreSQL, MariaDB 10.6, MySQL 8.0 (or newer) or SQLite, \
         the primary, and a user who may update the table"
    )]
    NoTransactions(String),
    /// The database did not answer in time.
    #[error(
        "the database does not answer within {0:?}: check that it runs and that the network lets it be reached"
    )]
    Timeout(Duration),
    /// The database refused.
    #[error("the database cannot be used: {0}")]
    Database(#[from] sqlx::Error),
}

fn listed(errors: &[TableError]) -> String {
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    texts.join("; ")
}
