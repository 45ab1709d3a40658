//! Whose disk this is, and what its replica may do.
//!
//! A replica that lost its disk has forgotten what it voted for and what it confirmed. Until the others have
//! told it enough, it must neither vote nor confirm anything, or a decision could be lost, or made twice:
//!
//! - [`Standing::Blank`]: it takes part in nothing. It becomes `Full` when a cluster forms of replicas that
//!   are all blank; or `Returning` when *every* other replica has told its term, and no majority of
//!   all has forgotten something as a whole.
//! - [`Standing::Returning`]: it follows leaders of the newest of these terms or later, and no older: whoever
//!   had its forgotten vote or confirmation was in none later. It does not vote. It becomes `Full` when it
//!   has all that such a leader had committed.
//! - [`Standing::Full`]: it is as good as any.
//! - [`Standing::Removed`]: the cluster goes on without it, for good.
//!
//! A replica that a running cluster takes in begins in the same way: `Blank`, then `Returning` when the leader says so,
//! with the leader's term, then `Full` when it has all, the decision that made it a member included.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Tells clusters apart; drawn when one forms.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClusterId(pub(super) u128);

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What a replica may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Standing {
    /// Its disk is empty.
    Blank,
    /// It is brought up, in a cluster in which it was before, or that takes it in.
    Returning {
        /// It follows no leader of an earlier term.
        term: u64,
    },
    /// All.
    Full,
    /// Nothing any more.
    Removed,
}

/// Whose disk this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// The replica.
    pub(super) replica: u64,
    /// Its cluster, once there is one.
    pub(super) cluster: Option<ClusterId>,
    /// What it may do.
    pub(super) standing: Standing,
}

impl Identity {
    /// Of an empty disk.
    pub(super) fn blank(replica: u64) -> Self {
        Self {
            replica,
            cluster: None,
            standing: Standing::Blank,
        }
    }
}
