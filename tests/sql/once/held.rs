//! Transactions that are held up on their way: an owner that stands still between two steps, and commits without an answer.

use std::net::SocketAddr;
use std::time::Duration;

use skyschedule_client::Dialect;
use skyschedule_client::sql::{AnyTx, Builder, Database, Metrics, Task};
use skyschedule_common::env::{self, rng};
use skyschedule_tests::proxy::{Direction, Flow, Proxy};

use super::{create, effect, effects, table};
use crate::common::crew::{Crew, Member, NoColumns, PATIENCE, in_transactions};
use crate::common::place::Place;
use crate::common::session::Session;

/// The mark of task 1 waits in the database until it is let go on.
struct Gate<'a> {
    place: &'a Place,
    /// The lock that marks wait for is held here.
    session: Session,
    lock: u64,
}

impl<'a> Gate<'a> {
    async fn shut(place: &'a Place) -> Self {
        let lock = rng::below(1 << 31);
        let session = place.session().await;
        let (function, trigger) = match place.dialect {
            Dialect::Postgres => (
                format!(
                    "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                     PERFORM pg_advisory_xact_lock_shared({lock}); RETURN NEW; END $$"
                ),
                "CREATE TRIGGER gate BEFORE UPDATE ON task_info FOR EACH ROW WHEN (NEW.id = 1) \
                 EXECUTE FUNCTION gate()"
                    .to_owned(),
            ),
            _ => (
                "SELECT 1".to_owned(),
                format!(
                    "CREATE TRIGGER gate BEFORE UPDATE ON task_info FOR EACH ROW \
                     IF NEW.id = 1 THEN DO GET_LOCK('{lock}', 60); DO RELEASE_LOCK('{lock}'); END IF"
                ),
            ),
        };
        place.execute(&function).await;
        place.execute(&trigger).await;
        session
            .execute(&match place.dialect {
                Dialect::Postgres => format!("SELECT pg_advisory_lock({lock})"),
                _ => format!("DO GET_LOCK('{lock}', 0)"),
            })
            .await;
        Self {
            place,
            session,
            lock,
        }
    }

