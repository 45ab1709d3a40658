//! A year of decisions does not grow the disk.
#![cfg(not(sim))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

mod store_common;

use std::fs;

use skyschedule_common::ids::{ClientId, Incarnation};
use skyschedule_server::state::{Change, Command, Joining};
use store_common::{TempDir, answered, group, open};

/// Clients come and go; the state stays small.
fn coming_and_going(at: u64) -> Command {
    let change = if at.is_multiple_of(2) {
        let member = Joining {
            client: ClientId::new(format!("client-{}", at % 100)).unwrap(),
            incarnation: Incarnation(u128::from(at)),
            weight: 1,
            consistency: None,
        };
        Change::Join {
            members: vec![member],
            start: true,
        }
    } else {
        Change::Leave {
            members: vec![at / 2 + 1],
            start: true,
        }
    };
    Command::Group {
        group: group("orders"),
        change,
    }
}

#[tokio::test]
async fn two_hundred_thousand_decisions_need_no_more_disk_than_half_of_them() {
    let folder = TempDir::new();
    let (consensus, mut decided) = open(folder.options()).await;
    let mut sizes = Vec::new();
    for at in (0..200_000u64).step_by(500) {
        consensus
            .propose(&(at..at + 500).map(coming_and_going).collect::<Vec<_>>())
            .unwrap();
        answered(&mut decided, 500).await;
        sizes.push(fs::metadata(folder.store()).unwrap().len());
    }
    let (first_half, second_half) = sizes.split_at(200);
    let (early, late) = (first_half.iter().max(), second_half.iter().max());
    println!("largest sizes: {early:?}, then {late:?} bytes");
    assert!(late <= early, "it grew from {early:?} to {late:?}");
    assert!(late < Some(&(4 << 20)), "{late:?}");
    consensus.read(|state| {
        let group = state.group(&group("orders")).unwrap();
        assert_eq!(
            (group.members().len(), group.next_membership()),
            (0, 100_001)
        );
    });
    consensus.shutdown().await;
    let (consensus, _decided) = open(folder.options()).await;
    consensus.read(|state| assert_eq!(state.member_count(), 0));
}
