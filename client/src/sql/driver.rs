//! The three drivers: how a statement is bound, executed and read. What the statements say is in `statements`.

use std::ops::DerefMut as _;

use futures_util::future::BoxFuture;
use skyschedule_common::share::Dialect;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgArgumentBuffer, PgRow, PgTypeInfo};
use sqlx::query::Query;
use sqlx::{
    AssertSqlSafe, Column as _, Connection as _, Encode, Executor as _, MySql, Postgres, Row,
    SqlSafeStr as _, Sqlite, Statement as _, Transaction, Type, TypeInfo as _, ValueRef as _,
};

use super::key::Key;
use super::schema::KeyType;

/// A value bound to a placeholder.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Bind {
    /// A number.
    Integer(i64),
    /// A number of MariaDB's and MySQL's unsigned types.
    Unsigned(u64),
    /// A text.
    Text(String),
    /// An array (PostgreSQL).
    Integers(Vec<i64>),
    /// An array (PostgreSQL).
    Texts(Vec<String>),
    /// A time that goes back to the database as it came.
    Due(Due),
}

/// A due time, to go on from: as the database sent it (PostgreSQL), or as a text.
#[derive(Debug, Clone, PartialEq)]
pub enum Due {
    Text(String),
    Raw(RawValue),
}

/// A value of PostgreSQL in its binary format, whatever its type: exact, and costs it no formatting.
#[derive(Debug, Clone, PartialEq)]
pub struct RawValue {
    kind: PgTypeInfo,
    bytes: Vec<u8>,
}

impl Type<Postgres> for RawValue {
    fn type_info() -> PgTypeInfo {
        // Not asked for: each value tells its own.
        <str as Type<Postgres>>::type_info()
    }
}

impl Encode<'_, Postgres> for RawValue {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend_from_slice(&self.bytes);
        Ok(IsNull::No)
    }

    fn produces(&self) -> Option<PgTypeInfo> {
        Some(self.kind.clone())
    }
}

impl From<&Key> for Bind {
    fn from(key: &Key) -> Self {
        match key {
            Key::Integer(id) => Self::Integer(*id),
            Key::Unsigned(id) => Self::Unsigned(*id),
            Key::Text(id) => Self::Text(id.clone()),
        }
    }
}

/// A statement with its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Statement {
    pub(super) text: String,
    pub(super) binds: Vec<Bind>,
    /// Whether it is worth a place among the connection's prepared statements.
    pub(super) lasting: bool,
}

impl Statement {
    pub(super) fn new(text: String, binds: Vec<Bind>) -> Self {
        Self {
            text,
            binds,
            lasting: true,
        }
    }

    /// The same, but it is not expected again.
    pub(super) fn passing(mut self) -> Self {
        self.lasting = false;
        self
    }
}

/// What is needed of each row beside the user's columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    pub(super) key: Key,
    /// Failed attempts so far.
    pub(super) attempts: i64,
}

/// The names of the columns that the consumer adds behind the user's, in this order. They are read by their places:
/// looking a name up costs more than the value.
pub(super) const KEY: &str = "skyschedule_key";
pub(super) const ATTEMPTS: &str = "skyschedule_attempts";
pub(super) const DUE: &str = "skyschedule_due";
pub(super) const LAG: &str = "skyschedule_lag";

/// The place of each of these, counted from the last column.
const KEY_AT: usize = 4;
const ATTEMPTS_AT: usize = 3;
const DUE_AT: usize = 2;
const LAG_AT: usize = 1;

fn place<R: Row>(row: &R, from_last: usize) -> usize {
    // Without so many columns there is none at this place: an error, not a panic.
    row.len().wrapping_sub(from_last)
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for sqlx::Postgres {}
    impl Sealed for sqlx::MySql {}
    impl Sealed for sqlx::Sqlite {}
}

/// A database that a [`Consumer`](super::Consumer) works on: `sqlx::Postgres`, `sqlx::MySql` (MariaDB too) or
/// `sqlx::Sqlite`. No other type can implement it.
pub trait Driver: sqlx::Database + sealed::Sealed {
    #[doc(hidden)]
    /// What its SQL looks like.
    const DIALECT: Dialect;
    #[doc(hidden)]
    /// How a transaction that writes begins.
    const BEGIN: &'static str;

