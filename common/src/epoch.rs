//! Epochs order the shares that a member is told.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Orders everything that the members of one group are told.
///
/// Compared field by field, in this order. `quorum` is a counter in the replicated state, raised by
/// every change of what any member was told; `degraded` and `replica` are 0 except for epochs that a
/// replica without a quorum hands out. Printed `17`, or `17~2.3` in degraded service.
///
/// ```
/// use skyschedule_common::epoch::Epoch;
/// let degraded: Epoch = "17~2.3".parse().unwrap();
/// assert!(Epoch::quorum(17) < degraded && degraded < Epoch::quorum(18));
/// ```
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch {
    /// Counter of the replicated state.
    pub quorum: u64,
    /// Counter of degraded service; 0 otherwise.
    pub degraded: u32,
    /// Replica that numbered in degraded service; 0 otherwise.
    pub replica: u16,
}

impl Epoch {
    /// Before anything was told.
    pub const ZERO: Self = Self::quorum(0);

    /// The epoch that a quorum decided.
    pub const fn quorum(counter: u64) -> Self {
        Self {
            quorum: counter,
            degraded: 0,
            replica: 0,
        }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.quorum)?;
        if self.degraded != 0 || self.replica != 0 {
            write!(f, "~{}.{}", self.degraded, self.replica)?;
        }
        Ok(())
    }
}

/// The text is no epoch: neither `17` nor `17~2.3`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no epoch: expected a number such as 17, or 17~2.3 for degraded service")]
pub struct ParseEpochError(String);

impl FromStr for Epoch {
    type Err = ParseEpochError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (quorum, rest) = text.split_once('~').unwrap_or((text, "0.0"));
            let (degraded, replica) = rest.split_once('.')?;
            Some(Self {
                quorum: quorum.parse().ok()?,
                degraded: degraded.parse().ok()?,
                replica: replica.parse().ok()?,
            })
        };
        parse().ok_or_else(|| ParseEpochError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_quorum_then_degraded_then_replica() {
        let mut epochs: Vec<Epoch> = ["18", "17~2.1", "17", "17~1.9", "17~2.3"]
            .map(|text| text.parse().unwrap())
            .into();
        epochs.sort();
        let printed: Vec<String> = epochs.iter().map(Epoch::to_string).collect();
        assert_eq!(printed, ["17", "17~1.9", "17~2.1", "17~2.3", "18"]);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "x", "1~", "1~2", "-1", "1~2.3.4"] {
            assert!(text.parse::<Epoch>().is_err(), "{text}");
        }
    }
}
