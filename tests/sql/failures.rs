//! What goes wrong: with a task, with its mark, with the database, with the membership.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::common::crew::{Crew, Member, NoColumns, PATIENCE, Seen, settled};
use crate::common::place::Place;
use skyschedule_client::sql::{Builder, Database, Key, Retry, Table, Task};
use skyschedule_common::env;
use skyschedule_tests::proxy::{Direction, Flow, Proxy};
use tokio::sync::Semaphore;

const TASKS: &str = "task_info";

fn number(key: &Key) -> i64 {
    match key {
        Key::Integer(id) => *id,
        other => panic!("{other} is no integer"),
    }
}

/// Fails, panics or hangs with most of the tasks, by the last digit of their ids.
async fn unreliable(seen: Seen, task: Task<NoColumns>) -> Result<(), String> {
    seen.note("a", &task);
    match number(task.key()) % 10 {
        1 => Err("an error on purpose".to_owned()),
        2 => panic!("a panic on purpose"),
        3 => std::future::pending().await,
        4 if task.attempt() == 1 => Err("only the first time".to_owned()),
        _ => Ok(()),
    }
}

async fn join_unreliable(
    crew: &Crew,
    place: &Place,
    table: Table,
    set_up: impl FnOnce(Builder) -> Builder,
) -> Member {
    let seen = crew.seen.clone();
    let handler = move |task| unreliable(seen.clone(), task);
    crew.join_with("a", &place.database, table, set_up, handler)
        .await
}

/// Gives the README's table columns for attempts.
async fn add_retries(place: &Place) {
    place
        .execute("ALTER TABLE task_info ADD COLUMN attempts INTEGER")
        .await;
    place
        .execute(place.pick(
            "ALTER TABLE task_info ADD COLUMN next_attempt TIMESTAMPTZ",
            "ALTER TABLE task_info ADD COLUMN next_attempt DATETIME(6)",
            "ALTER TABLE task_info ADD COLUMN next_attempt TEXT",
        ))
        .await;
}

fn quick() -> Retry {
    Retry::default()
        .attempts(3)
        .back_off(Duration::from_millis(200), Duration::from_secs(1))
}

