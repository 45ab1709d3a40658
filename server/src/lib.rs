//! The SkySchedule server.
//!
//! One way through the code, and no short cuts:
//!
//! ```text
//! socket → session → coordinator → consensus → state::apply → effects → coordinator → session → socket
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`state`] | the pure core: decides everything |
//! | [`consensus`] | the replicas agree: makes decisions durable on a quorum, and applies them in order |
//! | [`coordinator`] | turns events into commands, and effects into messages |
//! | `degraded` | numbers without a quorum, where that is better than nothing |
//! | `peers` | connections between replicas |
//! | `session` | one connection: handshake, deadlines, bounded queue |
//! | [`stderr`], `strangers` | log lines hold up nobody, and are not for strangers to fill |
//! | [`config`], [`metrics`], [`view`] | what operators set and see |
//! | [`simulation`] | no code: what the simulation does, and which broken rules it finds |
//! | [`capacity`] | no code: how many clients, what they cost, and how to plan for more |
//!
//! Start one with [`Server::start`]; the binary `skyschedule` does it from a command line.

pub mod admin;
#[doc = include_str!("docs/capacity.md")]
pub mod capacity {}
pub mod config;
pub mod consensus;
pub mod coordinator;
mod degraded;
pub mod metrics;
mod peers;
mod server;
mod session;
#[doc = include_str!("docs/simulation.md")]
pub mod simulation {}
pub mod state;
pub mod stderr;
mod strangers;
pub mod view;

pub use server::{RunError, Server, StartError};
