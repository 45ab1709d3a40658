use proptest::prelude::*;
use skyschedule_common::protocol::messages::Millis;
use skyschedule_common::share::Numbers;

use super::*;

const M: Membership = Membership::quorum(1);
const LEASE: Duration = Duration::from_millis(6_000);

fn at(millis: u64) -> Instant {
    Instant::from_nanos(1_000_000_000 + millis * 1_000_000)
}

fn terms(consistency: Consistency, numbering: Numbering) -> Terms {
    Terms {
        consistency,
        numbering,
        drain_timeout: Millis(5_000),
    }
}

fn share(total: u32, numbers: &[u32]) -> Share {
    Share::new(total, numbers.iter().copied().collect()).unwrap()
}

fn key(id: i64) -> RowKey {
    id.into()
}

/// A member with this share in epoch 1, with a lease from 0 to 6,000 ms.
fn member(consistency: Consistency, numbering: Numbering, share: Share) -> Permit {
    let mut permit = Permit::new();
    permit
        .welcome(M, Epoch::quorum(1), share, terms(consistency, numbering))
        .unwrap();
    assert!(permit.renew(M, at(0), LEASE, None, at(1)));
    permit
}

fn available(share: Share) -> Permit {
    member(Consistency::Available, Numbering::Modulo, share)
}

fn exclusive(share: Share) -> Permit {
    member(Consistency::Exclusive, Numbering::Modulo, share)
}

#[test]
fn a_welcome_alone_is_no_lease() {
    let mut permit = Permit::new();
    let terms = terms(Consistency::Available, Numbering::Modulo);
    permit
        .welcome(M, Epoch::quorum(1), share(1, &[0]), terms)
        .unwrap();
    assert!(permit.acquire(at(0)).is_none());
    permit.renew(M, at(0), LEASE, None, at(1));
    assert!(permit.acquire(at(1)).is_some());
}

#[test]
fn a_lease_counts_from_sending_and_never_shrinks() {
    let mut permit = exclusive(share(1, &[0]));
    assert!(permit.may_begin(key(0), at(5_999)));
    assert!(!permit.may_begin(key(0), at(6_000)));
    // Answered late: what counts is when it was sent.
    permit.renew(M, at(2_000), LEASE, None, at(5_000));
    assert!(permit.may_begin(key(0), at(7_999)) && !permit.may_begin(key(0), at(8_000)));
    // An older answer that arrives later takes nothing away.
    permit.renew(M, at(1_000), LEASE, None, at(5_001));
    assert!(permit.may_begin(key(0), at(7_999)));
    // Another membership's answer is none.
    assert!(!permit.renew(Membership::quorum(2), at(5_000), LEASE, None, at(5_002)));
    assert!(!permit.may_begin(key(0), at(8_000)));
}

#[test]
fn only_a_greater_epoch_of_the_own_membership_is_taken() {
    let mut permit = available(share(2, &[0]));
    assert!(
        !permit.told(M, Epoch::quorum(1), share(2, &[1])),
        "the same epoch"
    );
    assert!(
        !permit.told(Membership::quorum(2), Epoch::quorum(9), share(2, &[1])),
        "another membership"
    );
    assert!(permit.told(M, Epoch::quorum(3), share(3, &[2])));
    assert!(
        !permit.told(M, Epoch::quorum(2), share(2, &[1])),
        "an older epoch, late"
    );
    assert!(permit.may_begin(key(2), at(2)) && !permit.may_begin(key(3), at(2)));
}

#[test]
fn rows_that_left_and_came_back_are_not_begun_from_stale_work() {
    let mut permit = available(share(2, &[0, 1]));
    let stale = permit.acquire(at(1)).unwrap();
    assert!(!permit.is_recalled(stale.tenure, at(1)));
    permit.told(M, Epoch::quorum(2), share(2, &[0]));
    permit.told(M, Epoch::quorum(3), share(2, &[0, 1]));
    assert!(permit.begin(stale.tenure, key(0), at(2)).is_some());
    assert!(permit.begin(stale.tenure, key(1), at(2)).is_none());
    assert!(permit.is_recalled(stale.tenure, at(2)));
    let fresh = permit.acquire(at(2)).unwrap();
    assert!(permit.begin(fresh.tenure, key(1), at(2)).is_some());
}