on_each_database! {
    async fn errors_panics_and_hanging_handlers_are_failures_of_their_task_alone(place: &Place) {
        place.create_tasks().await;
        place.add_tasks(0..100).await;
        let crew = Crew::new().await;
        let limit = |builder: Builder| builder.timeout(Duration::from_millis(200)).batch(10);
        let member = join_unreliable(&crew, place, Table::new(TASKS), limit).await;
        member.until("all are marked", |metrics| metrics.done + metrics.failed == 100).await;
        let metrics = member.close().await;
        // Without columns for attempts the first failure is final.
        assert_eq!((metrics.done, metrics.failed), (60, 40), "{metrics:?}");
        assert_eq!((metrics.panicked, metrics.timed_out), (10, 10), "{metrics:?}");
        assert_eq!((place.with_status(1).await, place.with_status(2).await), (60, 40));
        assert_eq!(crew.seen.len(), 100);
    }

    async fn failed_tasks_are_tried_again_after_a_wait_and_given_up_after_their_attempts(place: &Place) {
        place.create_tasks().await;
        add_retries(place).await;
        place.add_tasks(0..50).await;
        let crew = Crew::new().await;
        let table = Table::new(TASKS).retries("attempts", quick()).next_attempt("next_attempt");
        let limit = |builder: Builder| builder.timeout(Duration::from_millis(100)).batch(20).longest_idle(Duration::from_millis(50));
        let member = join_unreliable(&crew, place, table, limit).await;
        member.until("all are marked", |metrics| metrics.done + metrics.failed == 50).await;
        let metrics = member.close().await;
        // 1, 2 and 3 fail three times; 4 fails once.
        assert_eq!((metrics.done, metrics.failed, metrics.retried), (35, 15, 35), "{metrics:?}");
        assert_eq!((place.with_status(1).await, place.with_status(2).await), (35, 15));
        let attempts = "SELECT COUNT(*) FROM task_info WHERE attempts";
        assert_eq!(place.number(&format!("{attempts} = 3 AND status = 2")).await, 15);
        assert_eq!(place.number(&format!("{attempts} = 1 AND status = 1")).await, 5);
        assert_eq!(place.number(&format!("{attempts} IS NULL AND status = 1")).await, 30);
        for (key, executions) in crew.seen.by_key() {
            let attempts: Vec<u32> = executions.iter().map(|one| one.attempt).collect();
            let expected = match key.parse::<i64>().unwrap() % 10 {
                1..=3 => vec![1, 2, 3],
                4 => vec![1, 2],
                _ => vec![1],
            };
            assert_eq!(attempts, expected, "{key}");
            for pair in executions.windows(2) {
                let wait = pair[1].at.saturating_duration_since(pair[0].at);
                assert!(wait >= Duration::from_millis(200), "{key} was tried again after {wait:?}");
            }
        }
    }

    async fn without_a_column_for_it_the_next_attempt_moves_the_due_time(place: &Place) {
        place.create_tasks().await;
        add_retries(place).await;
        place.add_tasks([4, 14]).await;
        let crew = Crew::new().await;
        let table = Table::new(TASKS).retries("attempts", quick());
        let member = join_unreliable(&crew, place, table, |builder| builder).await;
        member.until("both are done", |metrics| metrics.done == 2).await;
        assert_eq!(member.close().await.retried, 2);
        for executions in crew.seen.by_key().values() {
            let wait = executions[1].at.saturating_duration_since(executions[0].at);
            assert!(wait >= Duration::from_millis(190), "{wait:?}");
        }
    }

    async fn tasks_that_always_fail_do_not_block_those_behind_them(place: &Place) {
        place.create_tasks().await;
        add_retries(place).await;
        // The oldest 50 hang until their time is over, again and again; a batch is 10.
        place.add_tasks((0..50).map(|n| n * 10 + 3)).await;
        env::sleep(Duration::from_millis(1_100)).await;
        place.add_tasks((0..50).map(|n| n * 10)).await;
        let crew = Crew::new().await;
        let patient = Retry::default().attempts(1_000).back_off(Duration::ZERO, Duration::ZERO);
        let table = Table::new(TASKS).retries("attempts", patient).next_attempt("next_attempt");
        let limit = |builder: Builder| builder.timeout(Duration::from_millis(50)).batch(10);
        let member = join_unreliable(&crew, place, table, limit).await;
        member.until("those that can are done", |metrics| metrics.done == 50).await;
        let metrics = member.close().await;
        assert_eq!(metrics.failed, 0, "{metrics:?}");
        assert_eq!(place.with_status(0).await, 50);
    }

    async fn tasks_that_are_done_can_be_deleted(place: &Place) {
        place.create_tasks().await;
        place.add_tasks(0..10).await;
        let crew = Crew::new().await;
        let limit = |builder: Builder| builder.timeout(Duration::from_millis(50));
        let member = join_unreliable(&crew, place, Table::new(TASKS).delete_when_done(), limit).await;
        member.until("all are marked", |metrics| metrics.done + metrics.failed == 10).await;
        member.close().await;
        assert_eq!(place.number("SELECT COUNT(*) FROM task_info").await, 4);
        assert_eq!(place.with_status(2).await, 4);
    }

    async fn a_row_that_cannot_be_read_fails_alone(place: &Place) {
        place.create_tasks().await;
        // No text: NULL, or in SQLite, whose driver reads NULL as one, bytes.
        let wrong = place.pick("(2, NULL)", "(2, NULL)", "(2, x'ff')");
        place.insert("task_info (id, task_data)", &["(1, 'a')", wrong, "(3, 'c')"].map(str::to_owned)).await;
        let crew = Crew::new().await;
        let table = Table::new(TASKS).columns(["task_data"]);
        let seen = crew.seen.clone();
        let handler = move |task: Task<(String,)>| {
            seen.note("a", &task);
            async { Ok::<_, String>(()) }
        };
        let member = crew.join_with("a", &place.database, table, |builder| builder, handler).await;
        member.until("all are marked", |metrics| metrics.done + metrics.failed == 3).await;
        member.close().await;
        assert_eq!(crew.seen.len(), 2);
        assert_eq!(place.number("SELECT id FROM task_info WHERE status = 2").await, 2);
    }

    async fn a_mark_that_the_database_refuses_keeps_no_other_from_being_made(place: &Place) {
        place.create_tasks().await;
        place.add_tasks(0..20).await;
        place.execute(place.pick(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN IF NEW.id = 7 THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$; \
             CREATE TRIGGER refuse BEFORE UPDATE ON task_info FOR EACH ROW EXECUTE FUNCTION refuse()",
            "CREATE TRIGGER refuse BEFORE UPDATE ON task_info FOR EACH ROW \
             IF NEW.id = 7 THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF",
            "CREATE TRIGGER refuse BEFORE UPDATE ON task_info WHEN NEW.id = 7 \
             BEGIN SELECT RAISE(ABORT, 'not this one'); END",
        )).await;
        let crew = Crew::new().await;
        let member = crew.join("a", &place.database, Table::new(TASKS)).await;
        member.until("all others are marked", |metrics| metrics.done == 19).await;
        let metrics = member.close().await;
        assert_eq!(metrics.refused_marks, 1, "{metrics:?}");
        assert_eq!(crew.seen.len(), 20, "it is left alone for a while: {metrics:?}");
        assert_eq!(place.with_status(0).await, 1);
    }

    async fn a_mark_that_changes_nothing_is_counted(place: &Place) {
        place.create_tasks().await;
        place.add_tasks(0..10).await;
        let crew = Crew::new().await;
        let database = place.database.clone();
        let handler = move |task: Task<NoColumns>| {
            let database = database.clone();
            async move {
                // Somebody else marks the row while it is worked on.
                if number(task.key()) == 3 {
                    const SQL: &str = "UPDATE task_info SET status = 5 WHERE id = 3";
                    match &database {
                        Database::Postgres(pool) => sqlx::query(SQL).execute(pool).await.map(|_| ()),
                        Database::MySql(pool) => sqlx::query(SQL).execute(pool).await.map(|_| ()),
                        Database::Sqlite(pool) => sqlx::query(SQL).execute(pool).await.map(|_| ()),
                    }
                } else {
                    Ok(())
                }
            }
        };
        let member = crew.join_with("a", &place.database, Table::new(TASKS), |builder| builder, handler).await;
        member.until("all are marked", |metrics| metrics.done + metrics.lost_marks == 10).await;
        let metrics = member.close().await;
        assert_eq!((metrics.done, metrics.lost_marks), (9, 1), "{metrics:?}");
        assert_eq!(place.with_status(5).await, 1);
    }

    async fn an_idle_consumer_asks_seldom_and_still_finds_new_tasks(place: &Place) {
        place.create_tasks().await;
        let crew = Crew::new().await;
        let member = crew.join("a", &place.database, Table::new(TASKS)).await;
        member.until("it asks", |metrics| metrics.polls > 0).await;
        env::sleep(Duration::from_secs(4)).await;
        let polls = member.metrics.borrow().polls;
        // 20, 40, 80... milliseconds to one second, at least half of each: 7 until then, and two a second.
        assert!((4..=15).contains(&polls), "{polls} queries in 4 seconds");
        place.add_tasks(0..10).await;
        let added = env::now();
        member.until("the new ones are done", |metrics| metrics.done == 10).await;
        assert!(added.elapsed() < Duration::from_secs(3), "{:?}", added.elapsed());
        member.close().await;
    }

    async fn a_full_batch_is_followed_at_once(place: &Place) {
        place.create_tasks().await;
        place.add_tasks(0..500).await;
        let crew = Crew::new().await;
        // Idle waits as long as the test is patient: one such wait between batches would fail it.
        let slow = |builder: Builder| builder.batch(10).longest_idle(PATIENCE);
        let member = crew.join_as("a", &place.database, Table::new(TASKS), slow).await;
        member.until("all are done", |metrics| metrics.done == 500).await;
        // Pages are at most ten batches.
        assert!(member.metrics.borrow().polls >= 5);
        member.close().await;
    }

    async fn on_a_join_the_rest_of_the_batch_is_dropped_and_what_runs_is_marked_first(place: &Place) {
        place.create_tasks().await;
        place.add_tasks(0..200).await;
        let crew = Crew::new().await;
        // The first member's handlers wait until they are let go on; marks wait, too, unless somebody needs the rows.
        let gate = Arc::new(Semaphore::new(0));
        let (seen, pass) = (crew.seen.clone(), Arc::clone(&gate));
        let handler = move |task: Task<NoColumns>| {
            let (seen, gate) = (seen.clone(), Arc::clone(&pass));
            async move {
                seen.note("a", &task);
                gate.acquire().await.map_err(|error| error.to_string())?.forget();
                Ok::<_, String>(())
            }
        };
        let lazy = |builder: Builder| builder.concurrency(4).mark_within(PATIENCE);
        let a = crew.join_with("a", &place.database, Table::new(TASKS), lazy, handler).await;
        gate.add_permits(10);
        a.until("four more run", |metrics| metrics.started == 14).await;
        let b = crew.join("b", &place.database, Table::new(TASKS)).await;
        // Nothing of `b` begins before what `a` executes is finished and marked.
        env::sleep(Duration::from_millis(300)).await;
        assert!(crew.seen.all().iter().all(|one| one.client == "a"), "not released yet");
        assert_eq!(place.with_status(1).await, 10, "what is executed is marked at once when rows are to move");
        gate.add_permits(1_000);
        settled(&[&a, &b]).await;
        a.until("its part is done", |metrics| metrics.waiting == 0 && metrics.running == 0).await;
        crew.seen.reach(200).await;
        let (a, b) = (a.close().await, b.close().await);
        assert!(a.dropped >= 40, "rows of the other are dropped: {a:?}");
        assert_eq!((a.lost_marks, b.lost_marks), (0, 0));
        assert_eq!(crew.seen.len(), 200, "none twice");
        assert_eq!(place.with_status(1).await, 200);
    }

    async fn a_stopped_consumer_finishes_and_marks_what_runs(place: &Place) {
        place.create_tasks().await;
        place.add_tasks(0..100).await;
        let crew = Crew::new().await;
        let seen = crew.seen.clone();
        let handler = move |task: Task<NoColumns>| {
            let seen = seen.clone();
            async move {
                seen.note("a", &task);
                env::sleep(Duration::from_millis(200)).await;
                Ok::<_, String>(())
            }
        };
        let lazy = |builder: Builder| builder.mark_within(PATIENCE);
        let member = crew.join_with("a", &place.database, Table::new(TASKS), lazy, handler).await;
        member.until("eight run", |metrics| metrics.running == 8).await;
        let (client, metrics) = member.stopped().await;
        assert_eq!((metrics.started, metrics.done, metrics.unmarked), (8, 8, 0), "{metrics:?}");
        assert_eq!((place.with_status(1).await, crew.seen.len()), (8, 8));
        assert_eq!(client.inspect().running.len(), 0, "all rows are given back");
        client.close().await.unwrap();
    }

    async fn the_age_of_the_oldest_task_is_shown_by_the_database_clock(place: &Place) {
        place.create_tasks().await;
        place.execute(place.pick(
            "INSERT INTO task_info (id, task_time) VALUES (1, now() - INTERVAL '100 seconds')",
            "INSERT INTO task_info (id, task_time) VALUES (1, NOW(6) - INTERVAL 100 SECOND)",
            "INSERT INTO task_info (id, task_time) VALUES (1, datetime('now', '-100 seconds'))",
        )).await;
        let crew = Crew::new().await;
        let member = crew.join("a", &place.database, Table::new(TASKS)).await;
        let expected = Duration::from_secs(99)..Duration::from_secs(130);
        member.until("it is about 100 s", |metrics| expected.contains(&metrics.lag)).await;
        member.until("it is nothing", |metrics| metrics.done == 1 && metrics.lag.is_zero()).await;
        member.close().await;
    }
}

