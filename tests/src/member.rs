//! A client in a process of its own: the binary `test-client`.

use std::fmt;
use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use skyschedule_common::env;
use skyschedule_common::share::{Numbers, Share};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{ChildStdin, Command};
use tokio::sync::watch;

use crate::process::{Log, Process, binary, each_line};
use crate::server::{PASSWORD, USER};

/// How long a client may take for what takes milliseconds, on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A line that `test-client` prints. Times are nanoseconds of the clock that counts suspend, which is the
/// same for all processes of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A change of its rows.
    Share(Rows),
    /// A change of its connections.
    State {
        /// The membership, as text.
        membership: Option<String>,
        /// How the connection to each server stands.
        links: Vec<String>,
        /// The last refusal since it became a member.
        refusal: Option<String>,
    },
    /// It did not become a member, and ends.
    Failed {
        /// When it knew.
        at: u64,
        /// Why.
        error: String,
    },
    /// It began a row, or was not allowed to.
    Begun {
        /// When: just after.
        at: u64,
        /// Which.
        key: i64,
        /// Its epoch, as text; `None`: the row is not its own.
        epoch: Option<String>,
        /// What was left of the lease, in nanoseconds.
        lease_left: u64,
    },
    /// It gave a row back.
    Ended {
        /// When: just before.
        at: u64,
        /// Which.
        key: i64,
        /// Whether it had to stop.
        revoked: bool,
    },
    /// The answer to `inspect`.
    Inspection {
        /// When.
        at: u64,
        /// How far the rows may be trusted.
        mode: String,
        /// What is left of the lease, in milliseconds.
        lease_left_ms: u64,
    },
    /// The answer to `pull`.
    Pulled {
        /// The epoch, as text.
        epoch: String,
        /// The share: its numbers and its total, as `0,2/3`; empty when there are none.
        numbers: String,
    },
    /// The runtime of its user was blocked, and is not any more.
    Unblocked {
        /// When.
        at: u64,
    },
    /// It closed, and ends.
    Closed {
        /// When.
        at: u64,
        /// Whether a server heard its goodbye.
        heard: bool,
    },
}

/// The rows of a client at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rows {
    /// When it was so.
    pub at: u64,
    /// The epoch, as text; `None`: it is no member.
    pub epoch: Option<String>,
    /// Each share: the total, and inclusive ranges of numbers.
    pub shares: Vec<(u32, Vec<(u32, u32)>)>,
    /// What the reference system knows as the total and the number of a node.
    pub node: Option<(u32, u32)>,
    /// Whether all had taken this numbering.
    pub settled: bool,
    /// How far the rows may be trusted.
    pub mode: String,
}

impl Rows {
    /// The only share; `None` where there are none or several.
    pub fn share(&self) -> Option<Share> {
        let [(total, ranges)] = self.shares.as_slice() else {
            return None;
        };
        let numbers = Numbers::from_ranges(ranges.clone()).expect("ranges of a share");
        Some(Share::new(*total, numbers).expect("a share"))
    }

    /// Whether a lease covers the rows.
    pub fn is_leased(&self) -> bool {
        self.mode == "leased"
    }
}

/// How a member is started.
#[derive(Debug, Clone)]
pub struct Options {
    servers: Vec<String>,
    group: String,
    id: String,
    password: String,
    more: Vec<String>,
}

impl Options {
    /// A client of this id in this group, with the credentials that servers of tests know.
    pub fn new(server: SocketAddr, group: &str, id: &str) -> Self {
        Self {
            servers: vec![server.to_string()],
            group: group.to_owned(),
            id: id.to_owned(),
            password: PASSWORD.to_owned(),
            more: Vec::new(),
        }
    }

    /// One more server.
    #[must_use]
    pub fn server(mut self, address: SocketAddr) -> Self {
        self.servers.push(address.to_string());
        self
    }

    /// Another password than that which servers of tests know.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        password.clone_into(&mut self.password);
        self
    }

    /// Another flag of `test-client`.
    #[must_use]
    pub fn flag(mut self, name: &str, value: &str) -> Self {
        self.more.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// Starts the process, and does not wait until it is a member.
    pub fn start(&self) -> Member {
        let mut command = Command::new(binary("test-client"));
        command
            .args(["--servers", &self.servers.join(",")])
            .args(["--group", &self.group])
            .args(["--client-id", &self.id])
            .args(["--user", USER, "--password", &self.password])
            .args(&self.more)
            .env("RUST_LOG", "info")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let log = Log::default();
        let mut process = Process::start(command, log.clone());
        let stdin = process.child().stdin.take().expect("stdin is piped");
        let stdout = process.child().stdout.take().expect("stdout is piped");
        let events = watch::Sender::new(Vec::new());
        let sink = events.clone();
        env::spawn(each_line(stdout, move |line| {
            let event =
                serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
            sink.send_modify(|events: &mut Vec<Event>| events.push(event));
        }));
        Member {
            id: self.id.clone(),
            process,
            stdin,
            events,
            log,
        }
    }
}

/// A client in a process of its own. It is killed when this is dropped.
#[derive(Debug)]
pub struct Member {
    id: String,
    process: Process,
    stdin: ChildStdin,
    events: watch::Sender<Vec<Event>>,
    log: Log,
}

impl Member {
    /// Starts a client, and does not wait until it is a member.
    pub fn start(server: SocketAddr, group: &str, id: &str) -> Self {
        Options::new(server, group, id).start()
    }

    /// How many lines of its log contain `text`.
    pub fn count_logged(&self, text: &str) -> usize {
        let log = self.log.to_string();
        log.lines().filter(|line| line.contains(text)).count()
    }

