//! The SQL of a consumer: which statements there are, and what they look like in each database.
//!
//! Their shapes were measured. Status values, masks and totals are literals, because a bound one keeps PostgreSQL
//! from using a partial or expression index in a generic plan; only slot, cursor, limit and keys are bound. There is
//! no LIMIT without ORDER BY.

use std::time::Duration;

use skyschedule_common::share::{Dialect, Share, ShareUnion};

use super::driver::{ATTEMPTS, Bind, DUE, Due, KEY, LAG, Statement};
use super::key::Key;
use super::schema::{KeyType, Schema};
use super::table::{Slots, Table, literal, quoted};

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

    /// The slots of this share, when rows are to be fetched slot by slot.
    pub(super) fn slots_of<'a>(&self, rows: &'a ShareUnion) -> Option<&'a Share> {
        let count = self.table.slots.as_ref()?.count;
        let share = rows.single().filter(|share| share.total() == count)?;
        (self.slot_column().is_some() || self.selects()).then_some(share)
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
        if let Some(cursor) = after {
            conditions.push(self.behind(&id, &due, cursor, &mut binds));
        }
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

    /// The next due rows of one slot, by due time and id.
    pub(super) fn slot(&self, slot: u32, after: Option<&Cursor>, limit: usize) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let slot = binds.add(Bind::Integer(i64::from(slot)));
        let rest = self.of_slot("t", &slot, after, &mut binds);
        let limit = binds.add(limit_bind(limit));
        let text = format!("SELECT {}{rest} LIMIT {limit}", self.selected());
        Statement::new(text, binds.values)
    }

    /// The first due rows of each of these slots, slot by slot: at most `limit` of each, or of all together (MariaDB,
    /// MySQL).
    pub(super) fn slots(&self, slots: &[u32], limit: usize) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let selected = self.selected();
        let text = match self.dialect {
            Dialect::Postgres => {
                let slots = slots.iter().copied().map(i64::from).collect();
                let slots = binds.add(Bind::Integers(slots));
                let rest = self.of_slot("u", "s.slot", None, &mut binds);
                let limit = binds.add(limit_bind(limit));
                format!(
                    "SELECT {selected} FROM unnest({slots}) AS s(slot) \
                     CROSS JOIN LATERAL (SELECT u.*{rest} LIMIT {limit}) AS t"
                )
            }
            // It opens the table and plans anew for each arm of a UNION: 64 of them take 20 ms to find nothing.
            Dialect::MySql => {
                let (slot, id, due) = (
                    self.slot_of_row("t"),
                    self.column("t", &self.table.id),
                    self.column("t", &self.table.due),
                );
                let slots = slots.iter().map(|slot| Bind::Integer(i64::from(*slot)));
                let list = list(&slots.collect::<Vec<_>>(), &mut binds);
                let limit = binds.add(limit_bind(limit));
                format!(
                    "SELECT {selected} FROM {} AS t WHERE {slot} IN ({list}) AND {} \
                     ORDER BY {slot}, {due}, {id} LIMIT {limit}",
                    name(self.dialect, &self.table),
                    self.due_conditions("t").join(" AND "),
                )
            }
            Dialect::Sqlite => {
                let mut arms = Vec::with_capacity(slots.len());
                for slot in slots {
                    let slot = binds.add(Bind::Integer(i64::from(*slot)));
                    let rest = self.of_slot("u", &slot, None, &mut binds);
                    let limit = binds.add(limit_bind(limit));
                    arms.push(format!(
                        "SELECT {selected} FROM (SELECT u.*{rest} LIMIT {limit}) AS t"
                    ));
                }
                arms.join(" UNION ALL ")
            }
        };
        Statement::new(text, binds.values)
    }

    /// What follows the selected columns: the due rows of a slot, in order.
    fn of_slot(
        &self,
        alias: &str,
        slot: &str,
        after: Option<&Cursor>,
        binds: &mut Binds,
    ) -> String {
        let (id, due) = (
            self.column(alias, &self.table.id),
            self.column(alias, &self.table.due),
        );
        let mut conditions = vec![format!("{} = {slot}", self.slot_of_row(alias))];
        conditions.extend(self.due_conditions(alias));
        if let Some(cursor) = after {
            conditions.push(self.behind(&id, &due, cursor, binds));
        }
        format!(
            " FROM {} AS {alias} WHERE {} ORDER BY {due}, {id}",
            name(self.dialect, &self.table),
            conditions.join(" AND "),
        )
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

    fn slot_column(&self) -> Option<&String> {
        self.table.slots.as_ref()?.column.as_ref()
    }

    /// The slot of a row: its column, or the expression of the index.
    fn slot_of_row(&self, alias: &str) -> String {
        if let Some(column) = self.slot_column() {
            return self.column(alias, column);
        }
        let count = self
            .table
            .slots
            .as_ref()
            .map_or(1, |slots: &Slots| slots.count);
        let id = self.column(alias, &self.table.id);
        let kind = self.schema.key.kind();
        self.dialect.remainder(&id, kind, count).unwrap_or_default()
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

    fn behind(&self, id: &str, due: &str, cursor: &Cursor, binds: &mut Binds) -> String {
        let clock = &self.schema.clock;
        let time = |binds: &mut Binds| {
            let placeholder = binds.add(Bind::Due(cursor.due.clone()));
            clock.time_of(&placeholder)
        };
        if self.dialect == Dialect::MySql {
            // It makes no use of an index for a comparison of pairs.
            let (from, later) = (time(binds), time(binds));
            let key = self.bound_key(&cursor.key, binds);
            format!("{due} >= {from} AND ({due} > {later} OR {id} > {key})")
        } else {
            let time = time(binds);
            let key = self.bound_key(&cursor.key, binds);
            format!("({due}, {id}) > ({time}, {key})")
        }
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
            Some(retries) => format!("COALESCE({}, 0)", self.column("t", &retries.attempts)),
            None => "0".to_owned(),
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
mod tests {
    use skyschedule_common::share::Numbers;

    use super::*;
    use crate::sql::clock::Clock;
    use crate::sql::table::Retry;

    fn statements(dialect: Dialect, table: Table) -> Statements {
        let clock = match dialect {
            Dialect::Postgres => Clock::PostgresZoned,
            Dialect::MySql => Clock::MySqlLocal {
                zone: "@@global.time_zone".to_owned(),
            },
            Dialect::Sqlite => Clock::SqliteText { minutes: 0 },
        };
        let schema = Schema {
            key: KeyType::Integer,
            key_cast: None,
            clock,
        };
        Statements::new(dialect, table, schema)
    }

    fn share(total: u32, last: u32) -> ShareUnion {
        Share::new(total, Numbers::range(0, last)).unwrap().into()
    }

    fn cursor() -> Cursor {
        Cursor {
            due: Due::Text("2026-11-30 12:00:00".to_owned()),
            key: Key::Integer(7),
        }
    }

    /// The part that decides how the table is read.
    fn condition(statement: &Statement) -> &str {
        statement.text.split_once(" WHERE ").unwrap().1
    }

    #[test]
    fn a_page_has_literals_for_what_an_index_is_made_of_and_binds_the_rest() {
        let table = || Table::new("task_info");
        let page = |dialect| statements(dialect, table()).page(&share(3, 0), Some(&cursor()), 100);
        assert_eq!(
            condition(&page(Dialect::Postgres)),
            "t.\"status\" = 0 AND t.\"task_time\" <= now() \
             AND (t.\"task_time\", t.\"id\") > ($1, $2) \
             AND CASE WHEN ((t.\"id\" % 3) + 3) % 3 = 0 THEN TRUE ELSE FALSE END \
             ORDER BY t.\"task_time\", t.\"id\" LIMIT $3"
        );
        let mysql = page(Dialect::MySql);
        assert_eq!(
            condition(&mysql),
            "t.`status` = 0 AND t.`task_time` <= CONVERT_TZ(UTC_TIMESTAMP(6), '+00:00', @@global.time_zone) \
             AND t.`task_time` >= ? AND (t.`task_time` > ? OR t.`id` > ?) \
             AND ((t.`id` % 3) + 3) % 3 = 0 ORDER BY t.`task_time`, t.`id` LIMIT ?"
        );
        assert_eq!(mysql.binds.len(), 4);
        assert_eq!(page(Dialect::Sqlite).binds.len(), 3);
    }

    #[test]
    fn slots_are_asked_for_one_by_one_each_with_its_own_limit() {
        let ask = |dialect, slots: &[u32]| {
            statements(dialect, Table::new("task_info").slot_index(1_024)).slots(slots, 50)
        };
        let statements = |dialect| statements(dialect, Table::new("task_info").slot_index(1_024));
        let one = statements(Dialect::Postgres).slot(9, None, 50);
        assert!(
            one.text.contains(
                "(t.\"id\" & 1023) = $1 AND t.\"status\" = 0 AND t.\"task_time\" <= now() \
                 ORDER BY t.\"task_time\", t.\"id\" LIMIT $2"
            ),
            "{}",
            one.text
        );
        let next = statements(Dialect::Postgres).slot(9, Some(&cursor()), 50);
        assert!(
            next.text
                .contains("(t.\"task_time\", t.\"id\") > ($2, $3) ORDER BY")
        );
        let many = ask(Dialect::Postgres, &[9, 10, 11]);
        assert!(
            many.text
                .contains("unnest($1) AS s(slot) CROSS JOIN LATERAL")
        );
        assert_eq!(many.binds.len(), 2);
        let list = ask(Dialect::MySql, &[9, 10, 11]);
        assert!(
            list.text.contains("(t.`id` & 1023) IN (?, ?, ?, ?)")
                && list
                    .text
                    .ends_with("ORDER BY (t.`id` & 1023), t.`task_time`, t.`id` LIMIT ?"),
            "{}",
            list.text
        );
        let union = ask(Dialect::Sqlite, &[9, 10, 11]);
        assert_eq!(union.text.matches("UNION ALL").count(), 2);
        assert_eq!(union.binds.len(), 6);
    }

    #[test]
    fn slots_serve_only_a_group_that_has_as_many() {
        let with = statements(Dialect::Postgres, Table::new("t").slot_index(1_024));
        assert!(with.slots_of(&share(1_024, 99)).is_some());
        assert!(with.slots_of(&share(512, 99)).is_none() && with.slots_of(&share(3, 0)).is_none());
        let without = statements(Dialect::Postgres, Table::new("t"));
        assert!(without.slots_of(&share(1_024, 99)).is_none());
    }

    #[test]
    fn marks_are_conditional() {
        let table = Table::new("t").retries("attempts", Retry::default());
        let keys = [Key::Integer(5), Key::Integer(6), Key::Integer(7)];
        let mark = |dialect, mark| statements(dialect, table.clone()).mark(mark, &keys);
        let done = mark(Dialect::Postgres, Mark::Done);
        assert_eq!(
            done.text,
            "UPDATE \"t\" SET \"status\" = 1 WHERE \"id\" = ANY($1) \
             AND CASE WHEN \"status\" = 0 THEN TRUE ELSE FALSE END"
        );
        let done = mark(Dialect::MySql, Mark::Done);
        assert_eq!(
            done.text,
            "UPDATE `t` SET `status` = 1 WHERE `id` IN (?, ?, ?, ?) AND `status` = 0"
        );
        assert_eq!(done.binds[2], done.binds[3], "filled up with the last key");
        let again = Mark::Again {
            attempts: 1,
            wait: Duration::from_secs(20),
        };
        let again = mark(Dialect::Postgres, again);
        assert!(
            again
                .text
                .ends_with("FALSE END AND COALESCE(\"attempts\", 0) = 1")
        );
        assert!(!again.lasting);
    }
}
