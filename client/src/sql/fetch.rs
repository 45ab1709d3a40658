//! Which rows to ask for next, and how the database is asked.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::share::{Dialect, RowKey, Share, ShareUnion};
use sqlx::pool::PoolConnection;

use super::driver::{Driver, Head, Statement};
use super::key::Key;
use super::rotation::Rotation;
use super::statements::{Cursor, Statements};

/// After so long a keyset begins anew at the oldest row: rows may have been committed behind the cursor.
pub(super) const REWIND: Duration = Duration::from_secs(2);

/// Most rows of a page that the process has to filter.
const MAX_FILTERED: usize = 5_000;

/// Where a consumer is in its share of the table.
#[derive(Debug)]
pub(super) struct Place {
    rows: ShareUnion,
    epoch: Option<Epoch>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// By due time and id through the whole share.
    Keyset {
        after: Option<Cursor>,
        since: Option<Instant>,
    },
    /// Slot by slot, round and round.
    Slots(Rotation),
}

/// What to ask.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) statement: Statement,
    /// Fewer rows than this: there are no more, where it looked.
    pub(super) limit: usize,
    /// The slots it looks into, of so many; none where it looks by due time.
    pub(super) slots: Vec<u32>,
    pub(super) total: u32,
    /// Whether the limit is that of all slots together, and the slots are read in ascending order.
    pub(super) together: bool,
    /// Rows outside must be dropped: the database could not tell.
    pub(super) filter: Option<ShareUnion>,
}

/// How far a page came.
#[derive(Debug, Default)]
pub(super) struct Extent {
    pub(super) rows: usize,
    /// Behind its last row.
    pub(super) last: Option<Cursor>,
    /// For each slot that has rows in it: how many, and behind the last one.
    pub(super) slots: BTreeMap<u32, (usize, Option<Cursor>)>,
    /// How long the query took.
    pub(super) took: Duration,
}

impl Place {
    pub(super) fn new() -> Self {
        Self {
            rows: ShareUnion::NONE,
            epoch: None,
            way: Way::Keyset {
                after: None,
                since: None,
            },
        }
    }

    /// Back to the oldest row.
    pub(super) fn rewind(&mut self) {
        match &mut self.way {
            Way::Keyset { after, .. } => *after = None,
            Way::Slots(rotation) => rotation.rewind(),
        }
    }

    /// What to ask for about `most` rows of this share beside those that are `known` already.
    pub(super) fn plan<'k>(
        &mut self,
        statements: &Statements,
        rows: &ShareUnion,
        epoch: Epoch,
        most: usize,
        known: impl Iterator<Item = &'k Key>,
    ) -> Plan {
        if self.rows != *rows || self.epoch != Some(epoch) {
            self.rows = rows.clone();
            self.epoch = Some(epoch);
            self.way = match statements.slots_of(rows) {
                Some(share) => Way::Slots(Rotation::new(share)),
                None => Way::Keyset {
                    after: None,
                    since: None,
                },
            };
        }
        let now = env::now();
        match &mut self.way {
            Way::Slots(rotation) => {
                let total = rows.single().map_or(1, Share::total);
                let (slots, after) = rotation.take(statements.slots_behind_at_most(most), now);
                plan_slots(statements, slots, &after, total, most, known)
            }
            Way::Keyset { after, since } => {
                if since.is_none_or(|since| now >= since + REWIND) {
                    *after = None;
                }
                if after.is_none() {
                    *since = Some(now);
                }
                let filtered = !statements.selects();
                let limit = if filtered { widened(most, rows) } else { most };
                Plan {
                    statement: statements.page(rows, after.as_ref(), limit),
                    limit,
                    slots: Vec::new(),
                    total: 1,
                    together: false,
                    filter: filtered.then(|| rows.clone()),
                }
            }
        }
    }

    /// Takes notice of a page. Whether there may be more rows right now.
    pub(super) fn advance(&mut self, plan: &Plan, page: &mut Extent) -> bool {
        match &mut self.way {
            Way::Keyset { after, .. } => {
                let full = page.rows >= plan.limit;
                *after = page.last.take().filter(|_| full);
                full
            }
            Way::Slots(rotation) => rotation.advance(plan, page, env::now()),
        }
    }
}

fn plan_slots<'k>(
    statements: &Statements,
    slots: Vec<u32>,
    after: &[Cursor],
    total: u32,
    most: usize,
    known: impl Iterator<Item = &'k Key>,
) -> Plan {
    let together = slots.len() > 1 && statements.dialect() == Dialect::MySql;
    let (statement, limit) = match (&slots[..], after) {
        // No known row is behind a cursor.
        ([slot], [cursor]) => (statements.slot(*slot, Some(cursor), most), most),
        (many, [_, ..]) => {
            let limit = most.div_ceil(many.len().max(1));
            (statements.slots_behind(many, after, limit), limit)
        }
        ([slot], []) => {
            let limit = most + held(total, &slots, known).sum::<usize>();
            (statements.slot(*slot, None, limit), limit)
        }
        (many, _) if together => {
            let limit = most + held(total, many, known).sum::<usize>();
            (statements.slots(many, limit), limit)
        }
        (many, _) => {
            let held = held(total, many, known).max().unwrap_or(0);
            let limit = most.div_ceil(many.len().max(1)) + held;
            (statements.slots(many, limit), limit)
        }
    };
    Plan {
        statement,
        limit,
        slots,
        total,
        together,
        filter: None,
    }
}

