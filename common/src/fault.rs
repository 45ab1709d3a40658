//! Rules of the protocol that a simulation can break on purpose.
//!
//! A test that passes proves little unless it fails when the thing that it tests is missing. So each
//! load-bearing rule asks [`broken`] at the one place that upholds it, and the simulation, which must
//! find the violation, leaves the rule out there. In normal builds the answer is a constant `false`,
//! and the question costs nothing.

/// A load-bearing rule: without it alone, the protocol has a known counterexample. The texts are
/// short; the rules themselves are in the protocol's description, under the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// A leader does nothing before its own first entry is applied.
    L1,
    /// No message comes from a proposal that is not applied.
    L2,
    /// A new leader gives every member a full lease; a longer lease is committed before it is told.
    L3,
    /// A heartbeat is answered only behind a quorum round that began after it was read.
    L4,
    /// A member proposed dead is never renewed by that leader.
    L5,
    /// Only a deadline that is over, or a FIN that proves it, makes a member dead.
    L6,
    /// A client id has at most one member, and a dead membership is never revived.
    L7,
    /// `Gone` is said only of a membership that was given out and is not there any more.
    L8,
    /// A release counts only for exactly the epoch told.
    L10,
    /// A grant follows the member's own release, and meets nobody's held rows.
    L11,
    /// A degraded epoch above the told one is answered by a new quorum epoch above it.
    L15,
    /// A member that knows such an epoch is renewed only after that.
    L15Renewal,
    /// `settled` waits until every member has taken its share, and the shares cover every row.
    L17,
    /// A FIN proves the membership of its connection dead, and no other.
    F1,
    /// A client's connection ends with a FIN only after its goodbye or its process's death.
    F3,
    /// A lease counts from when the answered heartbeat was sent; nothing else renews it.
    C2,
    /// Only a greater epoch of the own membership replaces a share.
    C3,
    /// A release is said only when nothing outside of the share is worked on.
    C4,
    /// The base is the union of the shares since the last settled one.
    C8,
    /// Every told share has an epoch of its own.
    UniqueEpochs,
    /// A degraded replica numbers only what is attached to it, and stops when it follows or leads.
    D1,
    /// A degraded replica's epochs are above all those it can know of, and on disk before the first push.
    D2,
    /// A degraded replica says `settled` when all that are attached have taken the present numbering.
    D3,
    /// A degraded replica answers heartbeats without a quorum, and drops who is not heard.
    D4,
}

impl Rule {
    /// Every rule, in the order of the protocol's description.
    pub const ALL: [Self; 24] = [
        Self::L1,
        Self::L2,
        Self::L3,
        Self::L4,
        Self::L5,
        Self::L6,
        Self::L7,
        Self::L8,
        Self::L10,
        Self::L11,
        Self::L15,
        Self::L15Renewal,
        Self::L17,
        Self::F1,
        Self::F3,
        Self::C2,
        Self::C3,
        Self::C4,
        Self::C8,
        Self::UniqueEpochs,
        Self::D1,
        Self::D2,
        Self::D3,
        Self::D4,
    ];
}

/// Whether `rule` is to be left out at present: never, except in a simulation that asked for it.
#[cfg(not(sim))]
#[inline]
pub const fn broken(rule: Rule) -> bool {
    let _ = rule;
    false
}

#[cfg(sim)]
mod switch {
    use super::Rule;
    use std::cell::Cell;

    thread_local! {
        static BROKEN: Cell<Option<Rule>> = const { Cell::new(None) };
    }

    /// Whether `rule` is to be left out at present: never, except in a simulation that asked for it.
    pub fn broken(rule: Rule) -> bool {
        BROKEN.get() == Some(rule)
    }

    /// Runs `simulation` (all of it: on one thread) with `rule` left out.
    pub fn breaking<T>(rule: Rule, simulation: impl FnOnce() -> T) -> T {
        struct Restore(Option<Rule>);
        impl Drop for Restore {
            fn drop(&mut self) {
                BROKEN.set(self.0);
            }
        }
        let _restore = Restore(BROKEN.replace(Some(rule)));
        simulation()
    }
}

#[cfg(sim)]
pub use switch::{breaking, broken};

#[cfg(test)]
#[cfg(not(sim))]
mod tests {
    use super::*;

    #[test]
    fn a_normal_build_breaks_no_rule() {
        const { assert!(!broken(Rule::L4)) };
        assert!(Rule::ALL.into_iter().all(|rule| !broken(rule)));
    }

    #[test]
    fn every_rule_is_listed_once_in_order() {
        assert!(Rule::ALL.is_sorted_by(|a, b| a < b));
        assert_eq!(Rule::ALL.len(), Rule::D4 as usize + 1);
    }
}
