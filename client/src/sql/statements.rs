//! The SQL of a consumer: which statements there are, and what they look like in each database.
//!
//! Their shapes were measured. Status values, masks and totals are literals, because a bound one keeps PostgreSQL
//! from using a partial or expression index in a generic plan; only slot, cursor, limit and keys are bound. There is
//! no LIMIT without ORDER BY.

mod slots;

use std::time::Duration;

use skyschedule_common::share::{Dialect, ShareUnion};

use super::driver::{ATTEMPTS, Bind, DUE, Due, KEY, LAG, Statement};
use super::key::Key;
use super::schema::{KeyType, Schema};
use super::table::{Table, literal, quoted};

/// See the module.
#[derive(Debug)]
pub(super) struct Statements {
    dialect: Dialect,
    table: Table,
    schema: Schema,
}

/// What a statement does to the rows it marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// They are done.
    Done,
    /// They have failed for good.
    Failed,
    /// They have failed so many times before, and are due again after a wait.
    Again { attempts: i64, wait: Duration },
}

/// Whether rows that are read are locked until the end of the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// They are not.
    No,
    /// They are; those that others have locked are left out. SQLite locks all or nothing.
    Skip,
}

/// Where a page begins: behind this row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cursor {
    pub(super) due: Due,
    pub(super) key: Key,
}

/// Placeholders and what they are bound to.
struct Binds {
    dialect: Dialect,
    values: Vec<Bind>,
}

impl Binds {
    fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            values: Vec::new(),
        }
    }

    fn add(&mut self, value: Bind) -> String {
        self.values.push(value);
        match self.dialect {
            Dialect::Postgres => format!("${}", self.values.len()),
            Dialect::MySql | Dialect::Sqlite => "?".to_owned(),
        }
    }
}

/// A query whose columns are the id and the due time first, then all others that are named: it tells their types, and
/// fails where one does not exist.
pub(super) fn columns_query(dialect: Dialect, table: &Table) -> String {
    let retries = table.retries.as_ref();
    let columns: Vec<String> = [&table.id, &table.due, &table.status]
        .into_iter()
        .chain(&table.columns)
        .chain(retries.map(|retries| &retries.attempts))
        .chain(retries.and_then(|retries| retries.next.as_ref()))
        .chain(table.slots.as_ref().and_then(|slots| slots.column.as_ref()))
        .map(|column| format!("t.{}", quoted(dialect, column)))
        .collect();
    format!(
        "SELECT {} FROM {} AS t WHERE 1 = 0",
        columns.join(", "),
        name(dialect, table)
    )
}

fn name(dialect: Dialect, table: &Table) -> String {
    let name = quoted(dialect, &table.name);
    match &table.schema {
        Some(schema) => format!("{}.{name}", quoted(dialect, schema)),
        None => name,
    }
}

impl Statements {
    pub(super) fn new(dialect: Dialect, table: Table, schema: Schema) -> Self {
        Self {
            dialect,
            table,
            schema,
        }
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub(super) fn key_type(&self) -> KeyType {
        self.schema.key
    }

    /// Whether the database can tell which rows are in a share; otherwise the process does.
    pub(super) fn selects(&self) -> bool {
        let kind = self.schema.key.kind();
        self.dialect.remainder("t", kind, 1).is_some()
    }

    /// The next due rows of a share, by due time and id.
    pub(super) fn page(
        &self,
        rows: &ShareUnion,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let (id, due) = (
            self.column("t", &self.table.id),
            self.column("t", &self.table.due),
        );
        let mut conditions = self.due_conditions("t");
        conditions.extend(after.map(|cursor| self.behind("t", cursor, &mut binds)));
        if let Some(own) = rows.predicate_for(self.dialect, &id, self.schema.key.kind()) {
            conditions.push(self.opaque(own));
        }
        let text = format!(
            "SELECT {} FROM {} AS t WHERE {} ORDER BY {due}, {id} LIMIT {}",
            self.selected(),
            name(self.dialect, &self.table),
            conditions.join(" AND "),
            binds.add(limit_bind(limit)),
        );
        Statement::new(text, binds.values)
    }

    /// Those of these rows that are still new and due.
    pub(super) fn claim(&self, keys: &[Key], lock: Lock) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let id = self.column("t", &self.table.id);
        let own = self.is_one_of(&id, keys, &mut binds);
        // In every database: an index by status would have more rows locked than these.
        let text = format!(
            "SELECT {} FROM {} AS t WHERE {own} AND CASE WHEN {} THEN TRUE ELSE FALSE END{}",
            self.selected(),
            name(self.dialect, &self.table),
            self.due_conditions("t").join(" AND "),
            match lock {
                Lock::Skip if self.dialect != Dialect::Sqlite => " FOR UPDATE SKIP LOCKED",
                Lock::Skip | Lock::No => "",
            }
        );
        Statement::new(text, binds.values)
    }

