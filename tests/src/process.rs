//! What all child processes of a test have in common.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use skyschedule_common::env::{self, JoinHandle};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};

/// How long what a process wrote may take to be read after its end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A child process. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    log: Log,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts `command`; what it writes to stderr becomes the log.
    pub(crate) fn start(mut command: Command, log: Log) -> Self {
        let mut child = command
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let stderr = child.stderr.take().expect("stderr is piped");
        let into = log.clone();
        let reader = Some(env::spawn(each_line(stderr, move |line| into.add(line))));
        Self { child, log, reader }
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The process id; the process must not have been waited for.
    pub(crate) fn pid(&self) -> Pid {
        let pid = self.child.id().expect("the process has not ended");
        Pid::from_raw(pid.cast_signed()).expect("a process has an id")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the process is there to take the signal");
    }

    /// Waits for the process to end by itself.
    pub(crate) async fn ended(&mut self, limit: Duration) -> ExitStatus {
        match env::timeout(limit, self.child.wait()).await {
            Ok(status) => {
                // Its last words may still be on their way.
                if let Some(reader) = self.reader.take() {
                    let _ = env::timeout(LAST_WORDS, reader).await;
                }
                status.expect("a child can be waited for")
            }
            Err(_) => panic!(
                "the process does not end within {limit:?}; its log:\n{}",
                self.log
            ),
        }
    }
}

/// The lines that a process wrote to stderr, over all its lives.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn add(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }

    pub(crate) fn contains(&self, text: &str) -> bool {
        self.0
            .lock()
            .unwrap()
            .iter()
            .any(|line| line.contains(text))
    }
}

impl std::fmt::Display for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.lock().unwrap().join("\n"))
    }
}

/// Hands each line of `from` to `take`, until it ends.
pub(crate) async fn each_line(from: impl AsyncRead + Unpin, mut take: impl FnMut(String)) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        take(line);
    }
}

/// A binary of this workspace.
pub(crate) fn binary(name: &str) -> PathBuf {
    let folder = std::env::var_os("SKY_BIN_DIR").expect(
        "SKY_BIN_DIR must name the folder with this workspace's binaries: \
         run the tests by tests/run, or `cargo build --bins` and set it to target/debug",
    );
    PathBuf::from(folder).join(name)
}

/// A loopback address that nobody else uses, so that ports are free and stay free while a server is away:
/// from the id of this process and a counter.
pub(crate) fn own_address() -> Ipv4Addr {
    /// Of the last byte: all but 0 and 255.
    const HOSTS: u16 = 254;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    assert!(
        number < 2 * HOSTS,
        "one test program uses too many addresses: split it"
    );
    let [.., high, low] = std::process::id().to_be_bytes();
    // Ids are mostly below 32,768: the second half of the networks is for programs that need more than one.
    let network = high.max(1) ^ if number < HOSTS { 0 } else { 0x80 };
    let host = u8::try_from(number % HOSTS + 1).unwrap();
    // 127.0.0.0/16 is left to those who write 127.0.0.1.
    Ipv4Addr::new(127, network.max(1), low, host)
}
