//! What must be so when there is no trouble any more.

use skyschedule_client::Mode;
use skyschedule_common::ids::Membership;
use skyschedule_common::share::Share;

use super::{Oracle, View, name};

impl Oracle {
    /// Promise 1, once there is no trouble any more: `Err` says what is not as it should be yet.
    ///
    /// # Errors
    /// What is not settled.
    pub fn settled(&self, views: &[View]) -> Result<(), String> {
        let Some(group) = &self.state else {
            return if views.is_empty() {
                Ok(())
            } else {
                Err("no group".to_owned())
            };
        };
        if group.in_handover() || group.wants_handover() {
            return Err("rows are moving".to_owned());
        }
        if !group.vacancies().is_empty() {
            return Err("shares are kept for clients that are away".to_owned());
        }
        let mut total = 0;
        let mut covered = 0;
        let mut shares: Vec<&Share> = Vec::new();
        for (number, member) in group.members() {
            let membership = Some(Membership::quorum(*number));
            let view = views
                .iter()
                .find(|view| view.inside.membership == membership);
            let Some(view) = view else {
                return Err(format!("member {number} belongs to no process"));
            };
            if view.inside.epoch != Some(member.epoch) || view.inside.share != member.told {
                return Err(format!(
                    "{} has {:?} at {:?} instead of {:?} at {}",
                    name(view),
                    view.inside.share,
                    view.inside.epoch,
                    member.told,
                    member.epoch
                ));
            }
            if (member.weight, member.draining) != (view.weight, view.drains) {
                return Err(format!(
                    "{} wants weight {} (drain: {}) and has {} ({})",
                    name(view),
                    view.weight,
                    view.drains,
                    member.weight,
                    member.draining
                ));
            }
            if !member.is_settled() {
                return Err(format!("member {number} has not what it should have"));
            }
            if view.inside.mode != Mode::Leased {
                return Err(format!("{} is {}", name(view), view.inside.mode));
            }
            if shares.iter().any(|share| share.meets(&member.told)) {
                return Err(format!("the share of member {number} meets another's"));
            }
            total = member.told.total();
            covered += member.told.numbers().len();
            shares.push(&member.told);
        }
        let weights: u32 = group
            .members()
            .values()
            .map(|member| if member.draining { 0 } else { member.weight })
            .sum();
        let cap = group.settings().max_slots.map(u64::from);
        let capped = shares
            .iter()
            .any(|share| Some(share.numbers().len()) == cap);
        if weights > 0 && covered != u64::from(total) && !capped {
            return Err(format!("{covered} of {total} numbers are held"));
        }
        for view in views {
            let id_is_taken = views.iter().any(|other| {
                other.client_id == view.client_id && other.inside.membership.is_some()
            });
            if view.inside.membership.is_none() && !id_is_taken {
                return Err(format!("{} is no member", name(view)));
            }
            let is_over = |membership: Membership| {
                membership.replica != 0 || !group.members().contains_key(&membership.number)
            };
            if view.inside.membership.is_some_and(is_over) {
                return Err(format!("{} does not know that it is none", name(view)));
            }
        }
        Ok(())
    }
}