/// Two databases behind a network that breaks.
async fn lives_through(place: &Place, cut: impl AsyncFn(&Proxy)) {
    place.create_tasks().await;
    place.add_tasks(0..2_000).await;
    let (before, after) = place.url.split_once('@').unwrap();
    let (target, path) = after.split_once('/').unwrap();
    let proxy = Proxy::start(target.parse::<SocketAddr>().unwrap()).await;
    let url = format!("{before}@{}/{path}", proxy.address());
    let database = Database::connect(&url, 3).await.unwrap();
    let crew = Crew::new().await;
    let seen = crew.seen.clone();
    let handler = move |task: Task<NoColumns>| {
        let seen = seen.clone();
        async move {
            seen.note("a", &task);
            env::sleep(Duration::from_millis(5)).await;
            Ok::<_, String>(())
        }
    };
    let set_up = |builder: Builder| {
        builder
            .batch(50)
            .database_timeout(Duration::from_millis(500))
    };
    let member = crew
        .join_with("a", &database, Table::new(TASKS), set_up, handler)
        .await;
    member.until("it works", |metrics| metrics.done > 100).await;
    cut(&proxy).await;
    member
        .until("it goes on", |metrics| {
            metrics.done + metrics.lost_marks == 2_000 && metrics.trouble.is_none()
        })
        .await;
    let metrics = member.close().await;
    assert!(metrics.database_errors > 0, "{metrics:?}");
    assert!(metrics.database_errors < 100, "it backs off: {metrics:?}");
    assert_eq!(place.with_status(1).await, 2_000);
    // Marks are tried again, not executions.
    assert_eq!(crew.seen.len(), 2_000, "{metrics:?}");
}

