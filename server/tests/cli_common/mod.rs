//! The `skyschedule` binary as a process.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, of which each test uses a part"
)]

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// The binary with these arguments, in a folder of its own and without variables of ours.
pub fn skyschedule(dir: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skyschedule"));
    command.current_dir(dir.path()).args(arguments);
    for (name, _) in std::env::vars_os() {
        let ours = name.to_str().is_some_and(|name| name.starts_with("SKY_"));
        if ours || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command
}

/// Runs it to its end.
pub fn run(dir: &TempDir, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    skyschedule(dir, arguments)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

pub fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// A server that runs until it is dropped.
pub struct Serving {
    child: Child,
    log: BufReader<ChildStderr>,
    pub clients: SocketAddr,
    pub admin: SocketAddr,
}

impl Serving {
    /// Serves at ports that the system chooses.
    pub fn start(dir: &TempDir, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let fixed = [
            "serve",
            "--listen=127.0.0.1:0",
            "--admin=127.0.0.1:0",
            "--log-format=json",
        ];
        let child = skyschedule(dir, &[&fixed[..], arguments].concat())
            .envs(environment.iter().copied())
            .stderr(Stdio::piped())
            .spawn();
        Self::of(child.unwrap())
    }

    /// A process that serves and logs JSON.
    pub fn of(mut child: Child) -> Self {
        let log = BufReader::new(child.stderr.take().unwrap());
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut serving = Self {
            child,
            log,
            clients: nowhere,
            admin: nowhere,
        };
        let address = |line: &Value| line["fields"]["address"].as_str().unwrap().parse().unwrap();
        serving.admin = address(&serving.logged("listens for admin calls"));
        serving.clients = address(&serving.logged("listens for clients"));
        serving
    }

    /// The next log line with this message.
    pub fn logged(&mut self, message: &str) -> Value {
        loop {
            let mut line = String::new();
            let read = self.log.read_line(&mut line).unwrap();
            assert!(read > 0, "the log ends before {message:?}");
            let line: Value =
                serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line:?} is no JSON"));
            if line["fields"]["message"]
                .as_str()
                .is_some_and(|text| text.contains(message))
            {
                return line;
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The exit code, once the process has ended.
    pub fn code(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Fails where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
