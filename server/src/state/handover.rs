//! Rows move in two steps: their owner is told to keep only what it may keep, and what it releases is
//! granted to the new owner. Grant follows release, an ended lease or a proven death, never hope.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::protocol::messages::{Consistency, Numbering};
use skyschedule_common::share::{Numbers, Share};

use super::effect::Event;
use super::group::{Group, Handover, MAX_CLAIM, Member};
use super::obstacles::Obstacles;
use super::plan::{self, Plan, Seat};

impl Group {
    /// Makes the targets anew where that is possible now, and moves what can move.
    ///
    /// A barrier of which nothing is granted yet takes in whatever changes; a later one is started by
    /// `start`, which pacing decides. In a slot group handovers follow one another without waiting.
    pub(super) fn replan(&mut self, start: bool, events: &mut Vec<Event>) {
        if self.outdated && self.may_plan(start) {
            self.make_targets();
            if self.handover.is_none() {
                self.handover = Some(Handover { granted: false });
                events.push(Event::HandoverStarted);
            }
        } else if self.outdated {
            self.give_left_over();
        }
        self.progress(events);
    }

    fn may_plan(&self, start: bool) -> bool {
        match (self.handover, self.settings.numbering) {
            // Where nobody works there is nobody to spare, and nobody to hand over from.
            (None, _) => start || self.members.values().all(|member| member.held.is_empty()),
            (Some(handover), Numbering::Modulo) => !handover.granted,
            (Some(handover), Numbering::Slots(_)) => start || !handover.granted,
        }
    }

