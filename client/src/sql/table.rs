//! The description of a task table.

use std::time::Duration;

use skyschedule_common::share::Dialect;

use super::error::TableError;

/// Largest number of slots that a table can be divided into.
const MAX_SLOTS: u32 = 65_536;

/// A task table: its name, its columns, and what they mean.
///
/// The defaults are those of this table; each can be changed, and every name may be of any kind (reserved words,
/// blanks, quotes, capitals): it is quoted as the database wants it.
///
/// ```sql
/// CREATE TABLE task_info (
///     id        BIGINT PRIMARY KEY,
///     task_data TEXT,
///     task_time TIMESTAMP WITH TIME ZONE NOT NULL, -- when the task is due
///     status    SMALLINT NOT NULL DEFAULT 0        -- 0 new, 1 done, 2 failed
/// )
/// ```
///
/// The types of the id and of the due time are read from the database. An id may be any integer, signed or not, text
/// or a UUID. A due time may have a zone or not; see [`time_zone`](Self::time_zone).
///
/// ```
/// use std::time::Duration;
/// use skyschedule_client::sql::{Retry, Table};
///
/// let table = Table::new("Order")
///     .schema("shop")
///     .id("order no")
///     .status("state")
///     .status_values("new", "done", "failed")
///     .due("due at")
///     .retries("attempts", Retry::default().attempts(5));
/// ```
#[derive(Debug, Clone)]
#[must_use = "a table is only a description"]
pub struct Table {
    pub(super) schema: Option<String>,
    pub(super) name: String,
    pub(super) columns: Vec<String>,
    pub(super) id: String,
    pub(super) status: String,
    pub(super) new: Value,
    pub(super) done: Value,
    pub(super) failed: Value,
    pub(super) due: String,
    pub(super) time_zone: Option<String>,
    pub(super) unix_time: Option<UnixTime>,
    pub(super) retries: Option<Retries>,
    pub(super) slots: Option<Slots>,
    pub(super) delete_when_done: bool,
}

/// A value of the status column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A number.
    Integer(i64),
    /// A text, or the name of an enumeration's value.
    Text(String),
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        Self::Integer(i64::from(number))
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Integer(number)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// The unit of a due time that is a number since 1970, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnixTime {
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Millis,
}

/// How often and how soon a failed task is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a description of retries does nothing by itself"]
pub struct Retry {
    pub(super) attempts: u32,
    pub(super) first: Duration,
    pub(super) longest: Duration,
}

/// Three attempts, the second after 10 seconds, the waits doubling to at most an hour.
impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 3,
            first: Duration::from_secs(10),
            longest: Duration::from_secs(3_600),
        }
    }
}

impl Retry {
    /// All attempts, the first one included; at least 1.
    pub fn attempts(mut self, all: u32) -> Self {
        self.attempts = all;
        self
    }

    /// The wait after the first attempt; it doubles with each attempt up to `longest`.
    pub fn back_off(mut self, first: Duration, longest: Duration) -> Self {
        self.first = first;
        self.longest = longest;
        self
    }

    /// The wait after this many failed attempts.
    pub(super) fn wait(&self, failed: u32) -> Duration {
        let doublings = failed.saturating_sub(1).min(30);
        self.first
            .saturating_mul(1 << doublings)
            .min(self.longest.max(self.first))
    }
}

/// Where attempts are kept.
#[derive(Debug, Clone)]
pub(super) struct Retries {
    pub(super) attempts: String,
    pub(super) next: Option<String>,
    pub(super) retry: Retry,
}

/// How the table divides its rows into slots.
#[derive(Debug, Clone)]
pub(super) struct Slots {
    pub(super) column: Option<String>,
    pub(super) count: u32,
}

