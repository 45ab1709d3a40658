//! The SkySchedule server.

pub mod coordinator;
pub mod state;
pub mod view;
