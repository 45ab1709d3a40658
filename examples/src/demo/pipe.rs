//! What every child of the demo has: a pipe to its parent, and one from it.

use std::fmt::Display;
use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use skyschedule_server::stderr::Stderr;
use tokio::sync::oneshot;

use super::FORMAT;
use super::folder::remove_orphaned;
use super::report::{Report, STOP};

/// Logs go to stderr: the parent shows the last lines of a child that fails.
pub(super) fn log(stderr: &Stderr) {
    if let Err(error) = stderr.log(FORMAT, "", "warn") {
        stderr.say(&error.to_string());
    }
}

/// Tells the parent.
pub(super) fn say(report: &Report) -> io::Result<()> {
    let line = serde_json::to_string(report)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Reads what the parent says: the receiver resolves when it asks the child to end. When there is no parent any more,
/// this process ends, too, and what the parent would have removed is removed.
pub(super) fn obey_parent(folder: PathBuf) -> oneshot::Receiver<()> {
    let (stop, stopped) = oneshot::channel();
    // A thread of its own: whatever the runtime does, an orphan ends.
    std::thread::spawn(move || {
        let mut stop = Some(stop);
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if line == STOP
                && let Some(stop) = stop.take()
            {
                // It may have ended by itself.
                let _ = stop.send(());
            }
        }
        remove_orphaned(&folder);
        std::process::exit(1);
    });
    stopped
}

/// How a child ends.
pub(super) fn exit_code(ended: Result<(), impl Display>, stderr: &Stderr) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            stderr.say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}
