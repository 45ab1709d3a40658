//! Tools for tests of SkySchedule.
//!
//! On real processes, over real sockets:
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | a `skyschedule serve` process: started, signalled, killed, restarted where it was |
//! | [`cluster`] | three of them that form one cluster |
//! | [`member`] | a `test-client` process: a real client that tells what it sees and does what it is told |
//! | [`numbering`] | whether members divide the rows among themselves, and the wait until they do |
//! | [`ledger`] | whether no row had two workers, or none |
//! | [`admin`] | the server's admin interface |
//! | [`peer`] | the protocol by hand: what no honest client would send |
//! | [`scene`] | a server under attack, and an honest client that must not notice |
//! | [`proxy`] | a bad network between a client and a server |
//! | [`mesh`] | a cluster over a bad network |
//!
//! Every server, proxy and member belongs to its test: it is killed when it is dropped.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "only tests use this crate: what goes wrong here fails the test"
)]

#[cfg(not(sim))]
pub mod admin;
#[cfg(not(sim))]
pub mod cluster;
#[cfg(not(sim))]
pub mod ledger;
#[cfg(not(sim))]
pub mod member;
#[cfg(not(sim))]
pub mod mesh;
#[cfg(not(sim))]
pub mod numbering;
#[cfg(not(sim))]
pub mod peer;
#[cfg(not(sim))]
mod process;
#[cfg(not(sim))]
pub mod proxy;
#[cfg(not(sim))]
pub mod scene;
#[cfg(not(sim))]
pub mod server;
#[cfg(sim)]
pub mod sim;
