//! Who should have which numbers: one pure function of the members.

use skyschedule_common::protocol::messages::Numbering;
use skyschedule_common::share::{Numbers, Share};

/// A member, or a share that is kept for one, as the plan sees it.
#[derive(Debug, Clone)]
pub(super) struct Seat {
    /// Its part of the whole; 0 gets nothing.
    pub(super) weight: u32,
    /// The numbers that it has under the present numbering.
    pub(super) present: Numbers,
    /// Of them, those that it works on already.
    pub(super) working: Numbers,
}

impl Seat {
    /// At most `count` of its numbers in `all`: first those that it works on.
    fn keeps(&self, all: &Numbers, count: u64) -> Numbers {
        let present = self.present.intersection(all);
        let working = first_n(&present.intersection(&self.working), count);
        let others = present.difference(&self.working);
        working.union(&first_n(&others, count - working.len()))
    }
}

/// The share of each seat, in the order of the seats. Seats are given oldest first.
pub(super) fn targets(numbering: Numbering, cap: Option<u32>, seats: &[Seat]) -> Vec<Share> {
    let (total, numbers) = match numbering {
        Numbering::Modulo => modulo(seats),
        Numbering::Slots(slots) => (slots, divide(slots, cap, seats)),
    };
    numbers
        .into_iter()
        .map(|numbers| Share::new(total, numbers).unwrap_or_default())
        .collect()
}

/// `total` is the sum of the weights. Numbers below it stay; holes are filled, ascending, by the seats
/// with the highest numbers, then by newcomers.
fn modulo(seats: &[Seat]) -> (u32, Vec<Numbers>) {
    let total = seats
        .iter()
        .fold(0u32, |sum, seat| sum.saturating_add(seat.weight));
    let all = Numbers::below(total);
    let mut kept: Vec<Numbers> = seats
        .iter()
        .map(|seat| seat.keeps(&all, u64::from(seat.weight)))
        .collect();
    let mut order: Vec<usize> = (0..seats.len()).collect();
    order.sort_by_key(|&at| seats[at].present.last().map_or(u64::MAX, u64::from));
    fill(&all, &mut kept, &order, |at| u64::from(seats[at].weight));
    (total, kept)
}

/// Largest remainder: each seat gets the whole part of its proportion, and one more goes to those with
/// the largest fractions; ties go to present owners, then to the oldest.
fn divide(slots: u32, cap: Option<u32>, seats: &[Seat]) -> Vec<Numbers> {
    let weights: u64 = seats.iter().map(|seat| u64::from(seat.weight)).sum();
    if weights == 0 {
        return vec![Numbers::EMPTY; seats.len()];
    }
    let share = |seat: &Seat| u64::from(slots) * u64::from(seat.weight);
    let mut sizes: Vec<u64> = seats.iter().map(|seat| share(seat) / weights).collect();
    let left = u64::from(slots).saturating_sub(sizes.iter().sum());
    let mut order: Vec<usize> = (0..seats.len())
        .filter(|&at| seats[at].weight > 0)
        .collect();
    order.sort_by_key(|&at| {
        let owns_more = seats[at].present.len() > sizes[at];
        (
            std::cmp::Reverse(share(&seats[at]) % weights),
            !owns_more,
            at,
        )
    });
    for &at in order
        .iter()
        .take(usize::try_from(left).unwrap_or(usize::MAX))
    {
        sizes[at] += 1;
    }
    if let Some(cap) = cap {
        sizes
            .iter_mut()
            .for_each(|size| *size = (*size).min(u64::from(cap)));
    }
    let all = Numbers::below(slots);
    let mut kept: Vec<Numbers> = seats
        .iter()
        .zip(&sizes)
        .map(|(seat, &size)| seat.keeps(&all, size))
        .collect();
    let oldest_first: Vec<usize> = (0..seats.len()).collect();
    fill(&all, &mut kept, &oldest_first, |at| sizes[at]);
    kept
}

