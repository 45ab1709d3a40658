//! The consumer of SQL task tables: fetches the rows that are this client's, runs a handler for each that is due,
//! and marks what became of it. On PostgreSQL, MariaDB, MySQL and SQLite. Cargo feature `sql`.
//!
//! ```
//! # use skyschedule_server::{Server, config::Config};
//! # use sqlx::Executor as _;
//! use skyschedule_client::Client;
//! use skyschedule_client::sql::{self, Table, Task};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let server = Server::start(Config::embedded(folder.path().join("server"))).await?;
//! # let address = server.local_addr().to_string();
//! # let url = format!("sqlite://{}?mode=rwc", folder.path().join("tasks.db").display());
//! # let sql::Database::Sqlite(pool) = sql::Database::connect(&url, 2).await? else { unreachable!() };
//! # pool.execute("CREATE TABLE task_info (id INTEGER PRIMARY KEY, task_data TEXT, task_time TEXT NOT NULL, \
//! #     status INTEGER NOT NULL DEFAULT 0)").await?;
//! # pool.execute("INSERT INTO task_info VALUES (7, 'a letter', datetime('now'), 0)").await?;
//! let client = Client::builder().servers([address]).group("orders").connect().await?;
//! let table = Table::new("task_info").columns(["id", "task_data"]);
//! let consumer = sql::consumer(&client, table).concurrency(16).connect(&url).await?;
//!
//! let stopper = consumer.stopper(); // a service stops it on SIGTERM
//! let counted = consumer
//!     .run(move |task: Task<(i64, String)>| {
//!         let stopper = stopper.clone();
//!         async move {
//!             let (id, data) = task.row();
//!             assert_eq!((*id, data.as_str()), (7, "a letter"));
//!             stopper.stop();
//!             Ok::<_, std::io::Error>(()) // done; with an Err it has failed
//!         }
//!     })
//!     .await;
//! client.close().await?; // what runs is finished and marked; then others have the rows
//! assert_eq!(counted.done, 1);
//! # Ok(())
//! # }
//! ```
//!
//! # What is promised
//! A task is started when the *database's* clock says that it is due, by the one client that owns its row. Its row is
//! given back only after its mark is committed. While membership is quiet, or changes in good order, each task is
//! executed once. Executed twice can be: what a client had executed or begun, but not yet marked, when it was killed,
//! stood still for longer than its lease, or was overtaken because it did not release its rows in time; at most a
//! [`batch`](Builder::batch). So a handler should be such that a second execution does no harm, or use
//! [`Task::epoch`] as a fencing token; or, where its effects are in the same database, they happen exactly once with
//! [`Consumer::run_in_transaction`]. Marks are conditional (`… AND status = 0`): one that comes too late changes
//! nothing, and [`Metrics::lost_marks`] counts it.
//!
//! | what happens | what follows |
//! |---|---|
//! | the handler returns an error, panics, or is out of [`time`](Builder::timeout) | this attempt has failed; other tasks go on. It is tried again after a wait if the table has [a column for attempts](Table::retries); else, or after the last attempt, its status is *failed* |
//! | rows move to another client | what runs is finished and marked at once; what waits is dropped |
//! | the lease of an exclusive group, or the membership, is over | handlers' futures are dropped; that counts as no attempt |
//! | the client closes, or the consumer is [stopped](Stopper) | no new tasks; what runs is finished and marked |
//! | the database is away | nothing new is begun; marks and queries are tried again, after 0.1 to 5 seconds |
//! | the database refuses a mark (a constraint, a trigger) | the others are marked; this task is left alone for a minute |
//!
//! A handler that blocks its thread costs no lease, but it delays the consumer if it blocks all threads of the runtime:
//! let it wait on a thread of its own. Handlers that end at once are executed several in a row, in one task of the
//! runtime; as soon as some take longer, or wait for something, each has its own.
//!
//! # Index and numbering
//! A group is numbered `modulo` (the default) or by `slots`. With a few clients both are fast. In a modulo group
//! each client reads the index entries of all others, so with N clients it reads N entries for each row it gets; from
//! about ten clients on use slots: `PUT /api/v1/groups/orders {"numbering": "slots", "slots": 1024}`, an index by
//! slot, and [`Table::slot_index`] or [`Table::slot_column`].
//!
//! | | modulo | slots |
//! |---|---|---|
//! | PostgreSQL | `CREATE INDEX … ON task_info (task_time, id) WHERE status = 0` | `CREATE INDEX … ON task_info ((id & 1023), task_time, id) WHERE status = 0` |
//! | MariaDB, MySQL | `INDEX (status, task_time, id)` | `slot SMALLINT UNSIGNED AS (id & 1023) VIRTUAL, INDEX (slot, status, task_time, id)` |
//! | SQLite | `CREATE INDEX … ON task_info (task_time, id) WHERE status = 0` | `CREATE INDEX … ON task_info ((id & 1023), task_time, id) WHERE status = 0` |
//!
//! For text and UUID keys the slot is, for 1,024 slots, in PostgreSQL
//! `(('x' || substr(md5(CAST(id AS text)), 1, 8))::bit(32)::bigint % 1024)`, in MariaDB
//! `CAST(CONV(SUBSTR(MD5(CONVERT(id USING utf8mb4)), 1, 8), 16, 10) AS UNSIGNED) % 1024`. SQLite cannot hash: there, write
//! [`RowKey::from(text).modulo(1024)`](crate::RowKey::modulo) into a slot column when a task is added; without one,
//! each client reads all rows and leaves those of the others.
//!
//! SQLite has one writer at a time: a [`batch`](Builder::batch) of 100 or more keeps its turns few.
//!
//! # Inside
//! `table` and `schema` say what the table is, `statements` and `clock` what is asked of it, `driver` how. `engine` is the
//! loop, `pages` when it asks for rows, `fetch` and `rotation` where it is in the table, `group` and `task` an execution,
//! `mark` the writing down of what came of it, `session` the connections for all that. `once` is the other loop, whose pages
//! become transactions.

mod clock;
mod consumer;
mod database;
mod driver;
mod engine;
mod error;
mod fetch;
mod group;
mod key;
mod mark;
mod metrics;
mod once;
mod pace;
mod pages;
mod rotation;
mod schema;
mod session;
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
pub use once::{AnyTx, HandlerError, TransactionHandler, Transactions, Tx};
pub use sqlx;
pub use table::{Retry, Table, UnixTime, Value};
pub use task::{Handler, Task};
