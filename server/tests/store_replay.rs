//! What is answered is remembered, in order, across restarts, crashes and failing disks.
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

use proptest::prelude::*;
use skyschedule_server::consensus::{
    ConfirmError, Consensus, ConsensusError, Decided, MemoryDisk, Options, ProposeError, Storage,
};
use skyschedule_server::state::State;
use store_common::{TempDir, answered, command, group, open, propose, state_after, try_open};

fn on(disk: &MemoryDisk) -> Options {
    Options::new(Storage::Memory(disk.clone()))
}

#[tokio::test]
async fn a_restart_knows_all_and_leads_anew() {
    let folder = TempDir::new();
    let (consensus, mut decided) = open(folder.options()).await;
    assert_eq!(consensus.term(), 1);
    propose(&consensus, &mut decided, 0, 100, 7).await;
    let other_handle = consensus.clone();
    consensus.shutdown().await;
    assert_eq!(
        other_handle.propose(&[command(0)]),
        Err(ProposeError::Stopped)
    );
    assert_eq!(other_handle.confirm().await, Err(ConfirmError::NotLeader));
    assert!(decided.recv().await.is_none(), "the answers end");

    let (consensus, _decided) = open(folder.options()).await;
    assert_eq!(consensus.term(), 2);
    assert_eq!(consensus.confirm().await, Ok(()));
    consensus.read(|state| assert_eq!(*state, state_after(100)));
}

#[tokio::test]
async fn a_snapshot_replaces_the_log_and_changes_nothing() {
    for snapshot_every in [1, 2, 10, 99, 1_000] {
        let disk = MemoryDisk::new();
        let options = || Options {
            snapshot_every,
            ..on(&disk)
        };
        for start in 0..4 {
            let (consensus, mut decided) = open(options()).await;
            consensus.read(|state| assert_eq!(*state, state_after(start * 50)));
            assert_eq!(consensus.term(), start + 1, "a snapshot keeps the term");
            propose(&consensus, &mut decided, start * 50, start * 50 + 50, 3).await;
            consensus.shutdown().await;
        }
    }
}

#[tokio::test]
async fn answers_come_in_order_and_with_the_effects_of_each_command() {
    let (consensus, mut decided) = open(on(&MemoryDisk::new())).await;
    let mut expected = State::default();
    let sizes = [1, 0, 30, 2, 5];
    let mut at = 0;
    for size in sizes {
        consensus
            .propose(&(at..at + size).map(command).collect::<Vec<_>>())
            .unwrap();
        at += size;
    }
    at = 0;
    for size in sizes {
        let effects: Vec<_> = (0..size)
            .flat_map(|nth| {
                let effects = expected.apply(&command(at + nth)).into_iter();
                effects.map(move |effect| (usize::try_from(nth).unwrap(), effect))
            })
            .collect();
        assert_eq!(answered(&mut decided, size).await, effects);
        at += size;
    }
}

#[tokio::test]
async fn who_takes_no_answers_is_told_busy_and_loses_nothing() {
    let disk = MemoryDisk::new();
    let (consensus, mut decided) = open(on(&disk)).await;
    let mut taken = 0;
    let refused = loop {
        match consensus.propose(&[command(taken)]) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, ProposeError::Busy);
    for _ in 0..taken {
        answered(&mut decided, 1).await;
    }
    propose(&consensus, &mut decided, taken, taken + 1, 1).await;
    consensus.read(|state| assert_eq!(*state, state_after(taken + 1)));
}

#[tokio::test]
async fn shutdown_writes_what_was_proposed_before() {
    let disk = MemoryDisk::new();
    let (consensus, decided) = open(on(&disk)).await;
    (0..50).for_each(|at| consensus.propose(&[command(at)]).unwrap());
    consensus.shutdown().await;
    drop(decided);
    disk.crash(|| false);
    let (consensus, _decided) = open(on(&disk)).await;
    consensus.read(|state| assert_eq!(*state, state_after(50)));
}

