//! The consumer of SQL task tables.

mod clock;
mod consumer;
mod database;
mod driver;
mod engine;
mod error;
mod fetch;
mod key;
mod mark;
mod metrics;
mod pace;
mod schema;
mod statements;
mod table;
mod task;

pub use consumer::{
    AnyBacklog, AnyConsumer, AnyRow, Backlog, Builder, Consumer, Stopper, consumer,
};
pub use database::Database;
pub use driver::Driver;
pub use error::{Error, TableError};
pub use key::Key;
pub use metrics::Metrics;
pub use sqlx;
pub use table::{Retry, Table, UnixTime, Value};
pub use task::{Handler, Task};
