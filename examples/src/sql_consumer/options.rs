//! The command line. Every flag is also an environment variable: `SKY_` and the flag in upper case.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use skyschedule_client::Consistency;
use skyschedule_client::sql::{Table, Transactions};

/// Works through the rows of a task table that are its own.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Options {
    /// The servers, as host:port, separated by commas. One that answers is enough.
    #[arg(
        long,
        env = "SKY_SERVERS",
        value_delimiter = ',',
        required_unless_present = "prepare_only"
    )]
    pub(super) servers: Vec<String>,
    /// The group: all that share the table.
    #[arg(long, env = "SKY_GROUP", required_unless_present = "prepare_only")]
    pub(super) group: Option<String>,
    /// The name in the group; made of host, process and chance unless given.
    #[arg(long, env = "SKY_CLIENT_ID")]
    pub(super) client_id: Option<String>,
    /// The user to log in as; none: the server asks for none.
    #[arg(long, env = "SKY_USER")]
    pub(super) user: Option<String>,
    /// A file with the password; or set SKY_PASSWORD.
    #[arg(long, env = "SKY_PASSWORD_FILE")]
    pub(super) password_file: Option<PathBuf>,
    /// Never as a flag: others could read it.
    #[arg(skip = std::env::var("SKY_PASSWORD").ok())]
    pub(super) password: Option<String>,
    /// sqlite://FILE, postgres://USER:PASSWORD@HOST/DATABASE or mysql://USER:PASSWORD@HOST/DATABASE.
    #[arg(long, env = "SKY_DATABASE_URL", hide_env_values = true)]
    database_url: String,
    /// The task table, as NAME or SCHEMA.NAME.
    #[arg(long, env = "SKY_TABLE", default_value = "task_info")]
    pub(super) table: TableName,
    /// The zone of a due time that has none of its own, as +08:00 or Asia/Shanghai.
    #[arg(long, env = "SKY_TIME_ZONE", allow_hyphen_values = true)]
    pub(super) time_zone: Option<String>,
    /// Rows of a query, and at most so many that a kill would have executed again.
    #[arg(long, env = "SKY_BATCH", default_value_t = 100)]
    pub(super) batch: usize,
    /// Tasks that run at a time.
    #[arg(long, env = "SKY_CONCURRENCY", default_value_t = 8)]
    pub(super) concurrency: usize,
    /// How long each task takes, in milliseconds.
    #[arg(long, env = "SKY_WORK_MS", default_value_t = 0)]
    pub(super) work_ms: u64,
    /// What a kill can cost: tasks executed twice, or nothing, since all that is done is one transaction.
    #[arg(long, env = "SKY_DELIVERY", value_enum, default_value_t)]
    pub(super) delivery: Delivery,
    /// With exactly-once: what shares a transaction.
    #[arg(long, env = "SKY_TRANSACTIONS", value_enum, default_value_t)]
    pub(super) transactions: Scope,
    /// What the group must promise; a new group is made so.
    #[arg(long, env = "SKY_CONSISTENCY")]
    pub(super) consistency: Option<Promise>,
    /// Write each execution into the table task_log; with exactly-once in the task's own transaction.
    #[arg(long, env = "SKY_LEDGER")]
    pub(super) ledger: bool,
    /// Make the tables, where they do not exist.
    #[arg(long, env = "SKY_CREATE")]
    pub(super) create: bool,
    /// Add so many due tasks.
    #[arg(long, env = "SKY_SEED", default_value_t = 0)]
    pub(super) seed: u64,
    /// End after --create and --seed; needs no server.
    #[arg(long, env = "SKY_PREPARE_ONLY")]
    pub(super) prepare_only: bool,
    /// End when nothing due is left in the whole table for 2 seconds.
    #[arg(long, env = "SKY_UNTIL_EMPTY")]
    pub(super) until_empty: bool,
}

impl Options {
    /// The URL; with `--create` a SQLite file that does not exist is made.
    pub(super) fn database_url(&self) -> String {
        let url = &self.database_url;
        if !self.create || !url.starts_with("sqlite:") || url.contains("mode=") {
            return url.clone();
        }
        let separator = if url.contains('?') { '&' } else { '?' };
        format!("{url}{separator}mode=rwc")
    }
}

/// How often a task has an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Delivery {
    /// Executed, then marked.
    #[default]
    AtLeastOnce,
    /// Claimed, executed and marked in one transaction.
    ExactlyOnce,
}

/// What shares a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Scope {
    /// Nothing: each task has its own.
    #[default]
    PerTask,
    /// The tasks of a batch.
    PerBatch,
}

impl From<Scope> for Transactions {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::PerTask => Self::PerTask,
            Scope::PerBatch => Self::PerBatch,
        }
    }
}

/// What the group must promise.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Promise {
    /// Rows may be held twice while something fails, and work goes on.
    Available,
    /// Rows are never held twice.
    Exclusive,
}

impl From<Promise> for Consistency {
    fn from(promise: Promise) -> Self {
        match promise {
            Promise::Available => Self::Available,
            Promise::Exclusive => Self::Exclusive,
        }
    }
}

/// A table, maybe in a schema.
#[derive(Debug, Clone)]
pub(super) struct TableName {
    pub(super) schema: Option<String>,
    pub(super) name: String,
}

impl TableName {
    /// As the library wants it described, with the columns of the README's table.
    pub(super) fn described(&self) -> Table {
        let table = Table::new(&self.name);
        match &self.schema {
            Some(schema) => table.schema(schema),
            None => table,
        }
    }
}

impl FromStr for TableName {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.split_once('.') {
            Some((schema, name)) => Self {
                schema: Some(schema.to_owned()),
                name: name.to_owned(),
            },
            None => Self {
                schema: None,
                name: text.to_owned(),
            },
        })
    }
}