    /// Waits until so many lines of its log contain `text`.
    pub async fn until_logged(&self, text: &str, count: usize) {
        let deadline = env::now() + PATIENCE;
        while self.count_logged(text) < count {
            assert!(env::now() < deadline, "not {count} times {text:?}; {self}");
            env::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Its client id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// All that it said so far.
    pub fn events(&self) -> Vec<Event> {
        self.events.borrow().clone()
    }

    /// Each of its numberings so far, in which it did have an epoch.
    pub fn history(&self) -> Vec<Rows> {
        let told = |event: &Event| match event {
            Event::Share(rows) if rows.epoch.is_some() => Some(rows.clone()),
            _ => None,
        };
        self.events.borrow().iter().filter_map(told).collect()
    }

    /// Its present rows.
    pub fn rows(&self) -> Rows {
        let events = self.events.borrow();
        let shown = events.iter().rev().find_map(|event| match event {
            Event::Share(rows) => Some(rows.clone()),
            _ => None,
        });
        shown.unwrap_or_default()
    }

    /// Its membership, as text.
    pub fn membership(&self) -> Option<String> {
        let events = self.events.borrow();
        let shown = events.iter().rev().find_map(|event| match event {
            Event::State { membership, .. } => Some(membership.clone()),
            _ => None,
        });
        shown.flatten()
    }

    /// Waits until `found` finds something in all that the client said, within [`PATIENCE`].
    pub async fn wait_for<T>(&self, what: &str, found: impl Fn(&[Event]) -> Option<T>) -> T {
        let mut events = self.events.subscribe();
        let mut result = None;
        let wait = events.wait_for(|events| {
            result = found(events);
            result.is_some()
        });
        let waited = env::timeout(PATIENCE, wait).await.is_ok();
        match result {
            Some(result) if waited => result,
            _ => panic!("{what} within {PATIENCE:?}; {self}"),
        }
    }

    /// Waits until it has rows under a lease.
    pub async fn has_rows(&self) -> Rows {
        self.rows_that("it has rows", |rows| {
            rows.is_leased() && !rows.shares.is_empty()
        })
        .await
    }

    /// Waits until its present rows are as wanted.
    pub async fn rows_that(&self, what: &str, wanted: impl Fn(&Rows) -> bool) -> Rows {
        self.wait_for(what, |events| {
            let last = events.iter().rev().find_map(|event| match event {
                Event::Share(rows) => Some(rows),
                _ => None,
            })?;
            wanted(last).then(|| last.clone())
        })
        .await
    }

    /// Waits until it is a member under a membership that is not `old`.
    pub async fn membership_other_than(&self, old: Option<&str>) -> String {
        self.wait_for("it has a new membership", |events| {
            let last = events.iter().rev().find_map(|event| match event {
                Event::State { membership, .. } => Some(membership.clone()),
                _ => None,
            });
            last.flatten()
                .filter(|membership| Some(membership.as_str()) != old)
        })
        .await
    }

    /// Waits until it has failed, and gives the reason.
    pub async fn failure(&self) -> String {
        self.wait_for("it fails", |events| {
            events.iter().find_map(|event| match event {
                Event::Failed { error, .. } => Some(error.clone()),
                _ => None,
            })
        })
        .await
    }

    /// Gives it a command; see `test-client`.
    pub async fn tell(&mut self, command: &str) {
        let line = format!("{command}\n");
        self.stdin
            .write_all(line.as_bytes())
            .await
            .expect("the client takes commands");
    }

    /// Gives it a command, and waits for the first event after it for which `answer` finds something.
    pub async fn ask<T>(&mut self, command: &str, answer: impl Fn(&Event) -> Option<T>) -> T {
        let before = self.events.borrow().len();
        self.tell(command).await;
        self.wait_for(command, |events| events[before..].iter().find_map(&answer))
            .await
    }

    /// Has it begin a row, which it holds until [`end`](Self::end); whether it may.
    pub async fn begin(&mut self, row: i64) -> bool {
        self.ask(&format!("begin {row}"), |event| match event {
            Event::Begun { key, epoch, .. } if *key == row => Some(epoch.is_some()),
            _ => None,
        })
        .await
    }

    /// Has it give a row back; when it did.
    pub async fn end(&mut self, row: i64) -> u64 {
        self.ask(&format!("end {row}"), |event| match event {
            Event::Ended { key, at, .. } if *key == row => Some(*at),
            _ => None,
        })
        .await
    }

    /// Sends a signal; when it did.
    pub fn signal(&self, signal: Signal) -> u64 {
        let at = env::now().as_nanos();
        self.process.signal(signal);
        at
    }

    /// Waits until it has closed in good order; when it had.
    pub async fn closed(&mut self) -> u64 {
        let (at, heard) = self
            .wait_for("it closes", |events| {
                events.iter().find_map(|event| match event {
                    Event::Closed { at, heard } => Some((*at, *heard)),
                    _ => None,
                })
            })
            .await;
        assert!(heard, "no server heard the goodbye; {self}");
        assert!(self.ended().await.success(), "{self}");
        at
    }

    /// Waits until the process has ended.
    pub async fn ended(&mut self) -> ExitStatus {
        self.process.ended(PATIENCE).await
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "client {} said:", self.id)?;
        let events = self.events.borrow();
        for event in &events[events.len().saturating_sub(40)..] {
            writeln!(f, "  {event:?}")?;
        }
        write!(f, "and logged:\n{}", self.log)
    }
}