    #[doc(hidden)]
    /// The rows of a query.
    fn fetch<'a>(
        connection: &'a mut PoolConnection<Self>,
        statement: &'a Statement,
    ) -> BoxFuture<'a, Result<Vec<Self::Row>, sqlx::Error>>;

    #[doc(hidden)]
    /// Executes a statement, and tells how many rows it changed.
    fn execute<'a>(
        connection: &'a mut Self::Connection,
        statement: &'a Statement,
    ) -> BoxFuture<'a, Result<u64, sqlx::Error>>;

    #[doc(hidden)]
    /// Executes a statement that is not prepared, such as one about transactions.
    fn command<'a>(
        connection: &'a mut Self::Connection,
        statement: &'static str,
    ) -> BoxFuture<'a, Result<(), sqlx::Error>>;

    #[doc(hidden)]
    /// Names and types of the columns that a query has.
    fn columns<'a>(
        connection: &'a mut PoolConnection<Self>,
        query: String,
    ) -> BoxFuture<'a, Result<Vec<(String, String)>, sqlx::Error>>;

    #[doc(hidden)]
    /// A transaction that writes.
    fn begin(
        connection: &mut PoolConnection<Self>,
    ) -> BoxFuture<'_, Result<Transaction<'_, Self>, sqlx::Error>>;

    #[doc(hidden)]
    /// A row's first column as text.
    fn first_text(row: &Self::Row) -> Result<Option<String>, sqlx::Error>;

    #[doc(hidden)]
    /// Of the columns that the consumer added, those that are needed of each row.
    fn head(row: &Self::Row, key: KeyType) -> Result<Head, sqlx::Error>;

    #[doc(hidden)]
    /// A row's due time, to go on from.
    fn due(row: &Self::Row) -> Result<Option<Due>, sqlx::Error>;

    #[doc(hidden)]
    /// For how many seconds a row has been due, by the database's clock.
    fn lag(row: &Self::Row) -> Result<f64, sqlx::Error>;
}

macro_rules! driver {
    ($database:ty, $dialect:expr, $begin:literal, $bind:ident, $due:ident) => {
        impl Driver for $database {
            const DIALECT: Dialect = $dialect;
            const BEGIN: &'static str = $begin;

            fn fetch<'a>(
                connection: &'a mut PoolConnection<Self>,
                statement: &'a Statement,
            ) -> BoxFuture<'a, Result<Vec<Self::Row>, sqlx::Error>> {
                let query = statement
                    .binds
                    .iter()
                    .fold(sqlx::query(AssertSqlSafe(statement.text.as_str())), $bind);
                connection
                    .deref_mut()
                    .fetch_all(query.persistent(statement.lasting))
            }

            fn execute<'a>(
                connection: &'a mut Self::Connection,
                statement: &'a Statement,
            ) -> BoxFuture<'a, Result<u64, sqlx::Error>> {
                Box::pin(async move {
                    let query = statement
                        .binds
                        .iter()
                        .fold(sqlx::query(AssertSqlSafe(statement.text.as_str())), $bind);
                    let done = connection
                        .execute(query.persistent(statement.lasting))
                        .await?;
                    Ok(done.rows_affected())
                })
            }

            fn command<'a>(
                connection: &'a mut Self::Connection,
                statement: &'static str,
            ) -> BoxFuture<'a, Result<(), sqlx::Error>> {
                Box::pin(async move { connection.execute(statement).await.map(|_| ()) })
            }

            fn columns<'a>(
                connection: &'a mut PoolConnection<Self>,
                query: String,
            ) -> BoxFuture<'a, Result<Vec<(String, String)>, sqlx::Error>> {
                Box::pin(async move {
                    let prepared = connection
                        .deref_mut()
                        .prepare(AssertSqlSafe(query).into_sql_str())
                        .await?;
                    let described = prepared.columns().iter().map(|column| {
                        let kind = column.type_info().name().to_owned();
                        (column.name().to_owned(), kind)
                    });
                    Ok(described.collect())
                })
            }

            fn begin(
                connection: &mut PoolConnection<Self>,
            ) -> BoxFuture<'_, Result<Transaction<'_, Self>, sqlx::Error>> {
                Box::pin(connection.deref_mut().begin_with(Self::BEGIN))
            }

            fn first_text(row: &Self::Row) -> Result<Option<String>, sqlx::Error> {
                row.try_get(0)
            }

            fn head(row: &Self::Row, key: KeyType) -> Result<Head, sqlx::Error> {
                let at = place(row, KEY_AT);
                Ok(Head {
                    key: match key {
                        KeyType::Integer => Key::Integer(row.try_get(at)?),
                        KeyType::Unsigned => unsigned_key(row, at)?,
                        KeyType::Text => Key::Text(row.try_get(at)?),
                    },
                    attempts: row
                        .try_get::<Option<i64>, _>(place(row, ATTEMPTS_AT))?
                        .unwrap_or(0),
                })
            }

            fn due(row: &Self::Row) -> Result<Option<Due>, sqlx::Error> {
                $due(row, place(row, DUE_AT))
            }

            fn lag(row: &Self::Row) -> Result<f64, sqlx::Error> {
                let lag: Option<f64> = row.try_get(place(row, LAG_AT))?;
                Ok(lag.unwrap_or(0.0))
            }
        }
    };
}

