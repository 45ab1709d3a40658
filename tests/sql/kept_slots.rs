//! Slots that stay where they are when somebody joins are worked on without a pause, also while others are handed over.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::try_join_all;
use skyschedule_client::sql::{self, Database, Table, Task};
use skyschedule_client::{Client, GroupName};
use skyschedule_common::env::{self, Instant};
use skyschedule_common::protocol::messages::{Millis, Numbering};
use skyschedule_server::Server;
use skyschedule_server::config::Config;
use skyschedule_server::state::Settings;
use tempfile::TempDir;
use tokio::sync::Semaphore;

use crate::common::crew::PATIENCE;
use crate::common::place::Place;

const SLOTS: u32 = 1_024;
const MEMBERS: usize = 20;

/// Each slot has a new task so often.
const STEP: Duration = Duration::from_millis(500);

/// For so long the members are watched, before and during the handover.
const WATCHED: Duration = Duration::from_secs(3);

/// So much longer than before may the longest pause of a kept slot be: a busy machine. If kept slots waited for those
/// that move, it would be `WATCHED`.
const TOLERANCE: Duration = Duration::from_secs(1);

/// Who executed a row of which slot, and when.
#[derive(Clone, Default)]
struct Ledger {
    entries: Arc<Mutex<Vec<(u32, String, Instant)>>>,
    /// From now on the first task of each slot does not end before it may.
    hold: Arc<AtomicBool>,
    held: Arc<Mutex<HashSet<u32>>>,
    /// For each task that is held.
    gate: Arc<Mutex<Option<Arc<Semaphore>>>>,
}

impl Ledger {
    /// Notes an execution; what it has to wait for, if it is held.
    fn note(&self, client: &str, slot: u32) -> Option<Arc<Semaphore>> {
        let entry = (slot, client.to_owned(), env::now());
        self.entries.lock().unwrap().push(entry);
        let is_held = self.hold.load(Ordering::Relaxed) && self.held.lock().unwrap().insert(slot);
        let gate = self.gate.lock().unwrap();
        gate.clone().filter(|_| is_held)
    }

    /// The longest time that a slot of these waited for its next row, of such waits that ended in this window.
    fn longest_gap(&self, owners: &BTreeMap<u32, String>, from: Instant, to: Instant) -> Duration {
        let mut last: HashMap<u32, Instant> = HashMap::new();
        let mut longest = Duration::ZERO;
        for (slot, client, at) in self.entries.lock().unwrap().iter() {
            let Some(owner) = owners.get(slot) else {
                continue;
            };
            assert_eq!(owner, client, "slot {slot} is kept");
            let before = last.insert(*slot, *at);
            if (from..to).contains(at) {
                let waited = at.saturating_duration_since(before.unwrap_or(from));
                longest = longest.max(waited);
            }
        }
        // A slot that was not worked on at all has waited all along.
        for slot in owners.keys() {
            let idle_since = last.get(slot).copied().unwrap_or(from);
            longest = longest.max(to.saturating_duration_since(idle_since));
        }
        longest
    }
}

fn owners(clients: &[Client]) -> BTreeMap<u32, String> {
    let mut owners = BTreeMap::new();
    for client in clients {
        let status = client.shares().borrow().clone();
        let share = status.rows.single().unwrap().clone();
        for slot in share.numbers().iter() {
            let id = client.client_id().to_string();
            assert_eq!(owners.insert(slot, id), None, "slot {slot} has one owner");
        }
    }
    owners
}

