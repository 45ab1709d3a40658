//! Who should have which numbers: one pure function of the members.

use skyschedule_common::protocol::messages::Numbering;
use skyschedule_common::share::{Numbers, Share};

/// A member, or a share that is kept for one, as the plan sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seat<'a> {
    /// Its part of the whole; 0 gets nothing.
    pub(super) weight: u32,
    /// The numbers that it has under the present numbering.
    pub(super) present: &'a Numbers,
    /// Of them, those that it works on already.
    pub(super) working: &'a Numbers,
}

impl Seat<'_> {
    /// At most `count` of its numbers below `total`, first those that it works on; none: all that it has.
    fn keeps(&self, total: u32, count: u64) -> Option<Numbers> {
        // Nearly all seats of a large group.
        if self.present.last().is_none_or(|last| last < total) && self.present.len() <= count {
            return None;
        }
        let present = self.present.intersection(&Numbers::below(total));
        let working = first_n(&present.intersection(self.working), count);
        let others = present.difference(self.working);
        Some(working.union(&first_n(&others, count - working.len())))
    }
}

/// Who shall have what.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) total: u32,
    /// The numbers of each seat, in the order of the seats; none: those that it has.
    pub(super) numbers: Vec<Option<Numbers>>,
}

impl Plan {
    /// The share of each of these seats.
    pub(super) fn shares(self, seats: &[Seat<'_>]) -> Vec<Share> {
        let numbers = self.numbers.into_iter().zip(seats);
        numbers
            .map(|(numbers, seat)| numbers.unwrap_or_else(|| seat.present.clone()))
            .map(|numbers| Share::new(self.total, numbers).unwrap_or_default())
            .collect()
    }
}

/// The share of each seat. Seats are given oldest first.
pub(super) fn targets(numbering: Numbering, cap: Option<u32>, seats: &[Seat<'_>]) -> Plan {
    match numbering {
        Numbering::Modulo => modulo(seats),
        Numbering::Slots(slots) => divide(slots, cap, seats),
    }
}

/// `total` is the sum of the weights. Numbers below it stay; holes are filled, ascending, by the seats
/// with the highest numbers, then by newcomers.
fn modulo(seats: &[Seat<'_>]) -> Plan {
    let weights = seats.iter().map(|seat| seat.weight);
    let total = weights.fold(0u32, u32::saturating_add);
    let sizes: Vec<u64> = seats.iter().map(|seat| u64::from(seat.weight)).collect();
    fill(total, seats, &sizes, |at| {
        seats[at].present.last().map_or(u64::MAX, u64::from)
    })
}

/// How many of the slots each seat gets. Largest remainder: each gets the whole part of its proportion, and one more
/// goes to those with the largest fractions; ties go to present owners, then to the oldest.
pub(super) fn sizes(slots: u32, cap: Option<u32>, seats: &[Seat<'_>]) -> Vec<u64> {
    let weights: u64 = seats.iter().map(|seat| u64::from(seat.weight)).sum();
    if weights == 0 {
        return vec![0; seats.len()];
    }
    // What a weight is worth: slots, and what is left over as a fraction of one. Most weights are like the one before,
    // and dividing takes longer than all the rest.
    let mut worth = (0, (0, 0));
    let mut worth_of = |weight: u32| {
        if worth.0 != weight {
            let share = u64::from(slots) * u64::from(weight);
            worth = (weight, (share / weights, share % weights));
        }
        worth.1
    };
    let worths: Vec<(u64, u64)> = seats.iter().map(|seat| worth_of(seat.weight)).collect();
    let mut sizes: Vec<u64> = worths.iter().map(|(whole, _)| *whole).collect();
    let left = u64::from(slots).saturating_sub(sizes.iter().sum());
    let mut order: Vec<_> = (0..seats.len())
        .filter(|&at| seats[at].weight > 0)
        .map(|at| {
            let (whole, fraction) = worths[at];
            let owns_more = seats[at].present.len() > whole;
            (std::cmp::Reverse(fraction), !owns_more, at)
        })
        .collect();
    let left = usize::try_from(left).unwrap_or(usize::MAX);
    // The first so many, in whatever order.
    if left < order.len() {
        order.select_nth_unstable(left);
    }
    for (_, _, at) in order.into_iter().take(left) {
        sizes[at] += 1;
    }
    if let Some(cap) = cap {
        sizes
            .iter_mut()
            .for_each(|size| *size = (*size).min(u64::from(cap)));
    }
    sizes
}

fn divide(slots: u32, cap: Option<u32>, seats: &[Seat<'_>]) -> Plan {
    let sizes = sizes(slots, cap, seats);
    // The oldest first.
    fill(slots, seats, &sizes, |_| 0)
}

/// All keep what they can. The free numbers below `total`, ascending, go to those that have fewer than their size, in the
/// order of their ranks, of equal ones in that of the seats.
fn fill(total: u32, seats: &[Seat<'_>], sizes: &[u64], rank: impl Fn(usize) -> u64) -> Plan {
    let mut numbers: Vec<Option<Numbers>> = seats
        .iter()
        .zip(sizes)
        .map(|(seat, &size)| seat.keeps(total, size))
        .collect();
    let missing = |at: &usize| {
        let kept = kept(&numbers, seats, *at);
        sizes[*at].saturating_sub(kept.len())
    };
    // Few of a large group.
    let mut order: Vec<(usize, u64)> = (0..seats.len())
        .map(|at| (at, missing(&at)))
        .filter(|(_, missing)| *missing > 0)
        .collect();
    if order.is_empty() {
        return Plan { total, numbers };
    }
    order.sort_by_cached_key(|(at, _)| rank(*at));
    let mut free = free(total, (0..seats.len()).map(|at| kept(&numbers, seats, at))).into_iter();
    let mut open = free.next();
    for (at, mut missing) in order {
        let mut gained = Vec::new();
        while let (true, Some((first, last))) = (missing > 0, open) {
            let taken = missing.min(u64::from(last - first) + 1);
            // `taken` is at least 1 and at most the length of the range.
            let end = first + u32::try_from(taken - 1).unwrap_or(0);
            gained.push((first, end));
            missing -= taken;
            open = if end == last {
                free.next()
            } else {
                Some((end + 1, last))
            };
        }
        if !gained.is_empty() {
            let gained = Numbers::from_ranges(gained).unwrap_or_default();
            numbers[at] = Some(kept(&numbers, seats, at).union(&gained));
        }
    }
    Plan { total, numbers }
}

/// What the seat has, as far as that is planned.
fn kept<'a>(numbers: &'a [Option<Numbers>], seats: &'a [Seat<'_>], at: usize) -> &'a Numbers {
    numbers[at].as_ref().unwrap_or(seats[at].present)
}

/// The ranges below `total` that are in none of the sets, ascending. The sets lie below it, too.
fn free<'a>(total: u32, sets: impl Iterator<Item = &'a Numbers>) -> Vec<(u32, u32)> {
    // A mark a number: sorting the ranges of thousands of sets takes longer.
    let mut is_free = vec![true; index(total)];
    for &(first, last) in sets.flat_map(Numbers::ranges) {
        is_free[index(first)..=index(last)].fill(false);
    }
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for (number, _) in (0..total).zip(is_free).filter(|(_, is_free)| *is_free) {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The `count` smallest numbers of the set.
pub(super) fn first_n(numbers: &Numbers, count: u64) -> Numbers {
    let mut left = count;
    let mut ranges = Vec::new();
    for &(first, last) in numbers.ranges() {
        let taken = left.min(u64::from(last - first) + 1);
        if taken == 0 {
            break;
        }
        ranges.push((first, first + u32::try_from(taken - 1).unwrap_or(0)));
        left -= taken;
    }
    Numbers::from_ranges(ranges).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    static NOTHING: Numbers = Numbers::EMPTY;

    /// Weights and numbers, as seats.
    fn seats(members: &[(u32, Numbers)]) -> Vec<Seat<'_>> {
        members
            .iter()
            .map(|(weight, present)| Seat {
                weight: *weight,
                present,
                working: &NOTHING,
            })
            .collect()
    }

    fn printed(numbering: Numbering, spec: &[(u32, &[u32])]) -> Vec<String> {
        let members: Vec<_> = spec
            .iter()
            .map(|&(weight, numbers)| (weight, numbers.iter().copied().collect()))
            .collect();
        let seats = seats(&members);
        targets(numbering, None, &seats)
            .shares(&seats)
            .iter()
            .map(|share| format!("{share:?}"))
            .collect()
    }

    #[test]
    fn numbers_below_the_total_stay_and_the_highest_fill_the_holes() {
        let after = printed(
            Numbering::Modulo,
            &[(1, &[0]), (1, &[2]), (1, &[3]), (1, &[4])],
        );
        assert_eq!(after, ["{0}/4", "{2}/4", "{3}/4", "{1}/4"]);
    }

    #[test]
    fn a_newcomer_takes_the_place_of_one_that_left() {
        let after = printed(Numbering::Modulo, &[(1, &[0]), (1, &[2]), (1, &[])]);
        assert_eq!(after, ["{0}/3", "{2}/3", "{1}/3"]);
    }

    #[test]
    fn weights_count_and_all_zero_is_no_share() {
        assert_eq!(
            printed(Numbering::Modulo, &[(2, &[]), (0, &[]), (1, &[])]),
            ["{0-1}/3", "{}/3", "{2}/3"]
        );
        assert_eq!(printed(Numbering::Modulo, &[(0, &[0])]), ["{}/0"]);
    }

    fn histories() -> impl Strategy<Value = Vec<(u32, bool)>> {
        proptest::collection::vec((0..5u32, any::<bool>()), 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Members come (weight) and go (front or back); each plan starts from the one before.
        #[test]
        fn plans_cover_are_disjoint_and_move_only_what_must(history in histories(), slots in prop_oneof![Just(None), Just(Some(16)), Just(Some(64))]) {
            let numbering = slots.map_or(Numbering::Modulo, Numbering::Slots);
            let mut members: Vec<(u32, Numbers)> = Vec::new();
            for (weight, drop_first) in history {
                if weight == 0 && !members.is_empty() {
                    members.remove(if drop_first { 0 } else { members.len() - 1 });
                } else {
                    members.push((weight, Numbers::EMPTY));
                }
                let plan = targets(numbering, None, &seats(&members)).shares(&seats(&members));
                let weights: u64 = members.iter().map(|(weight, _)| u64::from(*weight)).sum();
                let total = slots.map_or(weights, u64::from);
                let owned: u64 = plan.iter().map(|share| share.numbers().len()).sum();
                prop_assert_eq!(owned, if weights == 0 { 0 } else { total });
                let distinct: Numbers = plan.iter().flat_map(|share| share.numbers().iter()).collect();
                prop_assert_eq!(distinct.len(), owned);
                for ((weight, present), share) in members.iter().zip(&plan) {
                    let kept = present.intersection(share.numbers()).len();
                    if slots.is_some() {
                        prop_assert_eq!(kept, present.len().min(share.numbers().len()), "only the surplus moves");
                        let proportion = total as f64 * f64::from(*weight) / (weights.max(1) as f64);
                        prop_assert!((share.numbers().len() as f64 - proportion).abs() < 1.0);
                    } else {
                        let below = present.intersection(&Numbers::below(u32::try_from(total).unwrap())).len();
                        prop_assert_eq!(kept, below.min(u64::from(*weight)), "numbers below the total stay");
                    }
                }
                for ((_, present), share) in members.iter_mut().zip(plan) {
                    *present = share.numbers().clone();
                }
            }
        }
    }
}