driver!(Postgres, Dialect::Postgres, "BEGIN", bind_postgres, raw_due);
driver!(
    MySql,
    Dialect::MySql,
    "START TRANSACTION",
    bind_mysql,
    text_due
);
// A transaction that reads first and writes then fails at once where another one writes, whatever the time limit.
driver!(
    Sqlite,
    Dialect::Sqlite,
    "BEGIN IMMEDIATE",
    bind_sqlite,
    text_due
);

/// Only MariaDB and MySQL have unsigned types.
trait UnsignedKey {
    fn unsigned(&self, at: usize) -> Result<Key, sqlx::Error>;
}

impl UnsignedKey for sqlx::mysql::MySqlRow {
    fn unsigned(&self, at: usize) -> Result<Key, sqlx::Error> {
        Ok(Key::Unsigned(self.try_get(at)?))
    }
}

impl UnsignedKey for PgRow {
    fn unsigned(&self, at: usize) -> Result<Key, sqlx::Error> {
        Ok(Key::Integer(self.try_get(at)?))
    }
}

impl UnsignedKey for sqlx::sqlite::SqliteRow {
    fn unsigned(&self, at: usize) -> Result<Key, sqlx::Error> {
        Ok(Key::Integer(self.try_get(at)?))
    }
}

fn unsigned_key(row: &impl UnsignedKey, at: usize) -> Result<Key, sqlx::Error> {
    row.unsigned(at)
}

fn raw_due(row: &PgRow, at: usize) -> Result<Option<Due>, sqlx::Error> {
    let value = row.try_get_raw(at)?;
    if value.is_null() {
        return Ok(None);
    }
    Ok(Some(Due::Raw(RawValue {
        kind: value.type_info().into_owned(),
        bytes: value.as_bytes().map_err(sqlx::Error::Decode)?.to_vec(),
    })))
}

fn text_due<R: Row>(row: &R, at: usize) -> Result<Option<Due>, sqlx::Error>
where
    usize: sqlx::ColumnIndex<R>,
    for<'r> String: sqlx::Decode<'r, R::Database> + Type<R::Database>,
{
    Ok(row.try_get::<Option<String>, _>(at)?.map(Due::Text))
}

type Bound<'q, D> = Query<'q, D, <D as sqlx::Database>::Arguments>;

fn bind_postgres<'q>(query: Bound<'q, Postgres>, value: &'q Bind) -> Bound<'q, Postgres> {
    match value {
        Bind::Integer(number) => query.bind(number),
        Bind::Unsigned(number) => query.bind(signed(*number)),
        Bind::Text(text) => query.bind(text),
        Bind::Integers(numbers) => query.bind(numbers),
        Bind::Texts(texts) => query.bind(texts),
        Bind::Due(Due::Raw(value)) => query.bind(value),
        Bind::Due(Due::Text(text)) => query.bind(text),
    }
}

fn bind_mysql<'q>(query: Bound<'q, MySql>, value: &'q Bind) -> Bound<'q, MySql> {
    match value {
        Bind::Integer(number) => query.bind(number),
        Bind::Unsigned(number) => query.bind(number),
        Bind::Text(text) => query.bind(text),
        Bind::Integers(numbers) => numbers
            .iter()
            .fold(query, |query, number| query.bind(number)),
        Bind::Texts(texts) => texts.iter().fold(query, |query, text| query.bind(text)),
        Bind::Due(Due::Text(text)) => query.bind(text),
        // Only PostgreSQL's.
        Bind::Due(Due::Raw(value)) => query.bind(&value.bytes),
    }
}

fn bind_sqlite<'q>(query: Bound<'q, Sqlite>, value: &'q Bind) -> Bound<'q, Sqlite> {
    match value {
        Bind::Integer(number) => query.bind(number),
        Bind::Unsigned(number) => query.bind(signed(*number)),
        Bind::Text(text) => query.bind(text),
        Bind::Integers(numbers) => numbers
            .iter()
            .fold(query, |query, number| query.bind(number)),
        Bind::Texts(texts) => texts.iter().fold(query, |query, text| query.bind(text)),
        Bind::Due(Due::Text(text)) => query.bind(text),
        // Only PostgreSQL's.
        Bind::Due(Due::Raw(value)) => query.bind(&value.bytes),
    }
}

/// No key of these databases is above the largest signed number.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
