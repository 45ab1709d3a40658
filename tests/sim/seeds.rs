//! The general mix: many seeds, each another history of joins, deaths, restarts, bad networks and bad clocks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

#[cfg(not(sim))]
compile_error!(
    "this is a simulation: build it with RUSTFLAGS='--cfg tokio_unstable --cfg sim', or use tests/run --sim"
);

use skyschedule_tests::sim::profile::Profile;
use skyschedule_tests::sim::seeds::{logs, number, report, run, run_many};
use std::time::Duration;

fn command(seed: u64) -> String {
    format!("SKY_SIM_SEED={seed} ./tests/run --sim --test sim_seeds -- no_seed_breaks_a_promise")
}

#[test]
fn no_seed_breaks_a_promise() {
    logs();
    let one = number("SKY_SIM_SEED", 0);
    let (first, count) = if one > 0 {
        (one, 1)
    } else {
        (number("SKY_SIM_FIRST", 1), number("SKY_SIM_SEEDS", 500))
    };
    let start = std::time::UNIX_EPOCH.elapsed().unwrap_or(Duration::ZERO);
    let (failed, runs) = run_many(first, count, Profile::of_seed, None);
    let took = std::time::UNIX_EPOCH.elapsed().unwrap_or(Duration::ZERO) - start;
    eprintln!("{runs} seeds in {took:.1?}");
    if let Some(outcome) = failed {
        panic!("{}", report(&outcome, &command(outcome.seed)));
    }
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_seed_another() {
    let mut seen = Vec::new();
    for seed in 1..=8 {
        let trace = || run(seed, &Profile::of_seed(seed), None).fingerprint;
        let first = trace();
        assert!(first.0 > 20, "seed {seed}: {first:?}");
        assert_eq!(first, trace(), "seed {seed}");
        assert!(!seen.contains(&first));
        seen.push(first);
    }
}
