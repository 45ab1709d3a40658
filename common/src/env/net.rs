//! TCP: one socket type for clients and servers, and what the end of a connection says.
//!
//! A FIN must mean something (rule F3 of the protocol): a client's stream ends by a reset, whatever
//! drops it, unless [`Stream::end_with_fin`] was called. Then a FIN without a goodbye can come only
//! from the kernel, after the process died.

use super::world;
use crate::fault::{Rule, broken};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A TCP connection. It is sent without delay (`TCP_NODELAY`).
///
/// How it ends when it is dropped depends on who opened it: one that was accepted ends with a FIN, one
/// that was connected with a reset, unless [`end_with_fin`](Self::end_with_fin) was called.
#[derive(Debug)]
pub struct Stream {
    socket: world::Socket,
    resets: bool,
    /// A write has failed: the system has told of a reset, and tells of it only once.
    failed: bool,
}

impl Stream {
    /// Connects to a server. It has no time limit of its own but the system's, which is minutes:
    /// use [`timeout`](super::timeout).
    ///
    /// # Errors
    /// The system's: refused, unreachable, no descriptor or port left.
    pub async fn connect(to: SocketAddr) -> io::Result<Self> {
        Ok(Self {
            socket: world::connect(to).await?,
            resets: true,
            failed: false,
        })
    }

    /// From here on this stream ends with a FIN. To be called by a client after its release, once its
    /// goodbye is written; what follows is `shutdown()`, then reading to the end, because the system
    /// answers a close with unread bytes by a reset.
    pub fn end_with_fin(&mut self) {
        self.resets = false;
    }

    /// From here on the present runtime watches this stream, in place of the one that opened or accepted
    /// it: a busy runtime does not delay what another one reads.
    ///
    /// # Errors
    /// The system's: no descriptor left.
    pub fn move_here(&mut self) -> io::Result<()> {
        world::move_here(&mut self.socket)
    }

    /// This end of the connection.
    ///
    /// # Errors
    /// The system's, where the connection has ended.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// The other end of the connection.
    ///
    /// # Errors
    /// The system's, where the connection has ended.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    fn written<T>(&mut self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.failed |= matches!(result, Poll::Ready(Err(_)));
        result
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        std::task::ready!(Pin::new(&mut self.socket).poll_read(cx, buf))?;
        // What looks like a FIN here may be the rest of a reset, and must prove nothing (rule F3).
        if self.failed && buf.filled().len() == before && buf.remaining() > 0 {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.written(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.written(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.socket).poll_flush(cx);
        self.written(result)
    }

    /// Sends a FIN, but not on a stream that has to end with a reset: there it does nothing.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.resets {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Not at creation: then a killed process would end with a reset, too, and prove nothing.
        if self.resets && !broken(Rule::F3) {
            world::reset_on_drop(&self.socket);
        }
    }
}

/// A socket that accepts connections.
#[derive(Debug)]
pub struct TcpListener(world::Listener);

impl TcpListener {
    /// Listens at `at`; port 0 lets the system choose one. At most `backlog` connections wait to be accepted.
    ///
    /// # Errors
    /// The system's: the address is in use, is not this machine's, or needs a privilege.
    pub async fn bind(at: SocketAddr, backlog: u32) -> io::Result<Self> {
        Ok(Self(world::listen(at, backlog).await?))
    }

    /// Waits for the next connection and tells where it comes from. An error concerns one connection
    /// or a shortage of the moment (descriptors): log it, wait a little, go on.
    ///
    /// # Errors
    /// The system's.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let (socket, from) = world::accept(&self.0).await?;
        Ok((
            Stream {
                socket,
                resets: false,
                failed: false,
            },
            from,
        ))
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// The addresses of `host:port`, asked for anew at each call.
///
/// # Errors
/// The name is unknown, the name service does not answer, or this is not `host:port`.
pub async fn resolve(host_and_port: &str) -> io::Result<Vec<SocketAddr>> {
    world::resolve(host_and_port).await
}

/// How the peer ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ending {
    /// The peer said so in order (FIN). On a direct connection of a client: goodbye, or its process died.
    Fin,
    /// Anything else: a reset, a time-out of the system. It proves nothing about the peer.
    Reset,
    /// Whoever carried the bytes of a peer ended it, in whichever way: the peer itself has only fallen silent.
    Silence,
}

impl Ending {
    /// What the error of a read says.
    pub fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Fin,
            _ => Self::Reset,
        }
    }
}

/// The end of the connection that the result of a read (with room in its buffer) tells, if it does.
pub fn ending(read: &io::Result<usize>) -> Option<Ending> {
    match read {
        Ok(0) => Some(Ending::Fin),
        Ok(_) => None,
        Err(error) => Some(Ending::of(error)),
    }
}

#[cfg(test)]
#[cfg(not(sim))]
mod tests;
