//! The simulated world (`--cfg sim`): what a simulation's driver needs besides `turmoil`.
//!
//! `turmoil` carries the network and moves time; this module gives each host a clock with a rate error,
//! randomness of its own, and the faults that `turmoil` does not have.
//!
//! ```text
//! let world = World::new(seed);                            // one for each simulation
//! // The capacity bounds what one tick may bring: turmoil panics at one more new connection.
//! let mut sim = turmoil::Builder::new().rng_seed(seed).tcp_capacity(1024).build();
//! let sky1 = world.host("sky-1");                          // outlives crashes: its clock goes on
//! sim.host("sky-1", { let host = sky1.clone(); move || host.run(server()) });
//! while !sim.step()? {
//!     // between two steps: sky1.pause(), sky1.resume(), sim::kill(&mut sim, &sky1), sim.bounce("sky-1"),
//!     // sim.hold(..) and sim.release(..) for a network that comes back, sim.partition(..) for one that
//!     // loses what is sent (turmoil sends nothing again: such connections are stuck for ever)
//! }
//! ```
//!
//! What runs on a host finds it by the runtime that `turmoil` made for it, also in tasks that a library
//! spawned by itself. Such foreign tasks go on during a pause, but their sockets and sleeps of this
//! crate do not.

mod socket;
pub(super) mod world;

use super::Instant;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::runtime::{Handle, Id};

/// The rate error that [`World::host`] stays within, in millionths: the protocol's ρ.
pub const RATE_BOUND_PPM: i32 = 1_000;

/// What the hosts of one simulation share.
#[derive(Debug)]
pub struct World {
    seed: u64,
    /// Ends of connections that were dropped with a reset and whose peer has not read that far yet.
    resets: Mutex<BTreeSet<(SocketAddr, SocketAddr)>>,
}

impl World {
    /// A world in which everything follows from `seed`.
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            seed,
            resets: Mutex::default(),
        })
    }

    /// A host whose clock has a rate error within [`RATE_BOUND_PPM`], drawn from the seed.
    pub fn host(self: &Arc<Self>, name: &str) -> Arc<Host> {
        let bound = i64::from(RATE_BOUND_PPM);
        let drawn = self.rng(name, 1).next_u64() % (2 * bound.unsigned_abs() + 1);
        let drift = i64::try_from(drawn).unwrap_or(0) - bound;
        self.host_with_drift(name, i32::try_from(drift).unwrap_or(0))
    }

    /// A host whose clock runs too fast by `ppm` millionths, or too slowly where it is negative; at most by half.
    pub fn host_with_drift(self: &Arc<Self>, name: &str, ppm: i32) -> Arc<Host> {
        let mut rng = self.rng(name, 0);
        Arc::new(Host {
            name: name.to_owned(),
            world: Arc::clone(self),
            drift_ppm: i64::from(ppm.clamp(-500_000, 500_000)),
            // Between one second and eleven days after an origin: no clock compares with another's.
            origin: 1_000_000_000 + rng.next_u64() % 1_000_000_000_000_000,
            jumped: AtomicU64::new(0),
            latest: AtomicU64::new(0),
            rng: Mutex::new(rng),
            process: Mutex::default(),
        })
    }

    /// Randomness that depends on the seed, the host's name and the purpose, not on the order of calls.
    fn rng(&self, name: &str, purpose: u64) -> SmallRng {
        let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let name = name.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, fnv);
        SmallRng::seed_from_u64(self.seed.rotate_left(32) ^ name ^ purpose)
    }
}

/// One machine with one process on it: its clock, its randomness, whether it is stopped.
///
/// It belongs to the driver and outlives the process's crashes.
#[derive(Debug)]
pub struct Host {
    name: String,
    world: Arc<World>,
    drift_ppm: i64,
    origin: u64,
    jumped: AtomicU64,
    latest: AtomicU64,
    rng: Mutex<SmallRng>,
    process: Mutex<Process>,
}

#[derive(Debug, Default)]
struct Process {
    stopped: bool,
    dying: bool,
    suspends: u64,
    tickets: u64,
    /// Tasks that wanted to run while the process was stopped, in a fixed order.
    waiting: BTreeMap<u64, Waker>,
    /// Counts [`Host::reset_connections`]: sockets that were made before the last one are dead.
    resets: u64,
    /// Who waits for bytes, to hear of a reset.
    readers: BTreeMap<u64, Waker>,
}

/// Where a task or a socket waits while its process is stopped.
#[derive(Debug, Clone, Copy)]
struct Ticket(u64);

impl Host {
    /// The name that `turmoil` knows it by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rate error of its clock, in millionths.
    pub fn drift_ppm(&self) -> i64 {
        self.drift_ppm
    }

    /// Runs `software` as this host's process: to be called on the host's own `turmoil` runtime, that
    /// is, in the closure given to `turmoil::Sim::host` or in the future given to `client`.
    pub fn run<F: Future>(
        self: &Arc<Self>,
        software: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let host = Arc::clone(self);
        PRESENT.scope(Arc::clone(self), async move {
            register(&host);
            host.gate(software).await
        })
    }

    /// Stops the process, as SIGSTOP does: none of its code runs until [`resume`](Self::resume). Time goes on, what the
    /// network brings waits, connections stay open.
    pub fn pause(&self) {
        lock(&self.process).stopped = true;
    }

    /// Suspends the machine: as [`pause`](Self::pause), and its timers stand still, so that sleeps end late.
    pub fn suspend(&self) {
        let mut process = lock(&self.process);
        process.stopped = true;
        process.suspends += 1;
    }

