//! What the tests of the store have in common.

#![allow(dead_code, reason = "each test uses its part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_server::consensus::{Consensus, ConsensusError, Decided, Options, Storage};
use skyschedule_server::state::{Change, Command, Effect, Joining, State};
use tokio::sync::mpsc;

/// A folder of the test's own, removed at its end.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "store-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Another folder with the same files.
    pub(crate) fn copy(&self) -> Self {
        let copy = Self::new();
        for file in fs::read_dir(&self.0).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), copy.0.join(file.file_name())).unwrap();
        }
        copy
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.0.join("skyschedule.redb")
    }

    pub(crate) fn options(&self) -> Options {
        Options::new(Storage::Folder(self.0.clone()))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn group(name: &str) -> GroupName {
    GroupName::new(name).unwrap()
}

/// The `at`th of a history in which clients come to seven groups, and every third leaves again.
pub(crate) fn command(at: u64) -> Command {
    let (round, group_at) = (at / 7, at % 7);
    let change = if round % 3 == 2 {
        // Each round of a group but every third gives out one number.
        let number = round - round / 3;
        Change::Leave {
            members: vec![number],
            start: true,
        }
    } else {
        let member = Joining {
            client: ClientId::new(format!("client-{at}")).unwrap(),
            incarnation: Incarnation(u128::from(at) << 64 | 0xABCD),
            weight: u32::try_from(1 + at % 3).unwrap(),
            consistency: None,
        };
        Change::Join {
            members: vec![member],
            start: at.is_multiple_of(2),
        }
    };
    Command::Group {
        group: group(&format!("group-{group_at}")),
        change,
    }
}

/// The state after the first `count` commands of the history.
pub(crate) fn state_after(count: u64) -> State {
    let mut state = State::default();
    (0..count).for_each(|at| drop(state.apply(&command(at))));
    state
}

pub(crate) async fn open(options: Options) -> (Consensus, mpsc::Receiver<Decided>) {
    try_open(options).await.unwrap()
}

/// Opens, and takes the answer to `Ready`.
pub(crate) async fn try_open(
    options: Options,
) -> Result<(Consensus, mpsc::Receiver<Decided>), ConsensusError> {
    let (consensus, mut decided) = Consensus::open(options).await?;
    match decided.recv().await {
        Some(Decided::Applied {
            commands: 1,
            effects,
        }) if matches!(effects[..], [(0, Effect::Ready { .. })]) => Ok((consensus, decided)),
        Some(Decided::Failed(error)) => Err(error),
        other => panic!("not the answer to Ready: {other:?}"),
    }
}

/// Proposes the commands of the history from `from` to `to`, `batch` at a time, and awaits each answer.
pub(crate) async fn propose(
    consensus: &Consensus,
    decided: &mut mpsc::Receiver<Decided>,
    from: u64,
    to: u64,
    batch: u64,
) {
    let mut at = from;
    while at < to {
        let end = to.min(at + batch);
        consensus
            .propose(&(at..end).map(command).collect::<Vec<_>>())
            .unwrap();
        answered(decided, end - at).await;
        at = end;
    }
}

pub(crate) async fn answered(
    decided: &mut mpsc::Receiver<Decided>,
    count: u64,
) -> Vec<(usize, Effect)> {
    match decided.recv().await {
        Some(Decided::Applied { commands, effects }) if commands as u64 == count => effects,
        other => panic!("not the answer to {count} commands: {other:?}"),
    }
}
