//! Log lines go to stderr.

use std::io::{IsTerminal as _, stderr};

use skyschedule_server::config::LogFormat;
use tracing_subscriber::EnvFilter;

use super::Failure;

/// Starts logging: what `RUST_LOG` asks for, else everything from `info` on.
pub(super) fn start(format: LogFormat) -> Result<(), Failure> {
    let asked = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
    let asked = if asked.is_empty() { "info" } else { &asked };
    // What operators must know of consensus, the server says itself; whoever asks for more gets it.
    let filter = EnvFilter::builder()
        .parse(format!("openraft=error,{asked}"))
        .map_err(|error| Failure::Usage(format!("RUST_LOG: {error}")))?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .log_internal_errors(false);
    match format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().try_init(),
    }
    .map_err(|error| Failure::Failed(format!("cannot start logging: {error}")))
}
