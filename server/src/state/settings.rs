//! What operators set for a group.

use std::fmt;

use serde::{Deserialize, Serialize};
use skyschedule_common::protocol::messages::{Consistency, Millis, Numbering};
use skyschedule_common::share::MAX_TOTAL;

/// Shortest lease: three heartbeats, a reconnect and an election fit in.
pub const MIN_LEASE: Millis = Millis(2_000);

/// Lease of small groups, unless set.
const DEFAULT_LEASE: Millis = Millis(6_000);

/// What a commit and a push may take within a lease, beside `drain_timeout`.
const COMMIT_AND_PUSH: Millis = Millis(500);

/// What operators set for a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// How rows are numbered.
    pub numbering: Numbering,
    /// What is promised.
    pub consistency: Consistency,
    /// Exclusive groups: a proven end of stream frees a share.
    pub trust_fin: bool,
    /// Available groups: how long the others wait for a release.
    pub drain_timeout: Millis,
    /// Exclusive groups: after how long a member that does not release is fenced.
    pub max_drain: Millis,
    /// Least time between two barriers.
    pub settle: Millis,
    /// How long a share is kept for a client that left or died.
    pub rejoin_grace: Millis,
    /// Available groups: how long after a reset, or an end of stream that proves nothing, a member is taken for dead.
    pub reset_grace: Millis,
    /// Length of leases; by the number of clients when not set.
    pub lease: Option<Millis>,
    /// Most slots that one member may own; what is above it stays unowned.
    pub max_slots: Option<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            numbering: Numbering::Modulo,
            consistency: Consistency::Available,
            trust_fin: false,
            drain_timeout: Millis(5_000),
            max_drain: Millis(60_000),
            settle: Millis(20),
            rejoin_grace: Millis(0),
            reset_grace: Millis(1_000),
            lease: None,
            max_slots: None,
        }
    }
}

/// In the words of the interface, for a line of the log.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "numbering {}, consistency {}, trust_fin {}, drain_timeout {}, max_drain {}, settle {}, rejoin_grace {}, \
             reset_grace {}",
            self.numbering,
            self.consistency,
            self.trust_fin,
            self.drain_timeout,
            self.max_drain,
            self.settle,
            self.rejoin_grace,
            self.reset_grace,
        )?;
        if let Some(lease) = self.lease {
            write!(f, ", lease {lease}")?;
        }
        if let Some(most) = self.max_slots {
            write!(f, ", max_slots {most}")?;
        }
        Ok(())
    }
}

/// Settings that do not go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The lease is too short.
    #[error("lease_ms must be at least {} (three heartbeats, a reconnect and an election fit in)", MIN_LEASE.0)]
    LeaseTooShort,
    /// The lease is absurdly long.
    #[error("lease_ms must be at most 3600000 (an hour)")]
    LeaseTooLong,
    /// A member must be able to answer within its lease.
    #[error("drain_timeout_ms must be at most lease_ms - {} (a commit and a push must fit in the lease beside it)", COMMIT_AND_PUSH.0)]
    DrainTimeout,
    /// Fencing comes after draining.
    #[error("max_drain_ms must be at least drain_timeout_ms and at most 86400000 (a day)")]
    MaxDrain,
    /// Members must work between barriers, and not wait for ever.
    #[error("settle_ms must be from 1 to 60000")]
    Settle,
    /// Nobody may hold rows of an available group longer than promised.
    #[error(
        "rejoin_grace_ms must be at most lease_ms in an available group, and at most 3600000 (an hour)"
    )]
    RejoinGrace,
    /// A reset is acted on before the lease ends, or not at all.
    #[error("reset_grace_ms must be at most lease_ms")]
    ResetGrace,
    /// Slots are a power of two.
    #[error("slots must be a power of two from 16 to 65536")]
    Slots,
    /// A cap needs slots.
    #[error("max_slots must be at least 1, and needs the numbering slots")]
    MaxSlots,
    /// Clients of an available group may work on their base, out of reach.
    #[error(
        "an available group that ever had a member cannot become exclusive: one of its clients may be working out of reach; use a new group"
    )]
    BecomesExclusive,
    /// The weights of the members are too large for modulo.
    #[error(
        "the weights of the group's members add up to more than {MAX_TOTAL}, the most that modulo can divide by; lower them, or keep slots"
    )]
    TotalTooLarge,
    /// There are too many groups.
    #[error("this cluster has as many groups as it can keep")]
    TooManyGroups,
}

