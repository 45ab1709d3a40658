//! What clients and servers of SkySchedule share.
//!
//! | module | what it holds |
//! |---|---|
//! | [`ids`] | names and identities: groups, clients, incarnations, memberships |
//! | [`epoch`] | the order of shares |
//! | [`share`] | which rows belong to a member, and the SQL that says so |
//! | [`protocol`] | messages, limits and framing on the wire |
//! | [`auth`] | the SCRAM-SHA-256 login |
//! | [`mod@env`] | the seam to the world: clock, network, randomness, tasks |
//! | [`fault`] | rules that the simulation can break on purpose |

pub mod auth;
pub mod env;
pub mod epoch;
pub mod fault;
pub mod ids;
pub mod protocol;
pub mod share;
