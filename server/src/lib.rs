//! The SkySchedule server.

pub mod state;
