//! What a child tells its parent: a JSON line on its stdout for each change.

use serde::{Deserialize, Serialize};
use skyschedule_client::{ShareUnion, Status};
use skyschedule_server::view::ServerEvent;

/// The line on a child's stdin that asks it to end in good order. The end of its stdin means that the
/// parent is dead.
pub(super) const STOP: &str = "stop";

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub(super) enum Report {
    /// A consumer's rows changed; none while they move.
    Rows {
        /// As people read it: `id % 4 = 1`.
        rows: Option<String>,
    },
    /// A consumer executed so many tasks until now.
    Executed {
        /// How many.
        count: u64,
    },
    /// The replica follows or leads.
    Ready,
    /// Something happened, as the replica that leads says.
    Server {
        /// What.
        event: ServerEvent,
    },
    /// The replica leads, and all members of the group have come to it.
    Reunited {
        /// The group's newest epoch.
        epoch: String,
    },
}

impl Report {
    pub(super) fn rows(status: &Status) -> Self {
        Self::Rows {
            rows: in_words(&status.rows),
        }
    }
}

fn in_words(rows: &ShareUnion) -> Option<String> {
    if rows.is_empty() {
        return None;
    }
    let Some(share) = rows.single() else {
        return Some("by its last numbers".to_owned());
    };
    let numbers = share.numbers();
    Some(match numbers.first() {
        Some(number) if numbers.len() == 1 => format!("id % {} = {number}", share.total()),
        _ => format!("{} of {} slots", numbers.len(), share.total()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use skyschedule_client::{Numbers, Share};

    #[test]
    fn rows_are_told_in_words() {
        let words = |total, first, last| {
            let share = Share::new(total, Numbers::range(first, last)).unwrap();
            in_words(&ShareUnion::from(share)).unwrap()
        };
        assert_eq!(words(4, 1, 1), "id % 4 = 1");
        assert_eq!(words(1_024, 0, 255), "256 of 1024 slots");
        assert_eq!(in_words(&ShareUnion::NONE), None);
    }
}
