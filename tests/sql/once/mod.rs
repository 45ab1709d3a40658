//! Exactly once: claim, handler and mark of a task in one transaction.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail like the test itself"
)]

mod conflicts;
mod held;
mod processes;

use std::time::Duration;

use crate::common::crew::{Crew, Member, NoColumns, PATIENCE, in_transactions};
use crate::common::place::Place;
use skyschedule_client::Dialect;
use skyschedule_client::sql::{
    self, AnyTx, Builder, Database, Error, HandlerError, Key, Retry, Table, Task, Transactions,
};
use skyschedule_common::env;
use sqlx::AssertSqlSafe;

fn number(key: &Key) -> i64 {
    match key {
        Key::Integer(id) => *id,
        other => panic!("{other} is no integer"),
    }
}

/// Executes a statement in the transaction.
async fn write(tx: &mut AnyTx, statement: &str) -> Result<(), sqlx::Error> {
    let statement = sqlx::raw_sql(AssertSqlSafe(statement));
    match tx {
        AnyTx::Postgres(tx) => statement.execute(&mut **tx).await.map(|_| ()),
        AnyTx::MySql(tx) => statement.execute(&mut **tx).await.map(|_| ()),
        AnyTx::Sqlite(tx) => statement.execute(&mut **tx).await.map(|_| ()),
    }
}

/// The effect of a task: a row in a table of its own.
async fn effect(tx: &mut AnyTx, task: &Task<NoColumns>, by: &str) -> Result<(), sqlx::Error> {
    let id = number(task.key());
    write(tx, &format!("INSERT INTO effect VALUES ({id}, '{by}')")).await
}

/// The README's table with a column for attempts, and one for effects.
async fn create(place: &Place) {
    place.create_tasks().await;
    place
        .execute("ALTER TABLE task_info ADD COLUMN attempts INTEGER")
        .await;
    place
        .execute("CREATE TABLE effect (task_id BIGINT NOT NULL, note VARCHAR(255) NOT NULL)")
        .await;
}

fn table() -> Table {
    let retry = Retry::default().attempts(2);
    let soon = retry.back_off(Duration::from_millis(10), Duration::from_millis(10));
    Table::new("task_info").retries("attempts", soon)
}

/// Effects, and tasks that have any.
async fn effects(place: &Place) -> (i64, i64) {
    let all = place.number("SELECT COUNT(*) FROM effect").await;
    let tasks = place
        .number("SELECT COUNT(DISTINCT task_id) FROM effect")
        .await;
    (all, tasks)
}

/// Waits until so many tasks are done.
async fn until_done(place: &Place, tasks: i64) {
    let deadline = env::now() + PATIENCE;
    while place.with_status(1).await < tasks {
        assert!(
            env::now() < deadline,
            "{} of {tasks} tasks are done",
            place.with_status(1).await
        );
        env::sleep(Duration::from_millis(20)).await;
    }
}

/// What the last digit of a task's id makes its handler do, after it has had its effect.
async fn unreliable(task: Task<NoColumns>, mut tx: AnyTx) -> Result<(), HandlerError> {
    effect(&mut tx, &task, "a").await?;
    match number(task.key()) % 10 {
        1 => Err("an error on purpose".into()),
        2 => panic!("a panic on purpose"),
        3 => {
            // The database would be at it for longer than the handler may take.
            match &tx {
                AnyTx::Postgres(_) => write(&mut tx, "SELECT pg_sleep(60)").await?,
                AnyTx::MySql(_) => write(&mut tx, "SELECT SLEEP(60)").await?,
                AnyTx::Sqlite(_) => {}
            }
            std::future::pending().await
        }
        4 if task.attempt() == 1 => Err("only the first time".into()),
        5 => Ok(write(&mut tx, "INSERT INTO nowhere VALUES (1)").await?),
        6 => {
            // Swallowed.
            let _ = write(&mut tx, "INSERT INTO nowhere VALUES (1)").await;
            Ok(())
        }
        7 => {
            env::spawn(async move {
                env::sleep(Duration::from_millis(50)).await;
                drop(tx);
            });
            Ok(())
        }
        8 => Ok(write(&mut tx, "ROLLBACK").await?),
        _ => Ok(()),
    }
}

async fn join_unreliable(crew: &Crew, place: &Place, transactions: Transactions) -> Member {
    let set_up = |builder: Builder| {
        builder
            .transactions(transactions)
            .timeout(Duration::from_millis(200))
            .longest_idle(Duration::from_millis(20))
    };
    let client = crew.client("a").await;
    in_transactions(client, &place.database, table(), set_up, unreliable).await
}