/// All connections are reset, and new ones refused for two seconds: a restart.
async fn restart(proxy: &Proxy) {
    proxy.admit(false);
    for link in proxy.links() {
        link.reset();
    }
    env::sleep(Duration::from_secs(2)).await;
    proxy.admit(true);
}

/// Nothing arrives any more, and nobody is told.
async fn silence(proxy: &Proxy) {
    proxy.set(Direction::ToClient, Flow::Stall);
    env::sleep(Duration::from_secs(2)).await;
    proxy.set(Direction::ToClient, Flow::Pass);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_postgres_is_lived_through() {
    let place = Place::postgres().await;
    lives_through(&place, restart).await;
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_mariadb_is_lived_through() {
    let place = Place::mariadb().await;
    lives_through(&place, restart).await;
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_that_falls_silent_is_lived_through() {
    let place = Place::postgres().await;
    lives_through(&place, silence).await;
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mariadb_that_falls_silent_is_lived_through() {
    let place = Place::mariadb().await;
    lives_through(&place, silence).await;
    place.remove().await;
}

/// Another process holds SQLite's one lock for longer than the consumer waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_sqlite_is_lived_through() {
    use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
    let place = Place::sqlite().await;
    place.create_tasks().await;
    place.add_tasks(0..300).await;
    let options: SqliteConnectOptions = place.url.parse().unwrap();
    let impatient = options.busy_timeout(Duration::from_millis(50));
    let pool = SqlitePoolOptions::new()
        .connect_with(impatient)
        .await
        .unwrap();
    let crew = Crew::new().await;
    let Database::Sqlite(other) = &place.database else {
        panic!("it is SQLite")
    };
    let lock = other.begin_with("BEGIN EXCLUSIVE").await.unwrap();
    let member = crew.join("a", &pool.into(), Table::new(TASKS)).await;
    member
        .until("marks fail", |metrics| metrics.database_errors > 2)
        .await;
    lock.rollback().await.unwrap();
    member
        .until("all are done", |metrics| metrics.done == 300)
        .await;
    let metrics = member.close().await;
    assert_eq!(metrics.lost_marks, 0, "{metrics:?}");
    assert_eq!(crew.seen.len(), 300, "none twice");
    place.remove().await;
}

/// In an exclusive group rows whose lease is over are let go, and that costs them no attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_task_has_not_failed() {
    let place = Place::sqlite().await;
    place.create_tasks().await;
    add_retries(&place).await;
    place.add_tasks(0..8).await;
    let crew = Crew::new().await;
    let handler = move |_: Task<NoColumns>| async {
        std::future::pending::<()>().await;
        Ok::<_, String>(())
    };
    let table = Table::new(TASKS).retries("attempts", quick());
    let member = crew
        .join_exclusive("a", &place.database, table, handler)
        .await;
    member
        .until("all run", |metrics| metrics.running == 8)
        .await;
    // The server is gone: the lease ends.
    crew.stop().await;
    member
        .until("all are let go", |metrics| metrics.interrupted == 8)
        .await;
    let metrics = member.metrics.borrow().clone();
    assert_eq!(
        (metrics.failed, metrics.retried, metrics.done),
        (0, 0, 0),
        "{metrics:?}"
    );
    assert_eq!(place.with_status(0).await, 8);
    let touched = "SELECT COUNT(*) FROM task_info WHERE attempts IS NOT NULL";
    assert_eq!(place.number(touched).await, 0);
}
