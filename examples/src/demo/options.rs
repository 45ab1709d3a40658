//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Consumers are processes: more of them tell nothing new.
const MAX_CLIENTS: i64 = 32;

/// Watch several consumers work through one SQL table, while one of them is killed, one joins and the leading server
/// is killed, too.
///
/// A table of due tasks is made in a temporary SQLite file. Each consumer is a process that works on the rows
/// that the servers number it for. At the end the table is checked: nothing may be lost.
#[derive(Debug, Parser)]
#[command(name = "demo", args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    pub(super) role: Option<Role>,
    #[command(flatten)]
    pub(super) options: Options,
}

#[derive(Debug, Subcommand)]
pub(super) enum Role {
    /// One of the demo's consumers.
    #[command(hide = true)]
    Worker(WorkerOptions),
    /// One of the demo's servers.
    #[command(hide = true)]
    Replica(ReplicaOptions),
}

/// What a user may choose.
#[derive(Debug, Clone, Args)]
pub(super) struct Options {
    /// How many tasks there are.
    #[arg(long, env = "SKY_TASKS", hide_env = true, default_value_t = 20_000, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) tasks: u32,
    /// How many consumers begin.
    #[arg(long, env = "SKY_CLIENTS", hide_env = true, default_value_t = 4, value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..=MAX_CLIENTS))]
    pub(super) clients: u16,
    /// About how long the work shall take: each task is given as much to do.
    #[arg(long, env = "SKY_SECONDS", hide_env = true, default_value_t = 20, value_name = "S",
        value_parser = clap::value_parser!(u16).range(1..=3_600))]
    pub(super) seconds: u16,
    /// How rows are divided among the consumers.
    #[arg(
        long,
        env = "SKY_NUMBERING",
        hide_env = true,
        value_enum,
        default_value_t
    )]
    pub(super) numbering: Numbering,
    /// Print one JSON object at the end and nothing else; so it is also when stdout is no terminal.
    #[arg(long, env = "SKY_JSON", hide_env = true)]
    pub(super) json: bool,
}

/// How rows are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Numbering {
    /// By the number of consumers: `id % total = number`.
    #[default]
    Modulo,
    /// Into 1,024 slots, of which each consumer owns some: a change moves few rows.
    Slots,
}

impl Numbering {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Modulo => "modulo",
            Self::Slots => "slots",
        }
    }

    /// How many slots there are, if any.
    pub(super) fn slots(self) -> Option<u32> {
        match self {
            Self::Modulo => None,
            Self::Slots => Some(1_024),
        }
    }
}

/// What a consumer is told by its parent.
#[derive(Debug, Clone, Args)]
pub(super) struct WorkerOptions {
    /// Its client id.
    #[arg(long)]
    pub(super) name: String,
    /// Where the servers listen.
    #[arg(long, value_delimiter = ',')]
    pub(super) servers: Vec<String>,
    /// The demo's folder.
    #[arg(long)]
    pub(super) folder: PathBuf,
    /// The most tasks that are executed but not yet marked.
    #[arg(long)]
    pub(super) batch: usize,
    /// Tasks at a time.
    #[arg(long)]
    pub(super) concurrency: usize,
    /// The number of slots that the table is indexed for.
    #[arg(long)]
    pub(super) slots: Option<u32>,
    /// How long each task takes, in microseconds.
    #[arg(long)]
    pub(super) work_us: u64,
}

impl WorkerOptions {
    /// The command line that says the same.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["worker".into()];
        for (flag, value) in [
            ("--name", self.name.clone().into()),
            ("--servers", self.servers.join(",").into()),
            ("--folder", self.folder.clone().into_os_string()),
            ("--batch", self.batch.to_string().into()),
            ("--concurrency", self.concurrency.to_string().into()),
            ("--work-us", self.work_us.to_string().into()),
        ] {
            arguments.extend([flag.into(), value]);
        }
        arguments.extend(self.slots.map(|slots| format!("--slots={slots}").into()));
        arguments
    }
}

