//! Log lines go to stderr, from a thread of their own: a reader that hangs must not hold up the server.

use std::io::{IsTerminal as _, stderr};

use skyschedule_server::config::LogFormat;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

use super::Failure;

/// Lines that wait to be written; more are dropped.
const WAITING: usize = 10_000;

/// Starts logging: what `RUST_LOG` asks for, else everything from `info` on. The last lines are written when
/// the guard is dropped.
pub(super) fn start(format: LogFormat) -> Result<WorkerGuard, Failure> {
    let asked = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
    let asked = if asked.is_empty() { "info" } else { &asked };
    // What operators must know of consensus, the server says itself; whoever asks for more gets it.
    let filter = EnvFilter::builder()
        .parse(format!("openraft=off,{asked}"))
        .map_err(|error| Failure::Usage(format!("RUST_LOG: {error}")))?;
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(WAITING)
        .finish(stderr());
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(stderr().is_terminal())
        .log_internal_errors(false);
    match format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().try_init(),
    }
    .map_err(|error| Failure::Failed(format!("cannot start logging: {error}")))?;
    Ok(guard)
}