#[tokio::test]
async fn a_failed_write_is_fatal_and_loses_nothing_that_was_answered() {
    // Wherever in a commit, or in the snapshot that follows, the disk begins to fail.
    for operations in 0..40 {
        let disk = MemoryDisk::new();
        let options = || Options {
            snapshot_every: 5,
            ..on(&disk)
        };
        let (consensus, mut decided) = open(options()).await;
        propose(&consensus, &mut decided, 0, 3, 1).await;
        disk.fail_after(operations);
        let mut answered = 3;
        let error = loop {
            // Refused when the failure, of a snapshot, is already known.
            let _ = consensus.propose(&[command(answered)]);
            match decided.recv().await {
                Some(Decided::Applied { .. }) => answered += 1,
                Some(Decided::Lost { .. }) => {}
                Some(Decided::Failed(error)) => break error,
                None => panic!("it ended without a reason"),
            }
        };
        assert!(matches!(error, ConsensusError::Write { .. }), "{error}");
        assert!(
            error.to_string().contains("make room on the disk"),
            "{error}"
        );
        assert_eq!(
            consensus.propose(&[command(answered)]),
            Err(ProposeError::Stopped)
        );
        assert_eq!(consensus.confirm().await, Err(ConfirmError::NotLeader));
        // What was decided before may be answered still.
        while let Some(late) = decided.recv().await {
            match late {
                Decided::Applied { .. } => answered += 1,
                Decided::Lost { .. } => {}
                Decided::Failed(error) => panic!("it ended twice: {error}"),
            }
        }
        disk.crash(|| false);
        let (consensus, _decided) = open(options()).await;
        consensus.read(|state| {
            let known = [answered, answered + 1].map(state_after);
            assert!(known.contains(state), "after {operations} operations");
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// The power fails in the middle of a commit, and any part of what was not synced reaches the disk.
    #[test]
    fn a_crash_at_any_point_loses_nothing_that_was_answered(
        before in 1..12u64,
        operations in 0..60u64,
        survivors in proptest::collection::vec(any::<bool>(), 64),
        snapshot_every in 1..8u64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let disk = MemoryDisk::new();
            let options = || Options { snapshot_every, ..on(&disk) };
            let (consensus, mut decided) = open(options()).await;
            propose(&consensus, &mut decided, 0, before, 2).await;
            disk.fail_after(operations);
            let mut answered = before;
            while consensus.propose(&[command(answered)]).is_ok() {
                match decided.recv().await {
                    Some(Decided::Applied { .. }) => answered += 1,
                    _ => break,
                }
            }
            let mut survivors = survivors.into_iter().cycle();
            disk.crash(|| survivors.next().unwrap());
            let (consensus, _decided) = open(options()).await;
            consensus.read(|state| {
                let known = [answered, answered + 1].map(state_after);
                assert!(known.contains(state));
            });
        });
    }
}

#[tokio::test]
async fn an_old_copy_of_a_disk_has_the_old_state() {
    let disk = MemoryDisk::new();
    let (consensus, mut decided) = open(on(&disk)).await;
    propose(&consensus, &mut decided, 0, 10, 1).await;
    let backup = disk.copy();
    propose(&consensus, &mut decided, 10, 20, 1).await;
    let (restored, _decided) = open(on(&backup)).await;
    restored.read(|state| assert_eq!(*state, state_after(10)));
    consensus.read(|state| assert_eq!(*state, state_after(20)));
}

#[tokio::test]
async fn a_folder_in_use_is_refused_until_its_user_is_gone() {
    let folder = TempDir::new();
    let (consensus, _decided) = open(folder.options()).await;
    let error = Consensus::open(folder.options()).await.unwrap_err();
    assert!(matches!(error, ConsensusError::Locked { .. }), "{error}");
    assert!(error.to_string().contains("--data-dir"), "{error}");
    consensus.shutdown().await;
    try_open(folder.options()).await.unwrap();
}

#[tokio::test]
async fn a_store_of_a_later_version_is_refused() {
    let folder = TempDir::new();
    open(folder.options()).await.0.shutdown().await;
    let database = redb::Database::open(folder.store()).unwrap();
    let write = database.begin_write().unwrap();
    let about = redb::TableDefinition::<&str, u64>::new("skyschedule");
    write
        .open_table(about)
        .unwrap()
        .insert("format", 4)
        .unwrap();
    write.commit().unwrap();
    drop(database);
    let error = Consensus::open(folder.options()).await.unwrap_err();
    assert!(
        matches!(
            error,
            ConsensusError::Newer {
                found: 4,
                known: 3,
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn an_entry_of_a_later_version_is_refused() {
    let folder = TempDir::new();
    open(folder.options()).await.0.shutdown().await;
    let database = redb::Database::open(folder.store()).unwrap();
    let write = database.begin_write().unwrap();
    let log = redb::TableDefinition::<u64, &[u8]>::new("log");
    write
        .open_table(log)
        .unwrap()
        .insert(2, [2u8, 0, 0].as_slice())
        .unwrap();
    write.commit().unwrap();
    drop(database);
    let error = Consensus::open(folder.options()).await.unwrap_err();
    assert!(
        matches!(
            error,
            ConsensusError::Newer {
                found: 2,
                known: 1,
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn other_files_are_refused_and_left_alone() {
    let database = |folder: &TempDir| {
        let database = redb::Database::create(folder.store()).unwrap();
        let write = database.begin_write().unwrap();
        let table = redb::TableDefinition::<u64, u64>::new("somebody's");
        write.open_table(table).unwrap().insert(1, 2).unwrap();
        write.commit().unwrap();
    };
    let text = |folder: &TempDir| fs::write(folder.store(), "x".repeat(100_000)).unwrap();
    let empty = |folder: &TempDir| fs::write(folder.store(), "").unwrap();
    let kinds: [&dyn Fn(&TempDir); 3] = [&database, &text, &empty];
    for make in kinds {
        let folder = TempDir::new();
        make(&folder);
        let error = Consensus::open(folder.options()).await.unwrap_err();
        assert!(matches!(error, ConsensusError::Foreign { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_store_that_went_missing_is_noticed() {
    let folder = TempDir::new();
    open(folder.options()).await.0.shutdown().await;
    fs::remove_file(folder.store()).unwrap();
    let error = Consensus::open(folder.options()).await.unwrap_err();
    assert!(
        matches!(error, ConsensusError::Inaccessible { .. }),
        "{error}"
    );
    // What the text of the next error tells: to go on with what is there.
    let old = TempDir::new();
    let (consensus, mut decided) = open(old.options()).await;
    propose(&consensus, &mut decided, 0, 5, 1).await;
    consensus.shutdown().await;
    let backup = old.copy();
    let (consensus, mut decided) = open(old.options()).await;
    propose(&consensus, &mut decided, 5, 10, 1).await;
    consensus.shutdown().await;
    fs::copy(backup.store(), old.store()).unwrap();
    let error = Consensus::open(old.options()).await.unwrap_err();
    assert!(matches!(error, ConsensusError::Shortened { .. }), "{error}");
    fs::remove_file(old.path().join("skyschedule.mark")).unwrap();
    let (consensus, _decided) = open(old.options()).await;
    consensus.read(|state| assert_eq!(*state, state_after(5)));
}

#[tokio::test]
async fn a_start_that_was_interrupted_is_begun_anew() {
    let folder = TempDir::new();
    fs::write(folder.path().join("skyschedule.redb.new"), "half a store").unwrap();
    let (consensus, mut decided) = open(folder.options()).await;
    propose(&consensus, &mut decided, 0, 5, 1).await;
    consensus.read(|state| assert!(state.group(&group("group-0")).is_some()));
}

#[tokio::test]
async fn a_decision_that_is_too_large_is_refused() {
    let (consensus, mut decided) = open(on(&MemoryDisk::new())).await;
    let refused = consensus.propose(&(0..600_000).map(command).collect::<Vec<_>>());
    assert!(
        matches!(refused, Err(ProposeError::TooLarge { .. })),
        "{refused:?}"
    );
    propose(&consensus, &mut decided, 0, 1, 1).await;
}