impl Settings {
    /// Length of leases that the settings ask for, before it is stretched for many clients.
    pub fn base_lease(&self) -> Millis {
        self.lease.unwrap_or(DEFAULT_LEASE)
    }

    /// Checks the inequalities between the timers, and the ranges.
    ///
    /// # Errors
    /// The first that is broken.
    pub fn validate(&self) -> Result<(), SettingsError> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// Every range and inequality that is broken; empty: the settings are possible.
    pub fn problems(&self) -> Vec<SettingsError> {
        let lease = self.base_lease();
        let available = self.consistency == Consistency::Available;
        let slots_ok = match self.numbering {
            Numbering::Modulo => true,
            Numbering::Slots(slots) => slots.is_power_of_two() && (16..=65_536).contains(&slots),
        };
        let cap_ok = match self.max_slots {
            None => true,
            Some(cap) => cap >= 1 && matches!(self.numbering, Numbering::Slots(_)),
        };
        let rules = [
            (lease >= MIN_LEASE, SettingsError::LeaseTooShort),
            (lease <= Millis(3_600_000), SettingsError::LeaseTooLong),
            (
                self.drain_timeout <= Millis(lease.0.saturating_sub(COMMIT_AND_PUSH.0)),
                SettingsError::DrainTimeout,
            ),
            (
                self.max_drain >= self.drain_timeout && self.max_drain <= Millis(86_400_000),
                SettingsError::MaxDrain,
            ),
            ((1..=60_000).contains(&self.settle.0), SettingsError::Settle),
            (
                self.rejoin_grace <= Millis(3_600_000)
                    && (!available || self.rejoin_grace <= lease),
                SettingsError::RejoinGrace,
            ),
            (self.reset_grace <= lease, SettingsError::ResetGrace),
            (slots_ok, SettingsError::Slots),
            (cap_ok, SettingsError::MaxSlots),
        ];
        rules
            .into_iter()
            .filter(|(holds, _)| !holds)
            .map(|(_, error)| error)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_possible() {
        assert_eq!(Settings::default().validate(), Ok(()));
    }

    #[test]
    fn a_line_of_the_log_has_the_words_of_the_interface() {
        let settings = Settings {
            numbering: Numbering::Slots(1_024),
            consistency: Consistency::Exclusive,
            lease: Some(Millis(8_000)),
            ..Settings::default()
        };
        assert_eq!(
            settings.to_string(),
            "numbering slots(1024), consistency exclusive, trust_fin false, drain_timeout 5000 ms, max_drain 60000 ms, \
             settle 20 ms, rejoin_grace 0 ms, reset_grace 1000 ms, lease 8000 ms"
        );
    }

    #[test]
    fn each_broken_inequality_is_named() {
        let with = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.validate()
        };
        assert_eq!(
            with(|s| s.lease = Some(Millis(1_999))),
            Err(SettingsError::LeaseTooShort)
        );
        assert_eq!(
            with(|s| s.lease = Some(Millis(4_000))),
            Err(SettingsError::DrainTimeout)
        );
        assert_eq!(
            with(|s| s.max_drain = Millis(1)),
            Err(SettingsError::MaxDrain)
        );
        assert_eq!(with(|s| s.settle = Millis(0)), Err(SettingsError::Settle));
        assert_eq!(
            with(|s| s.rejoin_grace = Millis(7_000)),
            Err(SettingsError::RejoinGrace)
        );
        assert_eq!(
            with(|s| s.reset_grace = Millis(7_000)),
            Err(SettingsError::ResetGrace)
        );
        assert_eq!(
            with(|s| s.numbering = Numbering::Slots(1_000)),
            Err(SettingsError::Slots)
        );
        assert_eq!(
            with(|s| s.max_slots = Some(5)),
            Err(SettingsError::MaxSlots)
        );
    }
}
