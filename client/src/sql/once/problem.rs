//! What an error of the database means for the transaction that met it.

use std::error::Error as StdError;
use std::time::Duration;

use skyschedule_common::env;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::sqlite::SqliteError;

use super::super::mark::is_of_a_row;

/// An error, sorted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) kind: Kind,
    pub(super) text: String,
}

/// What can be done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Another transaction was in the way (a deadlock, a serialization failure, a lock): the same may succeed later.
    Conflict,
    /// The data is refused, and would be again: a constraint, a trigger.
    Row,
    /// The statement is refused for another reason.
    Refused,
    /// The connection or the server does not answer any more; what it did is not known.
    Lost,
}

impl Problem {
    pub(super) fn of(error: &sqlx::Error) -> Self {
        Self {
            kind: kind(error),
            text: error.to_string(),
        }
    }
}

/// The answer to a statement, waited for as long as `limit`.
pub(super) async fn within<T>(
    limit: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, Problem> {
    match env::timeout(limit, statement).await {
        Ok(answer) => answer.map_err(|error| Problem::of(&error)),
        Err(elapsed) => Err(Problem {
            kind: Kind::Lost,
            text: elapsed.to_string(),
        }),
    }
}

/// Whether a handler failed only because another transaction was in its way.
pub(super) fn is_conflict(error: &(dyn StdError + Send + Sync + 'static)) -> bool {
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<sqlx::Error>() {
            return kind(error) == Kind::Conflict;
        }
        // `anyhow::Error` hides its outermost error's type, some make a text of it.
        let text = error.to_string();
        if CONFLICTS.iter().any(|known| text.contains(known)) {
            return true;
        }
        next = error.source();
    }
    false
}

/// How the databases, through sqlx, tell of conflicts.
const CONFLICTS: [&str; 6] = [
    "error returned from database: deadlock detected",
    "error returned from database: could not serialize access",
    "error returned from database: canceling statement due to lock timeout",
    "error returned from database: 1213 (40001)",
    "error returned from database: 1205 (HY000)",
    "error returned from database: (code: 5) database is locked",
];

fn kind(error: &sqlx::Error) -> Kind {
    let sqlx::Error::Database(of_database) = error else {
        return Kind::Lost;
    };
    if is_of_a_row(error) {
        return Kind::Row;
    }
    if let Some(error) = of_database.try_downcast_ref::<MySqlDatabaseError>() {
        const LOCK_WAIT_TIMEOUT: u16 = 1205;
        const DEADLOCK: u16 = 1213;
        const CHANGED_SINCE_READ: u16 = 1020;
        const KILLED: u16 = 1927;
        match error.number() {
            LOCK_WAIT_TIMEOUT | DEADLOCK | CHANGED_SINCE_READ => return Kind::Conflict,
            KILLED => return Kind::Lost,
            _ => {}
        }
    }
    let code = of_database.code().unwrap_or_default();
    if of_database.try_downcast_ref::<SqliteError>().is_some() {
        const BUSY: u32 = 5;
        const LOCKED: u32 = 6;
        let primary = code.parse::<u32>().map(|code| code & 0xff);
        return match primary {
            Ok(BUSY | LOCKED) => Kind::Conflict,
            _ => Kind::Refused,
        };
    }
    match code.as_ref() {
        // Serialization failure, deadlock, lock_timeout.
        "40001" | "40P01" | "55P03" => Kind::Conflict,
        // The connection ends, or the server does.
        _ if ["08", "57P"].iter().any(|class| code.starts_with(class)) => Kind::Lost,
        _ => Kind::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conflict_is_known_by_its_text_too() {
        let hidden: Box<dyn StdError + Send + Sync> =
            "error returned from database: 1213 (40001): Deadlock found".into();
        assert!(is_conflict(hidden.as_ref()));
        let other: Box<dyn StdError + Send + Sync> = "deadlock detected in the mail".into();
        assert!(!is_conflict(other.as_ref()));
    }

    #[test]
    fn what_is_no_answer_of_a_database_is_a_lost_connection() {
        let error = sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into());
        assert_eq!(Problem::of(&error).kind, Kind::Lost);
        assert!(!is_conflict(&error));
    }
}