on_each_database! {
    async fn only_what_handlers_that_end_well_have_written_is_there(place: &Place) {
        create(place).await;
        let crew = Crew::new().await;
        let mut ids = 0..;
        for transactions in [Transactions::PerTask, Transactions::PerBatch] {
            place.add_tasks(ids.by_ref().take(20)).await;
            let member = join_unreliable(&crew, place, transactions).await;
            // PostgreSQL takes no more statements after an error, the others do.
            let swallowed = if place.dialect == Dialect::Postgres { 2 } else { 0 };
            let failed = 12 + swallowed;
            member.until("all are marked", |metrics| metrics.done + metrics.failed == 20).await;
            let metrics = member.close().await;
            assert_eq!((metrics.failed, metrics.retried), (failed, failed + 2), "{metrics:?}");
            assert_eq!((metrics.panicked, metrics.timed_out), (4, 4), "{metrics:?}");
            assert_eq!((metrics.lost_marks, metrics.locked), (0, 0), "{metrics:?}");
        }
        let done = place.with_status(1).await;
        let failed = place.number("SELECT COUNT(*) FROM task_info WHERE status = 2 AND attempts = 2").await;
        assert_eq!(done + failed, 40);
        assert_eq!(effects(place).await, (done, done), "an effect a task that is done");
        let of_failed = "SELECT COUNT(*) FROM effect JOIN task_info ON id = task_id WHERE status <> 1";
        assert_eq!(place.number(of_failed).await, 0);
    }

    async fn what_the_commit_refuses_has_failed_and_takes_no_other_task_with_it(place: &Place) {
        create(place).await;
        place.add_tasks(0..10).await;
        // A reference that is checked when the transaction is committed; MariaDB checks at once.
        place.execute("CREATE TABLE letter (id BIGINT PRIMARY KEY)").await;
        place.execute("INSERT INTO letter VALUES (1)").await;
        place.execute(place.pick(
            "CREATE TABLE sent (letter BIGINT REFERENCES letter DEFERRABLE INITIALLY DEFERRED)",
            "CREATE TABLE sent (letter BIGINT, FOREIGN KEY (letter) REFERENCES letter (id))",
            "CREATE TABLE sent (letter BIGINT REFERENCES letter (id) DEFERRABLE INITIALLY DEFERRED)",
        )).await;
        let handler = |task: Task<NoColumns>, mut tx: AnyTx| async move {
            effect(&mut tx, &task, "a").await?;
            let letter = if number(task.key()) == 7 { 2 } else { 1 };
            write(&mut tx, &format!("INSERT INTO sent VALUES ({letter})")).await
        };
        let set_up = |builder: Builder| builder.transactions(Transactions::PerBatch);
        let crew = Crew::new().await;
        let client = crew.client("a").await;
        let member = in_transactions(client, &place.database, table(), set_up, handler).await;
        member.until("all are marked", |metrics| metrics.done + metrics.failed == 10).await;
        let metrics = member.close().await;
        assert_eq!((metrics.failed, metrics.retried), (1, 1), "{metrics:?}");
        assert_eq!(effects(place).await, (9, 9));
        assert_eq!(place.number("SELECT id FROM task_info WHERE status = 2 AND attempts = 2").await, 7);
        assert_eq!(place.number("SELECT COUNT(*) FROM task_info WHERE status = 1 AND attempts IS NULL").await, 9);
    }

    async fn a_batch_is_one_transaction_and_a_task_alone_has_its_own(place: &Place) {
        create(place).await;
        let crew = Crew::new().await;
        // The isolation, and the transaction's own number where the database tells it: MariaDB shows what it knew
        // a moment ago.
        let note = place.pick(
            "current_setting('transaction_isolation') || ' ' || pg_current_xact_id()",
            "COALESCE((SELECT LOWER(trx_isolation_level) FROM information_schema.innodb_trx \
             WHERE trx_mysql_thread_id = CONNECTION_ID()), 'unknown')",
            "'read committed'",
        );
        let insert = format!("INSERT INTO effect SELECT id, {note} FROM task_info WHERE id = ");
        // Sessions are told nothing about isolation, and would be stricter.
        let database = stricter(place).await;
        for (transactions, most, least) in [(Transactions::PerBatch, 20, 1), (Transactions::PerTask, 100, 100)] {
            place.execute("DELETE FROM effect").await;
            place.execute("DELETE FROM task_info").await;
            place.add_tasks(0..100).await;
            let insert = insert.clone();
            let handler = move |task: Task<NoColumns>, mut tx: AnyTx| {
                let insert = format!("{insert}{}", task.key());
                async move { write(&mut tx, &insert).await }
            };
            let set_up = |builder: Builder| builder.transactions(transactions).concurrency(4);
            let member = in_transactions(crew.client("a").await, &database, table(), set_up, handler).await;
            member.until("all are done", |metrics| metrics.done == 100).await;
            member.close().await;
            assert_eq!(effects(place).await, (100, 100));
            let other = "SELECT COUNT(*) FROM effect WHERE note NOT LIKE 'read committed%' AND note <> 'unknown'";
            assert_eq!(place.number(other).await, 0, "the isolation is said in each transaction");
            let known = place.number("SELECT COUNT(*) FROM effect WHERE note <> 'unknown'").await;
            assert!(known > 0);
            let count = place.number("SELECT COUNT(DISTINCT note) FROM effect").await;
            if place.dialect == Dialect::Postgres {
                assert!((least..=most).contains(&count), "{count} transactions, {transactions:?}");
            }
        }
        if let Database::MySql(pool) = &database {
            let mut connections = Vec::new();
            while let Some(mut connection) = pool.try_acquire() {
                let query = "SELECT CAST(@@autocommit AS SIGNED)";
                let one: i64 = sqlx::query_scalar(query).fetch_one(&mut *connection).await.unwrap();
                assert_eq!(one, 1, "connections are given back as they were");
                connections.push(connection);
            }
            assert!(!connections.is_empty());
        }
    }

    async fn slots_are_worked_through_as_well_and_a_locked_row_is_taken_later(place: &Place) {
        create(place).await;
        place.add_tasks(0..400).await;
        let holder = place.session().await;
        // SQLite has no such locks, and whoever writes waits for this one.
        if place.dialect != Dialect::Sqlite {
            // Otherwise MariaDB would lock the row behind these, too.
            holder.execute(place.pick("SELECT 1", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "")).await;
            holder.execute("BEGIN").await;
            holder.execute("SELECT id FROM task_info WHERE id < 20 FOR UPDATE").await;
        }
        let crew = Crew::new().await;
        crew.slots(16).await;
        let mut members = Vec::new();
        for (id, transactions) in [("a", Transactions::PerTask), ("b", Transactions::PerBatch)] {
            let handler = move |task: Task<NoColumns>, mut tx: AnyTx| async move { effect(&mut tx, &task, id).await };
            let set_up = |builder: Builder| builder.transactions(transactions).batch(20);
            let table = table().slot_index(16);
            members.push(in_transactions(crew.client(id).await, &place.database, table, set_up, handler).await);
        }
        if place.dialect != Dialect::Sqlite {
            for member in &members {
                member.until("it meets locks", |metrics| metrics.locked > 0).await;
            }
            until_done(place, 380).await;
            assert_eq!(place.with_status(0).await, 20);
            holder.execute("ROLLBACK").await;
        }
        until_done(place, 400).await;
        assert_eq!(effects(place).await, (400, 400));
        for member in members {
            let metrics = member.close().await;
            assert_eq!((metrics.lost_marks, metrics.failed), (0, 0), "{metrics:?}");
        }
    }

    async fn what_a_stopped_consumer_has_begun_is_committed(place: &Place) {
        create(place).await;
        place.add_tasks(0..100).await;
        let crew = Crew::new().await;
        for transactions in [Transactions::PerTask, Transactions::PerBatch] {
            let handler = |task: Task<NoColumns>, mut tx: AnyTx| async move {
                env::sleep(Duration::from_millis(20)).await;
                effect(&mut tx, &task, "a").await
            };
            let set_up = |builder: Builder| builder.transactions(transactions);
            let client = crew.client("a").await;
            let member = in_transactions(client, &place.database, table(), set_up, handler).await;
            member.until("some run", |metrics| metrics.started > 2).await;
            let (client, metrics) = member.stopped().await;
            assert_eq!(metrics.started, metrics.done, "{metrics:?}");
            assert_eq!(client.inspect().running.len(), 0, "all rows are given back");
            client.close().await.unwrap();
        }
        let done = place.with_status(1).await;
        assert!((6..100).contains(&done), "{done}");
        assert_eq!(effects(place).await, (done, done));
    }
}

