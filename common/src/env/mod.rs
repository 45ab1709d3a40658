//! The seam between SkySchedule and the world: clock, timers, randomness, tasks, network.
//!
//! Code of the project asks for these things here and nowhere else. Normally they are tokio and the
//! machine; a build with `--cfg sim` replaces them by a simulated world (`sim`) in which the same
//! code runs under drifting clocks, pauses, crashes and a bad network, the same way for the same seed.
//!
//! | need | use |
//! |---|---|
//! | a point in time that may decide something | [`now`], [`Instant`] |
//! | to wait, or to limit a wait | [`sleep`], [`sleep_until`], [`sleep_roughly`], [`timeout`] |
//! | a date to show or to log | [`unix_micros`] |
//! | random numbers, secrets, jitter | [`rng`] |
//! | a task | [`spawn`], [`blocking`]; [`io_spawn`] for what must never wait for a user's code, [`spawn_apart`] for what must wait for nothing |
//! | sockets and names | [`net`] |

mod instant;
#[cfg(not(sim))]
mod machine;
pub mod net;
pub mod rng;
#[cfg(sim)]
pub mod sim;
mod task;
mod time;

#[cfg(not(sim))]
use machine as world;
#[cfg(sim)]
use sim::world;

pub use instant::Instant;
pub use task::{IoThreadError, JoinError, JoinHandle, blocking, io_spawn, spawn, spawn_apart};
pub use time::{Elapsed, now, sleep, sleep_roughly, sleep_until, timeout, timeout_at, unix_micros};
