//! What benchmarks share: child processes that play roles, and the table of results.

pub(crate) mod process;
pub(crate) mod report;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
