//! The real world: the machine's clock and randomness, tokio's timers, tasks and sockets.

use super::task::IoThreadError;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinHandle;

pub(super) use tokio::net::{TcpListener as Listener, TcpStream as Socket};

/// The reading of a clock that counts suspend; elsewhere than on Linux the monotonic clock does.
pub(super) fn nanos() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let time = clock_gettime(ClockId::Boottime);
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one place that reads the wall clock, for display"
)]
pub(super) fn unix_micros() -> i64 {
    let time = std::time::SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

/// One wait of tokio's timer, which may end early or late by this crate's clock.
#[expect(
    clippy::disallowed_methods,
    reason = "what env::sleep_until is made of"
)]
pub(super) async fn timer(duration: Duration) {
    tokio::time::sleep(duration).await;
}

pub(super) fn fill(buffer: &mut [u8]) {
    rand::Rng::fill_bytes(&mut rand::rng(), buffer);
}

#[expect(clippy::disallowed_methods, reason = "what env::spawn is made of")]
pub(super) fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(future)
}

#[expect(clippy::disallowed_methods, reason = "what env::blocking is made of")]
pub(super) fn blocking<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    tokio::task::spawn_blocking(work)
}

static IO_THREAD: Mutex<Option<Handle>> = Mutex::new(None);

pub(super) fn io_spawn<F>(future: F) -> Result<JoinHandle<F::Output>, IoThreadError>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let mut started = IO_THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    let handle = match &*started {
        Some(handle) => handle,
        None => started.insert(start_io_thread()?),
    };
    Ok(handle.spawn(future))
}

/// How long what is left of a runtime of its own may take to end.
const LEFTOVERS: Duration = Duration::from_secs(1);

pub(super) fn spawn_apart<F>(name: &str, future: F) -> Result<(), IoThreadError>
where
    F: Future<Output = ()> + Send + 'static,
{
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(name)
        .enable_all()
        .build()?;
    thread::Builder::new().name(name.into()).spawn(move || {
        runtime.block_on(future);
        runtime.shutdown_timeout(LEFTOVERS);
    })?;
    Ok(())
}

fn start_io_thread() -> io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new()
        .name("skyschedule-io".into())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(handle)
}

#[expect(clippy::disallowed_methods, reason = "what env::net is made of")]
pub(super) async fn connect(to: SocketAddr) -> io::Result<Socket> {
    let socket = TcpStream::connect(to).await?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

#[expect(clippy::unused_async, reason = "the simulation's is")]
pub(super) async fn listen(at: SocketAddr, backlog: u32) -> io::Result<Listener> {
    let socket = if at.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    // Windows would let another process take the port over.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(at)?;
    socket.listen(backlog)
}

pub(super) async fn accept(listener: &TcpListener) -> io::Result<(Socket, SocketAddr)> {
    let (socket, from) = listener.accept().await?;
    // Refused on some systems where the peer is gone already; the first read will tell.
    let _ = socket.set_nodelay(true);
    Ok((socket, from))
}

pub(super) async fn resolve(name: &str) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host(name).await?.collect())
}

/// Registers `socket` with the present runtime.
#[cfg(unix)]
pub(super) fn move_here(socket: &mut Socket) -> io::Result<()> {
    use std::os::fd::AsFd as _;
    let descriptor = socket.as_fd().try_clone_to_owned()?;
    *socket = TcpStream::from_std(descriptor.into())?;
    Ok(())
}

/// Elsewhere it stays where it is, which costs no more than some delay.
#[cfg(not(unix))]
pub(super) fn move_here(_: &mut Socket) -> io::Result<()> {
    Ok(())
}

/// Makes the drop of `socket`, which follows at once, send a reset instead of a FIN.
pub(super) fn reset_on_drop(socket: &Socket) {
    // Fails only where the connection has ended already.
    let _ = socket.set_zero_linger();
}
