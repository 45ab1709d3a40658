//! What the database says about the columns of a table.

use skyschedule_common::share::{Dialect, KeyKind};
use sqlx::Pool;

use super::clock::{Clock, is_zone_name, offset_minutes, offset_text};
use super::driver::{Bind, Driver, Statement};
use super::error::Error;
use super::statements::columns_query;
use super::table::Table;

/// How keys are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyType {
    /// As `i64`.
    Integer,
    /// As `u64`.
    Unsigned,
    /// As text; UUIDs too.
    Text,
}

impl KeyType {
    pub(super) fn kind(self) -> KeyKind {
        match self {
            Self::Integer | Self::Unsigned => KeyKind::Integer,
            Self::Text => KeyKind::Text,
        }
    }
}

/// The types of the columns that statements depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Schema {
    pub(super) key: KeyType,
    /// PostgreSQL: the type that a bound text key is cast to; elsewhere texts are compared as they are.
    pub(super) key_cast: Option<String>,
    pub(super) clock: Clock,
}

impl Schema {
    /// Asks the database, and checks what only it can know: that the columns exist, that their types and the zone
    /// can be used.
    pub(super) async fn read<D: Driver>(pool: &Pool<D>, table: &Table) -> Result<Self, Error> {
        let mut connection = pool.acquire().await?;
        let columns = D::columns(&mut connection, columns_query(D::DIALECT, table)).await?;
        let kind = |at: usize| {
            columns
                .get(at)
                .map(|(_, kind)| kind.clone())
                .unwrap_or_default()
        };
        // In the order of `columns_query`.
        let (id, due) = (kind(0), kind(1));
        let clock = clock(D::DIALECT, table, due)?;
        let mut ask = async |statement: &Statement| {
            let rows = D::fetch(&mut connection, statement).await?;
            match rows.first() {
                Some(row) => D::first_text(row),
                None => Ok(None),
            }
        };
        // The protocol of MariaDB and MySQL shows a text of a binary collation as it shows bytes.
        let id = match id.as_str() {
            "BINARY" | "VARBINARY" | "BLOB" | "TINYBLOB" | "MEDIUMBLOB"
                if D::DIALECT == Dialect::MySql =>
            {
                ask(&declared_type(table)).await?.unwrap_or(id)
            }
            _ => id,
        };
        let (key, key_cast) = key_type(D::DIALECT, &id).ok_or_else(|| Error::IdType {
            column: table.id.clone(),
            kind: id,
        })?;
        let mut first = async |query: &str| {
            let statement = Statement::new(query.to_owned(), Vec::new());
            ask(&statement.passing()).await
        };
        match &clock {
            Clock::PostgresLocal { .. } => {
                let zone = table.time_zone.clone().unwrap_or_default();
                let query = format!("SELECT CAST({} AS text)", clock.now());
                first(&query).await.map_err(|_| Error::TimeZone {
                    zone,
                    hint: "SELECT name FROM pg_timezone_names lists those that it knows",
                })?;
            }
            Clock::MySqlLocal { .. } => {
                let query = format!("SELECT CAST({} AS CHAR)", clock.now());
                if first(&query).await?.is_none() {
                    return Err(Error::TimeZone {
                        zone: table.time_zone.clone().unwrap_or_default(),
                        hint: "give it as an offset such as +08:00, or load the zones (mariadb-tzinfo-to-sql)",
                    });
                }
            }
            _ => {}
        }
        if key == KeyType::Text
            && D::DIALECT == Dialect::Postgres
            && let Some(encoding) = first("SELECT current_setting('server_encoding')").await?
            && encoding != "UTF8"
        {
            return Err(Error::Encoding(encoding));
        }
        Ok(Self {
            key,
            key_cast,
            clock,
        })
    }
}

/// The type of the id column as it was declared, in MariaDB and MySQL.
fn declared_type(table: &Table) -> Statement {
    let text = "SELECT CONVERT(DATA_TYPE USING utf8mb4) FROM information_schema.COLUMNS \
                WHERE TABLE_SCHEMA = COALESCE(NULLIF(?, ''), DATABASE()) AND TABLE_NAME = ? AND COLUMN_NAME = ?";
    let schema = table.schema.clone().unwrap_or_default();
    let binds = [schema, table.name.clone(), table.id.clone()];
    Statement::new(text.to_owned(), binds.into_iter().map(Bind::Text).collect()).passing()
}

