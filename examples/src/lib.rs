//! Runnable examples of SkySchedule.

pub mod demo;
pub mod sql_consumer;
