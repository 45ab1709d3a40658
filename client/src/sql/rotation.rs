//! The slots of a share, some after the others, so that none starves.
//!
//! A slot is read on behind its last row while it gives as many as it may, so that rows which were marked meanwhile, and
//! which the database still has to step over, are met once. A slot that had no more is left out for a while; when all have,
//! the consumer is idle, and looks into many slots at a time.

use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::share::Share;

use super::fetch::{Extent, Plan, REWIND};
use super::statements::Cursor;

/// Most slots that one query looks into.
pub(super) const MAX_WIDTH: usize = 64;

/// A query widens and narrows by this factor.
const STEP: usize = 4;

/// For how long a slot is left out that has no more, at least.
const DRY: Duration = Duration::from_millis(20);

/// Looks into slots without rows take one part in so many of the time.
const THRIFT: u32 = 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Rotation {
    slots: Vec<Slot>,
    next: usize,
    width: usize,
    /// How many slots are dry.
    dry: usize,
}

#[derive(Debug)]
struct Slot {
    number: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    /// To be read from its oldest row.
    Unread,
    /// Read as far as this row; its oldest row was asked for at that time.
    Behind(Cursor, Instant),
    /// It had no more rows. Not to be read before that time, unless all are dry.
    Dry(Instant),
}

impl State {
    fn is_dry(&self) -> bool {
        matches!(self, Self::Dry(_))
    }

    fn waits(&self, now: Instant) -> bool {
        matches!(self, Self::Dry(until) if now < *until)
    }

    /// Where to read on. Not for ever: rows may have been committed behind it.
    fn cursor(&self, now: Instant) -> Option<&Cursor> {
        match self {
            Self::Behind(cursor, since) if now < *since + REWIND => Some(cursor),
            _ => None,
        }
    }
}

impl Rotation {
    pub(super) fn new(share: &Share) -> Self {
        let slot = |number| Slot {
            number,
            state: State::Unread,
        };
        Self {
            slots: share.numbers().iter().map(slot).collect(),
            next: 0,
            width: 1,
            dry: 0,
        }
    }

    /// Back to the oldest row of each slot.
    pub(super) fn rewind(&mut self) {
        for slot in &mut self.slots {
            slot.state = State::Unread;
        }
        self.dry = 0;
    }

    /// The next slot that may be read; while none may be, the next one all the same, rather than none.
    fn next_of(&self, now: Instant) -> usize {
        let count = self.slots.len();
        let mut around = (self.next..count).chain(0..self.next);
        let next = around.find(|at| !self.slots[*at].state.waits(now));
        next.unwrap_or(self.next)
    }

    /// The slots to read: each behind a cursor, of which there may be as many as `behind`, or each from its oldest row.
    pub(super) fn take(&mut self, behind: usize, now: Instant) -> (Vec<u32>, Vec<Cursor>) {
        if self.dry >= self.slots.len() {
            self.rewind();
        }
        self.next = self.next_of(now);
        let (mut slots, mut cursors) = (Vec::new(), Vec::new());
        let (before, from) = self.slots.split_at(self.next);
        for slot in from.iter().chain(before) {
            let cursor = slot.state.cursor(now);
            let is_first = slots.is_empty();
            let fits = match cursor {
                Some(_) => cursors.len() == slots.len() && slots.len() < behind,
                None => cursors.is_empty() && slots.len() < self.width.max(behind),
            };
            if !is_first && (!fits || slot.state.waits(now)) {
                break;
            }
            slots.push(slot.number);
            cursors.extend(cursor.cloned());
        }
        (slots, cursors)
    }

    /// Takes notice of a page. Whether there may be more rows right now.
    pub(super) fn advance(&mut self, plan: &Plan, page: &mut Extent, now: Instant) -> bool {
        let full = page.rows >= plan.limit;
        // Read together, only those before the last one are read to their ends.
        let last_read = match page.slots.keys().next_back() {
            Some(number) if plan.together && full && plan.slots.contains(number) => *number,
            _ => u32::MAX,
        };
        let until = now + (page.took * THRIFT).clamp(DRY, REWIND);
        let count = self.slots.len();
        for _ in 0..plan.slots.len() {
            let Some(slot) = self.slots.get_mut(self.next) else {
                break;
            };
            self.next = (self.next + 1) % count;
            let found = page.slots.remove(&slot.number);
            let since = match &slot.state {
                State::Behind(_, since) if now < *since + REWIND => *since,
                _ => now,
            };
            let was_dry = slot.state.is_dry();
            slot.state = match found {
                Some((rows, last)) if rows >= plan.limit || slot.number == last_read => {
                    last.map_or(State::Unread, |cursor| State::Behind(cursor, since))
                }
                _ if slot.number > last_read => State::Unread,
                _ => State::Dry(until),
            };
            self.dry = self.dry + usize::from(slot.state.is_dry()) - usize::from(was_dry);
        }
        let wanted = if plan.together {
            plan.limit
        } else {
            plan.limit * plan.slots.len()
        };
        if page.rows < wanted / 2 {
            self.width = (self.width * STEP).min(MAX_WIDTH);
        } else if page.rows >= wanted {
            self.width = (self.width / STEP).max(1);
        }
        self.dry < count
    }
}

