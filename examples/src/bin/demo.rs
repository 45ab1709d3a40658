//! `cargo demo`: see [`skyschedule_examples::demo`].

use std::process::ExitCode;

use clap::Parser as _;
use skyschedule_examples::demo;

#[tokio::main]
async fn main() -> ExitCode {
    demo::run(demo::Cli::parse()).await
}
