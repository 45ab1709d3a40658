//! The simulated counterparts of what `machine` takes from the real world.

use super::socket;
use super::{current, lock};
use crate::env::IoThreadError;
use rand::Rng;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use tokio::task::JoinHandle;

pub(in crate::env) use socket::{Listener, Socket, accept, connect, listen, reset_on_drop};

/// 2026-01-01: where each simulation's wall clock begins.
const WALL_CLOCK_MICROS: i64 = 1_767_225_600_000_000;

pub(in crate::env) fn nanos() -> u64 {
    current().nanos()
}

pub(in crate::env) fn unix_micros() -> i64 {
    let elapsed = turmoil::sim_elapsed().unwrap_or_default();
    WALL_CLOCK_MICROS.saturating_add(i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX))
}

#[expect(
    clippy::disallowed_methods,
    reason = "what env::sleep_until is made of"
)]
pub(in crate::env) async fn timer(duration: Duration) {
    let host = current();
    let wait = host.true_time(duration);
    let suspends = || lock(&host.process).suspends;
    loop {
        let before = suspends();
        tokio::time::sleep(wait).await;
        host.running().await;
        // The timer stood still in a suspend: what was left of it is waited for afterwards, at most all.
        if suspends() == before {
            return;
        }
    }
}

pub(in crate::env) fn fill(buffer: &mut [u8]) {
    lock(&current().rng).fill_bytes(buffer);
}

#[expect(clippy::disallowed_methods, reason = "what env::spawn is made of")]
pub(in crate::env) fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(current().gate(future))
}

/// There are no threads in a simulation: the work is done by a task of its own.
pub(in crate::env) fn blocking<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    spawn(async move { work() })
}

#[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
pub(in crate::env) fn io_spawn<F>(future: F) -> Result<JoinHandle<F::Output>, IoThreadError>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    Ok(spawn(future))
}

#[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
pub(in crate::env) fn spawn_apart<F>(_: &str, future: F) -> Result<(), IoThreadError>
where
    F: Future<Output = ()> + Send + 'static,
{
    spawn(future);
    Ok(())
}

/// A host has one runtime.
#[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
pub(in crate::env) fn move_here(_: &mut Socket) -> io::Result<()> {
    Ok(())
}

pub(in crate::env) async fn resolve(name: &str) -> io::Result<Vec<SocketAddr>> {
    current().running().await;
    let invalid = || {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} is not host:port"),
        )
    };
    let (host, port) = name.rsplit_once(':').ok_or_else(invalid)?;
    let port = port.parse().map_err(|_| invalid())?;
    Ok(vec![SocketAddr::new(turmoil::lookup(host), port)])
}

/// `turmoil` knows no other addresses to listen at than these.
pub(super) fn any_of_family(at: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match at.ip() {
        ip if ip.is_loopback() => ip,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    SocketAddr::new(ip, at.port())
}
