//! What the demo does to its consumers and its servers, and when.

/// One act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    /// A consumer is killed abruptly.
    Kill,
    /// One more consumer joins.
    Join,
    /// The server that leads is killed abruptly, and comes back after a while.
    KillLeader,
}

/// The acts, each after so many sixths of the tasks.
const ACTS: [(u64, Act); 3] = [(2, Act::Kill), (3, Act::Join), (4, Act::KillLeader)];

/// The acts that are still to come.
#[derive(Debug, Default)]
pub(super) struct Script {
    next: usize,
}

impl Script {
    /// The act that is due when so many of all tasks are done. Without a living consumer nothing would go on:
    /// then the next act is due at once.
    pub(super) fn due(&mut self, done: u64, all: u64, alive: usize) -> Option<Act> {
        let &(sixths, act) = ACTS.get(self.next)?;
        let due = done * 6 >= all * sixths || alive == 0;
        due.then(|| {
            self.next += 1;
            act
        })
    }

    /// Whether every act was given.
    pub(super) fn is_over(&self) -> bool {
        self.next == ACTS.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_act_comes_once_and_in_order() {
        let mut script = Script::default();
        assert_eq!(script.due(33, 100, 4), None);
        assert_eq!(script.due(34, 100, 4), Some(Act::Kill));
        assert_eq!(script.due(34, 100, 3), None);
        assert_eq!(script.due(100, 100, 3), Some(Act::Join));
        assert!(!script.is_over());
        assert_eq!(script.due(100, 100, 4), Some(Act::KillLeader));
        assert!(script.is_over());
        assert_eq!(script.due(100, 100, 4), None);
    }

    #[test]
    fn when_the_only_consumer_was_killed_another_joins_at_once() {
        let mut script = Script::default();
        assert_eq!(script.due(34, 100, 1), Some(Act::Kill));
        assert_eq!(script.due(34, 100, 0), Some(Act::Join));
    }
}