#[test]
fn an_exclusive_lease_that_is_over_revokes_for_good() {
    let mut permit = exclusive(share(1, &[0]));
    let work = permit.acquire(at(1)).unwrap();
    let row = permit.begin(work.tenure, key(7), at(1)).unwrap();
    assert!(!permit.is_revoked(row.revocation, at(5_999)));
    assert!(permit.is_revoked(row.revocation, at(6_000)));
    permit.renew(M, at(5_900), LEASE, None, at(6_001));
    assert!(
        permit.is_revoked(row.revocation, at(6_001)),
        "a renewal brings nothing back"
    );
    assert!(permit.begin(work.tenure, key(7), at(6_001)).is_none());
    assert!(permit.acquire(at(6_001)).is_some());
    assert!(permit.holds(key(7), at(6_001)));
}

#[test]
fn an_available_lease_that_is_over_means_ask_first() {
    let mut permit = available(share(1, &[0]));
    let work = permit.acquire(at(1)).unwrap();
    let row = permit.begin(work.tenure, key(7), at(1)).unwrap();
    assert!(permit.begin(work.tenure, key(8), at(6_000)).is_none());
    assert!(permit.acquire(at(6_000)).is_none());
    assert!(
        !permit.is_revoked(row.revocation, at(6_000)),
        "what runs may finish"
    );
    permit.renew(M, at(6_000), LEASE, None, at(6_001));
    assert!(permit.begin(work.tenure, key(8), at(6_001)).is_some());
}

#[test]
fn the_base_is_the_union_since_the_last_settled_share() {
    let mut permit = available(share(2, &[0]));
    permit.told(M, Epoch::quorum(2), share(3, &[]));
    permit.told(M, Epoch::quorum(3), share(3, &[1]));
    permit.grant_autonomy(at(9_000));
    assert!(
        !permit.may_begin(key(0), at(5_000)),
        "not while the lease runs"
    );
    for id in [0, 2, 1, 4] {
        assert!(permit.may_begin(key(id), at(8_000)), "{id}");
    }
    assert!(!permit.may_begin(key(3), at(8_000)));
    assert!(
        !permit.may_begin(key(0), at(9_000)),
        "the permission has an end of its own"
    );

    permit.renew(M, at(8_000), LEASE, Some(Epoch::quorum(2)), at(8_001));
    assert!(
        permit.inspect(at(8_001)).base.contains(key(0)),
        "settled in an older epoch"
    );
    permit.renew(M, at(8_000), LEASE, Some(Epoch::quorum(3)), at(8_001));
    permit.grant_autonomy(at(16_000));
    assert!(!permit.may_begin(key(0), at(15_000)) && permit.may_begin(key(1), at(15_000)));
}

#[test]
fn an_exclusive_client_never_works_on_alone() {
    let mut permit = exclusive(share(1, &[0]));
    permit.told(M, Epoch::quorum(2), share(1, &[0]));
    permit.grant_autonomy(at(99_000));
    assert!(!permit.may_begin(key(0), at(7_000)));
}

#[test]
fn rows_of_the_base_leave_all_work_when_servers_answer_again() {
    let mut permit = available(share(2, &[0]));
    permit.told(M, Epoch::quorum(2), share(2, &[1]));
    permit.grant_autonomy(at(9_000));
    let work = permit.acquire(at(8_000)).unwrap();
    assert!(permit.begin(work.tenure, key(0), at(8_000)).is_some());
    assert_eq!(
        permit.keeping(),
        None,
        "a row outside the share is worked on"
    );
    permit.renew(M, at(8_000), LEASE, None, at(8_100));
    permit.grant_autonomy(at(20_000));
    assert!(permit.begin(work.tenure, key(0), at(15_000)).is_none());
    assert!(permit.begin(work.tenure, key(1), at(15_000)).is_some());
}

#[test]
fn a_modulo_release_waits_for_the_last_row_outside() {
    let mut permit = exclusive(share(2, &[0]));
    let work = permit.acquire(at(1)).unwrap();
    let (two, six) = (
        permit.begin(work.tenure, key(2), at(1)),
        permit.begin(work.tenure, key(6), at(1)),
    );
    permit.told(M, Epoch::quorum(2), share(3, &[0]));
    assert_eq!(permit.keeping(), None);
    assert!(
        !permit.finish_row(six.unwrap().guard),
        "it is inside the new share"
    );
    assert_eq!(permit.keeping(), None);
    // Also when the lease is over meanwhile, and the row was revoked.
    permit.observe(at(7_000));
    assert!(permit.finish_row(two.unwrap().guard));
    assert_eq!(permit.keeping(), Some(Share::none_of(3)));
}

