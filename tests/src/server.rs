//! A server process.

use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use skyschedule_common::env;
use tempfile::TempDir;
use tokio::process::Command;

use crate::admin::Admin;
use crate::process::{Log, Process, binary, own_address};

/// The user whom servers of tests know.
pub const USER: &str = "moon";

/// That user's password.
pub const PASSWORD: &str = "walker";

/// How long a server may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(30);

/// A `skyschedule serve` with a folder and an address of its own, which it keeps over restarts.
#[derive(Debug)]
pub struct Server {
    process: Option<Process>,
    listen: SocketAddr,
    admin: SocketAddr,
    folder: TempDir,
    user: Option<&'static str>,
    more: Vec<String>,
    log: Log,
}

impl Server {
    /// A server that knows [`USER`], and is ready.
    pub async fn start() -> Self {
        let mut server = Self::prepared();
        server.restart().await;
        server
    }

    /// A server that asks nobody for a password, and is ready.
    pub async fn start_open() -> Self {
        let mut server = Self::prepared();
        server.user = None;
        server.restart().await;
        server
    }

    /// A server that has an address but does not run yet.
    pub fn prepared() -> Self {
        let address = own_address();
        Self {
            process: None,
            listen: (address, 9991).into(),
            admin: (address, 9980).into(),
            folder: TempDir::new().expect("a temporary folder can be made"),
            user: Some(USER),
            more: Vec::new(),
            log: Log::default(),
        }
    }

    /// Another flag of `skyschedule serve`, or another value of one, from its next start on.
    pub fn flag(&mut self, name: &str, value: &str) {
        match self.more.iter().position(|flag| flag == name) {
            Some(at) => value.clone_into(&mut self.more[at + 1]),
            None => self.more.extend([name.to_owned(), value.to_owned()]),
        }
    }

    /// Waits until the leader, as this server knows it, has heard heartbeats of so many members of a group.
    pub async fn hears(&self, group: &str, members: usize) {
        let deadline = env::now() + PATIENCE;
        loop {
            let group = self.admin().group(group).await.unwrap_or_default();
            let shown = group["members"].as_array().cloned().unwrap_or_default();
            let is_heard =
                |member: &Value| member["state"] == "active" && member["heartbeat_age_ms"].is_u64();
            let heard = shown.iter().filter(|member| is_heard(member)).count();
            if heard == members && group["stale"] == false {
                return;
            }
            assert!(
                env::now() < deadline,
                "members are not back: {group}; {}",
                self.log
            );
            env::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Gives it other addresses, from its next start on.
    pub fn move_away(&mut self) {
        let address = own_address();
        self.listen = (address, 9991).into();
        self.admin = (address, 9980).into();
    }

    /// Takes its disk away, while it does not run.
    pub fn lose_disk(&mut self) {
        assert!(self.process.is_none(), "the server runs");
        self.folder = TempDir::new().expect("a temporary folder can be made");
    }

    /// A copy of its disk, while it does not run.
    pub fn copy_disk(&self) -> TempDir {
        assert!(self.process.is_none(), "the server runs");
        let copy = TempDir::new().expect("a temporary folder can be made");
        for file in std::fs::read_dir(self.folder.path()).expect("its folder can be read") {
            let file = file.expect("its folder can be read");
            std::fs::copy(file.path(), copy.path().join(file.file_name()))
                .expect("a file can be copied");
        }
        copy
    }

    /// Gives it another disk, while it does not run.
    pub fn put_disk(&mut self, disk: TempDir) {
        assert!(self.process.is_none(), "the server runs");
        self.folder = disk;
    }

    /// Gives it the disk of another server, while both do not run, and that one its own.
    pub fn swap_disks(&mut self, other: &mut Self) {
        assert!(
            self.process.is_none() && other.process.is_none(),
            "a server runs"
        );
        std::mem::swap(&mut self.folder, &mut other.folder);
    }

    /// Whether its process runs.
    pub fn runs(&self) -> bool {
        self.process.is_some()
    }

    /// Starts the server where it was, with what it remembers, and waits until it is ready.
    pub async fn restart(&mut self) {
        self.launch();
        self.ready().await;
    }

    /// Waits until its admin interface answers, whether it is ready or not.
    pub async fn answers(&self) {
        let deadline = env::now() + PATIENCE;
        while !self.admin().answers().await {
            assert!(env::now() < deadline, "no answer; its log:\n{}", self.log);
            env::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until it can number clients.
    pub async fn ready(&mut self) {
        let deadline = env::now() + PATIENCE;
        while !self.admin().is_ready().await {
            let status = self
                .process()
                .child()
                .try_wait()
                .expect("a child can be asked");
            assert!(
                status.is_none(),
                "the server ended ({status:?}); its log:\n{}",
                self.log
            );
            assert!(
                env::now() < deadline,
                "the server is not ready; its log:\n{}",
                self.log
            );
            env::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts the server and does not wait.
    pub fn launch(&mut self) {
        let mut command = Command::new(binary("skyschedule"));
        command
            .arg("serve")
            .args(["--listen", &self.listen.to_string()])
            .args(["--admin", &self.admin.to_string()])
            .arg("--data-dir")
            .arg(self.folder.path())
            .args(&self.more)
            .env("RUST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if let Some(user) = self.user {
            command.args(["--user", user]).env("SKY_PASSWORD", PASSWORD);
        }
        assert!(self.process.is_none(), "the server runs already");
        self.process = Some(Process::start(command, self.log.clone()));
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.listen
    }

    /// Its admin interface.
    pub fn admin(&self) -> Admin {
        Admin::new(self.admin)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        self.process
            .as_ref()
            .expect("the server runs")
            .signal(signal);
    }

    /// Kills it at once, as `kill -9` does.
    pub async fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.ended().await;
    }

    /// Asks it to stop (SIGTERM), and waits until it has.
    pub async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended().await
    }

    /// Waits until it has ended.
    pub async fn ended(&mut self) -> ExitStatus {
        let status = self.process().ended(PATIENCE).await;
        self.process = None;
        status
    }

    /// Runs a command of the command line against this server: whether it did, and what it printed.
    pub async fn command(&self, arguments: &[&str]) -> (bool, String) {
        let admin = self.admin.to_string();
        Self::command_line(&[arguments, &["--admin", &admin]].concat()).await
    }

    /// Runs a command of the command line: whether it did, and what it printed.
    pub async fn command_line(arguments: &[&str]) -> (bool, String) {
        let output = Command::new(binary("skyschedule"))
            .args(arguments)
            .output()
            .await
            .expect("a command can be run");
        let text = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8(text).expect("what is printed is text"),
        )
    }

    /// The memory that it uses at present, in bytes.
    pub fn memory(&self) -> u64 {
        let pid = self.process.as_ref().expect("the server runs").pid();
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))
            .expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.expect("Linux tells the memory of a process") * 1_024
    }

    /// Whether a line of its log contains `text`.
    pub fn logged(&self, text: &str) -> bool {
        self.log.contains(text)
    }

    /// How many lines of its log contain `text`.
    pub fn count_logged(&self, text: &str) -> usize {
        self.log()
            .lines()
            .filter(|line| line.contains(text))
            .count()
    }

    /// Waits until a line of its log contains `text`.
    pub async fn until_logged(&self, text: &str) {
        let deadline = env::now() + PATIENCE;
        while !self.logged(text) {
            assert!(env::now() < deadline, "no {text:?} in\n{}", self.log);
            env::sleep(Duration::from_millis(10)).await;
        }
    }

    /// All that it logged.
    pub fn log(&self) -> String {
        self.log.to_string()
    }

    fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("the server runs")
    }
}
