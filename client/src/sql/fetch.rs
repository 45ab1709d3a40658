//! Which rows to ask for next: the place in the table, and how wide to look.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::share::{RowKey, Share, ShareUnion};

use super::driver::{Driver, Head, Statement};
use super::key::Key;
use super::statements::{Cursor, Statements};

/// After so long a keyset begins anew at the oldest row: rows may have been committed behind the cursor.
const REWIND: Duration = Duration::from_secs(2);

/// Most slots that one query looks into.
const MAX_WIDTH: usize = 64;

/// A query widens and narrows by this factor.
const STEP: usize = 4;

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

/// The owned slots, and which come next.
#[derive(Debug)]
struct Rotation {
    slots: Vec<u32>,
    next: usize,
    width: usize,
    /// Slots looked into since the last row was found.
    barren: usize,
}

/// What to ask.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) statement: Statement,
    /// Fewer rows than this: there are no more, where it looked.
    limit: usize,
    /// How many slots it looks into.
    width: usize,
    /// Rows outside must be dropped: the database could not tell.
    pub(super) filter: Option<ShareUnion>,
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
        if let Way::Keyset { after, .. } = &mut self.way {
            *after = None;
        }
    }

    /// What to ask for rows of this share, of which some are `known` already.
    pub(super) fn plan(
        &mut self,
        statements: &Statements,
        rows: &ShareUnion,
        epoch: Epoch,
        batch: usize,
        known: &HashSet<Key>,
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
        match &mut self.way {
            Way::Slots(rotation) => {
                let slots = rotation.take();
                let held = busiest(rotation.total(rows), &slots, known);
                let limit = batch.div_ceil(slots.len().max(1)) + held;
                Plan {
                    statement: statements.slots(&slots, limit),
                    limit,
                    width: slots.len(),
                    filter: None,
                }
            }
            Way::Keyset { after, since } => {
                let now = env::now();
                if since.is_none_or(|since| now >= since + REWIND) {
                    *after = None;
                }
                if after.is_none() {
                    *since = Some(now);
                }
                let filtered = !statements.selects();
                let limit = if filtered {
                    widened(batch, rows)
                } else {
                    batch
                };
                Plan {
                    statement: statements.page(rows, after.as_ref(), limit),
                    limit,
                    width: 0,
                    filter: filtered.then(|| rows.clone()),
                }
            }
        }
    }

    /// Takes notice of a page. Whether there may be more rows right now.
    pub(super) fn advance(&mut self, plan: &Plan, heads: &[Head], found: bool) -> bool {
        match &mut self.way {
            Way::Keyset { after, .. } => {
                let full = heads.len() >= plan.limit;
                *after = if full {
                    heads.last().and_then(Cursor::behind)
                } else {
                    None
                };
                full
            }
            Way::Slots(rotation) => rotation.advance(plan, heads.len(), found),
        }
    }
}

impl Rotation {
    fn new(share: &Share) -> Self {
        Self {
            slots: share.numbers().iter().collect(),
            next: 0,
            width: 1,
            barren: 0,
        }
    }

    fn total(&self, rows: &ShareUnion) -> u32 {
        rows.single().map_or(1, Share::total)
    }

    fn take(&mut self) -> Vec<u32> {
        let count = self.width.min(self.slots.len());
        let slots = self.slots.iter().cycle().skip(self.next).take(count);
        slots.copied().collect()
    }

    fn advance(&mut self, plan: &Plan, rows: usize, found: bool) -> bool {
        self.next = (self.next + plan.width) % self.slots.len().max(1);
        self.barren = if found { 0 } else { self.barren + plan.width };
        if rows < plan.limit {
            self.width = (self.width * STEP).min(MAX_WIDTH);
        } else if rows >= plan.limit * plan.width {
            self.width = (self.width / STEP).max(1);
        }
        let all_barren = self.barren >= self.slots.len();
        if all_barren {
            self.barren = 0;
        }
        !all_barren
    }
}

/// The largest number of known rows of one of these slots: so many more must be asked for to find new ones.
fn busiest(total: u32, slots: &[u32], known: &HashSet<Key>) -> usize {
    let mut counts = vec![0_usize; slots.len()];
    for key in known {
        let slot = RowKey::from(key).modulo(total.max(1));
        if let Some(at) = slots.iter().position(|own| *own == slot) {
            counts[at] += 1;
        }
    }
    counts.into_iter().max().unwrap_or(0)
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

/// A page: the rows with what the consumer needs of each.
pub(super) type Rows<D> = Vec<(Head, <D as sqlx::Database>::Row)>;

/// Asks the database. Rows whose key cannot be read are left out, and counted.
pub(super) async fn fetch<D: Driver>(
    pool: &sqlx::Pool<D>,
    statements: &Arc<Statements>,
    statement: &Statement,
) -> Result<(Rows<D>, u64), sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let rows = match D::fetch(&mut connection, statement).await {
        Ok(rows) => rows,
        Err(error) => {
            // What is wrong may be the connection's own: a plan of before a change of the table, say.
            connection.close_on_drop();
            return Err(error);
        }
    };
    let mut unreadable = 0;
    let mut page = Vec::with_capacity(rows.len());
    for row in rows {
        match D::head(&row, statements.key_type()) {
            Ok(head) => page.push((head, row)),
            Err(error) => {
                tracing::warn!(%error, "a row is left out: its key cannot be read");
                unreadable += 1;
            }
        }
    }
    Ok((page, unreadable))
}

#[cfg(test)]
mod tests {
    use skyschedule_common::share::Numbers;

    use super::*;

    fn plan(limit: usize, width: usize) -> Plan {
        Plan {
            statement: Statement::new(String::new(), Vec::new()),
            limit,
            width,
            filter: None,
        }
    }

    #[test]
    fn a_rotation_visits_every_slot_and_widens_while_it_finds_nothing() {
        let share = Share::new(1_024, Numbers::range(0, 99)).unwrap();
        let mut rotation = Rotation::new(&share);
        let mut seen: Vec<u32> = Vec::new();
        let mut queries = 0;
        loop {
            let slots = rotation.take();
            seen.extend(&slots);
            queries += 1;
            if !rotation.advance(&plan(10, slots.len()), 0, false) {
                break;
            }
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 100);
        assert!(queries <= 6, "{queries}");
        let wide = rotation.take().len();
        rotation.advance(&plan(2, wide), 2 * wide, true);
        assert!(rotation.take().len() < wide, "full slots: narrower again");
    }

    #[test]
    fn a_page_to_filter_is_wider_within_bounds() {
        let rows = |total| ShareUnion::from(Share::new(total, Numbers::range(0, 0)).unwrap());
        assert_eq!(widened(100, &rows(1)), 100);
        assert_eq!(widened(100, &rows(5)), 500);
        assert_eq!(widened(100, &rows(1_000)), MAX_FILTERED);
    }
}
