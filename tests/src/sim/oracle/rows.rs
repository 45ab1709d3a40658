//! Who holds which row: never two (with the exceptions that available groups allow), and not nobody for long.

use skyschedule_common::share::RowKey;
use std::time::Duration;

use super::{Oracle, View, Violation, World, name};
use crate::sim::worker::KEYS;

impl Oracle {
    /// Promises 2 and 3: no row is held twice.
    pub(super) fn overlaps(&mut self, world: &World, views: &[View]) -> Result<(), Violation> {
        let now = world.now;
        if !self.exclusive {
            let excused = self.server_lease() + self.drain + Duration::from_secs(5);
            if self.troubled_at.is_some_and(|at| now <= at + excused) {
                return Ok(());
            }
        }
        for (at, one) in views.iter().enumerate() {
            if !one.is_trusting() {
                continue;
            }
            for other in views[at + 1..].iter().filter(|other| other.is_trusting()) {
                if let Some(what) = self.overlap(now, one, other) {
                    return Err(Violation::new("held twice", what));
                }
            }
        }
        Ok(())
    }

    /// Notes since when members are told to give up rows: the server counts from its decision, which the client
    /// may hear of later.
    pub(super) fn note_recalls(&mut self, now: Duration) {
        let Some(group) = &self.state else { return };
        for (number, member) in group.members() {
            for key in KEYS {
                if member.told.contains(key.into()) {
                    self.recalled.remove(&(*number, key));
                } else {
                    self.recalled.entry((*number, key)).or_insert(now);
                }
            }
        }
    }

    pub(super) fn overlap(&self, now: Duration, one: &View, other: &View) -> Option<String> {
        let describe = |what: String| {
            format!(
                "{what} by {} (member {:?}, {}, {:?}, works on {:?}) and {} (member {:?}, {}, {:?}, works on {:?})",
                name(one),
                one.inside.membership,
                one.inside.mode,
                one.inside.rows,
                one.running,
                name(other),
                other.inside.membership,
                other.inside.mode,
                other.inside.rows,
                other.running
            )
        };
        for share in one.inside.rows.shares() {
            if let Some(met) = other
                .inside
                .rows
                .shares()
                .iter()
                .find(|met| share.meets(met))
            {
                return Some(describe(format!("{share:?} and {met:?} are held")));
            }
        }
        let mut keys = one.running.iter().chain(&other.running);
        if let Some(key) =
            keys.find(|key| self.counts(now, one, **key) && self.counts(now, other, **key))
        {
            return Some(describe(format!("row {key} is held")));
        }
        None
    }

    /// Whether the client holds the row, and not only by a handler that takes longer than a drain: that one was
    /// overtaken, and counted.
    pub(super) fn counts(&self, now: Duration, view: &View, key: i64) -> bool {
        if view.inside.rows.contains(RowKey::from(key)) {
            return view.is_trusting();
        }
        let number = view
            .inside
            .membership
            .map_or(0, |membership| membership.number);
        let overtaken = self
            .recalled
            .get(&(number, key))
            .is_some_and(|since| now + Duration::from_millis(20) >= *since + self.drain);
        view.holds(key) && (self.exclusive || !overtaken)
    }

    /// In an exclusive group each owner's token is above that of the owner before.
    pub(super) fn begins(&mut self, views: &[View]) -> Result<(), Violation> {
        if !self.exclusive || self.history_lost {
            return Ok(());
        }
        for view in views {
            for begun in &view.begun {
                let before = self
                    .tokens
                    .insert(begun.key, (begun.epoch, begun.membership));
                if let Some((epoch, owner)) = before
                    && owner != begun.membership
                    && epoch >= begun.epoch
                {
                    return Err(Violation::new(
                        "token back",
                        format!(
                            "row {} had token {epoch} of member {owner:?}, and {} began it with {}",
                            begun.key,
                            name(view),
                            begun.epoch
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Promise 3: nobody holds a row for no longer than the bound, also when the server is away.
    pub(super) fn coverage(&mut self, world: &World, views: &[View]) -> Result<(), Violation> {
        let able = views
            .iter()
            .any(|view| view.willing && view.inside.membership.is_some());
        self.note_settled(views);
        if !able || self.is_capped() {
            self.unheld.clear();
            return Ok(());
        }
        let bound = self.server_lease() + self.regained() + self.drain + self.rejoin_grace;
        let bound = bound + Duration::from_millis(1_500);
        // A new leader gives everyone a lease to come back.
        let served_since = world.served_since.unwrap_or_default();
        for key in KEYS {
            if views.iter().any(|view| view.holds(key)) {
                self.unheld.remove(&key);
                continue;
            }
            // Without a server, rows of clients that die meanwhile, or were moving to them, wait for it.
            let owner = self.settled.get(&key);
            let owner_lives = views.iter().any(|view| {
                view.willing
                    && view.inside.membership.map(|membership| membership.number) == owner.copied()
            });
            if !(world.is_reachable || owner.is_some() && owner_lives) {
                self.unheld.remove(&key);
                continue;
            }
            let since = *self.unheld.entry(key).or_insert(world.now);
            if world.now > since.max(world.last_event).max(served_since) + bound {
                return Err(Violation::new(
                    "held by nobody",
                    format!("row {key} is held by nobody since {since:?}"),
                ));
            }
        }
        Ok(())
    }

    /// Remembers whose the rows are when every member has taken its share: to those it may fall back.
    pub(super) fn note_settled(&mut self, views: &[View]) {
        for view in views {
            if let (Some(membership), Some(epoch)) = (view.inside.membership, view.inside.epoch) {
                self.taken.insert(membership.number, epoch);
            }
        }
        let Some(group) = self.state.as_ref().filter(|group| !group.in_handover()) else {
            return;
        };
        let taken = |(number, member): (&u64, &skyschedule_server::state::Member)| {
            self.taken.get(number) == Some(&member.epoch)
        };
        if !group.members().iter().all(taken) {
            return;
        }
        self.settled.clear();
        for (number, member) in group.members() {
            let rows = KEYS.filter(|key| member.told.contains((*key).into()));
            self.settled.extend(rows.map(|key| (key, *number)));
        }
    }
}
