//! The children, as their parent sees them: processes of the same binary.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use skyschedule_common::env;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

use super::happening::Happening;
use super::report::{Report, STOP};

/// Log lines of a child that are kept for the case that it fails.
const LOG_LINES: usize = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Stop,
    Kill,
}

/// A running child. It is killed when this is dropped.
#[derive(Debug)]
pub(super) struct Process {
    orders: mpsc::Sender<Order>,
}

impl Process {
    /// Starts one; what it does is told under this name.
    pub(super) fn start(
        program: &Path,
        name: &str,
        arguments: Vec<OsString>,
        tell: mpsc::Sender<Happening>,
    ) -> std::io::Result<Self> {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C is meant for the parent, which ends its children in good order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let (orders, inbox) = mpsc::channel(2);
        let log = Log::default();
        if let Some(stderr) = child.stderr.take() {
            env::spawn(keep(stderr, log.clone()));
        }
        env::spawn(watch(child, name.to_owned(), inbox, log, tell));
        Ok(Self { orders })
    }

    /// Asks it to finish what it runs, mark it, and say goodbye.
    pub(super) fn stop(&self) {
        self.order(Order::Stop);
    }

    /// Kills it at once, as `kill -9` does.
    pub(super) fn kill(&self) {
        self.order(Order::Kill);
    }

    fn order(&self, order: Order) {
        // It may have ended: that is told.
        let _ = self.orders.try_send(order);
    }
}

async fn watch(
    mut child: Child,
    name: String,
    mut orders: mpsc::Receiver<Order>,
    log: Log,
    tell: mpsc::Sender<Happening>,
) {
    let mut stdin = child.stdin.take();
    let reports = child.stdout.take().map(|stdout| {
        let (name, tell) = (name.clone(), tell.clone());
        env::spawn(pass_on(stdout, name, tell))
    });
    let mut asked = None;
    let status = loop {
        tokio::select! {
            biased;
            order = orders.recv() => {
                asked = order;
                match order {
                    Some(Order::Stop) => say_stop(&mut stdin).await,
                    // It may have ended just now.
                    Some(Order::Kill) => drop(child.start_kill()),
                    // Nobody wants it any more: it is killed with `child`.
                    None => return,
                }
            }
            status = child.wait() => break status,
        }
    };
    // What it told before its end comes first.
    if let Some(reports) = reports {
        let _ = reports.await;
    }
    let in_order = match asked {
        Some(Order::Stop) => status.as_ref().is_ok_and(ExitStatus::success),
        Some(Order::Kill) => true,
        None => false,
    };
    let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
    let how = format!("{status}{log}");
    // The director may be gone.
    let _ = tell
        .send(Happening::Ended {
            name,
            in_order,
            how,
        })
        .await;
}

async fn say_stop(stdin: &mut Option<ChildStdin>) {
    if let Some(stdin) = stdin {
        // It may have ended just now.
        let _ = stdin.write_all(format!("{STOP}\n").as_bytes()).await;
    }
}

async fn pass_on(stdout: impl AsyncRead + Unpin, name: String, tell: mpsc::Sender<Happening>) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(report) = serde_json::from_str::<Report>(&line) {
            let name = name.clone();
            // The director may be gone.
            let _ = tell.send(Happening::Told { name, report }).await;
        }
    }
}

async fn keep(stderr: impl AsyncRead + Unpin, log: Log) {
    let mut lines = BufReader::new(stderr).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        log.add(line);
    }
}

/// The last lines that a child logged.
#[derive(Debug, Clone, Default)]
struct Log(Arc<Mutex<VecDeque<String>>>);

impl Log {
    fn add(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == LOG_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }
}

impl std::fmt::Display for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !lines.is_empty() {
            f.write_str("; its log ends with:")?;
        }
        lines.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}
