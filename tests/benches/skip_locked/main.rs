//! The library's consumer beside `SELECT … FOR UPDATE SKIP LOCKED` workers, on PostgreSQL and MariaDB:
//! `SKY_TEST_CACHE_MB=2048 tests/databases/with cargo bench -p skyschedule-tests --bench skip_locked`. With less memory
//! than the tables need, it is the disk that is measured.
//!
//! Both work through tables of 1M due, 1M done and 1M future rows with a handler that does nothing, and mark 100 rows in a
//! statement, with the same sessions and as many connections (two for a consumer or worker), as tasks of this process,
//! which shares the machine with the database. A consumer has at most 200 rows in work, as a worker with two transactions. They take turns in each round, and each round gives one ratio; what is shown
//! is the median. What was marked is put back after each turn, and vacuumed.
//!
//! * **throughput**: rows marked in a window of some seconds.
//! * **drain**: until every due row is marked, by tenths; once more while another session holds an old snapshot.
//! * **idle poll**: a query of a consumer none of whose rows is due, while a million of others' are.
//!
//! The workers are the better of two kinds, chosen anew for each number of them: with one transaction at a time, and
//! with as many as the worker has connections.

mod idle;
mod locked;
mod members;
mod place;
mod report;
mod rounds;

use std::time::Duration;

use clap::{Parser, ValueEnum};
use place::{Kind, Order, Place};
use report::Report;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    Modulo,
    Slots,
    Drain,
    Idle,
}

/// How it is measured.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Options {
    /// Due rows; as many are done, and as many in the future.
    #[arg(long, default_value_t = 1_000_000)]
    rows: u64,
    /// In which order rows are due.
    #[arg(long, value_enum, default_value_t = Order::Mixed)]
    order: Order,
    /// Numbers of consumers; slots are measured from 16 on, modulo up to 16.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64])]
    consumers: Vec<usize>,
    /// Databases.
    #[arg(long, value_delimiter = ',', default_values = ["postgres", "mariadb"])]
    database: Vec<Kind>,
    /// Parts.
    #[arg(long, value_delimiter = ',', default_values = ["modulo", "slots", "drain", "idle"])]
    part: Vec<Part>,
    /// Rounds of throughput.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Rounds of drains.
    #[arg(long, default_value_t = 1)]
    drains: usize,
    /// Seconds of a window.
    #[arg(long, default_value_t = 8)]
    seconds: u64,
    /// Prints the results as one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// cargo says so.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    pub(crate) fn window(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    fn wants(&self, part: Part) -> bool {
        self.part.contains(&part)
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(run(&options))
}

async fn run(options: &Options) -> Result<()> {
    let mut places = Vec::new();
    for kind in &options.database {
        places.push(Place::connect(*kind, options.rows, options.order).await?);
    }
    let servers = members::Servers::start().await?;
    let mut report = Report::new(options);
    for place in &places {
        report.describe(place).await?;
        place.fill().await?;
        for (part, most, least) in [(Part::Modulo, 16, 1), (Part::Slots, usize::MAX, 16)] {
            for count in &options.consumers {
                if options.wants(part) && (least..=most).contains(count) {
                    rounds::throughput(options, place, &servers, part, *count, &mut report).await?;
                }
            }
        }
        if options.wants(Part::Drain) {
            for snapshot in [false, true] {
                rounds::drain(options, place, &servers, snapshot, &mut report).await?;
            }
        }
        if options.wants(Part::Idle) {
            idle::poll(place, &servers, &mut report).await?;
        }
        place.clear().await?;
    }
    report.print();
    servers.stop().await
}
