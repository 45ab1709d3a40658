//! `sql-consumer` processes.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use skyschedule_common::env;
use skyschedule_tests::server::{PASSWORD, Server, USER};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::crew::PATIENCE;
use super::place::Place;

/// A command with what all of them need.
pub(crate) fn command(place: &Place) -> Command {
    let binaries = std::env::var_os("SKY_BIN_DIR").expect(
        "SKY_BIN_DIR must name the folder with this workspace's binaries: run the tests by ./tests/run",
    );
    let mut command = Command::new(Path::new(&binaries).join("sql-consumer"));
    command
        .args(["--database-url", &place.url])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    command
}

/// Makes the tables and adds tasks.
pub(crate) async fn prepare(place: &Place, tasks: u64) {
    let mut command = command(place);
    command.args(["--create", "--prepare-only", "--seed", &tasks.to_string()]);
    let status = env::timeout(PATIENCE, command.status()).await.unwrap();
    assert!(status.unwrap().success());
}

/// A process that works. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Consumer {
    child: Child,
    log: PathBuf,
}

impl Consumer {
    /// Starts one with a ledger, and does not wait until it is a member. Its log is a file in `logs`.
    pub(crate) fn start(
        server: &Server,
        place: &Place,
        logs: &TempDir,
        id: &str,
        flags: &[&str],
    ) -> Self {
        let log = logs.path().join(id);
        let child = command(place)
            .args(["--servers", &server.address().to_string()])
            .args(["--group", "1000", "--client-id", id, "--user", USER])
            .args(["--ledger", "--until-empty"])
            .args(flags)
            .env("SKY_PASSWORD", PASSWORD)
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self { child, log }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = self.child.id().expect("it has not ended").cast_signed();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// Waits until it has ended by itself.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        match env::timeout(PATIENCE, self.child.wait()).await {
            Ok(status) => status.unwrap(),
            Err(_) => panic!("it does not end: {}", self.log()),
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }
}
