//! SkySchedule beside what people build such things on:
//! `cargo bench -p skyschedule-tests --features compare --bench compare`.
//!
//! One etcd and one ZooKeeper server, from Debian's packages (`etcd-server`, `zookeeper`), started here as private
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
//! `-- --members 10,100` makes it shorter, `--json FILE` also writes the results as JSON.

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the other benchmark uses all of it")]
mod common;
mod crew;
mod etcd;
mod run;
mod store;
mod zookeeper;

use std::path::PathBuf;

use clap::Parser;
use common::Result;
use common::report::Report;

/// What to measure.
#[derive(Debug, Parser)]
struct Options {
    /// Sizes of groups.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100, 1_000])]
    members: Vec<usize>,
    /// Rounds of joins and leaves, and of SIGKILLs and SIGSTOPs at most three.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Also writes the results to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// cargo says so.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    let mut thread = tokio::runtime::Builder::new_current_thread();
    let (threads, thread) = (threads.enable_all().build()?, thread.enable_all().build()?);
    match arguments[..] {
        ["server", folder] => threads.block_on(common::server::serve(folder)),
        ["members", server] => thread.block_on(common::members::run(server)),
        ["etcd", server] => thread.block_on(crew::run::<etcd::Etcd>(server)),
        ["zookeeper", server] => thread.block_on(crew::run::<zookeeper::ZooKeeper>(server)),
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
