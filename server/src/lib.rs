//! SkySchedule.
