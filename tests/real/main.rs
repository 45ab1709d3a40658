//! On real processes: the binaries in `SKY_BIN_DIR` (tests/run). One program, so that tests which wait do so together.

mod changes;
mod cluster;
mod copies;
mod demo;
mod drain;
mod flapping;
mod leases;
mod logins;
mod maintenance;
mod members;
mod misbehaviour;
mod operators;
mod relays;
mod replicas;
mod restarts;
mod servers;
mod steps;
mod strangers;
mod work;
