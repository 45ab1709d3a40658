//! Promise 5: in slot groups shares are in proportion to the weights, and no more moves than that needs.

use skyschedule_common::protocol::messages::Numbering;
use skyschedule_common::share::Share;
use skyschedule_server::state::{Group, Member};
use std::collections::BTreeMap;

use super::{Oracle, Violation};

/// A group at a moment at which nothing moved.
#[derive(Debug)]
pub(super) struct Still {
    numbering: Numbering,
    next_membership: u64,
    members: BTreeMap<u64, Share>,
    /// Weights as they were first seen, also of those who joined since.
    weights: BTreeMap<u64, u32>,
    /// Something else than a join or an end of a membership has changed since.
    disturbed: bool,
}

impl Oracle {
    /// Compares this moment with the last at which nothing moved.
    pub(super) fn movement(&mut self, group: &Group) -> Result<(), Violation> {
        let numbering = group.settings().numbering;
        let Numbering::Slots(slots) = numbering else {
            self.still = None;
            return Ok(());
        };
        let unusual = group.settings().max_slots.is_some() || !group.vacancies().is_empty();
        if let Some(still) = &mut self.still {
            let mut reweighted = false;
            for (number, member) in group.members() {
                let weight = weight_of(member);
                reweighted |= *still.weights.entry(*number).or_insert(weight) != weight;
            }
            still.disturbed |= unusual || reweighted || still.numbering != numbering;
        }
        if group.in_handover() || group.wants_handover() {
            return Ok(());
        }
        within_cap(group, slots)?;
        if !unusual {
            in_proportion(group, slots)?;
        }
        if let Some(still) = self.still.as_ref().filter(|still| !still.disturbed) {
            let joined = group.next_membership() - still.next_membership;
            let ended = still.members.len() as u64 + joined - group.members().len() as u64;
            if joined + ended == 1 {
                no_more_than_needed(&still.members, group)?;
            }
        }
        let members = || group.members().iter();
        self.still = Some(Still {
            numbering,
            next_membership: group.next_membership(),
            members: members()
                .map(|(number, member)| (*number, member.told.clone()))
                .collect(),
            weights: members()
                .map(|(number, member)| (*number, weight_of(member)))
                .collect(),
            disturbed: unusual,
        });
        Ok(())
    }
}

fn weight_of(member: &Member) -> u32 {
    if member.draining || member.fenced {
        0
    } else {
        member.weight
    }
}

/// No member has more than its cap; and nothing is left to nobody that a member may have.
fn within_cap(group: &Group, slots: u32) -> Result<(), Violation> {
    let Some(cap) = group.settings().max_slots else {
        return Ok(());
    };
    for (number, member) in group.members() {
        if member.told.numbers().len() > u64::from(cap) {
            let what = format!(
                "member {number} has {:?}, and the cap is {cap}",
                member.told
            );
            return Err(Violation::new("beyond the cap", what));
        }
    }
    if group.vacancies().is_empty() {
        let weights = group.members().values().map(weight_of);
        let all: u64 = weights.map(u64::from).sum();
        for (number, member) in group.members().iter().filter(|_| all > 0) {
            // As without a cap, and then no more than it.
            let whole = u64::from(slots) * u64::from(weight_of(member)) / all;
            if member.target.numbers().len() < whole.min(u64::from(cap)) {
                let what = format!("member {number} has only {:?} of {slots}", member.target);
                return Err(Violation::new("not balanced", what));
            }
        }
    }
    Ok(())
}

fn in_proportion(group: &Group, slots: u32) -> Result<(), Violation> {
    let weights = group.members().values().map(weight_of);
    let all: u64 = weights.map(u64::from).sum();
    for (number, member) in group.members().iter().filter(|_| all > 0) {
        let wanted = u64::from(slots) * u64::from(weight_of(member));
        let has = member.target.numbers().len() * all;
        if has.abs_diff(wanted) >= all {
            return Err(Violation::new(
                "not balanced",
                format!(
                    "member {number} of weight {} of {all} has {:?}",
                    weight_of(member),
                    member.target
                ),
            ));
        }
    }
    Ok(())
}

/// After one join or one end of a membership, those who were there before only give, or only get.
fn no_more_than_needed(before: &BTreeMap<u64, Share>, group: &Group) -> Result<(), Violation> {
    for (number, member) in group.members() {
        let Some(had) = before.get(number) else {
            continue;
        };
        let (had, has) = (had.numbers(), member.told.numbers());
        if had.intersection(has).len() != had.len().min(has.len()) {
            return Err(Violation::new(
                "moved too much",
                format!("member {number} had {had:?}, and has {has:?} after one change"),
            ));
        }
    }
    Ok(())
}