fn key_type(dialect: Dialect, kind: &str) -> Option<(KeyType, Option<String>)> {
    let kind = kind.to_ascii_uppercase();
    let cast = |name: &str| Some((KeyType::Text, Some(name.to_owned())));
    match (dialect, kind.as_str()) {
        (Dialect::Postgres, "INT2" | "INT4" | "INT8") | (Dialect::Sqlite, "INTEGER") => {
            Some((KeyType::Integer, None))
        }
        (Dialect::Postgres, "TEXT" | "VARCHAR") => Some((KeyType::Text, None)),
        (Dialect::Postgres, "UUID") => cast("uuid"),
        (Dialect::Postgres, "CHAR" | "BPCHAR") => cast("bpchar"),
        (Dialect::Postgres, "CITEXT") => cast("citext"),
        (Dialect::MySql, "BOOLEAN" | "TINYINT" | "SMALLINT" | "MEDIUMINT" | "INT" | "BIGINT") => {
            Some((KeyType::Integer, None))
        }
        (Dialect::MySql, unsigned) if unsigned.ends_with(" UNSIGNED") => {
            Some((KeyType::Unsigned, None))
        }
        (Dialect::MySql, "CHAR" | "VARCHAR" | "TEXT" | "TINYTEXT" | "MEDIUMTEXT" | "UUID")
        // NULL: a type of which SQLite knows nothing, such as UUID.
        | (Dialect::Sqlite, "TEXT" | "NULL") => Some((KeyType::Text, None)),
        _ => None,
    }
}

fn clock(dialect: Dialect, table: &Table, kind: String) -> Result<Clock, Error> {
    let upper = kind.to_ascii_uppercase();
    let column = || table.due.clone();
    let is_integer = upper.contains("INT");
    if let Some(unit) = table.unix_time {
        if !is_integer {
            return Err(Error::DueType {
                column: column(),
                kind,
                hint: ": times since 1970 are kept in integers; leave Table::unix_time out",
            });
        }
        return Ok(match dialect {
            Dialect::Postgres => Clock::PostgresUnix(unit),
            Dialect::MySql => Clock::MySqlUnix(unit),
            Dialect::Sqlite => Clock::SqliteUnix(unit),
        });
    }
    let no_time = |hint| Error::DueType {
        column: column(),
        kind: kind.clone(),
        hint,
    };
    let zone = table.time_zone.as_deref();
    match (dialect, upper.as_str()) {
        _ if is_integer => Err(no_time(
            ": if it counts seconds or milliseconds since 1970, say so (Table::unix_time)",
        )),
        (Dialect::Postgres, "TIMESTAMPTZ") => Ok(Clock::PostgresZoned),
        (Dialect::Postgres, "TIMESTAMP" | "DATE") => {
            let zone = zone.ok_or_else(|| Error::NoTimeZone {
                column: column(),
                kind: kind.clone(),
            })?;
            Ok(Clock::PostgresLocal {
                zone: match offset_minutes(zone) {
                    // As a text it would count westwards, as POSIX does.
                    Some(minutes) => format!("INTERVAL '{}'", offset_text(minutes)),
                    None => zone_literal(zone)?,
                },
                type_name: if upper == "DATE" { "date" } else { "timestamp" },
            })
        }
        (Dialect::MySql, "TIMESTAMP") => Ok(Clock::MySqlZoned),
        (Dialect::MySql, "DATETIME" | "DATE") => Ok(Clock::MySqlLocal {
            zone: match zone {
                None => "@@global.time_zone".to_owned(),
                Some(zone) => match offset_minutes(zone) {
                    Some(minutes) => format!("'{}'", offset_text(minutes)),
                    None => zone_literal(zone)?,
                },
            },
        }),
        (Dialect::Sqlite, "TEXT" | "DATETIME" | "DATE" | "NULL") => Ok(Clock::SqliteText {
            minutes: match zone {
                None => 0,
                Some(zone) => offset_minutes(zone).ok_or_else(|| Error::TimeZone {
                    zone: zone.to_owned(),
                    hint: "SQLite knows no names of zones; give it as an offset such as +08:00",
                })?,
            },
        }),
        _ => Err(no_time(
            ": use a column of a date and time type, or an integer with Table::unix_time",
        )),
    }
}

fn zone_literal(zone: &str) -> Result<String, Error> {
    if is_zone_name(zone) {
        Ok(format!("'{zone}'"))
    } else {
        Err(Error::TimeZone {
            zone: zone.to_owned(),
            hint: "write it as Asia/Shanghai or +08:00",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_without_a_zone_need_one_in_postgres() {
        let table = Table::new("t");
        assert!(matches!(
            clock(Dialect::Postgres, &table, "TIMESTAMP".to_owned()),
            Err(Error::NoTimeZone { .. })
        ));
        let named = |zone: &str| {
            clock(
                Dialect::Postgres,
                &Table::new("t").time_zone(zone),
                "TIMESTAMP".to_owned(),
            )
            .map(|clock| clock.now())
        };
        assert_eq!(
            named("+08:00").unwrap(),
            "(now() AT TIME ZONE INTERVAL '+08:00')"
        );
        assert_eq!(
            named("Asia/Shanghai").unwrap(),
            "(now() AT TIME ZONE 'Asia/Shanghai')"
        );
        assert!(named("x' OR 1=1").is_err());
    }

    #[test]
    fn numbers_are_no_times_unless_their_unit_is_known() {
        for dialect in [Dialect::Postgres, Dialect::MySql, Dialect::Sqlite] {
            let error = clock(dialect, &Table::new("t"), "INTEGER".to_owned()).unwrap_err();
            assert!(error.to_string().contains("unix_time"), "{error}");
        }
    }
}
