//! Groups of consumers in the test's own process, with a server of their own.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use skyschedule_client::sql::{
    self, AnyConsumer, AnyRow, AnyTx, Builder, Database, Handler, Metrics, Stopper, Table, Task,
    TransactionHandler,
};
use skyschedule_client::{Client, Consistency, GroupName, Share};
use skyschedule_common::env::{self, Instant, JoinHandle};
use skyschedule_common::protocol::messages::{Millis, Numbering};
use skyschedule_server::Server;
use skyschedule_server::config::Config;
use skyschedule_server::state::Settings;
use tempfile::TempDir;
use tokio::sync::watch;

/// How long to wait for what takes milliseconds, on a machine that is busy with other tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const GROUP: &str = "1000";

/// A server and the clients that joined it.
pub(crate) struct Crew {
    server: Server,
    _folder: TempDir,
    pub(crate) seen: Seen,
}

/// Who executed what, and when.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Vec<Execution>>>);

#[derive(Debug, Clone)]
pub(crate) struct Execution {
    pub(crate) key: String,
    pub(crate) client: String,
    pub(crate) at: Instant,
    pub(crate) attempt: u32,
}

/// A consumer that runs.
pub(crate) struct Member {
    pub(crate) client: Client,
    pub(crate) metrics: watch::Receiver<Metrics>,
    pub(crate) stopper: Stopper,
    running: JoinHandle<Metrics>,
}

impl Crew {
    pub(crate) async fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let server = Server::start(Config::embedded(folder.path()))
            .await
            .unwrap();
        Self {
            server,
            _folder: folder,
            seen: Seen::default(),
        }
    }

    /// Makes the group one of slots.
    pub(crate) async fn slots(&self, count: u32) {
        let settings = Settings {
            numbering: Numbering::Slots(count),
            ..Settings::default()
        };
        let group = GroupName::new(GROUP).unwrap();
        let configured = self.server.handle().configure(group, settings).await;
        configured.unwrap();
    }

    pub(crate) async fn client(&self, id: &str) -> Client {
        self.builder(id).connect().await.unwrap()
    }

    fn builder(&self, id: &str) -> skyschedule_client::Builder {
        Client::builder()
            .servers([self.server.local_addr().to_string()])
            .group(GROUP)
            .client_id(id)
    }

    /// A member that notes what it executes.
    pub(crate) async fn join(&self, id: &str, database: &Database, table: Table) -> Member {
        self.join_as(id, database, table, |builder| builder).await
    }

    /// The same, set up in some way.
    pub(crate) async fn join_as(
        &self,
        id: &str,
        database: &Database,
        table: Table,
        set_up: impl FnOnce(Builder) -> Builder,
    ) -> Member {
        let seen = self.seen.clone();
        let client = id.to_owned();
        // No columns are needed, but each table has an id.
        self.join_with::<NoColumns, _>(id, database, table, set_up, move |task: Task<NoColumns>| {
            seen.note(&client, &task);
            async { Ok::<_, String>(()) }
        })
        .await
    }

    /// A member of an exclusive group, which this makes it.
    pub(crate) async fn join_exclusive<R: AnyRow, H: Handler<R>>(
        &self,
        id: &str,
        database: &Database,
        table: Table,
        handler: H,
    ) -> Member {
        let builder = self.builder(id).consistency(Consistency::Exclusive);
        let client = builder.connect().await.unwrap();
        run(client, database, table, |builder| builder, handler).await
    }

    /// Makes the group an exclusive one with leases of two seconds, the shortest there are.
    pub(crate) async fn exclusive(&self) {
        let settings = Settings {
            consistency: Consistency::Exclusive,
            lease: Some(Millis(2_000)),
            drain_timeout: Millis(1_000),
            ..Settings::default()
        };
        let group = GroupName::new(GROUP).unwrap();
        let configured = self.server.handle().configure(group, settings).await;
        configured.unwrap();
    }

    /// Where the server is.
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// A client that reaches the server by another address.
    pub(crate) async fn client_by(&self, address: SocketAddr, id: &str) -> Client {
        let builder = Client::builder().servers([address.to_string()]);
        let client = builder.group(GROUP).client_id(id).connect().await;
        client.unwrap()
    }

    /// Stops the server.
    pub(crate) async fn stop(self) {
        self.server.shutdown().await.unwrap();
    }

    /// A member that does this with each task.
    pub(crate) async fn join_with<R: AnyRow, H: Handler<R>>(
        &self,
        id: &str,
        database: &Database,
        table: Table,
        set_up: impl FnOnce(Builder) -> Builder,
        handler: H,
    ) -> Member {
        run(self.client(id).await, database, table, set_up, handler).await
    }
}

