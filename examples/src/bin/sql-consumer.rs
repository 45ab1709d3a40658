//! A consumer of any SQL task table, as a command: see [`skyschedule_examples::sql_consumer`].

use std::process::ExitCode;

use clap::Parser as _;
use skyschedule_examples::sql_consumer;

#[tokio::main]
async fn main() -> ExitCode {
    sql_consumer::run(sql_consumer::Options::parse()).await
}
