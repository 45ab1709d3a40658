//! When a client of an available group that hears from nobody stops asking and works on (rule C8).

use std::time::Duration;

use skyschedule_common::env::Instant;
use skyschedule_common::protocol::messages::Consistency;

use crate::observe::Mode;
use crate::permit::Permit;

/// How long to ask without an answer before working on alone, and how long that is good for unless prolonged.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often to look while asking.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// The most that one look counts for: time in which the process did not run was not spent asking.
const MOST_COUNTED: Duration = Duration::from_millis(100);

/// Counts the time for which the client has really been asking.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// The last look, while asking.
    looked: Option<Instant>,
    asked: Duration,
}

impl Patience {
    /// An `Alive` or a `Welcome` came.
    pub(super) fn answered(&mut self) {
        self.asked = Duration::ZERO;
    }

    /// Whether the client is to look every [`LOOK`].
    pub(super) fn is_asking(&self) -> bool {
        self.looked.is_some()
    }

    /// Looks; whether to ask now: the lease has just been found over.
    pub(super) fn look(&mut self, permit: &mut Permit, now: Instant) -> bool {
        let available = permit
            .holding()
            .is_some_and(|holding| holding.terms.consistency == Consistency::Available);
        if !available || permit.mode(now) == Mode::Leased {
            *self = Self::default();
            return false;
        }
        let gap = self
            .looked
            .replace(now)
            .map(|looked| now.saturating_duration_since(looked));
        match gap {
            Some(gap) if gap <= PATIENCE => self.asked += gap.min(MOST_COUNTED),
            // The lease was found over just now, or the process did not run: ask first.
            _ => {
                self.asked = Duration::ZERO;
                permit.stop_autonomy();
                return true;
            }
        }
        if self.asked >= PATIENCE {
            permit.grant_autonomy(now + PATIENCE);
        }
        false
    }
}