/// A member whose tasks are each a part of a transaction.
pub(crate) async fn in_transactions<H: TransactionHandler<NoColumns, AnyTx>>(
    client: Client,
    database: &Database,
    table: Table,
    set_up: impl FnOnce(Builder) -> Builder,
    handler: H,
) -> Member {
    let work =
        |consumer: AnyConsumer| async move { consumer.run_in_transaction(handler).await.unwrap() };
    member(client, database, table, set_up, work).await
}

async fn run<R: AnyRow, H: Handler<R>>(
    client: Client,
    database: &Database,
    table: Table,
    set_up: impl FnOnce(Builder) -> Builder,
    handler: H,
) -> Member {
    let work = |consumer: AnyConsumer| consumer.run(handler);
    member(client, database, table, set_up, work).await
}

async fn member<W>(
    client: Client,
    database: &Database,
    table: Table,
    set_up: impl FnOnce(Builder) -> Builder,
    work: impl FnOnce(AnyConsumer) -> W,
) -> Member
where
    W: Future<Output = Metrics> + Send + 'static,
{
    let consumer = set_up(sql::consumer(&client, table))
        .on_any(database.clone())
        .await
        .unwrap();
    Member {
        metrics: consumer.metrics(),
        stopper: consumer.stopper(),
        client,
        running: env::spawn(work(consumer)),
    }
}

impl Member {
    /// Closes the client; what the consumer counted.
    pub(crate) async fn close(self) -> Metrics {
        env::timeout(PATIENCE, self.client.close())
            .await
            .unwrap()
            .unwrap();
        self.running.await.unwrap()
    }

    /// Stops the consumer and keeps the client.
    pub(crate) async fn stopped(self) -> (Client, Metrics) {
        self.stopper.stop();
        let metrics = env::timeout(PATIENCE, self.running).await.unwrap().unwrap();
        (self.client, metrics)
    }

    /// Waits until the counters are such.
    pub(crate) async fn until(&self, what: &str, holds: impl FnMut(&Metrics) -> bool) {
        let mut metrics = self.metrics.clone();
        let shown = env::timeout(PATIENCE, metrics.wait_for(holds)).await;
        if !matches!(shown, Ok(Ok(_))) {
            panic!(
                "it does not come to this: {what}; {:?}",
                self.metrics.borrow()
            );
        }
    }
}

/// Waits until all members know that the numbering has settled.
pub(crate) async fn settled(members: &[&Member]) {
    let count = u64::try_from(members.len()).unwrap();
    for member in members {
        let mut shares = member.client.shares();
        // Its part is one of as many as there are members, in numbers or in slots.
        let is_part = |share: &Share| {
            let total = u64::from(share.total());
            (total == count || total >= 16) && share.numbers().len() * count < total + count
        };
        let settled =
            shares.wait_for(|status| status.settled && status.rows.single().is_some_and(is_part));
        env::timeout(PATIENCE, settled).await.unwrap().unwrap();
    }
}

impl Seen {
    pub(crate) fn note<R>(&self, client: &str, task: &Task<R>) {
        self.0.lock().unwrap().push(Execution {
            key: task.key().to_string(),
            client: client.to_owned(),
            at: env::now(),
            attempt: task.attempt(),
        });
    }

    pub(crate) fn all(&self) -> Vec<Execution> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Each key with its executions.
    pub(crate) fn by_key(&self) -> BTreeMap<String, Vec<Execution>> {
        let mut keys: BTreeMap<String, Vec<Execution>> = BTreeMap::new();
        for execution in self.all() {
            keys.entry(execution.key.clone())
                .or_default()
                .push(execution);
        }
        keys
    }

    /// Waits until so many executions were seen.
    pub(crate) async fn reach(&self, executions: usize) {
        let deadline = env::now() + PATIENCE;
        while self.len() < executions {
            assert!(
                env::now() < deadline,
                "{} of {executions} executions",
                self.len()
            );
            env::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A row of which nothing is read.
#[derive(Debug)]
pub(crate) struct NoColumns;

impl<'r, R: sqlx::Row> sqlx::FromRow<'r, R> for NoColumns {
    fn from_row(_: &'r R) -> Result<Self, sqlx::Error> {
        Ok(Self)
    }
}
