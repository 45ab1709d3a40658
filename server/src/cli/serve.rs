//! `skyschedule serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::ArgMatches;
use skyschedule_server::config::{self, Config, KEYS};
use skyschedule_server::{Server, StartError};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Failure, logs, print, sources};

/// How long what is left of the runtime may take to end.
const LEFTOVERS: Duration = Duration::from_secs(1);

/// Runs a server until it is asked to stop.
pub(super) fn serve(matches: &ArgMatches) -> Result<(), Failure> {
    raise_open_files();
    let path = matches.get_one::<PathBuf>("config");
    let loaded = config::load(sources(matches, &KEYS), path.map(PathBuf::as_path))
        .map_err(|problems| Failure::Usage(problems.to_string()))?;
    if matches.get_flag("print_config") {
        print(&loaded.print());
        return Ok(());
    }
    let stderr = logs::start(loaded.config.log_format)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Failed(format!("cannot start threads: {error}")))?;
    let done = runtime.block_on(run(loaded.config));
    runtime.shutdown_timeout(LEFTOVERS);
    // In the way of the log, which waits for no reader: a server that has failed must end.
    done.map_err(|failure| {
        if tracing::enabled!(tracing::Level::ERROR) {
            tracing::error!(why = %failure, "the server has ended");
        } else {
            stderr.say(&failure.to_string());
        }
        match failure {
            Failure::Failed(_) => Failure::Failed(String::new()),
            Failure::Usage(_) => Failure::Usage(String::new()),
        }
    })
}

/// Each connection is an open file, and the limit that shells set is for programs with few. What the
/// system does not grant is known afterwards, from the limit that is left.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    let _ = setrlimit(Resource::Nofile, raised);
}

async fn run(config: Config) -> Result<(), Failure> {
    let mut signals = Signals::new()
        .map_err(|error| Failure::Failed(format!("cannot listen to signals: {error}")))?;
    let mut server = tokio::select! {
        biased;
        started = Server::start(config) => started.map_err(|error| match error {
            StartError::Config(_) => Failure::Usage(error.to_string()),
            _ => Failure::Failed(error.to_string()),
        })?,
        () = signals.next() => return Ok(()),
    };
    tokio::select! {
        biased;
        failed = server.failed() => return failed.map_err(|error| Failure::Failed(error.to_string())),
        () = signals.next() => {}
    }
    tracing::info!("stops; once more stops it at once");
    tokio::select! {
        biased;
        stopped = server.shutdown() => stopped.map_err(|error| Failure::Failed(error.to_string())),
        () = signals.next() => Err(Failure::Failed("stopped at once".into())),
    }
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// The next of either.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
