//! Transactions that are in each other's way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use skyschedule_client::Dialect;
use skyschedule_client::sql::{AnyTx, Builder, Metrics, Table, Task, Transactions};
use tokio::sync::Barrier;

use super::{create, effect, effects, number, table, write};
use crate::common::crew::{Crew, NoColumns, in_transactions};
use crate::common::place::Place;

/// Two accounts; a task takes its own first and then the other.
async fn accounts(place: &Place) {
    create(place).await;
    place
        .execute("CREATE TABLE account (id BIGINT PRIMARY KEY, n BIGINT NOT NULL)")
        .await;
    place
        .execute("INSERT INTO account VALUES (1, 0), (2, 0)")
        .await;
    place.add_tasks([1, 2]).await;
}

/// Takes an account.
async fn take(tx: &mut AnyTx, account: i64) -> Result<(), sqlx::Error> {
    write(
        tx,
        &format!("UPDATE account SET n = n + 1 WHERE id = {account}"),
    )
    .await
}

/// Two handlers that meet in a deadlock the first time; what the consumer counted.
async fn deadlock(
    place: &Place,
    transactions: Transactions,
    table: Table,
    swallow: bool,
) -> Metrics {
    accounts(place).await;
    let crew = Crew::new().await;
    let (both, runs) = (Arc::new(Barrier::new(2)), Arc::new(AtomicUsize::new(0)));
    let handler = move |task: Task<NoColumns>, mut tx: AnyTx| {
        let (both, runs) = (Arc::clone(&both), Arc::clone(&runs));
        async move {
            let own = number(task.key());
            take(&mut tx, own).await?;
            if runs.fetch_add(1, Ordering::Relaxed) < 2 {
                both.wait().await;
            }
            let taken = take(&mut tx, 3 - own).await;
            if !swallow {
                taken?;
            }
            effect(&mut tx, &task, "a").await
        }
    };
    let set_up = |builder: Builder| builder.transactions(transactions).concurrency(2);
    let client = crew.client("a").await;
    let member = in_transactions(client, &place.database, table, set_up, handler).await;
    member
        .until("both have ended", |metrics| {
            metrics.done + metrics.failed == 2
        })
        .await;
    member.close().await
}

async fn a_deadlock_is_no_failure(place: Place, transactions: Transactions) {
    let metrics = deadlock(&place, transactions, table(), false).await;
    assert_eq!(
        (metrics.done, metrics.failed, metrics.retried),
        (2, 0, 0),
        "{metrics:?}"
    );
    assert!(metrics.rolled_back >= 1, "{metrics:?}");
    assert_eq!(effects(&place).await, (2, 2));
    let taken = "SELECT COUNT(*) FROM account WHERE n = 2";
    assert_eq!(place.number(taken).await, 2, "each took both once");
    let attempts = "SELECT COUNT(*) FROM task_info WHERE attempts IS NOT NULL";
    assert_eq!(place.number(attempts).await, 0);
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_of_two_handlers_is_tried_again_and_costs_no_attempt() {
    tokio::join!(
        a_deadlock_is_no_failure(Place::postgres().await, Transactions::PerTask),
        a_deadlock_is_no_failure(Place::postgres().await, Transactions::PerBatch),
        a_deadlock_is_no_failure(Place::mariadb().await, Transactions::PerTask),
        a_deadlock_is_no_failure(Place::mariadb().await, Transactions::PerBatch),
    );
}

/// A deadlock has ended its transaction, and what it writes from there on must not stay either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_goes_on_after_a_deadlock_has_failed_and_has_no_effect() {
    for place in [Place::postgres().await, Place::mariadb().await] {
        // Its first failure is final.
        let table = Table::new("task_info");
        let metrics = deadlock(&place, Transactions::PerTask, table, true).await;
        assert_eq!((metrics.done, metrics.failed), (1, 1), "{metrics:?}");
        assert_eq!(effects(&place).await, (1, 1));
        let of_failed =
            "SELECT COUNT(*) FROM effect JOIN task_info ON id = task_id WHERE status <> 1";
        assert_eq!(place.number(of_failed).await, 0);
        let taken = "SELECT COUNT(*) FROM account WHERE n = 1";
        assert_eq!(place.number(taken).await, 2, "only the other one took both");
        place.remove().await;
    }
}

/// A lock that is held elsewhere for longer than the session waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_a_lock_that_is_too_long_is_no_failure() {
    for place in [Place::postgres().await, Place::mariadb().await] {
        accounts(&place).await;
        let holder = place.session().await;
        holder.execute("BEGIN").await;
        holder
            .execute("UPDATE account SET n = 5 WHERE id = 1")
            .await;
        let impatient = match place.dialect {
            Dialect::Postgres => "SET LOCAL lock_timeout = '100ms'",
            _ => "SET innodb_lock_wait_timeout = 1",
        };
        let handler = move |task: Task<NoColumns>, mut tx: AnyTx| async move {
            write(&mut tx, impatient).await?;
            take(&mut tx, 1).await?;
            effect(&mut tx, &task, "a").await
        };
        let crew = Crew::new().await;
        let client = crew.client("a").await;
        let one = |builder: Builder| {
            builder
                .concurrency(1)
                .database_timeout(Duration::from_secs(20))
        };
        let member = in_transactions(client, &place.database, table(), one, handler).await;
        member
            .until("it gives up waiting", |metrics| metrics.rolled_back >= 2)
            .await;
        holder.execute("ROLLBACK").await;
        member
            .until("both are done", |metrics| metrics.done == 2)
            .await;
        let metrics = member.close().await;
        assert_eq!((metrics.failed, metrics.retried), (0, 0), "{metrics:?}");
        assert_eq!(effects(&place).await, (2, 2));
        place.remove().await;
    }
}