#[test]
fn slots_are_released_one_by_one() {
    let mut permit = member(
        Consistency::Exclusive,
        Numbering::Slots(16),
        share(16, &[0, 1, 2, 3]),
    );
    let work = permit.acquire(at(1)).unwrap();
    let mut begin = |id: i64| permit.begin(work.tenure, key(id), at(1)).unwrap().guard;
    let (zero, two, again, three) = (begin(0), begin(2), begin(18), begin(3));
    permit.told(M, Epoch::quorum(2), share(16, &[0]));
    assert_eq!(permit.keeping(), Some(share(16, &[2, 3])));
    permit.finish_row(two);
    assert_eq!(
        permit.keeping(),
        Some(share(16, &[2, 3])),
        "another row of the slot is worked on"
    );
    permit.finish_row(again);
    assert_eq!(permit.keeping(), Some(share(16, &[3])));
    permit.finish_row(three);
    assert_eq!(permit.keeping(), Some(share(16, &[])));
    permit.finish_row(zero);
    assert_eq!(permit.guards_out(), 0);
}

#[test]
fn after_a_change_of_the_numbering_slots_are_not_released_early() {
    let mut permit = member(Consistency::Exclusive, Numbering::Slots(16), share(3, &[0]));
    let work = permit.acquire(at(1)).unwrap();
    let row = permit.begin(work.tenure, key(3), at(1)).unwrap();
    permit.told(M, Epoch::quorum(2), share(16, &[]));
    assert_eq!(permit.keeping(), None);
    permit.finish_row(row.guard);
    assert_eq!(permit.keeping(), Some(share(16, &[])));
}

#[test]
fn the_end_of_a_membership_takes_everything() {
    let mut permit = available(share(1, &[0]));
    let work = permit.acquire(at(1)).unwrap();
    let row = permit.begin(work.tenure, key(7), at(1)).unwrap();
    assert!(!permit.end_membership(Membership::quorum(2)));
    assert!(permit.end_membership(M));
    assert!(permit.is_revoked(row.revocation, at(2)) && permit.is_revoked(work.revocation, at(2)));
    assert!(permit.begin(work.tenure, key(7), at(2)).is_none());
    permit.grant_autonomy(at(9_000));
    assert!(!permit.may_begin(key(7), at(2)) && permit.acquire(at(2)).is_none());
    assert_eq!(permit.guards_out(), 1);
    assert!(
        permit.finish_row(row.guard),
        "the driver must know: the next membership waits for it"
    );
}

#[test]
fn a_leader_replaces_a_membership_that_a_degraded_replica_minted() {
    let minted = Membership {
        number: 4,
        replica: 2,
    };
    let degraded = Epoch {
        quorum: 5,
        degraded: 1,
        replica: 2,
    };
    let terms = terms(Consistency::Available, Numbering::Modulo);
    let mut permit = Permit::new();
    permit
        .welcome(minted, degraded, share(1, &[0]), terms)
        .unwrap();
    assert_eq!(
        permit.welcome(M, Epoch::quorum(6), share(2, &[1]), terms),
        Ok(Welcomed::New)
    );
    assert_eq!(permit.holding().unwrap().epoch, Epoch::quorum(6));
    assert!(
        permit
            .welcome(
                Membership::quorum(3),
                Epoch::quorum(7),
                share(1, &[0]),
                terms
            )
            .is_err()
    );
}

#[test]
fn node_is_one_number_of_a_modulo_group() {
    let node = |permit: &Permit| permit.holding().unwrap().node();
    assert_eq!(node(&available(share(3, &[1]))), Some((3, 1)));
    assert_eq!(node(&available(share(3, &[0, 1]))), None);
    assert_eq!(node(&available(share(3, &[]))), None);
    assert_eq!(
        node(&member(
            Consistency::Available,
            Numbering::Slots(16),
            share(16, &[1])
        )),
        None
    );
}

#[test]
fn a_closing_client_begins_nothing_and_finishes_what_runs() {
    let mut permit = available(share(1, &[0]));
    let work = permit.acquire(at(1)).unwrap();
    let row = permit.begin(work.tenure, key(7), at(1)).unwrap();
    permit.begin_closing();
    assert!(permit.begin(work.tenure, key(8), at(2)).is_none() && permit.acquire(at(2)).is_none());
    assert!(!permit.is_revoked(row.revocation, at(2)) && permit.is_recalled(work.tenure, at(2)));
    assert!(permit.holds(key(7), at(2)) && !permit.holds(key(8), at(2)));
    assert!(permit.finish_row(row.guard));
    permit.end();
    assert!(permit.is_revoked(row.revocation, at(2)));
}

