//! SkySchedule beside what people build such things on:
//! `cargo bench -p skyschedule-tests --features compare --bench compare`.
//!
//! etcd and ZooKeeper servers, from Debian's packages (`etcd-server`, `zookeeper`), started here as private
//! processes with their usual settings, except that sessions end as soon as these servers allow. Members are small
//! clients of the usual libraries, each with its own connection, session and watch:
//!
//! * **watch**: each member has a key (etcd: with a lease, ZooKeeper: ephemeral) and watches those of all. The clock
//!   stops when the last member has seen the change. Nobody waits for anybody: two members may work on one row.
//! * **acknowledged**: what it takes to promise what SkySchedule does. On a change each member stops and creates an
//!   acknowledgement; one process counts them, and creates the grant that all wait for.
//!
//! SkySchedule's own time is that until the last member has its new share, released and granted. Its lease is the
//! shortest that it allows. The clock starts with the proof of the login, the creation of the key, the goodbye, the
//! removal of the key, or the signal. All servers keep their decisions on the same disk.
//!
//! Its parts, chosen by `-- --parts one,cluster`:
//!
//! * **one**: one server beside one etcd and one ZooKeeper, numbered modulo its members and by slots;
//! * **cluster**: the same with three replicas, each a `skyschedule serve` with a log on disk, beside three etcd members;
//! * **commits**: decisions a second of these three, see [`commits`];
//! * **slots**: how soon a newcomer has its first row, beside a rebalance through etcd, see [`slot_crew`].
//!
//! All but the first run the binary `skyschedule`: `cargo build --profile bench --bin skyschedule` first.
//! `--members 10,100` makes it shorter, `--json FILE` also writes the results as JSON.

mod commits;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the other benchmark uses all of it")]
mod common;
mod crew;
mod etcd;
mod replicas;
mod rows;
mod run;
mod servers;
mod slot_crew;
mod slots;
mod stage;
mod store;
mod zookeeper;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use common::Result;
use common::report::Report;

/// What to measure.
#[derive(Debug, Parser)]
struct Options {
    /// What is compared.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "one,cluster,commits,slots"
    )]
    parts: Vec<Part>,
    /// Sizes of groups of `one` and `cluster`.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100, 1_000])]
    members: Vec<usize>,
    /// Rounds of joins and leaves, and of SIGKILLs and SIGSTOPs at most three.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seconds of each run of commits.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Slots, a power of two from 16 on.
    #[arg(long, default_value_t = 1_024)]
    slots: u32,
    /// Members that share the slots; fewer than these, so that a newcomer gets one.
    #[arg(long, default_value_t = 1_000)]
    slot_members: usize,
    /// Newcomers that wait for their first row.
    #[arg(long, default_value_t = 100)]
    joins: usize,
    /// Also writes the results to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// cargo says so.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What is compared.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Part {
    /// One server.
    One,
    /// Three replicas.
    Cluster,
    /// Decisions a second of three replicas.
    Commits,
    /// A newcomer's first row.
    Slots,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    let mut thread = tokio::runtime::Builder::new_current_thread();
    let (threads, thread) = (threads.enable_all().build()?, thread.enable_all().build()?);
    match arguments[..] {
        ["server", folder] => threads.block_on(common::server::serve(folder)),
        ["members", servers] => thread.block_on(common::members::run(servers)),
        ["etcd", servers] => thread.block_on(crew::run::<etcd::Etcd>(servers)),
        ["zookeeper", server] => thread.block_on(crew::run::<zookeeper::ZooKeeper>(server)),
        ["settings", server] => threads.block_on(commits::run::<commits::Settings>(server)),
        ["puts", server] => threads.block_on(commits::run::<commits::Put>(server)),
        ["slots", servers, table] => thread.block_on(slot_crew::run(servers, table)),
        _ => {
            let options = Options::parse();
            let mut report = Report::default();
            threads.block_on(run::all(&options, &mut report))?;
            match &options.json {
                Some(path) => report.write_json("compare", path),
                None => Ok(()),
            }
        }
    }
}
