//! A client's process: the real client, and handlers that work on rows.

use skyschedule_client::Client;
use skyschedule_common::env::{self, rng};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::messages::Consistency;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;

use super::profile::Handlers;
use super::server;

/// The keys of the rows, negative ones included.
pub const KEYS: std::ops::RangeInclusive<i64> = -12..=12;

/// Most rows that one client works on at a time.
const MOST_ROWS: usize = 6;

/// The group.
pub const GROUP: &str = "orders";

/// Where a server is.
pub fn server_name(at: usize) -> String {
    format!("sky-{}", at + 1)
}

/// How a process is set up.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Its client id.
    pub client_id: String,
    /// Its weight.
    pub weight: u32,
    /// The servers of its configuration.
    pub servers: Vec<usize>,
    /// What it relies on; `None`: whatever the group promises.
    pub consistency: Option<Consistency>,
    /// How long it works on rows.
    pub handlers: Handlers,
    /// The longest drain.
    pub drain: Duration,
    /// How long it waits before it turns to a server without a quorum.
    pub degraded_after: Duration,
    /// Set when the trouble is over: no row takes long from then on.
    pub calm: Arc<AtomicBool>,
}

/// A row that was begun.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    /// Its key.
    pub key: i64,
    /// Its fencing token.
    pub epoch: Epoch,
    /// Of whom.
    pub membership: Option<Membership>,
}

/// One run of a client's process, as its driver sees it.
#[derive(Debug)]
pub struct Process {
    /// How it is set up.
    pub setup: Setup,
    client: Mutex<Option<Client>>,
    close: Notify,
    closing: AtomicBool,
    closed: AtomicBool,
    /// Rows that are worked on.
    running: Mutex<BTreeMap<u64, i64>>,
    begun: Mutex<Vec<Begun>>,
    count: AtomicU64,
}

impl Process {
    /// A process that has not run yet.
    pub fn new(setup: Setup) -> Arc<Self> {
        Arc::new(Self {
            setup,
            client: Mutex::default(),
            close: Notify::new(),
            closing: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            running: Mutex::default(),
            begun: Mutex::default(),
            count: AtomicU64::new(0),
        })
    }

    /// The client, once it runs.
    pub fn client(&self) -> Option<Client> {
        lock(&self.client).clone()
    }

    /// Asks it to leave in good order.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.close.notify_one();
    }

    /// Whether it was asked to leave.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Whether it has left, and its process can end.
    pub fn has_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Keys of the rows that its handlers work on.
    pub fn running(&self) -> Vec<i64> {
        lock(&self.running).values().copied().collect()
    }

    /// Rows begun since the last call.
    pub fn take_begun(&self) -> Vec<Begun> {
        std::mem::take(&mut *lock(&self.begun))
    }

    /// Rows begun in all.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The process is dead: what it had is forgotten.
    pub fn bury(&self) {
        lock(&self.client).take();
        lock(&self.running).clear();
    }
}

/// Runs the process.
///
/// # Errors
/// When the client cannot be set up.
pub async fn run(process: Arc<Process>) -> turmoil::Result {
    let setup = &process.setup;
    let mut builder = Client::builder()
        .servers(setup.servers.iter().map(|at| server::address(*at)))
        .group(GROUP)
        .credentials("moon", "walker")
        .client_id(&setup.client_id)
        .weight(setup.weight)
        .degraded_after(setup.degraded_after);
    if let Some(consistency) = setup.consistency {
        builder = builder.consistency(consistency);
    }
    let client = builder.connect_in_background()?;
    *lock(&process.client) = Some(client.clone());
    loop {
        let work = tokio::select! {
            biased;
            () = process.close.notified() => break,
            work = client.acquire() => match work {
                Ok(work) => work,
                // Its group was lost, and made again with another promise.
                Err(_) => break,
            },
        };
        let mut key = *KEYS.start() + i64::try_from(rng::below(25)).unwrap_or(0);
        for _ in KEYS {
            key = if key == *KEYS.end() {
                *KEYS.start()
            } else {
                key + 1
            };
            let busy = {
                let running = lock(&process.running);
                running.len() >= MOST_ROWS || running.values().any(|other| *other == key)
            };
            if !busy && let Some(row) = work.begin(key) {
                begin(&process, &client, key, row);
            }
        }
        let pause = rng::jitter(Duration::from_millis(40), 0.9);
        tokio::select! {
            biased;
            () = process.close.notified() => break,
            () = env::sleep(pause) => {}
        }
    }
    // Whether a server heard the goodbye shows there.
    let _ = client.close().await;
    process.closed.store(true, Ordering::Relaxed);
    std::future::pending().await
}

fn begin(process: &Arc<Process>, client: &Client, key: i64, row: skyschedule_client::Row) {
    let number = process.count.fetch_add(1, Ordering::Relaxed);
    lock(&process.running).insert(number, key);
    lock(&process.begun).push(Begun {
        key,
        epoch: row.epoch(),
        membership: client.inspect().membership,
    });
    let handlers = process.setup.handlers;
    let drain = u64::try_from(process.setup.drain.as_millis()).unwrap_or(1_000);
    let calm = process.setup.calm.load(Ordering::Relaxed);
    let takes = if rng::below(100) < handlers.slow_percent && !calm {
        drain / 2 + rng::below(drain * 3 / 2)
    } else {
        1 + rng::below(handlers.usual_ms)
    };
    let stubborn = rng::below(100) < handlers.stubborn_percent;
    let process = Arc::clone(process);
    env::spawn(async move {
        let revoked = row.revoked();
        tokio::select! {
            biased;
            () = revoked, if !stubborn => {}
            () = env::sleep(Duration::from_millis(takes)) => {}
        }
        lock(&process.running).remove(&number);
        drop(row);
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
