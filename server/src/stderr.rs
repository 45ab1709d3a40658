//! What a process writes to stderr goes there from a thread of its own: a pipe that nobody reads must hold up no work.
//!
//! Lines wait for that thread up to a bound; those beyond it are dropped, and counted: the count is written once somebody
//! reads again.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, OnceLock};

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// Lines that wait to be written; more are dropped.
const WAITING: usize = 10_000;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people, in colours or not.
    Text {
        /// Whether stderr is a terminal.
        colours: bool,
    },
    /// A JSON object a line.
    Json,
}

/// Stderr of this process. When it is dropped, the last lines are written, as far as somebody reads them.
pub struct Stderr {
    lines: NonBlocking,
    _worker: WorkerGuard,
}

impl fmt::Debug for Stderr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stderr")
    }
}

/// Why a process does not log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// `RUST_LOG` cannot be read.
    #[error("RUST_LOG: {0}")]
    Filter(#[from] ParseError),
    /// Something else in this process logs already.
    #[error("cannot start logging: {0}")]
    Taken(String),
}

impl Stderr {
    /// Starts the thread. Nothing else in the process should write to stderr from here on: it might wait for a reader.
    pub fn start(format: Format) -> Self {
        Self::write_to(io::stderr(), format)
    }

    fn write_to(place: impl Write + Send + 'static, format: Format) -> Self {
        let dropped = Arc::new(OnceLock::new());
        let counted = Counted {
            place,
            format,
            dropped: Arc::clone(&dropped),
            told: 0,
        };
        let (lines, worker) = NonBlockingBuilder::default()
            .buffered_lines_limit(WAITING)
            .finish(counted);
        // It was made a moment ago, and is set only here.
        let _ = dropped.set(lines.error_counter());
        Self {
            lines,
            _worker: worker,
        }
    }

    /// Logs to here: what `RUST_LOG` asks for, on top of `always`, else what `default` asks for.
    ///
    /// # Errors
    /// When `RUST_LOG` cannot be read, or something in this process logs already.
    pub fn log(&self, format: Format, always: &str, default: &str) -> Result<(), LogError> {
        let asked = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
        let asked = if asked.is_empty() { default } else { &asked };
        let filter = EnvFilter::builder().parse(format!("{always},{asked}"))?;
        let lines = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(self.lines.clone())
            .log_internal_errors(false);
        match format {
            Format::Text { colours } => lines.with_ansi(colours).try_init(),
            Format::Json => lines.json().try_init(),
        }
        .map_err(|error| LogError::Taken(error.to_string()))
    }

    /// Writes a line.
    pub fn say(&self, line: &str) {
        self.lines().say(line);
    }

    /// To write lines from elsewhere.
    pub fn lines(&self) -> Lines {
        Lines(self.lines.clone())
    }
}

/// Writes lines to a [`Stderr`], as long as that lives.
#[derive(Debug, Clone)]
pub struct Lines(NonBlocking);

impl Lines {
    /// Writes a line.
    pub fn say(&self, line: &str) {
        // What cannot be written is counted.
        let _ = self.0.clone().write_all(format!("{line}\n").as_bytes());
    }
}

/// Says how many lines were dropped before it writes the next one.
struct Counted<W> {
    place: W,
    format: Format,
    dropped: Arc<OnceLock<ErrorCounter>>,
    told: usize,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let dropped = self.dropped.get().map_or(0, ErrorCounter::dropped_lines);
        if dropped > self.told {
            let count = dropped - self.told;
            self.told = dropped;
            match self.format {
                Format::Text { .. } => writeln!(
                    self.place,
                    "({count} lines are missing: nobody read stderr in time)"
                )?,
                Format::Json => writeln!(
                    self.place,
                    r#"{{"level":"WARN","fields":{{"message":"lines are missing: nobody read stderr in time","count":{count}}}}}"#
                )?,
            }
        }
        self.place.write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.place.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Takes what is written only when it is let.
    struct Pipe {
        let_through: Receiver<()>,
        written: Sender<String>,
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // The test may be over.
            let _ = self.let_through.recv();
            let _ = self
                .written
                .send(String::from_utf8_lossy(bytes).into_owned());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_hangs_holds_nobody_up_and_learns_what_it_missed() {
        let (let_one, let_through) = channel();
        let (written, lines) = channel();
        let pipe = Pipe {
            let_through,
            written,
        };
        let stderr = Stderr::write_to(pipe, Format::Json);
        for at in 0..2 * WAITING {
            stderr.say(&at.to_string());
        }
        drop(let_one);
        stderr.say("the last");
        drop(stderr);
        let text: String = lines.iter().collect();
        let (notes, said): (Vec<&str>, Vec<&str>) =
            text.lines().partition(|line| line.contains("missing"));
        let missing = notes.iter().map(|note| {
            let note: serde_json::Value = serde_json::from_str(note).unwrap();
            note["fields"]["count"].as_u64().unwrap()
        });
        let missing: u64 = missing.sum();
        assert_eq!(said[0], "0");
        assert!(missing > 0);
        assert_eq!(missing + said.len() as u64, 2 * WAITING as u64 + 1);
    }
}
