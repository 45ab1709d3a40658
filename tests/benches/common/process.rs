//! Child processes. Each is this program again, in a role: it does what a line on its stdin says, and
//! answers with a line of JSON. It ends with its stdin, so that none is left over.

use std::process::Stdio;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::Result;

/// A child process in a role.
pub(crate) struct Worker {
    role: String,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// Starts this program in a role.
    pub(crate) fn start(role: &str, arguments: &[&str]) -> Result<Self> {
        Self::start_under(&[], role, arguments)
    }

    /// Starts this program in a role, by another program: a profiler, say.
    pub(crate) fn start_under(by: &[String], role: &str, arguments: &[&str]) -> Result<Self> {
        let this = std::env::current_exe()?;
        let mut command = match by {
            [] => Command::new(this),
            [program, options @ ..] => {
                let mut command = Command::new(program);
                command.args(options).arg(this);
                command
            }
        };
        let mut child = command
            .arg(role)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let input = child.stdin.take().ok_or("no stdin")?;
        let output = child.stdout.take().ok_or("no stdout")?;
        Ok(Self {
            role: role.to_owned(),
            child,
            input,
            output: BufReader::new(output).lines(),
        })
    }

    /// Has a command carried out, and waits for the answer.
    pub(crate) async fn ask<T: DeserializeOwned>(&mut self, command: &str) -> Result<T> {
        self.input
            .write_all(format!("{command}\n").as_bytes())
            .await?;
        let answer = self.output.next_line().await?;
        let answer = answer.ok_or_else(|| format!("{} ended at '{command}'", self.role))?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> Result<u32> {
        Ok(self.child.id().ok_or("the process has ended")?)
    }

    /// Kills it, as `kill -9` does, and waits for its end.
    pub(crate) async fn kill(mut self) -> Result<()> {
        self.child.kill().await?;
        Ok(())
    }

    /// Lets it end in good order.
    pub(crate) async fn end(self) -> Result<()> {
        let Self {
            mut child, input, ..
        } = self;
        drop(input);
        child.wait().await?;
        Ok(())
    }
}

/// Memory of a process that is in use, in bytes.
pub(crate) fn memory(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("no VmRSS")?.parse::<u64>()? * 1_024)
}

/// Time that the processors worked for a process, those threads left out that have ended.
pub(crate) fn processor_time(pid: u32) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end meanwhile.
        if let Ok(stat) = std::fs::read_to_string(thread?.path().join("schedstat")) {
            let nanos = stat.split_whitespace().next().ok_or("no time")?;
            sum += Duration::from_nanos(nanos.parse()?);
        }
    }
    Ok(sum)
}

/// The child's side: carries out commands, given as words, until stdin ends.
pub(crate) async fn obey(
    mut carry_out: impl AsyncFnMut(&[&str]) -> Result<serde_json::Value>,
) -> Result<()> {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut out = tokio::io::stdout();
    while let Some(line) = lines.next_line().await? {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = carry_out(&words).await?;
        out.write_all(format!("{answer}\n").as_bytes()).await?;
        out.flush().await?;
    }
    Ok(())
}
