//! A process that is killed at any point has remembered all that it answered.
#![cfg(all(unix, not(sim)))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

mod store_common;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use skyschedule_server::consensus::{Consensus, ConsensusError, Options};
use store_common::{TempDir, open, propose, state_after};

/// Set for the process that is to be killed: the folder of its store.
const FOLDER: &str = "STORE_KILL_FOLDER";

const THIS_TEST: &str = "a_killed_process_has_remembered_what_it_answered";

#[tokio::test]
async fn a_killed_process_has_remembered_what_it_answered() {
    if let Ok(folder) = std::env::var(FOLDER) {
        return decide_for_ever(&folder).await;
    }
    let folder = TempDir::new();
    let mut known = 0;
    for round in 0..12u64 {
        let mut child = start(&folder);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut answered = known;
        // Kills at another point of the commit each time: some lines later, and some microseconds.
        for _ in 0..round * 7 + 3 {
            answered = next_answer(&mut lines);
        }
        let error = Consensus::open(folder.options()).await.unwrap_err();
        assert!(matches!(error, ConsensusError::Locked { .. }), "{error}");
        child.kill().unwrap();
        child.wait().unwrap();
        // What it had said meanwhile counts too.
        while let Some(Ok(line)) = lines.next() {
            answered = answer(&line).unwrap_or(answered);
        }
        let (consensus, _decided) = open(folder.options()).await;
        known = consensus.read(|state| {
            let known = (answered..answered + 3).find(|&count| *state == state_after(count));
            known.unwrap_or_else(|| panic!("after {answered} answers, another state"))
        });
        consensus.shutdown().await;
    }
}

fn start(folder: &TempDir) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", THIS_TEST, "--nocapture"])
        .env(FOLDER, folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn next_answer(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> u64 {
    lines
        .find_map(|line| answer(&line.unwrap()))
        .expect("the process goes on until it is killed")
}

fn answer(line: &str) -> Option<u64> {
    line.strip_prefix("answered ")?.parse().ok()
}

/// Decides on, from where the store ends, and says what was answered.
async fn decide_for_ever(folder: &str) {
    let storage = skyschedule_server::consensus::Storage::Folder(folder.into());
    let options = Options {
        snapshot_every: 16,
        ..Options::new(storage)
    };
    let (consensus, mut decided) = open(options).await;
    let mut at = (0..)
        .find(|&count| consensus.read(|state| *state == state_after(count)))
        .unwrap();
    loop {
        propose(&consensus, &mut decided, at, at + 1, 1).await;
        at += 1;
        println!("answered {at}");
    }
}
