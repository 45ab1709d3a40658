//! `turmoil`'s sockets, with what they lack: stopped processes, resets by the closing side, a backlog.

use super::world::any_of_family;
use super::{Host, Ticket, current, lock};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Mutex, mpsc};
use tokio::task::AbortHandle;
use turmoil::net::{TcpListener, TcpStream};

#[derive(Debug)]
pub(in crate::env) struct Socket {
    stream: TcpStream,
    host: Arc<Host>,
    ticket: Ticket,
    /// Resets of the host's connections before this one was made.
    resets: u64,
    was_reset: bool,
}

impl Socket {
    fn new(stream: TcpStream, host: Arc<Host>) -> Self {
        let ticket = host.ticket();
        let resets = lock(&host.process).resets;
        Self {
            stream,
            host,
            ticket,
            resets,
            was_reset: false,
        }
    }

    pub(in crate::env) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    pub(in crate::env) fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// Whether the peer ended this connection with a reset; asked once, when its end arrived.
    fn take_reset(&self) -> bool {
        let (Ok(local), Ok(peer)) = (self.local_addr(), self.peer_addr()) else {
            return false;
        };
        lock(&self.host.world.resets).remove(&(peer, local))
    }
}

/// `turmoil` ends a dropped stream with a FIN only, so the peer finds a mark at its end that says reset.
/// A killed process leaves no mark: its kernel sends the FIN.
pub(in crate::env) fn reset_on_drop(socket: &Socket) {
    if lock(&socket.host.process).dying {
        return;
    }
    if let (Ok(local), Ok(peer)) = (socket.local_addr(), socket.peer_addr()) {
        lock(&socket.host.world.resets).insert((local, peer));
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        lock(&self.host.process).readers.remove(&self.ticket.0);
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.host.poll_running(self.ticket, cx));
        let (room, before) = (buf.remaining(), buf.filled().len());
        self.was_reset |= self.host.has_reset(self.ticket, self.resets, cx);
        if !self.was_reset {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
            let at_end = room > 0 && buf.filled().len() == before;
            self.was_reset = at_end && self.take_reset();
        }
        Poll::Ready(if self.was_reset {
            Err(io::ErrorKind::ConnectionReset.into())
        } else {
            Ok(())
        })
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.host.poll_running(self.ticket, cx));
        if self.was_reset {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.host.poll_running(self.ticket, cx));
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.host.poll_running(self.ticket, cx));
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

pub(in crate::env) async fn connect(to: SocketAddr) -> io::Result<Socket> {
    let host = current();
    host.running().await;
    let stream = TcpStream::connect(to).await;
    host.running().await;
    let socket = Socket::new(stream?, host);
    // Marks of an earlier connection with the same ends, whose end never arrived.
    let (local, peer) = (socket.local_addr()?, socket.peer_addr()?);
    let mut resets = lock(&socket.host.world.resets);
    resets.remove(&(local, peer));
    resets.remove(&(peer, local));
    drop(resets);
    Ok(socket)
}

/// Connections are completed by the kernel, so to speak: also while the process is stopped.
#[derive(Debug)]
pub(in crate::env) struct Listener {
    at: SocketAddr,
    host: Arc<Host>,
    accepted: Mutex<mpsc::Receiver<TcpStream>>,
    kernel: AbortHandle,
}

impl Listener {
    #[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
    pub(in crate::env) fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.at)
    }
}

/// The port is free again when the runtime has run its other tasks once.
impl Drop for Listener {
    fn drop(&mut self) {
        self.kernel.abort();
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the kernel is not stopped with the process"
)]
pub(in crate::env) async fn listen(at: SocketAddr, backlog: u32) -> io::Result<Listener> {
    let host = current();
    host.running().await;
    let listener = TcpListener::bind(any_of_family(at)).await?;
    let at = listener.local_addr()?;
    let room = usize::try_from(backlog.max(1))
        .unwrap_or(usize::MAX)
        .min(4096);
    let (queue, accepted) = mpsc::channel(room);
    let kernel = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // Beyond the backlog a connection ends at once.
            let _ = queue.try_send(stream);
        }
    });
    Ok(Listener {
        at,
        host,
        accepted: Mutex::new(accepted),
        kernel: kernel.abort_handle(),
    })
}

pub(in crate::env) async fn accept(listener: &Listener) -> io::Result<(Socket, SocketAddr)> {
    let stream = listener.accepted.lock().await.recv().await;
    listener.host.running().await;
    let stream = stream.ok_or(io::ErrorKind::ConnectionAborted)?;
    let from = stream.peer_addr()?;
    Ok((Socket::new(stream, Arc::clone(&listener.host)), from))
}
