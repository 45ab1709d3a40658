//! What follows from the rest of the state, and is kept since finding it anew takes longer the more members there are.

/// A value that is neither stored nor compared: only found, and then kept up with what changes.
#[derive(Debug, Clone)]
pub(super) struct Derived<T>(Option<T>);

impl<T> Default for Derived<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> PartialEq for Derived<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Derived<T> {
    /// The value, if it was found.
    pub(super) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }

    /// Keeps the value up with a change. One that was not found yet will be found with it.
    pub(super) fn change(&mut self, change: impl FnOnce(&mut T)) {
        self.0.as_mut().map(change);
    }

    /// The value, which is found where that was not done yet: of a new state, and of one that was read from a snapshot.
    pub(super) fn or_find(&mut self, find: impl FnOnce() -> T) -> &mut T {
        self.0.get_or_insert_with(find)
    }

    /// Keeps nothing, until the value is found again.
    pub(super) fn forget(&mut self) {
        self.0 = None;
    }
}
