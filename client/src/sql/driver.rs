//! The three drivers: how a statement is bound, executed and read. What the statements say is in `statements`.

use std::ops::DerefMut as _;

use futures_util::future::BoxFuture;
use skyschedule_common::share::Dialect;
use sqlx::pool::PoolConnection;
use sqlx::query::Query;
use sqlx::{
    AssertSqlSafe, Column as _, Executor as _, MySql, Pool, Postgres, Row as _, SqlSafeStr as _,
    Sqlite, Statement as _, Transaction, TypeInfo as _,
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

/// What `Page` needs of a row beside the user's columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    pub(super) key: Key,
    /// The due time as text, to go on from.
    pub(super) due: Option<String>,
    /// Failed attempts so far.
    pub(super) attempts: i64,
    /// For how long it has been due, in seconds, by the database's clock.
    pub(super) lag: f64,
}

pub(super) const KEY: &str = "skyschedule_key";
pub(super) const DUE: &str = "skyschedule_due";
pub(super) const ATTEMPTS: &str = "skyschedule_attempts";
pub(super) const LAG: &str = "skyschedule_lag";

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
    fn begin(pool: &Pool<Self>) -> BoxFuture<'_, Result<Transaction<'static, Self>, sqlx::Error>>;

    #[doc(hidden)]
    /// A row's first column as text.
    fn first_text(row: &Self::Row) -> Result<Option<String>, sqlx::Error>;

    #[doc(hidden)]
    /// A row's columns that the consumer added.
    fn head(row: &Self::Row, key: KeyType) -> Result<Head, sqlx::Error>;
}

macro_rules! driver {
    ($database:ty, $dialect:expr, $begin:literal, $bind:ident) => {
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
                pool: &Pool<Self>,
            ) -> BoxFuture<'_, Result<Transaction<'static, Self>, sqlx::Error>> {
                Box::pin(pool.begin_with(Self::BEGIN))
            }

            fn first_text(row: &Self::Row) -> Result<Option<String>, sqlx::Error> {
                row.try_get(0)
            }

            fn head(row: &Self::Row, key: KeyType) -> Result<Head, sqlx::Error> {
                Ok(Head {
                    key: match key {
                        KeyType::Integer => Key::Integer(row.try_get(KEY)?),
                        KeyType::Unsigned => unsigned_key(row)?,
                        KeyType::Text => Key::Text(row.try_get(KEY)?),
                    },
                    due: row.try_get(DUE)?,
                    attempts: row.try_get(ATTEMPTS)?,
                    lag: row.try_get::<Option<f64>, _>(LAG)?.unwrap_or(0.0),
                })
            }
        }
    };
}

driver!(Postgres, Dialect::Postgres, "BEGIN", bind_postgres);
driver!(MySql, Dialect::MySql, "START TRANSACTION", bind_mysql);
// A transaction that reads first and writes then fails at once where another one writes, whatever the time limit.
driver!(Sqlite, Dialect::Sqlite, "BEGIN IMMEDIATE", bind_sqlite);

/// Only MariaDB and MySQL have unsigned types.
trait UnsignedKey {
    fn unsigned(&self) -> Result<Key, sqlx::Error>;
}

impl UnsignedKey for sqlx::mysql::MySqlRow {
    fn unsigned(&self) -> Result<Key, sqlx::Error> {
        Ok(Key::Unsigned(self.try_get(KEY)?))
    }
}

impl UnsignedKey for sqlx::postgres::PgRow {
    fn unsigned(&self) -> Result<Key, sqlx::Error> {
        Ok(Key::Integer(self.try_get(KEY)?))
    }
}

impl UnsignedKey for sqlx::sqlite::SqliteRow {
    fn unsigned(&self) -> Result<Key, sqlx::Error> {
        Ok(Key::Integer(self.try_get(KEY)?))
    }
}

fn unsigned_key(row: &impl UnsignedKey) -> Result<Key, sqlx::Error> {
    row.unsigned()
}

type Bound<'q, D> = Query<'q, D, <D as sqlx::Database>::Arguments>;

fn bind_postgres<'q>(query: Bound<'q, Postgres>, value: &'q Bind) -> Bound<'q, Postgres> {
    match value {
        Bind::Integer(number) => query.bind(number),
        Bind::Unsigned(number) => query.bind(signed(*number)),
        Bind::Text(text) => query.bind(text),
        Bind::Integers(numbers) => query.bind(numbers),
        Bind::Texts(texts) => query.bind(texts),
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
    }
}

/// No key of these databases is above the largest signed number.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