    /// Ends a pause or a suspend.
    pub fn resume(&self) {
        let waiting = {
            let mut process = lock(&self.process);
            process.stopped = false;
            std::mem::take(&mut process.waiting)
        };
        waiting.into_values().for_each(Waker::wake);
    }

    /// All connections that the process has at present break with a reset, as when a middlebox forgets them. The
    /// other ends hear of it when the process drops its sockets.
    pub fn reset_connections(&self) {
        let readers = {
            let mut process = lock(&self.process);
            process.resets += 1;
            std::mem::take(&mut process.readers)
        };
        readers.into_values().for_each(Waker::wake);
    }

    /// Whether the process is paused or suspended.
    pub fn is_stopped(&self) -> bool {
        lock(&self.process).stopped
    }

    /// Sets the clock forward by `step` at once, and no timer with it. No rate error within the
    /// protocol's bound does that: what must hold under such a clock is for the test to say.
    pub fn jump(&self, step: Duration) {
        let nanos = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX);
        self.jumped.fetch_add(nanos, Ordering::Relaxed);
    }

    /// What its clock shows when the simulation has run for `elapsed` (`turmoil::Sim::elapsed`).
    pub fn clock_at(&self, elapsed: Duration) -> Instant {
        let passed = elapsed.as_nanos() * self.rate() / 1_000_000;
        let passed = u64::try_from(passed).unwrap_or(u64::MAX);
        let jumped = self.jumped.load(Ordering::Relaxed);
        Instant::from_nanos(self.origin.saturating_add(passed).saturating_add(jumped))
    }

    /// What its clock shows now; never less than before.
    fn nanos(&self) -> u64 {
        match turmoil::sim_elapsed() {
            Some(elapsed) => {
                let reading = self.clock_at(elapsed).as_nanos();
                self.latest
                    .fetch_max(reading, Ordering::Relaxed)
                    .max(reading)
            }
            // The simulation itself is being torn down.
            None => self.latest.load(Ordering::Relaxed),
        }
    }

    /// Nanoseconds of this clock in a true millisecond.
    fn rate(&self) -> u128 {
        u128::from((1_000_000 + self.drift_ppm).unsigned_abs())
    }

    /// The true time in which this clock advances by `duration`.
    fn true_time(&self, duration: Duration) -> Duration {
        let nanos = duration
            .as_nanos()
            .saturating_mul(1_000_000)
            .div_ceil(self.rate());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn ticket(&self) -> Ticket {
        let mut process = lock(&self.process);
        process.tickets += 1;
        Ticket(process.tickets)
    }

    /// Ready unless the process is stopped; then the task is woken when it goes on.
    fn poll_running(&self, ticket: Ticket, cx: &Context<'_>) -> Poll<()> {
        let mut process = lock(&self.process);
        if process.stopped {
            process.waiting.insert(ticket.0, cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(())
    }

    /// Whether a socket that was made after `resets` resets is dead; else the task is woken when it dies.
    fn has_reset(&self, ticket: Ticket, resets: u64, cx: &Context<'_>) -> bool {
        let mut process = lock(&self.process);
        let dead = process.resets != resets;
        if !dead {
            process.readers.insert(ticket.0, cx.waker().clone());
        }
        dead
    }

    /// Waits while the process is stopped.
    async fn running(&self) {
        let ticket = self.ticket();
        poll_fn(|cx| self.poll_running(ticket, cx)).await;
    }

    /// Runs `future`, except while the process is stopped.
    async fn gate<F: Future>(self: Arc<Self>, future: F) -> F::Output {
        let ticket = self.ticket();
        let mut future = pin!(future);
        poll_fn(|cx| {
            ready!(self.poll_running(ticket, cx));
            future.as_mut().poll(cx)
        })
        .await
    }
}

/// Kills `host`'s process, as SIGKILL does: its connections end with a FIN (or, where bytes are unread, a reset),
/// whatever its code would have said. `turmoil::Sim::bounce` starts it again.
///
/// For a loss of power, `turmoil::Sim::partition` the host from all others first, so that they hear nothing.
pub fn kill(sim: &mut turmoil::Sim<'_>, host: &Host) {
    lock(&host.process).dying = true;
    sim.crash(host.name());
    *lock(&host.process) = Process::default();
}

/// The host that the calling code runs on.
///
/// # Panics
/// Outside of [`Host::run`].
#[expect(clippy::panic, reason = "a mistake in a simulation's driver")]
pub fn current() -> Arc<Host> {
    let present = || PRESENT.try_with(Arc::clone).ok();
    let of_runtime = || {
        let runtime = Handle::try_current().ok()?.id();
        HOSTS.with_borrow(|hosts| hosts.get(&runtime).and_then(Weak::upgrade))
    };
    match present().or_else(of_runtime) {
        Some(host) => host,
        None => panic!(
            "this code runs on no simulated host: the driver wraps a host's software in Host::run"
        ),
    }
}

tokio::task_local! {
    /// Set also while a host's software is dropped, when its runtime is gone already.
    static PRESENT: Arc<Host>;
}

thread_local! {
    static HOSTS: RefCell<HashMap<Id, Weak<Host>>> = RefCell::default();
}

fn register(host: &Arc<Host>) {
    HOSTS.with_borrow_mut(|hosts| {
        hosts.retain(|_, known| known.strong_count() > 0);
        hosts.insert(Handle::current().id(), Arc::downgrade(host));
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