    /// Members and vacancies as the plan sees them, the oldest first.
    pub(super) fn seats<'a>(&'a self) -> Vec<Seat<'a>> {
        static NOTHING: Numbers = Numbers::EMPTY;
        let same = self.planned == self.settings.numbering;
        let members = self.members.iter().map(|(&number, member)| {
            let is_working = member.held.total() == member.target.total();
            let seat = Seat {
                weight: member.effective_weight(),
                present: member.target.numbers(),
                working: if is_working {
                    member.held.numbers()
                } else {
                    &NOTHING
                },
            };
            (number, seat)
        });
        let vacancies = self.vacancies.values().map(|vacancy| {
            let seat = Seat {
                weight: vacancy.weight,
                present: vacancy.target.numbers(),
                working: &NOTHING,
            };
            (vacancy.member, seat)
        });
        let mut seats: Vec<(u64, Seat<'a>)> = members.chain(vacancies).collect();
        if !self.vacancies.is_empty() {
            seats.sort_by_key(|(number, _)| *number);
        }
        let seat = |(_, seat): (u64, Seat<'a>)| Seat {
            present: if same { seat.present } else { &NOTHING },
            working: if same { seat.working } else { &NOTHING },
            ..seat
        };
        seats.into_iter().map(seat).collect()
    }

    fn make_targets(&mut self) {
        if self.settings.numbering == Numbering::Modulo {
            // Nearly all members will move.
            self.moving.forget();
        }
        let Plan { total, numbers } = plan::targets(
            self.settings.numbering,
            self.settings.max_slots,
            &self.seats(),
        );
        let same = self.planned == self.settings.numbering;
        let members = self
            .members
            .iter_mut()
            .map(|(&number, member)| (number, &mut member.target));
        let vacancies = self
            .vacancies
            .values_mut()
            .map(|vacancy| (vacancy.member, &mut vacancy.target));
        let mut places: Vec<(u64, &mut Share)> = members.chain(vacancies).collect();
        places.sort_by_key(|(number, _)| *number);
        for ((number, place), numbers) in places.into_iter().zip(numbers) {
            let numbers = match numbers {
                Some(numbers) => numbers,
                None if !same => Numbers::EMPTY,
                None if place.total() == total => continue,
                None => place.numbers().clone(),
            };
            *place = Share::new(total, numbers).unwrap_or_default();
            self.moving.add(number);
        }
        self.planned = self.settings.numbering;
        self.outdated = false;
    }

    /// Nobody is promised these rows any more. Unless a plan is made at once, they go to the live members
    /// with the fewest, under the present total, until the next plan.
    pub(super) fn free(&mut self, shares: &[Share], start: bool) {
        let shares = || shares.iter().filter(|share| !share.is_empty());
        // Targets that are not empty have one total.
        let Some(total) = shares().map(Share::total).next() else {
            return;
        };
        self.outdated = true;
        if !self.may_plan(start) {
            self.give(total, shares());
        }
    }

    /// Rows that became free when no member could take them: now one may.
    fn give_left_over(&mut self) {
        let members = self.members.values().map(|member| &member.target);
        let vacancies = self.vacancies.values().map(|vacancy| &vacancy.target);
        let targets = members.chain(vacancies);
        let total = targets.clone().map(Share::total).max().unwrap_or(0);
        let promised: u64 = targets.clone().map(|target| target.numbers().len()).sum();
        if promised >= u64::from(total) {
            return;
        }
        let left_over = targets.fold(Numbers::below(total), |left, target| {
            left.difference(target.numbers())
        });
        if let Ok(share) = Share::new(total, left_over)
            && !share.is_empty()
        {
            self.give(total, std::iter::once(&share));
        }
    }

    fn give<'a>(&mut self, total: u32, shares: impl Iterator<Item = &'a Share>) {
        let most = self.settings.max_slots.map_or(u64::MAX, u64::from);
        let receivers = self
            .members
            .iter()
            .filter(|(_, member)| member.effective_weight() > 0 && member.target.total() == total);
        // The one with the fewest first, of these the oldest.
        let mut receivers: BinaryHeap<Reverse<(u64, u64)>> = receivers
            .map(|(&number, member)| Reverse((member.target.numbers().len(), number)))
            .collect();
        for share in shares {
            let Some(mut first) = receivers.peek_mut() else {
                return;
            };
            let Reverse((owned, number)) = &mut *first;
            if let Some(member) = self.members.get_mut(number) {
                let present = member.target.numbers();
                let room = most.saturating_sub(*owned);
                let numbers = present.union(&plan::first_n(share.numbers(), room));
                *owned = numbers.len();
                member.target =
                    Share::new(total, numbers).unwrap_or_else(|_| member.target.clone());
                self.moving.add(*number);
            }
        }
    }

    /// A member answered what it was told: nothing but that and `keeping` is worked on any more.
    pub(super) fn release(&mut self, number: u64, epoch: Epoch, keeping: &Share) {
        let Some(member) = self.members.get_mut(&number) else {
            return;
        };
        if (member.epoch != epoch && !broken(Rule::L10)) || !keeping.is_within(&member.held) {
            return;
        }
        self.moving.add(number);
        member.held = if keeping.is_empty() {
            member.told.clone()
        } else if member.told.is_empty() {
            keeping.clone()
        } else if member.told.total() == keeping.total() {
            let numbers = member.told.numbers().union(keeping.numbers());
            Share::new(keeping.total(), numbers).unwrap_or_else(|_| member.held.clone())
        } else {
            return;
        };
    }

    /// The others go on without a member's release. In an exclusive group nobody does.
    pub(super) fn overtake(&mut self, number: u64, epoch: Epoch, events: &mut Vec<Event>) {
        if self.settings.consistency == Consistency::Exclusive {
            return;
        }
        let Some(member) = self.members.get_mut(&number) else {
            return;
        };
        if member.epoch == epoch && !member.has_released() {
            let held = std::mem::replace(&mut member.held, member.told.clone());
            self.moving.add(number);
            events.push(Event::Overtaken {
                member: number,
                held,
            });
        }
    }

    pub(super) fn reissue(&mut self, number: u64, epoch: Epoch, events: &mut Vec<Event>) {
        let Some(member) = self.members.get_mut(&number) else {
            return;
        };
        if epoch > member.epoch && epoch.quorum <= MAX_CLAIM {
            if epoch.quorum > self.counter {
                self.counter = epoch.quorum + super::group::LOST_EPOCHS;
            }
            let told = member.told.clone();
            tell(&mut self.counter, number, member, told, events);
        }
    }

    /// Shrinks, then grants, whatever can be shrunk and granted now; ends the handover when all is done.
    pub(super) fn progress(&mut self, events: &mut Vec<Event>) {
        let numbering = self.planned;
        // Those that have what they should have need and hinder nothing. Of a large group few others are taken out
        // meanwhile, so that it need not be looked through.
        let few = self.few_moving();
        let mut aside: Vec<(u64, Member)> = few
            .iter()
            .flatten()
            .filter_map(|number| self.members.remove_entry(number))
            .collect();
        let mut moving: Vec<(u64, &mut Member)> = if few.is_some() {
            let aside = aside.iter_mut();
            aside.map(|(number, member)| (*number, member)).collect()
        } else {
            let members = self.members.iter_mut();
            members
                .filter(|(_, member)| !member.is_settled())
                .map(|(&number, member)| (number, member))
                .collect()
        };
        for (number, member) in &mut moving {
            if !member.fenced && member.has_released() && !member.held.is_within(&member.target) {
                let keeps = match numbering {
                    Numbering::Modulo => Share::none_of(member.target.total()),
                    Numbering::Slots(_) => member.held.retained(&member.target),
                };
                tell(&mut self.counter, *number, member, keeps, events);
            }
        }
        // Targets are disjoint, and have one total: only rows that are held outside their holder's own
        // target can be in the way.
        let members = moving.iter().map(|(_, member)| &**member);
        let totals = members.clone().map(|member| member.target.total());
        let total = totals.max().unwrap_or(0);
        let outside = members.filter(|member| !member.held.is_within(&member.target));
        let obstacles = Obstacles::new(total, outside.map(|member| &member.held));
        let mut granted = false;
        let (mut is_over, mut hands_over) = (true, false);
        for (number, member) in &mut moving {
            if let Some(share) = granted_now(member, numbering, &obstacles) {
                granted |= !share.is_empty();
                member.held = share.clone();
                tell(&mut self.counter, *number, member, share, events);
            }
            let waits = !member.is_settled();
            is_over &= !waits;
            hands_over |= waits && !member.fenced;
        }
        self.members.extend(aside);
        if let Some(handover) = &mut self.handover {
            handover.granted |= granted;
        } else if hands_over {
            self.handover = Some(Handover { granted });
            events.push(Event::HandoverStarted);
        }
        if is_over {
            self.end(events);
        }
    }

    fn end(&mut self, events: &mut Vec<Event>) {
        if self.handover.take().is_some() {
            events.push(Event::HandoverEnded);
        }
    }
}

/// What a member may have from now on, beyond what it has (rule L11).
fn granted_now(member: &Member, numbering: Numbering, obstacles: &Obstacles) -> Option<Share> {
    if member.fenced
        || member.told == member.target
        || !(member.has_released() || broken(Rule::L11))
    {
        return None;
    }
    let free = if broken(Rule::L11) {
        member.target.clone()
    } else {
        obstacles.free_of(&member.target)
    };
    if numbering == Numbering::Modulo && free != member.target {
        return None;
    }
    // A grant takes nothing away: between two totals, a number that must wait may have rows that it holds.
    let grows = member.held.is_within(&free) || broken(Rule::L11);
    (grows && free != member.told).then_some(free)
}

/// Tells a member a share under an epoch of its own.
fn tell(
    counter: &mut u64,
    number: u64,
    member: &mut Member,
    share: Share,
    events: &mut Vec<Event>,
) {
    if !broken(Rule::UniqueEpochs) || *counter == 0 {
        *counter += 1;
    }
    member.epoch = Epoch::quorum(*counter);
    member.told = share.clone();
    events.push(Event::Told {
        member: number,
        epoch: member.epoch,
        share,
    });
}
