//! Rows that no member is to have, although there are members: what an operator must hear of.

use std::fmt;

use skyschedule_common::protocol::messages::Numbering;

use super::group::Group;
use super::plan;

/// Rows of a group with members that have no owner, and will not have one before something is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unowned {
    /// So many numbers,
    pub numbers: u32,
    /// of so many.
    pub total: u32,
    /// Why.
    pub why: WhyUnowned,
}

/// Why rows have no owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyUnowned {
    /// No member may work.
    Nobody {
        /// Members whose shares moved away.
        draining: usize,
        /// Members that did not release in time.
        fenced: usize,
        /// Members of the weight 0.
        weightless: usize,
    },
    /// Members may not own more.
    Cap {
        /// The most that one may.
        max_slots: u32,
    },
}

impl Unowned {
    /// The part of all rows, from 0 to 1.
    pub fn ratio(&self) -> f64 {
        f64::from(self.numbers) / f64::from(self.total.max(1))
    }
}

/// For the operator: what is wrong, and what to do.
impl fmt::Display for Unowned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.why {
            WhyUnowned::Nobody {
                draining,
                fenced,
                weightless,
            } => write!(
                f,
                "nobody works: of {} members, {draining} drain (skyschedule undrain), {fenced} did not release in time, and \
                 {weightless} have the weight 0",
                draining + fenced + weightless
            ),
            WhyUnowned::Cap { max_slots } => write!(
                f,
                "{} of {} slots have no owner, since members may not have more than {max_slots} each: add members, or raise \
                 max_slots",
                self.numbers, self.total
            ),
        }
    }
}

impl Group {
    /// What no member is to have, if there is anything, and there are members.
    pub fn unowned(&self) -> Option<Unowned> {
        let settings = self.settings();
        let slots = match settings.numbering {
            Numbering::Modulo => None,
            Numbering::Slots(slots) => Some(slots),
        };
        // A share that is kept for a client that will be back is nobody's business yet.
        let kept = self.vacancies.values().any(|vacancy| vacancy.weight > 0);
        let mut members = self.members.values();
        if !kept && !members.any(|member| member.effective_weight() > 0) {
            return self.nobody(slots.unwrap_or(1));
        }
        let (slots, max_slots) = slots.zip(settings.max_slots)?;
        let sizes = plan::sizes(slots, Some(max_slots), &self.seats());
        let owned: u64 = sizes.iter().sum();
        let numbers = u32::try_from(u64::from(slots).saturating_sub(owned)).unwrap_or(slots);
        (numbers > 0).then_some(Unowned {
            numbers,
            total: slots,
            why: WhyUnowned::Cap { max_slots },
        })
    }

    fn nobody(&self, total: u32) -> Option<Unowned> {
        let members = self.members.values();
        let fenced = members.clone().filter(|member| member.fenced).count();
        let draining = members
            .clone()
            .filter(|member| member.draining && !member.fenced);
        let draining = draining.count();
        (members.len() > 0).then(|| Unowned {
            numbers: total,
            total,
            why: WhyUnowned::Nobody {
                draining,
                fenced,
                weightless: members.len() - fenced - draining,
            },
        })
    }
}
