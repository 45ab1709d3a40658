//! One session of a database, to hold locks in.

use skyschedule_client::Dialect;
use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection, PgConnection, SqliteConnection};
use tokio::sync::Mutex;

use super::place::Place;

/// See the module.
pub(crate) struct Session(Mutex<Connection>);

enum Connection {
    Postgres(PgConnection),
    MySql(MySqlConnection),
    Sqlite(SqliteConnection),
}

impl Place {
    /// A session of its own.
    pub(crate) async fn session(&self) -> Session {
        let url = &self.url;
        Session(Mutex::new(match self.dialect {
            Dialect::Postgres => Connection::Postgres(PgConnection::connect(url).await.unwrap()),
            Dialect::MySql => Connection::MySql(MySqlConnection::connect(url).await.unwrap()),
            Dialect::Sqlite => Connection::Sqlite(SqliteConnection::connect(url).await.unwrap()),
        }))
    }
}

impl Session {
    pub(crate) async fn execute(&self, statement: &str) {
        let statement = sqlx::raw_sql(AssertSqlSafe(statement));
        let done = match &mut *self.0.lock().await {
            Connection::Postgres(connection) => statement.execute(connection).await.map(|_| ()),
            Connection::MySql(connection) => statement.execute(connection).await.map(|_| ()),
            Connection::Sqlite(connection) => statement.execute(connection).await.map(|_| ()),
        };
        done.unwrap();
    }
}
