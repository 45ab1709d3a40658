//! A handler of an exclusive group that may go on no more learns of it before its next step, not at the next chance that
//! somebody wakes it.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use skyschedule_client::sql::{self, Metrics, Table, Task, Tx};
use skyschedule_client::{Client, Consistency};
use skyschedule_common::env;
use skyschedule_tests::proxy::{Direction, Flow, Proxy};
use skyschedule_tests::server::{PASSWORD, Server, USER};
use sqlx::{Executor as _, Sqlite, SqlitePool};
use tempfile::TempDir;

const GROUP: &str = "exclusive";

/// A client that works alone on a table with one task, behind a network that can be cut.
struct Scene {
    _server: Server,
    network: Proxy,
    client: Client,
    tasks: SqlitePool,
    _folder: TempDir,
    second_step: AtomicBool,
}

impl Scene {
    async fn new() -> Arc<Self> {
        let server = Server::start().await;
        let settings = serde_json::json!({
            "consistency": "exclusive", "lease_ms": 2_000, "drain_timeout_ms": 1_000
        });
        server.admin().configure(GROUP, &settings).await;
        let network = Proxy::start(server.address()).await;
        let client = Client::builder()
            .servers([network.address().to_string()])
            .group(GROUP)
            .consistency(Consistency::Exclusive)
            .credentials(USER, PASSWORD)
            .connect()
            .await
            .unwrap();
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("tasks.db");
        let url = format!("sqlite://{}?mode=rwc", file.display());
        let sql::Database::Sqlite(tasks) = sql::Database::connect(&url, 3).await.unwrap() else {
            panic!("a pool of SQLite");
        };
        let table = "CREATE TABLE task_info (id INTEGER PRIMARY KEY, task_data TEXT, \
             task_time TEXT NOT NULL, status INTEGER NOT NULL DEFAULT 0); \
             INSERT INTO task_info VALUES (7, 'a letter', datetime('now'), 0)";
        tasks.execute(table).await.unwrap();
        Arc::new(Self {
            _server: server,
            network,
            client,
            tasks,
            _folder: folder,
            second_step: AtomicBool::new(false),
        })
    }

    async fn consumer(&self) -> sql::Consumer<Sqlite> {
        let table = Table::new("task_info").columns(["id", "task_data"]);
        let consumer = sql::consumer(&self.client, table).on(self.tasks.clone());
        consumer.await.unwrap()
    }

    /// The handler: between its two steps, which wait for nobody, the lease ends.
    async fn handle(&self, task: Task<(i64, String)>) {
        for direction in [Direction::ToServer, Direction::ToClient] {
            self.network.set(direction, Flow::Stall);
        }
        // It can go on at the very moment at which its lease is over, and is woken by nothing else than that.
        poll_fn(|_| {
            if task.is_revoked() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        self.second_step.store(true, Ordering::SeqCst);
    }

    /// The second step was not taken, and the task is as it was.
    async fn assert_interrupted(&self, counted: &Metrics) {
        assert!(!self.second_step.load(Ordering::SeqCst), "{counted:?}");
        assert_eq!((counted.interrupted, counted.done), (1, 0), "{counted:?}");
        let status = "SELECT status FROM task_info WHERE id = 7";
        let status: i64 = sqlx::query_scalar(status)
            .fetch_one(&self.tasks)
            .await
            .unwrap();
        assert_eq!(status, 0, "it is another's by now");
    }
}

/// Stops a consumer once a handler was interrupted, or got to its end.
fn stop_afterwards(consumer: &sql::Consumer<Sqlite>) {
    let (stopper, mut metrics) = (consumer.stopper(), consumer.metrics());
    env::spawn(async move {
        let over = |metrics: &Metrics| {
            metrics.interrupted + metrics.done + metrics.lost_marks + metrics.rolled_back > 0
        };
        // It may have ended by itself.
        let _ = metrics.wait_for(over).await;
        stopper.stop();
    });
}

async fn at_least_once() {
    let scene = Scene::new().await;
    let consumer = scene.consumer().await;
    stop_afterwards(&consumer);
    let own = Arc::clone(&scene);
    let counted = consumer.run(move |task: Task<(i64, String)>| {
        let scene = Arc::clone(&own);
        async move {
            scene.handle(task).await;
            Ok::<_, sqlx::Error>(())
        }
    });
    scene.assert_interrupted(&counted.await).await;
}

async fn exactly_once() {
    let scene = Scene::new().await;
    let consumer = scene.consumer().await;
    stop_afterwards(&consumer);
    let own = Arc::clone(&scene);
    let counted = consumer.run_in_transaction(move |task: Task<(i64, String)>, _tx: Tx<Sqlite>| {
        let scene = Arc::clone(&own);
        async move {
            scene.handle(task).await;
            Ok::<_, sqlx::Error>(())
        }
    });
    scene.assert_interrupted(&counted.await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_whose_lease_ends_between_two_steps_does_not_take_the_second() {
    let (one, other) = tokio::join!(env::spawn(at_least_once()), env::spawn(exactly_once()));
    one.and(other).unwrap();
}
