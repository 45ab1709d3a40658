//! Leader only: events become commands, effects become messages.

mod handle;

pub use handle::{AskError, ConfigureError, Handle};
