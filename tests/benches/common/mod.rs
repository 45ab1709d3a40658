//! What benchmarks share: child processes that play roles, SkySchedule's roles, and the table of results.

pub(crate) mod members;
pub(crate) mod newcomer;
pub(crate) mod process;
pub(crate) mod report;
pub(crate) mod server;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
