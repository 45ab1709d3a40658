//! Log lines go to stderr without waiting for whoever reads there.

use std::io::{IsTerminal as _, stderr};

use skyschedule_server::config::LogFormat;
use skyschedule_server::stderr::{Format, LogError, Stderr};

use super::Failure;

/// Starts logging: what `RUST_LOG` asks for, else everything from `info` on. The last lines are written when
/// what this gives is dropped.
pub(super) fn start(format: LogFormat) -> Result<Stderr, Failure> {
    let format = match format {
        LogFormat::Text => Format::Text {
            colours: stderr().is_terminal(),
        },
        LogFormat::Json => Format::Json,
    };
    let stderr = Stderr::start(format);
    // What operators must know of consensus, the server says itself; whoever asks for more gets it.
    match stderr.log(format, "openraft=off", "info") {
        Ok(()) => Ok(stderr),
        Err(error @ LogError::Filter(_)) => Err(Failure::Usage(error.to_string())),
        Err(error) => Err(Failure::Failed(error.to_string())),
    }
}
