//! The SkySchedule client: which rows of a shared task table are this process's own.
//!
//! Several replicas of a service link this crate and work through one task table. Each joins the same
//! *group*; the servers number the members, and each member takes the rows with `id mod total ∈ numbers`. When
//! one joins, leaves or dies, the others are told within milliseconds.
//!
//! ```no_run
//! use skyschedule_client::{Client, Dialect};
//!
//! # struct Task { id: i64 }
//! # async fn fetch(condition: &str) -> Result<Vec<Task>, Box<dyn std::error::Error>> { Ok(Vec::new()) }
//! # async fn run(task: &Task) -> Result<(), Box<dyn std::error::Error>> { Ok(()) }
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::builder()
//!     .servers(["sky-1:9991", "sky-2:9991"])
//!     .group("orders")
//!     .credentials("moon", "walker")
//!     .connect()
//!     .await?;
//!
//! loop {
//!     let work = client.acquire().await?; // waits until this client has rows
//!     for task in fetch(&work.share().predicate(Dialect::Postgres, "id")).await? {
//!         let Some(row) = work.begin(task.id) else { continue }; // no longer ours
//!         tokio::select! {
//!             done = run(&task) => done?,
//!             () = row.revoked() => {} // the servers gave this client up: stop
//!         }
//!         // Dropping `row` is the release: another client may have it now.
//!     }
//! #   break;
//! }
//! client.close().await?; // on SIGTERM: no new rows, wait for those that run, say goodbye
//! # Ok(())
//! # }
//! ```
//!
//! # Rows
//! [`Client::acquire`] gives a [`Work`]: rows to fetch. [`Work::begin`] asks, right before a row is worked on,
//! whether it still is this client's, and gives a [`Row`], a guard. Rows move to another client only when their
//! guards are dropped: in an *exclusive* group always; in an *available* group, the default, at the latest
//! after the group's `drain_timeout`. [`Row::epoch`] is a fencing token for what the work writes.
//!
//! # Leases
//! A client trusts its share for a few seconds after the last heartbeat that a server answered, counted from when
//! the heartbeat was sent, by a clock that counts suspend. One I/O thread a process, on which no user code runs,
//! sends the heartbeats of all its clients: a handler that blocks its thread costs no lease. When a lease is over
//! (a pause of the process, a network that is cut), a client of an exclusive group stops: [`Row::revoked`] ends and
//! `begin` gives nothing. A client of an available group asks first, and works on with its last rows when for a
//! second no server answers: then [`Work::share`] may hold shares of several numberings.
//!
//! # Servers
//! The client connects to every server that is named, is served by one, and keeps the others as a standby; names are
//! resolved anew at each attempt. Where the one that leads is not reached, but another one that reaches it, that one carries the
//! connection on ([`Link::Relaying`]). It starts with any one server up, or with none
//! ([`Builder::connect_in_background`]). [`Client::state`] and [`Client::shares`] are watches of what happens.
//!
//! # SQL task tables
//! With the cargo feature `sql` the whole loop is there, on PostgreSQL, MariaDB, MySQL and SQLite: fetch what is due, run
//! a handler for each row, mark, try again, give back. See the module `sql`.
//!
//! # Inside
//! The decisions are two pure state machines: `permit` (what may be begun now) and `membership` (which server,
//! what to say). `driver` and `connection` carry them out.

mod builder;
mod client;
mod config;
mod connection;
mod driver;
mod error;
mod identity;
mod membership;
mod observe;
mod permit;
mod shared;
#[cfg(feature = "sql")]
pub mod sql;
mod work;

pub use builder::Builder;
pub use client::Client;
pub use error::{Closed, ConfigError, ConnectError, NoGoodbye, WeightTooLarge};
pub use observe::{ConnectionState, Inspection, Link, Mode, ServerState, Status};
pub use skyschedule_common::env::Instant;
pub use skyschedule_common::epoch::Epoch;
pub use skyschedule_common::ids::{ClientId, GroupName, HandlerName, Membership};
pub use skyschedule_common::protocol::messages::{Code, Consistency};
pub use skyschedule_common::share::{Dialect, KeyKind, Numbers, RowKey, Share, ShareUnion};
pub use work::{Row, Work};
