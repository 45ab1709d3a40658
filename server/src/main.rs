//! The `skyschedule` binary: the server, and the commands that ask it.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
