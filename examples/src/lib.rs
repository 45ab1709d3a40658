//! Runnable examples of SkySchedule.

pub mod demo;