#[cfg(test)]
mod tests {
    use skyschedule_common::share::Numbers;

    use super::super::driver::{Due, Statement};
    use super::super::key::Key;
    use super::*;

    fn rotation(slots: u32) -> Rotation {
        Rotation::new(&Share::new(1_024, Numbers::range(0, slots - 1)).unwrap())
    }

    fn plan(slots: &[u32], limit: usize) -> Plan {
        Plan {
            statement: Statement::new(String::new(), Vec::new()),
            limit,
            slots: slots.to_vec(),
            total: 1_024,
            together: false,
            filter: None,
        }
    }

    fn cursor() -> Option<Cursor> {
        Some(Cursor {
            due: Due::Text(String::new()),
            key: Key::Integer(1),
        })
    }

    /// Pages with so many rows of each of these slots.
    fn page(slots: &[(u32, usize)]) -> Extent {
        Extent {
            rows: slots.iter().map(|(_, rows)| rows).sum(),
            slots: slots
                .iter()
                .map(|(slot, rows)| (*slot, (*rows, cursor())))
                .collect(),
            ..Extent::default()
        }
    }

    #[test]
    fn every_slot_is_visited_and_the_look_widens_while_it_finds_nothing() {
        let (mut rotation, now) = (rotation(100), Instant::from_nanos(0));
        let mut seen: Vec<u32> = Vec::new();
        let mut queries = 0;
        loop {
            let (slots, after) = rotation.take(1, now);
            assert!(after.is_empty());
            seen.extend(&slots);
            queries += 1;
            if !rotation.advance(&plan(&slots, 10), &mut page(&[]), now) {
                break;
            }
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 100);
        assert!(queries <= 6, "{queries}");
        let (wide, _) = rotation.take(1, now);
        let full: Vec<(u32, usize)> = wide.iter().map(|slot| (*slot, 2)).collect();
        rotation.advance(&plan(&wide, 2), &mut page(&full), now);
        assert!(rotation.width < wide.len(), "full slots: narrower again");
    }

    #[test]
    fn a_full_slot_is_read_on_but_not_before_the_others_nor_for_ever() {
        let (mut rotation, now) = (rotation(3), Instant::from_nanos(0));
        for slot in 0..3 {
            assert_eq!(rotation.take(1, now).0, [slot]);
            assert!(rotation.advance(&plan(&[slot], 10), &mut page(&[(slot, 10)]), now));
        }
        let (slots, after) = rotation.take(1, now);
        assert!(slots == [0] && after == [cursor().unwrap()]);
        let (_, after) = rotation.take(1, now + REWIND);
        assert!(after.is_empty(), "rows may have come behind the cursor");
    }

    #[test]
    fn several_slots_are_read_on_together_each_behind_its_own_row() {
        let (mut rotation, now) = (rotation(6), Instant::from_nanos(0));
        for slots in [vec![0, 1, 2, 3], vec![4, 5]] {
            let (taken, after) = rotation.take(4, now);
            assert!(taken == slots && after.is_empty());
            let full: Vec<(u32, usize)> = taken.iter().map(|slot| (*slot, 10)).collect();
            assert!(rotation.advance(&plan(&taken, 10), &mut page(&full), now));
        }
        let (taken, after) = rotation.take(4, now);
        assert_eq!(taken, [0, 1, 2, 3]);
        assert_eq!(after.len(), 4, "none of them from its oldest row");
    }

    #[test]
    fn a_slot_without_more_rows_is_left_out_for_a_while_only() {
        let (mut rotation, now) = (rotation(2), Instant::from_nanos(0));
        assert_eq!(rotation.take(1, now).0, [0]);
        assert!(rotation.advance(&plan(&[0], 10), &mut page(&[(0, 9)]), now));
        for _ in 0..3 {
            assert_eq!(rotation.take(1, now).0, [1]);
            assert!(rotation.advance(&plan(&[1], 10), &mut page(&[(1, 10)]), now));
        }
        let later = now + DRY;
        assert_eq!(rotation.take(1, later).0, [0], "new rows may be in it");
    }

    #[test]
    fn slots_read_together_are_read_to_the_last_row_of_the_page() {
        let (mut rotation, now) = (rotation(4), Instant::from_nanos(0));
        rotation.width = 4;
        let (slots, _) = rotation.take(1, now);
        assert_eq!(slots, [0, 1, 2, 3]);
        let together = Plan {
            together: true,
            ..plan(&slots, 10)
        };
        assert!(rotation.advance(&together, &mut page(&[(0, 4), (2, 6)]), now));
        let states: Vec<&State> = rotation.slots.iter().map(|slot| &slot.state).collect();
        assert!(matches!(
            states[..],
            [
                State::Dry(_),
                State::Dry(_),
                State::Behind(..),
                State::Unread
            ]
        ));
    }
}
