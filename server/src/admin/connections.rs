//! Connections of callers, within limits: a crowd or slow senders must not keep probes out.

use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use skyschedule_common::env;
use skyschedule_common::env::net::{Stream, TcpListener};
use tokio::sync::watch;

use super::impatient::Impatient;
use super::places::{Call, Full, Place, Places};
use super::stopped;

/// How long a caller may take to send the head of a request, or may be silent between two.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// Largest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;

/// Pause after a failed accept, which is usually a shortage of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// How long calls in progress may take to end when the server stops.
const LAST_CALLS: Duration = Duration::from_secs(1);

/// Failed accepts are told this often.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// Serves until `stop` turns true.
pub(super) async fn serve(socket: TcpListener, router: Router, mut stop: watch::Receiver<bool>) {
    let places = Places::default();
    let mut told = None;
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let entered = tokio::select! {
                    biased;
                    () = stopped(&mut stop) => break,
                    entered = enter(&places, peer.ip()) => entered,
                };
                // Without a place the connection is closed at once.
                if let Some(place) = entered {
                    env::spawn(connection(stream, router.clone(), stop.clone(), place));
                }
            }
            Err(error) => {
                let now = env::now();
                if told.is_none_or(|told| now.saturating_duration_since(told) >= TOLD_EVERY) {
                    tracing::warn!(%error, "cannot accept admin connections");
                    told = Some(now);
                }
                env::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    // Nothing is lost when this is not enough: callers see the end of their connection.
    let _ = env::timeout(LAST_CALLS, places.emptied()).await;
}

/// A place, as soon as there is one; `None`: all are being answered. Others wait in the system's queue meanwhile.
async fn enter(places: &Places, address: IpAddr) -> Option<Place> {
    loop {
        match places.enter(address, env::now()) {
            Ok(place) => return Some(place),
            Err(Full::For(wait)) => env::sleep(wait).await,
            Err(Full::Busy) => return None,
        }
    }
}

async fn connection(stream: Stream, router: Router, mut stop: watch::Receiver<bool>, place: Place) {
    let router = TowerToHyperService::new(router);
    let answer = service_fn(|request: hyper::Request<Incoming>| {
        let (call, answering) = (place.call(), router.call(request));
        async {
            let Ok(response) = answering.await;
            Ok::<_, std::convert::Infallible>(Response::map(response, |body| Answer {
                body,
                _call: call,
            }))
        }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Impatient::new(stream)), answer);
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = place.must_give_way() => return,
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

/// An answer, which is a call in progress until all of it is handed over.
struct Answer {
    body: Body,
    _call: Call,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
