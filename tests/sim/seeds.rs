//! The general mix: many seeds, each another history of joins, deaths, restarts, bad networks and bad clocks.
//!
//! With one server, and with three or five that agree among themselves.
//!
//! A failure prints the last lines of what happened, what must not be, and a command that runs this seed alone.
//! Read it from below: the last line names the promise or the rule and the rows; then look upwards for who was
//! told what, and what the driver did before.
//!
//! ```text
//! 0.367 state: member 1 c1 told {0-5}/16 at 12, held {0-7}/16, target {0-5}/16    decided by the server
//! 0.371 host 1 (c1.1): member 1 told {0-5}/16 at 12 (leased)                      heard by the first process of c1 on host 1
//! 0.605 host 1: suspended for 334ms                                               done by the driver
//! ```
//!
//! | variable | |
//! |---|---|
//! | `SKY_SIM_SEED=17` | this seed only (name the test, too) |
//! | `SKY_SIM_FIRST=1 SKY_SIM_SEEDS=500` | these seeds: many more in a long run |
//! | `SKY_SIM_ALL=1` | goes on after a failure, and lists all seeds that fail |
//! | `SKY_SIM_KIND=4` | with several servers, worlds of this kind only: see `Profile::of_replicas_like` |
//! | `SKY_SIM_THREADS=2` | simulations at a time; as many as there are cores by default |
//! | `SKY_SIM_TRACE=1` | all lines, as they happen (with `-- --nocapture`) |
//! | `SKY_SIM_LOG=skyschedule_client=debug,skyschedule_server=debug,turmoil=info` | the logs of client and server between them, with the host's name |
//!
//! Same seed, same trace: also beside other simulations in one process. What is drawn follows from the seed, so a change
//! of the code under test usually makes another history of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

#[cfg(not(sim))]
compile_error!(
    "this is a simulation: build it with RUSTFLAGS='--cfg tokio_unstable --cfg sim', or use tests/run --sim"
);

use skyschedule_tests::sim::profile::Profile;
use skyschedule_tests::sim::seeds::{line, logs, number, report, run, run_all, run_many};

fn command(seed: u64, test: &str) -> String {
    format!("SKY_SIM_SEED={seed} ./tests/run --sim --test sim_seeds -- {test}")
}

/// The first seed, and how many, unless the environment asks for others.
fn asked(count: u64) -> (u64, u64) {
    match number("SKY_SIM_SEED", 0) {
        0 => (number("SKY_SIM_FIRST", 1), number("SKY_SIM_SEEDS", count)),
        seed => (seed, 1),
    }
}

/// Runs the seeds asked for, and fails with the first that breaks a promise.
fn none_breaks_a_promise(test: &str, count: u64, profile: impl Fn(u64) -> Profile + Sync) {
    logs();
    let (first, count) = asked(count);
    if std::env::var_os("SKY_SIM_ALL").is_some() {
        let failed = run_all(first, count, profile, None);
        let lines: Vec<String> = failed.iter().map(line).collect();
        assert!(failed.is_empty(), "{}", lines.join("\n"));
        return;
    }
    let (failed, _) = run_many(first, count, profile, None);
    if let Some(outcome) = failed {
        panic!("{}", report(&outcome, &command(outcome.seed, test)));
    }
}

#[test]
fn no_seed_breaks_a_promise() {
    none_breaks_a_promise("no_seed_breaks_a_promise", 500, Profile::of_seed);
}

#[test]
fn a_server_that_lost_its_disk_keeps_exclusive_groups_exclusive() {
    let test = "a_server_that_lost_its_disk_keeps_exclusive_groups_exclusive";
    none_breaks_a_promise(test, 60, |_| Profile::lost_and_exclusive());
}

#[test]
fn several_servers_keep_every_promise() {
    let profile = |seed: u64| match number("SKY_SIM_KIND", u64::MAX) {
        u64::MAX => Profile::of_replicas(seed),
        kind => Profile::of_replicas_like(kind, seed),
    };
    none_breaks_a_promise("several_servers_keep_every_promise", 300, profile);
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_seed_another() {
    let mut seen = Vec::new();
    let one = (1..=8).map(|seed| (seed, Profile::of_seed(seed)));
    let several = (1..=8).map(|seed| (seed, Profile::of_replicas(seed)));
    for (seed, profile) in one.chain(several) {
        let trace = || run(seed, &profile, None).fingerprint;
        let first = trace();
        assert!(first.0 > 10, "seed {seed}: {first:?}");
        assert_eq!(first, trace(), "seed {seed}");
        assert!(!seen.contains(&first));
        seen.push(first);
    }
}
