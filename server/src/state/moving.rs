//! Members that do not have what they should have: for them alone a large group is looked through at each decision.

use std::collections::{BTreeMap, BTreeSet};

use super::derived::Derived;
use super::group::{Group, Member};

/// Numbers of members: all that are not settled, and perhaps some that are.
pub(super) type Moving = Derived<BTreeSet<u64>>;

impl Moving {
    /// Something that this member has, or should have, changes.
    pub(super) fn add(&mut self, number: u64) {
        self.change(|moving| {
            moving.insert(number);
        });
    }
}

impl Group {
    /// Those that are not settled, in the order of their numbers; `None`: they are so many that the whole group may as
    /// well be looked through.
    pub(super) fn few_moving(&mut self) -> Option<Vec<u64>> {
        let members = &self.members;
        let few = members.len() / 4 + 2;
        if self.moving.get().is_none() && unsettled(members).nth(few).is_some() {
            return None;
        }
        let moving = self.moving.or_find(|| unsettled(members).collect());
        moving.retain(|number| {
            let member = members.get(number);
            member.is_some_and(|member| !member.is_settled())
        });
        let numbers = (moving.len() <= few).then(|| moving.iter().copied().collect());
        if numbers.is_none() {
            self.moving.forget();
        }
        numbers
    }

    /// A member that is not settled, and is not among those that are kept as such: a fault of this module.
    pub(super) fn forgotten(&self) -> Option<u64> {
        let moving = self.moving.get()?;
        unsettled(&self.members).find(|number| !moving.contains(number))
    }
}

fn unsettled(members: &BTreeMap<u64, Member>) -> impl Iterator<Item = u64> {
    let unsettled = members.iter().filter(|(_, member)| !member.is_settled());
    unsettled.map(|(&number, _)| number)
}
