//! The row guards that are out.

use skyschedule_common::share::{Numbers, RowKey, Share};

/// Names a guard while it is out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuardId(usize);

/// Row guards that are out, and how many of them are outside the present share.
#[derive(Debug, Default)]
pub(super) struct Guards {
    /// The place of each; what has come back leaves its place to another.
    places: Vec<Option<RowKey>>,
    free: Vec<usize>,
    outside: usize,
}

impl Guards {
    pub(super) fn insert(&mut self, key: RowKey, inside: bool) -> GuardId {
        self.outside += usize::from(!inside);
        let place = self.free.pop().unwrap_or(self.places.len());
        match self.places.get_mut(place) {
            Some(free) => *free = Some(key),
            None => self.places.push(Some(key)),
        }
        GuardId(place)
    }

    /// Whether the guard that came back was outside of `share`, the present one.
    pub(super) fn remove(&mut self, guard: GuardId, share: &Share) -> bool {
        let place = self.places.get_mut(guard.0);
        let Some(key) = place.and_then(Option::take) else {
            return false;
        };
        self.free.push(guard.0);
        let outside = !share.contains(key);
        self.outside = self.outside.saturating_sub(usize::from(outside));
        outside
    }

    /// The present share has changed.
    pub(super) fn recount(&mut self, share: &Share) {
        self.outside = self.keys().filter(|key| !share.contains(*key)).count();
    }

    /// Slots of the guards that are outside of `share`, which is of a slots group.
    pub(super) fn numbers_outside(&self, share: &Share) -> Numbers {
        let outside = self.keys().filter(|key| !share.contains(*key));
        outside.map(|key| key.modulo(share.total())).collect()
    }

    pub(super) fn outside(&self) -> usize {
        self.outside
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn has(&self, key: RowKey) -> bool {
        self.keys().any(|out| out == key)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = RowKey> + '_ {
        self.places.iter().copied().flatten()
    }
}
