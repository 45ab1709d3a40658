//! Runs seeds, several at a time, and reports the first that fails.

use skyschedule_common::fault::{self, Rule};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::oracle::Violation;
use super::profile::Profile;
use super::world::World;

/// How one seed ended.
#[derive(Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What must not be, if it was.
    pub violation: Option<Violation>,
    /// The last lines of what happened.
    pub tail: Vec<String>,
    /// Number of lines, and a hash of all of them.
    pub fingerprint: (u64, u64),
}

/// Runs one simulation to its end, or to the first thing that must not be.
pub fn run(seed: u64, profile: &Profile, rule: Option<Rule>) -> Outcome {
    let prints = std::env::var_os("SKY_SIM_TRACE").is_some();
    let simulate = || {
        let mut world = World::new(seed, profile, prints);
        let result = catch_unwind(AssertUnwindSafe(|| world.run()));
        let violation = match result {
            Ok(result) => result.err(),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                Some(Violation::new("panic", text.unwrap_or_default()))
            }
        };
        Outcome {
            seed,
            violation,
            tail: world.trace.tail(),
            fingerprint: world.trace.fingerprint(),
        }
    };
    match rule {
        Some(rule) => fault::breaking(rule, simulate),
        None => simulate(),
    }
}

/// Runs the seeds from `first` on, `count` of them, until one fails: that one, and how many were run.
pub fn run_many(
    first: u64,
    count: u64,
    profile: impl Fn(u64) -> Profile + Sync,
    rule: Option<Rule>,
) -> (Option<Outcome>, u64) {
    let next = AtomicU64::new(0);
    let run_so_far = AtomicU64::new(0);
    let failed: Mutex<Option<Outcome>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads() {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    // The lowest failing seed is reported, whichever thread is faster.
                    let over = failed
                        .lock()
                        .unwrap()
                        .as_ref()
                        .is_some_and(|outcome| outcome.seed < first + at);
                    if at >= count || over {
                        return;
                    }
                    let outcome = run(first + at, &profile(first + at), rule);
                    run_so_far.fetch_add(1, Ordering::Relaxed);
                    if outcome.violation.is_some() {
                        let mut failed = failed.lock().unwrap();
                        if failed
                            .as_ref()
                            .is_none_or(|other| other.seed > outcome.seed)
                        {
                            *failed = Some(outcome);
                        }
                    }
                }
            });
        }
    });
    (failed.into_inner().unwrap(), run_so_far.into_inner())
}

/// Runs all these seeds: those that fail.
pub fn run_all(
    first: u64,
    count: u64,
    profile: impl Fn(u64) -> Profile + Sync,
    rule: Option<Rule>,
) -> Vec<Outcome> {
    let next = AtomicU64::new(first);
    let failed: Mutex<Vec<Outcome>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads() {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let outcome = run(seed, &profile(seed), rule);
                    if outcome.violation.is_some() {
                        failed.lock().unwrap().push(outcome);
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner().unwrap();
    failed.sort_by_key(|outcome| outcome.seed);
    failed
}

/// A number that the environment gives, or another.
pub fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text:?} is no number"))
    })
}

fn threads() -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    number("SKY_SIM_THREADS", cores)
}

/// Prints logs of client and server when `SKY_SIM_LOG` says so.
pub fn logs() {
    if let Ok(filter) = std::env::var("SKY_SIM_LOG") {
        // Another test of this process may have been first.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .without_time()
            .with_ansi(false)
            .try_init();
    }
}

/// A failure in one line.
pub fn line(outcome: &Outcome) -> String {
    let violation = outcome.violation.as_ref();
    let (kind, what) = violation.map_or(("", ""), |it| (it.kind, it.what.as_str()));
    format!("seed {}: {kind}: {what}", outcome.seed)
}

/// The text of a failure.
pub fn report(outcome: &Outcome, command: &str) -> String {
    let tail = outcome.tail.join("\n");
    format!("{tail}\n{}\nrun it again: {command}", line(outcome))
}