    /// The same table, of which only keys are read.
    pub(super) fn keys_only(&self) -> Self {
        let id = self.table.id.clone();
        let table = self.table.clone().columns([id]);
        Self::new(self.dialect, table, self.schema.clone())
    }

    /// What a failure leads to, after so many failed attempts before.
    pub(super) fn mark_of_failure(&self, attempts: i64) -> Mark {
        let Some(retries) = &self.table.retries else {
            return Mark::Failed;
        };
        let failed = u32::try_from(attempts.saturating_add(1)).unwrap_or(u32::MAX);
        if failed >= retries.retry.attempts {
            return Mark::Failed;
        }
        Mark::Again {
            attempts,
            wait: retries.retry.wait(failed),
        }
    }

    /// Marks these rows where they are still new (and, to be tried again, have failed as often as they had).
    pub(super) fn mark(&self, mark: Mark, keys: &[Key]) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let table = name(self.dialect, &self.table);
        let column = |column: &str| quoted(self.dialect, column);
        let status = column(&self.table.status);
        let retries = self.table.retries.as_ref();
        let attempts = retries.map(|retries| column(&retries.attempts));
        let set = |value| format!("{status} = {}", literal(value));
        let mut lasting = true;
        let mut unchanged = String::new();
        let change = match mark {
            Mark::Done if self.table.delete_when_done => format!("DELETE FROM {table}"),
            Mark::Done => format!("UPDATE {table} SET {}", set(&self.table.done)),
            Mark::Failed => {
                let count = attempts
                    .map(|attempts| format!(", {attempts} = COALESCE({attempts}, 0) + 1"))
                    .unwrap_or_default();
                format!("UPDATE {table} SET {}{count}", set(&self.table.failed))
            }
            Mark::Again {
                attempts: failed,
                wait,
            } => {
                lasting = false;
                let attempts = attempts.unwrap_or_default();
                let next = retries.and_then(|retries| retries.next.as_ref());
                let next = column(next.unwrap_or(&self.table.due));
                unchanged = format!(" AND COALESCE({attempts}, 0) = {failed}");
                format!(
                    "UPDATE {table} SET {attempts} = {}, {next} = {}",
                    failed.saturating_add(1),
                    self.schema.clock.after(wait)
                )
            }
        };
        let keys = self.is_one_of(&column(&self.table.id), keys, &mut binds);
        let is_new = self.opaque(format!("{status} = {}", literal(&self.table.new)));
        let text = format!("{change} WHERE {keys} AND {is_new}{unchanged}");
        let statement = Statement::new(text, binds.values);
        if lasting {
            statement
        } else {
            statement.passing()
        }
    }

    /// The first due row of the whole table, if there is any.
    pub(super) fn any_due(&self) -> Statement {
        let (id, due) = (
            self.column("t", &self.table.id),
            self.column("t", &self.table.due),
        );
        let text = format!(
            "SELECT {} FROM {} AS t WHERE {} ORDER BY {due}, {id} LIMIT 1",
            self.key(),
            name(self.dialect, &self.table),
            self.due_conditions("t").join(" AND "),
        );
        Statement::new(text, Vec::new())
    }

    fn column(&self, alias: &str, column: &str) -> String {
        format!("{alias}.{}", quoted(self.dialect, column))
    }

    fn due_conditions(&self, alias: &str) -> Vec<String> {
        let (status, due) = (
            self.column(alias, &self.table.status),
            self.column(alias, &self.table.due),
        );
        let mut conditions = vec![
            format!("{status} = {}", literal(&self.table.new)),
            self.schema.clock.reached(&due),
        ];
        if let Some(next) = self
            .table
            .retries
            .as_ref()
            .and_then(|retries| retries.next.as_ref())
        {
            let next = self.column(alias, next);
            conditions.push(format!(
                "({next} IS NULL OR ({}))",
                self.schema.clock.reached(&next)
            ));
        }
        conditions
    }

    /// That a row comes after the cursor's.
    fn behind(&self, alias: &str, cursor: &Cursor, binds: &mut Binds) -> String {
        let (id, due) = (
            self.column(alias, &self.table.id),
            self.column(alias, &self.table.due),
        );
        if self.dialect == Dialect::MySql {
            // It makes no use of an index for a comparison of pairs.
            let from = self.bound_time(cursor, binds);
            let (later, key) = self.bound(cursor, binds);
            format!("{due} >= {from} AND ({due} > {later} OR {id} > {key})")
        } else {
            let (time, key) = self.bound(cursor, binds);
            format!("({due}, {id}) > ({time}, {key})")
        }
    }

    fn bound(&self, cursor: &Cursor, binds: &mut Binds) -> (String, String) {
        let time = self.bound_time(cursor, binds);
        (time, self.bound_key(&cursor.key, binds))
    }

    fn bound_time(&self, cursor: &Cursor, binds: &mut Binds) -> String {
        let placeholder = binds.add(Bind::Due(cursor.due.clone()));
        self.schema.clock.time_of(&placeholder)
    }

    /// A condition by which no index is to be chosen, nor left: PostgreSQL takes `id % 3 = 0` for one row in 200, and a
    /// partial index on new rows, where its statistics are old, for smaller than a list of keys.
    fn opaque(&self, condition: String) -> String {
        match self.dialect {
            Dialect::Postgres => format!("CASE WHEN {condition} THEN TRUE ELSE FALSE END"),
            Dialect::MySql | Dialect::Sqlite => condition,
        }
    }

    fn bound_key(&self, key: &Key, binds: &mut Binds) -> String {
        let placeholder = binds.add(key.into());
        match &self.schema.key_cast {
            Some(cast) => format!("CAST({placeholder} AS {cast})"),
            None => placeholder,
        }
    }

    fn is_one_of(&self, id: &str, keys: &[Key], binds: &mut Binds) -> String {
        if keys.is_empty() {
            return "1 = 0".to_owned();
        }
        if self.dialect == Dialect::Postgres {
            let texts: Vec<String> = keys
                .iter()
                .filter_map(|key| match key {
                    Key::Text(text) => Some(text.clone()),
                    Key::Integer(_) | Key::Unsigned(_) => None,
                })
                .collect();
            let numbers = keys
                .iter()
                .filter_map(|key| match key {
                    Key::Integer(number) => Some(*number),
                    Key::Text(_) | Key::Unsigned(_) => None,
                })
                .collect();
            let array = binds.add(if self.schema.key == KeyType::Text {
                Bind::Texts(texts)
            } else {
                Bind::Integers(numbers)
            });
            return match &self.schema.key_cast {
                Some(cast) => format!("{id} = ANY(CAST({array} AS {cast}[]))"),
                None => format!("{id} = ANY({array})"),
            };
        }
        let keys: Vec<Bind> = keys.iter().map(Bind::from).collect();
        format!("{id} IN ({})", list(&keys, binds))
    }

    fn key(&self) -> String {
        let id = self.column("t", &self.table.id);
        match (self.schema.key, self.dialect) {
            (KeyType::Text, Dialect::MySql) => format!("CONVERT({id} USING utf8mb4) AS {KEY}"),
            (KeyType::Text, _) => format!("CAST({id} AS TEXT) AS {KEY}"),
            (_, Dialect::Postgres) => format!("CAST({id} AS bigint) AS {KEY}"),
            (KeyType::Unsigned, _) => format!("CAST({id} AS UNSIGNED) AS {KEY}"),
            (KeyType::Integer, Dialect::MySql) => format!("CAST({id} AS SIGNED) AS {KEY}"),
            (KeyType::Integer, Dialect::Sqlite) => format!("CAST({id} AS INTEGER) AS {KEY}"),
        }
    }

    /// The user's columns first, then ours.
    fn selected(&self) -> String {
        let columns = if self.table.columns.is_empty() {
            "t.*".to_owned()
        } else {
            let columns = self.table.columns.iter();
            columns
                .map(|column| self.column("t", column))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let integer = match self.dialect {
            Dialect::Postgres => "bigint",
            Dialect::MySql => "SIGNED",
            Dialect::Sqlite => "INTEGER",
        };
        let attempts = match &self.table.retries {
            Some(retries) => self.column("t", &retries.attempts),
            None => "NULL".to_owned(),
        };
        let due = self.column("t", &self.table.due);
        let clock = &self.schema.clock;
        format!(
            "{columns}, {}, CAST({attempts} AS {integer}) AS {ATTEMPTS}, {} AS {DUE}, {} AS {LAG}",
            self.key(),
            clock.to_go_on_from(&due),
            clock.lag(&due)
        )
    }
}

/// A list of placeholders, filled up to a power of two with the last value: few different statements to prepare.
fn list(values: &[Bind], binds: &mut Binds) -> String {
    let padding = values.len().next_power_of_two() - values.len();
    let padded = values
        .iter()
        .chain(values.last().into_iter().cycle().take(padding));
    let list: Vec<String> = padded.map(|value| binds.add(value.clone())).collect();
    list.join(", ")
}

fn limit_bind(limit: usize) -> Bind {
    Bind::Integer(i64::try_from(limit).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests;
