//! A place of its own for each test: a schema, a database or a file.

use skyschedule_client::Dialect;
use skyschedule_client::sql::Database;
use skyschedule_common::env::rng;
use sqlx::AssertSqlSafe;
use tempfile::TempDir;

/// Rows that one INSERT adds.
const ROWS: usize = 1_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) dialect: Dialect,
    /// The URL of the place, for other processes.
    pub(crate) url: String,
    pub(crate) database: Database,
    /// The schema or database that is removed at the end.
    name: String,
    /// The file's folder.
    _folder: Option<TempDir>,
}

/// A database that the script provides.
fn provided(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: ./tests/run starts private databases and sets it, and so does tests/databases/with COMMAND")
    })
}

fn own_name() -> String {
    format!("sky_test_{:016x}", rng::u64())
}

impl Place {
    pub(crate) async fn postgres() -> Self {
        let base = provided("SKY_TEST_POSTGRES_URL");
        let name = own_name();
        let at = Database::connect(&base, 2).await.unwrap();
        execute(&at, &format!("CREATE SCHEMA {name}")).await;
        let separator = if base.contains('?') { '&' } else { '?' };
        let url = format!("{base}{separator}options=-c%20search_path%3D{name}");
        Self::at(Dialect::Postgres, url, name, None).await
    }

    pub(crate) async fn mariadb() -> Self {
        let base = provided("SKY_TEST_MYSQL_URL");
        let name = own_name();
        let at = Database::connect(&base, 2).await.unwrap();
        execute(
            &at,
            &format!("CREATE DATABASE {name} CHARACTER SET utf8mb4"),
        )
        .await;
        let (server, _) = base.rsplit_once('/').expect("the URL names a database");
        Self::at(Dialect::MySql, format!("{server}/{name}"), name, None).await
    }

    pub(crate) async fn sqlite() -> Self {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("tasks.db");
        let url = format!("sqlite://{}", file.display());
        // Made once; then opened as it is.
        Database::connect(&format!("{url}?mode=rwc"), 2)
            .await
            .unwrap();
        Self::at(Dialect::Sqlite, url, "main".to_owned(), Some(folder)).await
    }

    async fn at(dialect: Dialect, url: String, name: String, folder: Option<TempDir>) -> Self {
        let database = Database::connect(&url, 8).await.unwrap();
        Self {
            dialect,
            url,
            database,
            name,
            _folder: folder,
        }
    }

    /// Removes it. After a failed test it stays, for those who look.
    pub(crate) async fn remove(self) {
        let statement = match self.dialect {
            Dialect::Postgres => format!("DROP SCHEMA {} CASCADE", self.name),
            Dialect::MySql => format!("DROP DATABASE {}", self.name),
            Dialect::Sqlite => return,
        };
        self.execute(&statement).await;
    }

    /// The name of its schema.
    pub(crate) fn schema(&self) -> &str {
        &self.name
    }

    /// One of three texts.
    pub(crate) fn pick<'a>(&self, postgres: &'a str, mariadb: &'a str, sqlite: &'a str) -> &'a str {
        match self.dialect {
            Dialect::Postgres => postgres,
            Dialect::MySql => mariadb,
            Dialect::Sqlite => sqlite,
        }
    }

    /// The table of the README, with integer ids.
    pub(crate) async fn create_tasks(&self) {
        self.execute(self.pick(
            "CREATE TABLE task_info (id BIGINT PRIMARY KEY, task_data TEXT, \
             task_time TIMESTAMPTZ NOT NULL DEFAULT now(), status SMALLINT NOT NULL DEFAULT 0)",
            "CREATE TABLE task_info (id BIGINT PRIMARY KEY, task_data TEXT, \
             task_time DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), status TINYINT NOT NULL DEFAULT 0, \
             KEY due (status, task_time, id))",
            "CREATE TABLE task_info (id INTEGER PRIMARY KEY, task_data TEXT, \
             task_time TEXT NOT NULL DEFAULT (datetime('now')), status INTEGER NOT NULL DEFAULT 0)",
        ))
        .await;
    }

    /// Adds tasks with these ids to the table of the README.
    pub(crate) async fn add_tasks(&self, ids: impl IntoIterator<Item = i64>) {
        let values: Vec<String> = ids.into_iter().map(|id| format!("({id})")).collect();
        self.insert("task_info (id)", &values).await;
    }

    /// Adds rows, each as `(…)`. MariaDB sessions are at the server's zone, so that defaults are what they are for
    /// everybody else.
    pub(crate) async fn insert(&self, into: &str, values: &[String]) {
        for values in values.chunks(ROWS) {
            self.execute(&format!("INSERT INTO {into} VALUES {}", values.join(", ")))
                .await;
        }
    }

    pub(crate) async fn execute(&self, statement: &str) {
        execute(&self.database, statement).await;
    }

    /// A number that a query yields.
    pub(crate) async fn number(&self, query: &str) -> i64 {
        let kind = self.pick("bigint", "SIGNED", "INTEGER");
        let query = AssertSqlSafe(format!("SELECT CAST(({query}) AS {kind})"));
        match &self.database {
            Database::Postgres(pool) => sqlx::query_scalar(query).fetch_one(pool).await,
            Database::MySql(pool) => sqlx::query_scalar(query).fetch_one(pool).await,
            Database::Sqlite(pool) => sqlx::query_scalar(query).fetch_one(pool).await,
        }
        .unwrap()
    }

    /// How many rows of the README's table have this status.
    pub(crate) async fn with_status(&self, status: i64) -> i64 {
        self.number(&format!(
            "SELECT COUNT(*) FROM task_info WHERE status = {status}"
        ))
        .await
    }
}

async fn execute(database: &Database, statement: &str) {
    let done = match database {
        Database::Postgres(pool) => sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(pool)
            .await
            .map(|_| ()),
        Database::MySql(pool) => sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(pool)
            .await
            .map(|_| ()),
        Database::Sqlite(pool) => sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(pool)
            .await
            .map(|_| ()),
    };
    done.unwrap_or_else(|error| panic!("{error}: {}", &statement[..statement.len().min(400)]));
}
