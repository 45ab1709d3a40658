//! Whether a quorum is there: a leader that is cut off steps aside, and a replica that has had none for long
//! goes on without.

use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::fault::{Rule, broken};

use super::Coordinator;

/// A leader asks at least this often whether a quorum still follows it.
const PULSE: Duration = Duration::from_millis(250);

/// A leader that no quorum has followed for so long tells its clients that it serves nobody. It is longer than an
/// election, so that one that was only slow to be heard does not lose its clients.
const PATIENCE: Duration = Duration::from_millis(750);

/// Since when a quorum has been missing.
#[derive(Debug)]
pub(super) struct Quorum {
    /// It was there last.
    at: Instant,
    /// The last round of this leader began.
    round: Instant,
    /// When the metrics were set last.
    shown: Instant,
    /// The leadership that has stepped aside, and leads anew once a quorum follows it.
    aside: Option<u64>,
}

impl Quorum {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            at: now,
            round: now,
            shown: now,
            aside: None,
        }
    }

    pub(super) fn round_begins(&mut self, now: Instant) {
        self.round = now;
    }

    /// When it will have been missing for so long, if it does not come.
    pub(super) fn missing_at(&self, long: Duration, now: Instant) -> Option<Instant> {
        Some(self.at + long).filter(|at| *at > now)
    }

    /// A quorum was there at this time. Time in which this process did not run counts for none without one.
    pub(super) fn seen(&mut self, at: Instant) {
        self.at = self.at.max(at);
    }
}

impl Coordinator {
    /// Whether this leader is to ask for its quorum, although nobody waits for it.
    pub(super) fn wants_pulse(&self) -> bool {
        let leads = self.consensus.leadership().own.is_some();
        let due = self.quorum.round + PULSE <= self.looked;
        leads && due && self.consensus.peers().is_some()
    }

    /// A quorum has confirmed that this replica leads, in a round that began at `round`.
    pub(super) fn quorum_confirmed(&mut self) {
        self.quorum.seen(self.quorum.round);
        let own = self.consensus.leadership().own;
        if own.is_some() && std::mem::take(&mut self.quorum.aside) == own {
            tracing::info!("a quorum follows this leader again");
            self.consensus.lead_anew();
        }
    }

    /// Looks how long no quorum was seen, and draws the consequences.
    pub(super) fn look_for_quorum(&mut self) {
        if self.consensus.peers().is_none() {
            return;
        }
        let now = env::now();
        let own = self.consensus.leadership().own;
        if own.is_none()
            && let Some(contact) = self.consensus.last_contact()
        {
            self.quorum.seen(contact);
        }
        let without = now.saturating_duration_since(self.quorum.at);
        if self.quorum.shown + PULSE <= now {
            self.quorum.shown = now;
            let length = if without > PATIENCE {
                without
            } else {
                Duration::ZERO
            };
            self.metrics.without_quorum(length);
            let lags = self.consensus.replicas().into_iter();
            let lags = lags.filter_map(|(id, replica)| Some((id, replica.lag?)));
            self.metrics.replicas(self.leadership.borrow().term, lags);
        }
        if self.ready.is_some() && without > PATIENCE {
            tracing::warn!(
                without_ms = without.as_millis(),
                "no quorum follows this leader: it serves nobody until one does; look why the other replicas do not answer"
            );
            self.step_aside();
            self.quorum.aside = own;
        }
        // Where most follow another one, it must not be the second that numbers, whatever keeps it from following, too.
        let alone = without >= self.degraded_after && !self.consensus.is_led_elsewhere();
        let lasts = alone || (broken(Rule::D1) && self.degraded.is_some());
        match self.degraded {
            None if lasts && self.ready.is_none() && self.consensus.is_full() => {
                self.begin_degraded(without);
            }
            Some(_) if !lasts => self.end_degraded(),
            _ => {}
        }
    }
}
