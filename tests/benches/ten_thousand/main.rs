//! Ten thousand clients, measured against the limit: `cargo bench -p skyschedule-tests --bench ten_thousand`.
//!
//! The server, the clients (real ones, in two processes) and the yardsticks are processes of their own, all on
//! this machine, so that what is measured is the work of both sides. Each figure has its yardstick beside it,
//! made in the same run and in turn with it:
//!
//! * **join, leave**: from the proof of the newcomer's login, or from the goodbye, until the last member has its
//!   new share; against a bare tokio loop that sends two frames to as many sockets as members get news, has each
//!   answered, and makes the same two durable appends.
//! * **all log in at once**: until the last client is a member; against a bare loop that accepts as many
//!   connections and exchanges four frames with each.
//! * **all drop at once**: from the kill until the one that is left owns everything; against a bare loop until it
//!   has seen the end of every connection.
//! * **memory, processor**: of the server's process a client; against `Framed` with default buffers and a bounded
//!   queue, and against a loop that echoes bytes.
//!
//! `-- --members 10,100`, `--storm 1000` and `--numberings slots` make it shorter, `--json FILE` also writes the results as JSON.

#![allow(
    clippy::disallowed_methods,
    reason = "the yardsticks are bare tokio and nothing else"
)]

mod bare;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the other benchmark uses all of it")]
mod common;
mod run;

use std::path::PathBuf;

use clap::Parser;
use common::Result;
use common::report::Report;

/// What to measure.
#[derive(Debug, Parser)]
struct Options {
    /// Sizes of groups for joins and leaves.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100, 1_000])]
    members: Vec<usize>,
    /// Clients that log in at once, and then see joins and leaves; 0 leaves that out.
    #[arg(long, default_value_t = 9_900)]
    storm: usize,
    /// How the rows of the groups are numbered.
    #[arg(long, value_delimiter = ',', value_parser = ["modulo", "slots"], default_values = ["modulo", "slots"])]
    numberings: Vec<String>,
    /// Rounds of joins and leaves; the largest group of modulo has a third.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Seconds for which heartbeats are watched.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Also writes the results to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Runs the server by another program: a profiler and its options.
    #[arg(long, value_delimiter = ' ')]
    server_by: Vec<String>,
    /// cargo says so.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server", folder] => many_threads()?.block_on(common::server::serve(folder)),
        ["bare-server", folder] => many_threads()?.block_on(bare::serve(folder)),
        ["echo-bytes"] => many_threads()?.block_on(bare::echo(false)),
        ["echo-frames"] => many_threads()?.block_on(bare::echo(true)),
        ["members", server] => one_thread()?.block_on(common::members::run(server)),
        ["bare-members", server] => one_thread()?.block_on(bare::members(server)),
        _ => {
            let options = Options::parse();
            let mut report = Report::default();
            many_threads()?.block_on(run::all(&options, &mut report))?;
            match &options.json {
                Some(path) => report.write_json("ten_thousand", path),
                None => Ok(()),
            }
        }
    }
}

fn many_threads() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?)
}

fn one_thread() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}