/// Waits until each has its part of all slots.
async fn divided(clients: &[Client]) {
    let fair = u64::from(SLOTS) / u64::try_from(clients.len()).unwrap();
    let deadline = env::now() + PATIENCE;
    loop {
        let count = |client: &Client| {
            let status = client.shares().borrow().clone();
            status
                .rows
                .single()
                .map_or(0, |share| share.numbers().len())
        };
        let counts: Vec<u64> = clients.iter().map(count).collect();
        let fits = |count: &u64| (fair..=fair + 1).contains(count);
        if counts.iter().all(fits) && counts.iter().sum::<u64>() == u64::from(SLOTS) {
            return;
        }
        assert!(env::now() < deadline, "{counts:?} slots");
        env::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_stay_are_worked_on_without_a_pause_while_others_move() {
    let place = Place::postgres().await;
    place.create_tasks().await;
    place
        .execute(
            "CREATE INDEX task_slot ON task_info ((id & 1023), task_time, id) WHERE status = 0",
        )
        .await;
    let folder = TempDir::new().unwrap();
    let server = Server::start(Config::embedded(folder.path()))
        .await
        .unwrap();
    let group = GroupName::new("1000").unwrap();
    let settings = Settings {
        numbering: Numbering::Slots(SLOTS),
        // The handover below must not be overtaken, on a busy machine either.
        lease: Some(Millis(12_000)),
        drain_timeout: Millis(10_000),
        ..Settings::default()
    };
    server.handle().configure(group, settings).await.unwrap();
    let database = Database::connect(&place.url, 40).await.unwrap();
    let ledger = Ledger::default();
    let gate = Arc::new(Semaphore::new(0));
    *ledger.gate.lock().unwrap() = Some(Arc::clone(&gate));

    let join = async |id: String| {
        let builder = Client::builder()
            .servers([server.local_addr().to_string()])
            .group("1000")
            .client_id(&*id);
        let client = builder.connect().await.unwrap();
        let consumer = sql::consumer(
            &client,
            Table::new("task_info").columns(["id"]).slot_index(SLOTS),
        )
        .batch(200)
        .concurrency(200)
        .longest_idle(Duration::from_millis(50))
        .on_any(database.clone())
        .await
        .unwrap();
        let (ledger, metrics) = (ledger.clone(), consumer.metrics());
        let running = env::spawn(consumer.run(move |task: Task<(i64,)>| {
            let slot = u32::try_from(task.row().0 & i64::from(SLOTS - 1)).unwrap();
            let gate = ledger.note(&id, slot);
            async move {
                if let Some(gate) = gate {
                    gate.acquire()
                        .await
                        .map_err(|error| error.to_string())?
                        .forget();
                }
                Ok::<_, String>(())
            }
        }));
        (client, running, metrics)
    };
    let (mut clients, mut consumers) = (Vec::new(), Vec::new());
    for member in 0..MEMBERS {
        let (client, running, _) = join(format!("member-{member}")).await;
        clients.push(client);
        consumers.push(running);
    }
    divided(&clients).await;

    // A task of each slot comes due at each step, spread over it.
    place
        .execute(&format!(
            "INSERT INTO task_info (id, task_time) SELECT step * {SLOTS} + slot, \
             now() + (step + slot / {SLOTS}.0) * interval '{} milliseconds' \
             FROM generate_series(0, {SLOTS} - 1) AS slot, generate_series(0, 59) AS step",
            STEP.as_millis()
        ))
        .await;
    ledger.hold.store(true, Ordering::Relaxed);
    let deadline = env::now() + PATIENCE;
    while ledger.held.lock().unwrap().len() < SLOTS as usize {
        assert!(env::now() < deadline, "not every slot has a task");
        env::sleep(Duration::from_millis(5)).await;
    }

    let quiet = env::now();
    env::sleep(WATCHED).await;
    let before = owners(&clients);
    let joined = env::now();
    let (newcomer, running, metrics) = join("newcomer".to_owned()).await;
    consumers.push(running);
    let left = (joined + WATCHED).saturating_duration_since(env::now());
    env::sleep(left).await;
    let watched = env::now();
    // Each slot that moves has a task that is held: the handover is under way all the time.
    let share = newcomer.shares().borrow().rows.clone();
    assert!(share.is_empty() && metrics.borrow().started == 0);
    gate.add_permits(SLOTS as usize);
    clients.push(newcomer);
    divided(&clients).await;

    let after = owners(&clients);
    let kept: BTreeMap<u32, String> = before
        .into_iter()
        .filter(|(slot, owner)| after.get(slot) == Some(owner))
        .collect();
    let moved = SLOTS as usize - kept.len();
    assert!(
        (48..=49).contains(&moved),
        "{moved} slots moved: a 21st of all"
    );
    let without = ledger.longest_gap(&kept, quiet, joined);
    let with = ledger.longest_gap(&kept, joined, watched);
    println!("longest pause of a kept slot: {without:?} without a join, {with:?} with one");
    assert!(
        with <= without + TOLERANCE,
        "kept slots paused for {with:?}, and without a join for {without:?}"
    );

    let closed = try_join_all(clients.iter().map(Client::close)).await;
    closed.unwrap();
    let mut done = 0;
    for consumer in consumers {
        let counted = consumer.await.unwrap();
        assert_eq!(counted.lost_marks, 0, "none twice: {counted:?}");
        done += counted.done;
    }
    assert_eq!(
        done,
        u64::try_from(ledger.entries.lock().unwrap().len()).unwrap()
    );
    server.shutdown().await.unwrap();
    place.remove().await;
}