#[derive(Debug, Clone)]
enum Step {
    Pass(u64),
    Acquire,
    Begin(usize, i64),
    Finish(usize),
    Told(u64, Share),
    Renew(u64, Option<u64>),
    Autonomy,
    Gone,
}

const TOTAL: u32 = 4;

fn steps() -> impl Strategy<Value = Step> {
    let share = proptest::collection::btree_set(0..TOTAL, 0..4)
        .prop_map(|set| Share::new(TOTAL, set.into_iter().collect::<Numbers>()).unwrap());
    prop_oneof![
        3 => (0..4_000u64).prop_map(Step::Pass),
        3 => Just(Step::Acquire),
        6 => (0..8usize, 0..8i64).prop_map(|(work, id)| Step::Begin(work, id)),
        4 => (0..8usize).prop_map(Step::Finish),
        3 => (0..12u64, share).prop_map(|(epoch, share)| Step::Told(epoch, share)),
        3 => (0..6_000u64, proptest::option::of(0..12u64)).prop_map(|(ago, settled)| Step::Renew(ago, settled)),
        1 => Just(Step::Autonomy),
        1 => Just(Step::Gone),
    ]
}

proptest! {
    /// The permit against a model that keeps sets of single rows and every promise in its plainest form.
    #[test]
    fn random_histories_keep_the_promises(
        exclusive in any::<bool>(),
        steps in proptest::collection::vec(steps(), 1..120),
    ) {
        let consistency = if exclusive { Consistency::Exclusive } else { Consistency::Available };
        let everything = Share::everything();
        let mut permit = Permit::new();
        let terms = terms(consistency, Numbering::Slots(TOTAL));
        permit.welcome(M, Epoch::quorum(1), Share::new(TOTAL, Numbers::below(TOTAL)).unwrap(), terms).unwrap();
        let mut time = 10_000;
        let (mut epoch, mut gone, mut lease_end, mut alone_until) = (1, false, 0, 0);
        let mut share: ShareUnion = everything.into();
        // Works with what may still be begun from them, at most; rows with their revocation.
        let mut works: Vec<(Granted, Vec<i64>)> = Vec::new();
        let mut rows: Vec<(GuardId, i64)> = Vec::new();
        for step in steps {
            match step {
                Step::Pass(millis) => time += millis,
                Step::Acquire => if let Some(granted) = permit.acquire(at(time)) {
                    let ids = (0..8).filter(|id| granted.rows.contains(key(*id))).collect();
                    works.push((granted, ids));
                },
                Step::Begin(work, id) => if let Some((granted, ids)) = works.get(work)
                    && let Some(begun) = permit.begin(granted.tenure, key(id), at(time))
                {
                    prop_assert!(!gone && ids.contains(&id), "rows never come back to a work");
                    let leased = time < lease_end;
                    prop_assert!(leased || (!exclusive && time < alone_until));
                    prop_assert!(!leased || share.contains(key(id)));
                    prop_assert!(begun.epoch >= granted.epoch);
                    rows.push((begun.guard, id));
                },
                Step::Finish(row) => if row < rows.len() {
                    let (guard, _) = rows.swap_remove(row);
                    permit.finish_row(guard);
                },
                Step::Told(new, told) => {
                    let taken = permit.told(M, Epoch::quorum(new), told.clone());
                    prop_assert_eq!(taken, !gone && new > epoch);
                    if taken {
                        epoch = new;
                        works.iter_mut().for_each(|(_, ids)| ids.retain(|id| told.contains(key(*id))));
                        share = told.into();
                    }
                }
                Step::Renew(ago, settled) => {
                    if permit.renew(M, at(time - ago), LEASE, settled.map(Epoch::quorum), at(time)) {
                        lease_end = lease_end.max(time - ago + 6_000);
                        alone_until = 0;
                    }
                }
                Step::Autonomy => {
                    permit.grant_autonomy(at(time + 1_000));
                    alone_until = time + 1_000;
                }
                Step::Gone => {
                    permit.end_membership(M);
                    gone = true;
                }
            }
            prop_assert_eq!(permit.guards_out(), rows.len());
            if let Some(keeping) = permit.keeping() {
                prop_assert!(!gone);
                let free = |id: i64| !share.contains(key(id)) && !keeping.contains(key(id));
                prop_assert!(rows.iter().all(|(_, id)| !free(*id)), "released, and worked on");
            }
            if gone {
                prop_assert!((0..8).all(|id| !permit.may_begin(key(id), at(time))));
            }
        }
    }
}