/// A database whose sessions are isolated as their defaults say, which is more than READ COMMITTED.
async fn stricter(place: &Place) -> Database {
    match place.dialect {
        Dialect::Postgres => {
            let url = format!(
                "{}%20-c%20default_transaction_isolation%3Dserializable",
                place.url
            );
            Database::Postgres(sqlx::PgPool::connect(&url).await.unwrap())
        }
        Dialect::MySql => {
            let options: sqlx::mysql::MySqlConnectOptions = place.url.parse().unwrap();
            let pool = sqlx::MySqlPool::connect_with(options.timezone(None)).await;
            Database::MySql(pool.unwrap())
        }
        Dialect::Sqlite => place.database.clone(),
    }
}

#[tokio::test]
async fn a_database_that_cannot_be_written_is_an_error_at_once() {
    let place = Place::sqlite().await;
    place.create_tasks().await;
    let crew = Crew::new().await;
    let client = crew.client("a").await;
    let url = format!("{}?mode=ro", place.url);
    let options: sqlx::sqlite::SqliteConnectOptions = url.parse().unwrap();
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let consumer = sql::consumer(&client, Table::new("task_info"))
        .on(pool)
        .await;
    let ran = consumer
        .unwrap()
        .run_in_transaction(|_: Task<NoColumns>, _: sql::Tx<sqlx::Sqlite>| async {
            Ok::<_, HandlerError>(())
        })
        .await;
    assert!(matches!(ran, Err(Error::NoTransactions(_))), "{ran:?}");
    client.close().await.unwrap();
}