/// How many known rows each of these slots has: so many more must be asked for to find new ones.
fn held<'k>(
    total: u32,
    slots: &[u32],
    known: impl Iterator<Item = &'k Key>,
) -> impl Iterator<Item = usize> {
    let mut counts = vec![0_usize; slots.len()];
    for key in known {
        let slot = RowKey::from(key).modulo(total.max(1));
        if let Some(at) = slots.iter().position(|own| *own == slot) {
            counts[at] += 1;
        }
    }
    counts.into_iter()
}

/// So many rows that about a batch of them is in the share.
fn widened(batch: usize, rows: &ShareUnion) -> usize {
    let one_in = rows
        .shares()
        .iter()
        .filter_map(|share| u64::from(share.total()).checked_div(share.numbers().len()))
        .min()
        .unwrap_or(1);
    let one_in = usize::try_from(one_in).unwrap_or(1).max(1);
    batch.saturating_mul(one_in).min(MAX_FILTERED).max(batch)
}

/// The rows that a query found, with what the consumer needs of each.
pub(super) struct Page<D: Driver> {
    pub(super) rows: Vec<(Head, D::Row)>,
    pub(super) extent: Extent,
    /// For how long the oldest of them has been due.
    pub(super) lag: Duration,
    /// Rows whose key cannot be read: they are left out.
    pub(super) unreadable: u64,
}

/// Asks the database.
pub(super) async fn fetch<D: Driver>(
    connection: &mut PoolConnection<D>,
    statements: &Statements,
    plan: &Plan,
) -> Result<Page<D>, sqlx::Error> {
    let begun = env::now();
    let rows = match D::fetch(connection, &plan.statement).await {
        Ok(rows) => rows,
        Err(error) => {
            // What is wrong may be the connection's own: a plan of before a change of the table, say.
            connection.close_on_drop();
            return Err(error);
        }
    };
    let mut page = Page {
        rows: Vec::with_capacity(rows.len()),
        extent: Extent {
            rows: rows.len(),
            took: begun.elapsed(),
            ..Extent::default()
        },
        lag: Duration::ZERO,
        unreadable: 0,
    };
    for row in rows {
        match D::head(&row, statements.key_type()) {
            Ok(head) => page.rows.push((head, row)),
            Err(error) => {
                tracing::warn!(%error, "a row is left out: its key cannot be read");
                page.unreadable += 1;
            }
        }
    }
    page.measure(plan)?;
    Ok(page)
}

impl<D: Driver> Page<D> {
    /// Where the page begins and ends, and where each slot does: the oldest row is the first of one.
    fn measure(&mut self, plan: &Plan) -> Result<(), sqlx::Error> {
        let slot_of = |head: &Head| match plan.slots[..] {
            [] => 0,
            [slot] => slot,
            _ => RowKey::from(&head.key).modulo(plan.total.max(1)),
        };
        let cursor = |(head, row): &(Head, D::Row)| -> Result<Option<Cursor>, sqlx::Error> {
            let key = head.key.clone();
            Ok(D::due(row)?.map(|due| Cursor { due, key }))
        };
        let mut lag = 0.0_f64;
        let mut found: HashMap<u32, (usize, usize)> = HashMap::new();
        for (at, (head, row)) in self.rows.iter().enumerate() {
            match found.entry(slot_of(head)) {
                Entry::Occupied(mut slot) => {
                    let (rows, last) = slot.get_mut();
                    (*rows, *last) = (*rows + 1, at);
                }
                Entry::Vacant(slot) => {
                    lag = lag.max(D::lag(row)?);
                    slot.insert((1, at));
                }
            }
        }
        for (slot, (rows, last)) in found {
            let last = cursor(&self.rows[last])?;
            if plan.slots.is_empty() {
                self.extent.last = last;
            } else {
                self.extent.slots.insert(slot, (rows, last));
            }
        }
        self.lag = Duration::try_from_secs_f64(lag).unwrap_or(Duration::ZERO);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use skyschedule_common::share::Numbers;

    use super::*;

    #[test]
    fn a_page_to_filter_is_wider_within_bounds() {
        let rows = |total| ShareUnion::from(Share::new(total, Numbers::range(0, 0)).unwrap());
        assert_eq!(widened(100, &rows(1)), 100);
        assert_eq!(widened(100, &rows(5)), 500);
        assert_eq!(widened(100, &rows(1_000)), MAX_FILTERED);
    }
}