/// Gives the free numbers of `all`, ascending, to those that have fewer than `size`, in `order`.
fn fill(all: &Numbers, kept: &mut [Numbers], order: &[usize], size: impl Fn(usize) -> u64) {
    let owned: Numbers = merge(kept);
    let mut free = all.difference(&owned).ranges().to_vec().into_iter();
    let mut open = free.next();
    for &at in order {
        let mut missing = size(at).saturating_sub(kept[at].len());
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
            kept[at] = kept[at].union(&Numbers::from_ranges(gained).unwrap_or_default());
        }
    }
}

/// All numbers of disjoint sets, in one pass.
fn merge(sets: &[Numbers]) -> Numbers {
    let mut ranges: Vec<(u32, u32)> = sets
        .iter()
        .flat_map(|set| set.ranges().iter().copied())
        .collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let touches = last.1.checked_add(1) == Some(next.0);
        if touches {
            last.1 = next.1;
        }
        touches
    });
    Numbers::from_ranges(ranges).unwrap_or_default()
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

    fn seats(spec: &[(u32, &[u32])]) -> Vec<Seat> {
        spec.iter()
            .map(|&(weight, numbers)| Seat {
                weight,
                present: numbers.iter().copied().collect(),
                working: Numbers::EMPTY,
            })
            .collect()
    }

    fn printed(numbering: Numbering, seats: &[Seat]) -> Vec<String> {
        targets(numbering, None, seats)
            .iter()
            .map(|share| format!("{share:?}"))
            .collect()
    }

    #[test]
    fn numbers_below_the_total_stay_and_the_highest_fill_the_holes() {
        let after = printed(
            Numbering::Modulo,
            &seats(&[(1, &[0]), (1, &[2]), (1, &[3]), (1, &[4])]),
        );
        assert_eq!(after, ["{0}/4", "{2}/4", "{3}/4", "{1}/4"]);
    }

    #[test]
    fn a_newcomer_takes_the_place_of_one_that_left() {
        let after = printed(Numbering::Modulo, &seats(&[(1, &[0]), (1, &[2]), (1, &[])]));
        assert_eq!(after, ["{0}/3", "{2}/3", "{1}/3"]);
    }

    #[test]
    fn weights_count_and_all_zero_is_no_share() {
        assert_eq!(
            printed(Numbering::Modulo, &seats(&[(2, &[]), (0, &[]), (1, &[])])),
            ["{0-1}/3", "{}/3", "{2}/3"]
        );
        assert_eq!(printed(Numbering::Modulo, &seats(&[(0, &[0])])), ["{}/0"]);
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
            let mut members: Vec<Seat> = Vec::new();
            for (weight, drop_first) in history {
                if weight == 0 && !members.is_empty() {
                    members.remove(if drop_first { 0 } else { members.len() - 1 });
                } else {
                    members.push(Seat { weight, present: Numbers::EMPTY, working: Numbers::EMPTY });
                }
                let plan = targets(numbering, None, &members);
                let weights: u64 = members.iter().map(|m| u64::from(m.weight)).sum();
                let total = slots.map_or(weights, u64::from);
                let owned: u64 = plan.iter().map(|share| share.numbers().len()).sum();
                prop_assert_eq!(owned, if weights == 0 { 0 } else { total });
                prop_assert_eq!(merge(&plan.iter().map(|s| s.numbers().clone()).collect::<Vec<_>>()).len(), owned);
                for (member, share) in members.iter().zip(&plan) {
                    let kept = member.present.intersection(share.numbers()).len();
                    if slots.is_some() {
                        prop_assert_eq!(kept, member.present.len().min(share.numbers().len()), "only the surplus moves");
                        let proportion = total as f64 * f64::from(member.weight) / (weights.max(1) as f64);
                        prop_assert!((share.numbers().len() as f64 - proportion).abs() < 1.0);
                    } else {
                        let below = member.present.intersection(&Numbers::below(u32::try_from(total).unwrap())).len();
                        prop_assert_eq!(kept, below.min(u64::from(member.weight)), "numbers below the total stay");
                    }
                }
                for (member, share) in members.iter_mut().zip(plan) {
                    member.present = share.numbers().clone();
                }
            }
        }
    }
}