/// What a replica is told by its parent.
#[derive(Debug, Clone, Args)]
pub(super) struct ReplicaOptions {
    /// Which one it is, from 1.
    #[arg(long)]
    pub(super) id: u16,
    /// Where all of them listen, in the order of their ids.
    #[arg(long, value_delimiter = ',')]
    pub(super) peers: Vec<String>,
    /// The demo's folder.
    #[arg(long)]
    pub(super) folder: PathBuf,
    /// The folder of its memory.
    #[arg(long)]
    pub(super) data: PathBuf,
    /// The number of slots of the group; none: it is numbered by its members.
    #[arg(long)]
    pub(super) slots: Option<u32>,
}

impl ReplicaOptions {
    /// The command line that says the same.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["replica".into()];
        for (flag, value) in [
            ("--id", self.id.to_string().into()),
            ("--peers", self.peers.join(",").into()),
            ("--folder", self.folder.clone().into_os_string()),
            ("--data", self.data.clone().into_os_string()),
        ] {
            arguments.extend([flag.into(), value]);
        }
        arguments.extend(self.slots.map(|slots| format!("--slots={slots}").into()));
        arguments
    }
}

/// How fast the consumers work, so that the whole takes as long as the user wants to watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pace {
    /// The most tasks of one consumer that are executed but not yet marked.
    pub(super) batch: u16,
    /// Tasks at a time in one consumer.
    pub(super) concurrency: u16,
    /// How long each task takes, in microseconds.
    pub(super) work_us: u64,
}

impl Options {
    /// After how long the demo gives up.
    pub(super) fn limit(&self) -> Duration {
        Duration::from_secs(u64::from(self.seconds) * 2 + 15)
    }

    /// How long the killed server stays away: well within a lease.
    pub(super) fn server_away(&self) -> Duration {
        (Duration::from_secs(self.seconds.into()) / 15).min(Duration::from_millis(1_500))
    }

    /// The least time between two acts, so that they can be told apart.
    pub(super) fn pause(&self) -> Duration {
        (Duration::from_secs(self.seconds.into()) / 20).min(Duration::from_secs(1))
    }

    pub(super) fn pace(&self) -> Pace {
        /// A consumer must be able to finish what it runs well before its group stops waiting for it.
        const LONGEST_US: u64 = 500_000;
        let (tasks, clients) = (u64::from(self.tasks), u64::from(self.clients));
        // Small tables are taken in smaller bites, so that every act happens while there is work.
        let batch = (tasks / clients / 20).clamp(1, 100);
        let batch = u16::try_from(batch).unwrap_or(100);
        let concurrency = batch.min(8);
        let work = u64::from(self.seconds) * 1_000_000 * clients * u64::from(concurrency) / tasks;
        Pace {
            batch,
            concurrency,
            work_us: work.min(LONGEST_US),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(arguments: &[&str]) -> Pace {
        let command = ["demo"].iter().chain(arguments);
        Cli::try_parse_from(command).unwrap().options.pace()
    }

    #[test]
    fn the_default_work_takes_the_seconds_that_are_asked_for() {
        let pace = pace(&[]);
        let rate = 4.0 * f64::from(pace.concurrency) * 1e6
            / f64::from(u32::try_from(pace.work_us).unwrap());
        assert!((20_000.0 / rate - 20.0).abs() < 0.1, "{pace:?}");
    }

    #[test]
    fn few_tasks_take_small_bites_and_bounded_time() {
        let pace = pace(&["--tasks", "1", "--clients", "32", "--seconds", "3600"]);
        assert_eq!(
            (pace.batch, pace.concurrency, pace.work_us),
            (1, 1, 500_000)
        );
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        for wrong in [
            ["--tasks", "0"],
            ["--clients", "0"],
            ["--clients", "33"],
            ["--seconds", "0"],
            ["--numbering", "x"],
        ] {
            assert!(
                Cli::try_parse_from(["demo"].iter().chain(&wrong)).is_err(),
                "{wrong:?}"
            );
        }
    }
}
