//! The row guards that are out.

use std::collections::BTreeMap;

use skyschedule_common::share::{Numbers, RowKey, Share};

/// Names a guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GuardId(u64);

/// Row guards that are out, and how many of them are outside the present share.
#[derive(Debug, Default)]
pub(super) struct Guards {
    out: BTreeMap<GuardId, RowKey>,
    outside: usize,
    last: u64,
}

impl Guards {
    pub(super) fn insert(&mut self, key: RowKey, inside: bool) -> GuardId {
        self.last += 1;
        self.out.insert(GuardId(self.last), key);
        self.outside += usize::from(!inside);
        GuardId(self.last)
    }

    /// Whether the guard that came back was outside of `share`, the present one.
    pub(super) fn remove(&mut self, guard: GuardId, share: &Share) -> bool {
        let outside = self
            .out
            .remove(&guard)
            .is_some_and(|key| !share.contains(key));
        self.outside = self.outside.saturating_sub(usize::from(outside));
        outside
    }

    /// The present share has changed.
    pub(super) fn recount(&mut self, share: &Share) {
        self.outside = self
            .out
            .values()
            .filter(|key| !share.contains(**key))
            .count();
    }

    /// Slots of the guards that are outside of `share`, which is of a slots group.
    pub(super) fn numbers_outside(&self, share: &Share) -> Numbers {
        let outside = self.out.values().filter(|key| !share.contains(**key));
        outside.map(|key| key.modulo(share.total())).collect()
    }

    pub(super) fn outside(&self) -> usize {
        self.outside
    }

    pub(super) fn len(&self) -> usize {
        self.out.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    pub(super) fn has(&self, key: RowKey) -> bool {
        self.out.values().any(|out| *out == key)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = RowKey> + '_ {
        self.out.values().copied()
    }
}
