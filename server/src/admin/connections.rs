//! Connections of callers, within limits: a crowd or slow senders must not keep probes out.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use skyschedule_common::env;
use skyschedule_common::env::net::{Stream, TcpListener};
use tokio::sync::watch;

use super::impatient::Impatient;
use super::stopped;

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 256;

/// Most connections at a time from one address.
const MAX_PER_ADDRESS: usize = 96;

/// How long a caller may take to send the head of a request, or may be silent between two.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// Largest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;

/// Pause after a failed accept, which is usually a shortage of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// How long calls in progress may take to end when the server stops.
const LAST_CALLS: Duration = Duration::from_secs(1);

/// Serves until `stop` turns true.
pub(super) async fn serve(socket: TcpListener, router: Router, mut stop: watch::Receiver<bool>) {
    let open = Arc::new(Open::default());
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                // Beyond the limits the connection is closed at once.
                if let Some(slot) = open.enter(peer.ip()) {
                    env::spawn(connection(stream, router.clone(), stop.clone(), slot));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept admin connections");
                env::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    // Nothing is lost when this is not enough: callers see the end of their connection.
    let _ = env::timeout(LAST_CALLS, open.emptied()).await;
}

async fn connection(stream: Stream, router: Router, mut stop: watch::Receiver<bool>, _slot: Slot) {
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(
            TokioIo::new(Impatient::new(stream)),
            TowerToHyperService::new(router),
        );
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = stopped(&mut stop) => {
            serving.as_mut().graceful_shutdown();
            match env::timeout(LAST_CALLS, serving).await {
                Ok(ended) => ended,
                Err(_) => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection ended");
    }
}

/// Connections that are open.
#[derive(Default)]
struct Open {
    by_address: Mutex<BTreeMap<IpAddr, usize>>,
    left: tokio::sync::Notify,
}

impl Open {
    fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Slot> {
        let mut open = self
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let total: usize = open.values().sum();
        let count = open.get(&address).copied().unwrap_or(0);
        if total >= MAX_CONNECTIONS || count >= MAX_PER_ADDRESS {
            return None;
        }
        open.insert(address, count + 1);
        let open = Arc::clone(self);
        Some(Slot { open, address })
    }

    fn leave(&self, address: IpAddr) {
        let mut open = self
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match open.get_mut(&address) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                open.remove(&address);
            }
        }
        self.left.notify_one();
    }

    async fn emptied(&self) {
        let empty = || {
            let open = self
                .by_address
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            open.is_empty()
        };
        while !empty() {
            self.left.notified().await;
        }
    }
}

/// Counts a connection while it lives.
struct Slot {
    open: Arc<Open>,
    address: IpAddr,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.open.leave(self.address);
    }
}