    /// Waits until a mark waits.
    async fn reached(&self) {
        let query = match self.place.dialect {
            Dialect::Postgres => format!(
                "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = {}",
                self.lock
            ),
            _ => format!(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'User lock' AND db = '{}'",
                self.place.schema()
            ),
        };
        let deadline = env::now() + PATIENCE;
        while self.place.number(&query).await == 0 {
            assert!(env::now() < deadline, "no mark waits");
            env::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Lets marks go on, and waits until the one that waited has ended, if nothing else holds it up.
    async fn open(&self) {
        let open = match self.place.dialect {
            Dialect::Postgres => format!("SELECT pg_advisory_unlock({})", self.lock),
            _ => format!("DO RELEASE_LOCK('{}')", self.lock),
        };
        self.session.execute(&open).await;
    }
}

/// A proxy before the database, and the database behind it.
async fn behind_proxy(place: &Place) -> (Proxy, Database) {
    let (before, after) = place.url.split_once('@').unwrap();
    let (target, path) = after.split_once('/').unwrap();
    let proxy = Proxy::start(target.parse::<SocketAddr>().unwrap()).await;
    let url = format!("{before}@{}/{path}", proxy.address());
    (proxy, Database::connect(&url, 4).await.unwrap())
}

/// A member whose effects bear its name.
async fn member(crew: &Crew, by: SocketAddr, id: &'static str, database: &Database) -> Member {
    let handler =
        move |task: Task<NoColumns>, mut tx: AnyTx| async move { effect(&mut tx, &task, id).await };
    let set_up = |builder: Builder| {
        builder
            .concurrency(2)
            .longest_idle(Duration::from_millis(100))
    };
    let client = crew.client_by(by, id).await;
    in_transactions(client, database, table(), set_up, handler).await
}

/// Time for what is under way to arrive where it is held, or nowhere: no more than this is left to chance, and
/// a test that lost it would not fail.
const ARRIVES: Duration = Duration::from_millis(300);

/// An owner stands still for longer than its lease after its mark: before it asks whether the lease has ended
/// (`held` is what comes to it), or after it has asked, before its commit (`held` is what it sends). What both counted.
async fn stale_owner(place: &Place, held: Direction) -> (Metrics, Metrics) {
    create(place).await;
    place.add_tasks([1]).await;
    let gate = Gate::shut(place).await;
    let crew = Crew::new().await;
    crew.exclusive().await;
    let server = Proxy::start(crew.address()).await;
    let (network, database) = behind_proxy(place).await;
    let stale = member(&crew, server.address(), "stale", &database).await;
    gate.reached().await;

    network.set(held, Flow::Stall);
    gate.open().await;
    env::sleep(ARRIVES).await;
    // From here on it is as good as stopped: nothing reaches it, nothing of it arrives.
    server.set(Direction::ToServer, Flow::Stall);
    server.set(Direction::ToClient, Flow::Stall);
    let next = member(&crew, crew.address(), "next", &place.database).await;
    next.until("it meets the lock", |metrics| metrics.locked >= 1)
        .await;
    assert_eq!(effects(place).await, (0, 0));
    place.add_tasks(2..20).await;
    let added = env::now();
    next.until("all others are done", |metrics| metrics.done == 18)
        .await;
    let waited = added.elapsed();
    assert!(
        waited < Duration::from_secs(5),
        "it waited behind the lock: {waited:?}"
    );
    assert_eq!(place.with_status(0).await, 1);

    network.set(held, Flow::Pass);
    let deadline = env::now() + PATIENCE;
    while place.with_status(1).await < 19 {
        assert!(env::now() < deadline, "the task is left");
        env::sleep(Duration::from_millis(5)).await;
    }
    server.set(Direction::ToServer, Flow::Pass);
    server.set(Direction::ToClient, Flow::Pass);
    assert_eq!(effects(place).await, (19, 19));
    (stale.close().await, next.close().await)
}

async fn before_the_commit(place: Place) {
    let (stale, next) = stale_owner(&place, Direction::ToServer).await;
    // Nobody could take the row meanwhile, so that this is right, and done once.
    assert_eq!((stale.done, next.done), (1, 18), "{stale:?} {next:?}");
    place.remove().await;
}

async fn before_the_lease_is_asked(place: Place) {
    let (stale, next) = stale_owner(&place, Direction::ToClient).await;
    assert_eq!((stale.done, stale.interrupted), (0, 1), "{stale:?}");
    assert_eq!(
        (stale.failed, stale.retried, next.done),
        (0, 0, 19),
        "{next:?}"
    );
    let attempts = "SELECT COUNT(*) FROM task_info WHERE attempts IS NOT NULL";
    assert_eq!(place.number(attempts).await, 0);
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_behind_the_locks_of_an_owner_that_stands_still_and_its_task_is_done_once() {
    tokio::join!(
        before_the_commit(Place::postgres().await),
        before_the_commit(Place::mariadb().await),
        before_the_lease_is_asked(Place::postgres().await),
        before_the_lease_is_asked(Place::mariadb().await),
    );
}

/// The connection is lost in the commit, before or after the database has heard of it.
async fn unanswered(place: Place, heard: bool) {
    create(&place).await;
    place.add_tasks([1]).await;
    let gate = Gate::shut(&place).await;
    let crew = Crew::new().await;
    let (network, database) = behind_proxy(&place).await;
    let only = member(&crew, crew.address(), "only", &database).await;
    gate.reached().await;
    network.set(Direction::ToServer, Flow::Stall);
    gate.open().await;
    env::sleep(ARRIVES).await;
    let held = network.links();
    if heard {
        network.set(Direction::ToClient, Flow::Stall);
        network.set(Direction::ToServer, Flow::Pass);
        let deadline = env::now() + PATIENCE;
        while place.with_status(1).await == 0 {
            assert!(env::now() < deadline, "the commit does not arrive");
            env::sleep(Duration::from_millis(5)).await;
        }
    }
    for link in held {
        link.reset();
    }
    network.set(Direction::ToClient, Flow::Pass);
    network.set(Direction::ToServer, Flow::Pass);
    only.until("it is done", |metrics| metrics.done == 1).await;
    let metrics = only.close().await;
    assert_eq!(metrics.unanswered_commits, 1, "{metrics:?}");
    let again = u64::from(!heard);
    assert_eq!(
        (metrics.rolled_back, metrics.started),
        (again, 1 + again),
        "{metrics:?}"
    );
    assert_eq!(
        (metrics.failed, metrics.retried, metrics.lost_marks),
        (0, 0, 0),
        "{metrics:?}"
    );
    assert_eq!(effects(&place).await, (1, 1));
    place.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_became_of_a_commit_without_an_answer_is_read_and_no_effect_is_doubled() {
    tokio::join!(
        unanswered(Place::postgres().await, true),
        unanswered(Place::postgres().await, false),
        unanswered(Place::mariadb().await, true),
        unanswered(Place::mariadb().await, false),
    );
}