impl Table {
    /// A table of this name, with the columns `id`, `status` (0 new, 1 done, 2 failed) and `task_time`.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            schema: None,
            name: name.into(),
            columns: Vec::new(),
            id: "id".to_owned(),
            status: "status".to_owned(),
            new: Value::Integer(0),
            done: Value::Integer(1),
            failed: Value::Integer(2),
            due: "task_time".to_owned(),
            time_zone: None,
            unix_time: None,
            retries: None,
            slots: None,
            delete_when_done: false,
        }
    }

    /// The schema of the table; in MariaDB and MySQL the database, in SQLite an attached database.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = Some(name.into());
        self
    }

    /// The columns that a handler's row is made of, in this order; all of the table unless named.
    pub fn columns<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.columns = names.into_iter().map(Into::into).collect();
        self
    }

    /// The column that identifies a row: a key, without NULL.
    pub fn id(mut self, column: impl Into<String>) -> Self {
        self.id = column.into();
        self
    }

    /// The status column.
    pub fn status(mut self, column: impl Into<String>) -> Self {
        self.status = column.into();
        self
    }

    /// What the status column holds for a task that waits, is done, or has failed for good.
    pub fn status_values(
        mut self,
        new: impl Into<Value>,
        done: impl Into<Value>,
        failed: impl Into<Value>,
    ) -> Self {
        (self.new, self.done, self.failed) = (new.into(), done.into(), failed.into());
        self
    }

    /// The column that says when a task is due; one with NULL there never is.
    pub fn due(mut self, column: impl Into<String>) -> Self {
        self.due = column.into();
        self
    }

    /// The zone of a due time that has none of its own: `+08:00`, or a name that the database knows, such as
    /// `Asia/Shanghai`.
    ///
    /// | column | without this |
    /// |---|---|
    /// | PostgreSQL `timestamp`, `date` | an error: name the zone |
    /// | MariaDB, MySQL `DATETIME`, `DATE` | the zone that the server is set to |
    /// | SQLite text, `YYYY-MM-DD HH:MM:SS` or with a `T` | UTC, as SQLite's own functions write it |
    ///
    /// PostgreSQL's `timestamptz`, MySQL's `TIMESTAMP` and numbers since 1970 need no zone; there this has no effect.
    /// SQLite knows no names.
    pub fn time_zone(mut self, zone: impl Into<String>) -> Self {
        self.time_zone = Some(zone.into());
        self
    }

    /// The due time is a number since 1970.
    pub fn unix_time(mut self, unit: UnixTime) -> Self {
        self.unix_time = Some(unit);
        self
    }

    /// A failed task is tried again, after a wait: `attempts` is an integer column that counts the failures.
    ///
    /// The wait moves the due time, unless [`next_attempt`](Self::next_attempt) names another column. Without this,
    /// the first failure is final.
    pub fn retries(mut self, attempts: impl Into<String>, retry: Retry) -> Self {
        let next = self.retries.and_then(|known| known.next);
        self.retries = Some(Retries {
            attempts: attempts.into(),
            next,
            retry,
        });
        self
    }

    /// Another column that says when a failed task is tried again, of the same type as the due time; NULL or a time
    /// that has passed: now. Only with [`retries`](Self::retries), which comes first.
    pub fn next_attempt(mut self, column: impl Into<String>) -> Self {
        if let Some(retries) = &mut self.retries {
            retries.next = Some(column.into());
        }
        self
    }

    /// The table has an integer column that holds each row's slot, usually a generated one: `id & (count - 1)` for
    /// integer keys; for text keys the first 32 bits of the MD5 of their UTF-8 text, big-endian, modulo `count`.
    ///
    /// In a group with this many slots, rows are then fetched slot by slot: the fastest way with many clients.
    /// `count` is a power of two from 16 to 65,536. The index is on slot, status, due time and id, in this order.
    pub fn slot_column(mut self, column: impl Into<String>, count: u32) -> Self {
        self.slots = Some(Slots {
            column: Some(column.into()),
            count,
        });
        self
    }

    /// The table has no slot column, but an index on the expression `(id & (count - 1))`, due time and id; otherwise
    /// as [`slot_column`](Self::slot_column). For PostgreSQL and SQLite: MariaDB has no such indexes.
    pub fn slot_index(mut self, count: u32) -> Self {
        self.slots = Some(Slots {
            column: None,
            count,
        });
        self
    }

    /// A task that is done is deleted, instead of getting the status done: 1.5 times faster.
    pub fn delete_when_done(mut self) -> Self {
        self.delete_when_done = true;
        self
    }

    /// What cannot be.
    pub(super) fn check(&self) -> Vec<TableError> {
        let mut wrong = Vec::new();
        let retries = self.retries.as_ref();
        let names = [&self.name, &self.id, &self.status, &self.due]
            .into_iter()
            .chain(&self.schema)
            .chain(&self.columns)
            .chain(retries.map(|retries| &retries.attempts))
            .chain(retries.and_then(|retries| retries.next.as_ref()))
            .chain(self.slots.as_ref().and_then(|slots| slots.column.as_ref()));
        for name in names {
            if name.is_empty() || name.contains('\0') {
                wrong.push(TableError::Name(name.clone()));
            }
        }
        for value in [&self.new, &self.done, &self.failed] {
            if let Value::Text(text) = value
                && text.contains(['\0', '\\'])
            {
                wrong.push(TableError::Status(text.clone()));
            }
        }
        let distinct = self.new != self.done && self.new != self.failed;
        if !distinct {
            wrong.push(TableError::SameStatus);
        }
        if let Some(slots) = &self.slots
            && !(slots.count.is_power_of_two() && (16..=MAX_SLOTS).contains(&slots.count))
        {
            wrong.push(TableError::Slots(slots.count));
        }
        if retries.is_some_and(|retries| retries.retry.attempts == 0) {
            wrong.push(TableError::NoAttempts);
        }
        wrong
    }
}

/// A name as an identifier of this database.
pub(super) fn quoted(dialect: Dialect, name: &str) -> String {
    match dialect {
        Dialect::MySql => format!("`{}`", name.replace('`', "``")),
        Dialect::Postgres | Dialect::Sqlite => format!("\"{}\"", name.replace('"', "\"\"")),
    }
}

/// A value as a literal; texts with a backslash were refused.
pub(super) fn literal(value: &Value) -> String {
    match value {
        Value::Integer(number) => number.to_string(),
        Value::Text(text) => format!("'{}'", text.replace('\'', "''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_quoted() {
        assert_eq!(quoted(Dialect::Postgres, "a\"b; --"), "\"a\"\"b; --\"");
        assert_eq!(quoted(Dialect::MySql, "a`b"), "`a``b`");
        assert_eq!(literal(&"it's".into()), "'it''s'");
    }

    #[test]
    fn everything_wrong_is_named_at_once() {
        let wrong = Table::new("")
            .id("a\0b")
            .status_values("x\\", 1, "x\\")
            .slot_index(1000)
            .retries("attempts", Retry::default().attempts(0))
            .check();
        assert_eq!(wrong.len(), 7, "{wrong:?}");
    }

    #[test]
    fn waits_double_and_are_bounded() {
        let retry = Retry::default().back_off(Duration::from_secs(1), Duration::from_secs(60));
        let waits: Vec<u64> = [1, 2, 3, 7, 8, u32::MAX]
            .into_iter()
            .map(|failed| retry.wait(failed).as_secs())
            .collect();
        assert_eq!(waits, [1, 2, 4, 60, 60, 60]);
    }
}
