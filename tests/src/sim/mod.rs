//! Simulations: the real servers and the real clients in a world that drifts, stalls, crashes and lies.
//!
//! | file | one idea |
//! |---|---|
//! | `profile`, `replicas` | what a simulation is like: settings, how many clients and servers, which trouble how often |
//! | `world` | machines, processes, disk and network, and what happens to them |
//! | `worker`, `server`, `operator` | the software on the machines, and who looks after the servers |
//! | `network` | links that keep, delay or lose what is sent |
//! | `oracle` | sees everything after each step, and says what must not be |
//! | `seeds` | runs seeds, several at a time, and reports the one that fails |
//! | `dice`, `trace` | what is drawn; what happened |

pub mod dice;
pub mod network;
pub mod operator;
pub mod oracle;
pub mod profile;
mod replicas;
pub mod seeds;
pub mod server;
pub mod trace;
pub mod worker;
pub mod world;
