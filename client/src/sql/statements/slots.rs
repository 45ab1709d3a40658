//! How rows are fetched slot by slot.

use skyschedule_common::share::{Dialect, Share, ShareUnion};

use super::super::driver::{Bind, Statement};
use super::super::rotation::MAX_WIDTH;
use super::super::table::Slots;
use super::{Binds, Cursor, Statements, limit_bind, list, name};

/// Of each slot that is read on together with others, so many rows are asked for at least.
const ROWS_OF_A_SLOT: usize = 16;

impl Statements {
    /// The slots of this share, when rows are to be fetched slot by slot.
    pub(in crate::sql) fn slots_of<'a>(&self, rows: &'a ShareUnion) -> Option<&'a Share> {
        let count = self.table.slots.as_ref()?.count;
        let share = rows.single().filter(|share| share.total() == count)?;
        (self.slot_column().is_some() || self.selects()).then_some(share)
    }

    /// The next due rows of one slot, by due time and id.
    pub(in crate::sql) fn slot(
        &self,
        slot: u32,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let slot = binds.add(Bind::Integer(i64::from(slot)));
        let behind = after.map(|cursor| self.behind("t", cursor, &mut binds));
        let rest = self.of_slot("t", &slot, behind);
        let limit = binds.add(limit_bind(limit));
        let text = format!("SELECT {}{rest} LIMIT {limit}", self.selected());
        Statement::new(text, binds.values)
    }

    /// How many slots one query may read behind cursors, so that it gets about `rows`. Neighbours among slots are
    /// neighbours in the table, so PostgreSQL reads and marks fewer pages; the others ask more for each slot than that gains.
    pub(in crate::sql) fn slots_behind_at_most(&self, rows: usize) -> usize {
        match self.dialect {
            Dialect::Postgres => (rows / ROWS_OF_A_SLOT).clamp(1, MAX_WIDTH),
            Dialect::MySql | Dialect::Sqlite => 1,
        }
    }

    /// The next due rows of each of these slots, at most `limit` of each, by due time and id (PostgreSQL).
    pub(in crate::sql) fn slots_behind(
        &self,
        slots: &[u32],
        after: &[Cursor],
        limit: usize,
    ) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let slots = slots.iter().map(|slot| i64::from(*slot));
        let mut looks: Vec<(i64, &Cursor)> = slots.zip(after).collect();
        if let Some((_, cursor)) = looks.last().copied() {
            // As in `list`; no row has this slot.
            looks.resize(looks.len().next_power_of_two(), (-1, cursor));
        }
        let looks: Vec<String> = looks
            .into_iter()
            .map(|(slot, cursor)| {
                let slot = binds.add(Bind::Integer(slot));
                let (due, key) = self.bound(cursor, &mut binds);
                format!("({slot}, {due}, {key})")
            })
            .collect();
        let (id, due) = (
            self.column("u", &self.table.id),
            self.column("u", &self.table.due),
        );
        let behind = format!("({due}, {id}) > (s.due, s.id)");
        let rest = self.of_slot("u", "s.slot", Some(behind));
        let looks = format!("(VALUES {}) AS s(slot, due, id)", looks.join(", "));
        let text = self.of_each_slot(&looks, &rest, limit, &mut binds);
        Statement::new(text, binds.values)
    }

    /// PostgreSQL's way to look into several slots. By due time: marks of a batch then meet neighbours.
    fn of_each_slot(&self, looks: &str, rest: &str, limit: usize, binds: &mut Binds) -> String {
        let (id, due) = (
            self.column("t", &self.table.id),
            self.column("t", &self.table.due),
        );
        format!(
            "SELECT {} FROM {looks} CROSS JOIN LATERAL (SELECT u.*{rest} LIMIT {}) AS t ORDER BY {due}, {id}",
            self.selected(),
            binds.add(limit_bind(limit)),
        )
    }

    /// The first due rows of each of these slots: at most `limit` of each, by due time and id (PostgreSQL), or slot by slot
    /// (SQLite), or of all together, slot by slot (MariaDB, MySQL).
    pub(in crate::sql) fn slots(&self, slots: &[u32], limit: usize) -> Statement {
        let mut binds = Binds::new(self.dialect);
        let selected = self.selected();
        let text = match self.dialect {
            Dialect::Postgres => {
                let slots = slots.iter().copied().map(i64::from).collect();
                let slots = binds.add(Bind::Integers(slots));
                let rest = self.of_slot("u", "s.slot", None);
                let looks = format!("unnest({slots}) AS s(slot)");
                self.of_each_slot(&looks, &rest, limit, &mut binds)
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
                    let rest = self.of_slot("u", &slot, None);
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
    fn of_slot(&self, alias: &str, slot: &str, behind: Option<String>) -> String {
        let (id, due) = (
            self.column(alias, &self.table.id),
            self.column(alias, &self.table.due),
        );
        let mut conditions = vec![format!("{} = {slot}", self.slot_of_row(alias))];
        conditions.extend(self.due_conditions(alias));
        conditions.extend(behind);
        format!(
            " FROM {} AS {alias} WHERE {} ORDER BY {due}, {id}",
            name(self.dialect, &self.table),
            conditions.join(" AND "),
        )
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
}
