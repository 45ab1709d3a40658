//! A file that is not what was written gives a clear error, or exactly what was decided: never another state.
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

use skyschedule_server::consensus::{Consensus, ConsensusError, Options};
use skyschedule_server::state::State;
use store_common::{TempDir, open, propose, state_after, try_open};

const COMMANDS: u64 = 60;

/// Two folders with the same decisions, snapshot and log: after a clean stop, and as a kill leaves it.
async fn stopped_and_killed() -> [TempDir; 2] {
    let folder = TempDir::new();
    let options = Options {
        snapshot_every: 40,
        ..folder.options()
    };
    let (consensus, mut decided) = open(options).await;
    propose(&consensus, &mut decided, 0, COMMANDS, 1).await;
    let killed = folder.copy();
    consensus.shutdown().await;
    [folder, killed]
}

/// Opens what `change` made of the store; true when it was refused.
async fn refused_or_right(
    original: &TempDir,
    expected: &State,
    what: &str,
    change: impl FnOnce(&mut Vec<u8>),
) -> bool {
    let folder = original.copy();
    let mut bytes = fs::read(folder.store()).unwrap();
    change(&mut bytes);
    fs::write(folder.store(), bytes).unwrap();
    match try_open(folder.options()).await {
        Ok((consensus, _decided)) => {
            consensus.read(|state| assert!(state == expected, "another state: {what}"));
            consensus.shutdown().await;
            false
        }
        Err(error) => {
            let text = error.to_string();
            let helps = [
                "restore",
                "Restore",
                "--data-dir",
                "at least as new",
                "report it",
            ];
            assert!(
                helps.iter().any(|help| text.contains(help)),
                "{what}: {text}"
            );
            true
        }
    }
}

#[tokio::test]
async fn a_flipped_bit_gives_an_error_or_the_right_state() {
    let expected = state_after(COMMANDS);
    let kinds = ["stopped", "killed"].into_iter().enumerate();
    for ((nth, name), original) in kinds.zip(stopped_and_killed().await) {
        let length = fs::metadata(original.store()).unwrap().len();
        let length = usize::try_from(length).unwrap();
        // Each half of the header's bytes, and each page at some places; the bit changes with the place.
        let header = (nth..320).step_by(2);
        let pages = (4_096..length).step_by(2_039);
        let (mut refused, mut right) = (0, 0);
        for at in header.chain(pages) {
            let bit = at % 8;
            let what = format!("{name}, bit {bit} of byte {at}");
            let flip = |bytes: &mut Vec<u8>| bytes[at] ^= 1 << bit;
            if refused_or_right(&original, &expected, &what, flip).await {
                refused += 1;
            } else {
                right += 1;
            }
        }
        println!("{name}: {refused} refused, {right} right, of a file of {length} bytes");
        assert!(
            refused > 20 && right > 20,
            "both happen: {refused}, {right}"
        );
    }
}

#[tokio::test]
async fn every_flag_of_the_header_is_covered() {
    let expected = state_after(COMMANDS);
    for original in stopped_and_killed().await {
        for at in 9..12 {
            for bit in 0..8 {
                let what = format!("bit {bit} of byte {at}");
                let flip = |bytes: &mut Vec<u8>| bytes[at] ^= 1 << bit;
                refused_or_right(&original, &expected, &what, flip).await;
            }
        }
    }
}

#[tokio::test]
async fn a_truncated_or_padded_file_gives_an_error_or_the_right_state() {
    let expected = state_after(COMMANDS);
    for original in stopped_and_killed().await {
        let length = fs::metadata(original.store()).unwrap().len();
        let length = usize::try_from(length).unwrap();
        let odd = (0..16).map(|nth| length * nth / 16 + nth * 7);
        let pages = (0..length).step_by(4_096 * 2);
        let longer = [length + 1, length + 4_096, length * 2];
        for left in odd.chain(pages).chain(longer) {
            let what = format!("{left} of {length} bytes");
            let cut = |bytes: &mut Vec<u8>| bytes.resize(left, 0);
            let refused = refused_or_right(&original, &expected, &what, cut).await;
            assert!(refused || left > length / 2, "{what} are not enough");
        }
    }
}

#[tokio::test]
async fn zeroed_and_mixed_up_pages_give_an_error_or_the_right_state() {
    let expected = state_after(COMMANDS);
    for original in stopped_and_killed().await {
        let pages = fs::metadata(original.store()).unwrap().len() / 4_096;
        let pages = usize::try_from(pages).unwrap();
        for nth in 0..40 {
            let (from, to) = (nth * 7 % pages, (nth * 13 + 1) % pages);
            let zeroed = |bytes: &mut Vec<u8>| bytes[to * 4_096..][..4_096].fill(0);
            refused_or_right(&original, &expected, &format!("page {to} zeroed"), zeroed).await;
            let copied = |bytes: &mut Vec<u8>| {
                bytes.copy_within(from * 4_096..(from + 1) * 4_096, to * 4_096);
            };
            let what = format!("page {from} over {to}");
            refused_or_right(&original, &expected, &what, copied).await;
        }
    }
}

#[tokio::test]
async fn a_damaged_mark_does_not_stand_in_the_way() {
    let [folder, _] = stopped_and_killed().await;
    let path = folder.path().join("skyschedule.mark");
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(
            &path,
            &damaged[..if at % 3 == 0 { at } else { damaged.len() }],
        )
        .unwrap();
        let (consensus, _decided) = open(folder.options()).await;
        consensus.read(|state| assert_eq!(*state, state_after(COMMANDS)));
        consensus.shutdown().await;
    }
}

#[tokio::test]
async fn a_commit_that_went_missing_is_noticed() {
    // redb goes back to the commit before the last when the last is damaged: only the mark can tell.
    let [_, folder] = stopped_and_killed().await;
    let (consensus, mut decided) = open(folder.options()).await;
    let before = fs::read(folder.store()).unwrap();
    propose(&consensus, &mut decided, COMMANDS, COMMANDS + 1, 1).await;
    let killed = folder.copy();
    fs::write(killed.store(), before).unwrap();
    let error = Consensus::open(killed.options()).await.unwrap_err();
    assert!(matches!(error, ConsensusError::Shortened { .. }), "{error}");
    consensus.shutdown().await;
}
