//! The admin interface: probes, metrics, JSON, events and a page, over HTTP.
//!
//! [`Admin::bind`] takes the port, [`Admin::run`] serves until it is told to stop. Who may call what is
//! decided in one place, `access`; every call passes it.

mod access;
mod api;
mod change;
mod cluster;
mod connections;
mod error;
mod events;
mod forward;
mod impatient;
mod page;
mod places;
mod probes;
mod shapes;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::Method;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use skyschedule_common::env;
use skyschedule_common::env::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

use crate::config::AdminConfig;
use crate::coordinator::Handle;
use crate::metrics::Metrics;
use access::Access;
use error::ApiError;

/// Largest body of a request, in bytes.
const MAX_BODY: usize = 64 << 10;

/// How long a call may take, events apart.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// Most callers that watch events at a time.
const MAX_WATCHERS: usize = 64;

/// Connections that the system keeps ready to be accepted: in a crowd, a probe must not have to knock twice.
const BACKLOG: u32 = 4_096;

/// What all calls share.
struct Shared {
    handle: Handle,
    metrics: Metrics,
    access: Access,
    tasks: Vec<AbortHandle>,
    watchers: Arc<Semaphore>,
    stop: watch::Receiver<bool>,
    openapi: String,
}

/// The admin interface of one server, at its port.
pub struct Admin {
    socket: TcpListener,
    address: SocketAddr,
    access: Access,
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Admin {
    /// Takes the port.
    ///
    /// # Errors
    /// The system's: the address is in use, is not this machine's, or needs a privilege.
    pub async fn bind(config: &AdminConfig) -> io::Result<Self> {
        let socket = TcpListener::bind(config.listen, BACKLOG).await?;
        let address = socket.local_addr()?;
        let access = Access::new(address, config.token.clone());
        if access.is_closed() {
            tracing::warn!(
                %address,
                "only probes and metrics are answered: other machines reach this address, and no admin_token_file is set"
            );
        }
        tracing::info!(%address, "listens for admin calls");
        Ok(Self {
            socket,
            address,
            access,
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` turns true. The server is healthy while none of `tasks` has ended.
    pub async fn run(
        self,
        handle: Handle,
        metrics: Metrics,
        tasks: Vec<AbortHandle>,
        stop: watch::Receiver<bool>,
    ) {
        let router = router(self.access, handle, metrics, tasks, stop.clone());
        connections::serve(self.socket, router, stop).await;
    }
}

fn router(
    access: Access,
    handle: Handle,
    metrics: Metrics,
    tasks: Vec<AbortHandle>,
    stop: watch::Receiver<bool>,
) -> Router {
    let shared = Arc::new(Shared {
        handle,
        metrics,
        access,
        tasks,
        watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
        stop,
        // Fails only for maps with keys that are no text.
        openapi: api::routes().to_openapi().to_json().unwrap_or_default(),
    });
    // What another replica passes on was checked there, and is passed on no further.
    if let Some(peers) = shared.handle.consensus().peers() {
        forward::answer_others(peers, calls().with_state(Arc::clone(&shared)));
    }
    calls()
        .layer(middleware::from_fn_with_state(
            Arc::clone(&shared),
            forward::pass_on,
        ))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), in_time))
        .layer(middleware::from_fn_with_state(
            Arc::clone(&shared),
            access::check,
        ))
        .layer(middleware::map_response(headers))
        .with_state(shared)
}

/// All calls, and answers for what is none.
fn calls() -> Router<Arc<Shared>> {
    let (routes, _) = api::routes().split_for_parts();
    routes
        .merge(page::routes())
        .fallback(async || ApiError::NotFound("there is nothing at this path".into()))
        .method_not_allowed_fallback(async || ApiError::Method)
}

/// Ends calls that take too long; the answer of events begins at once.
async fn in_time(State(shared): Server, request: Request, next: Next) -> Response {
    let reads = request.method() == Method::GET;
    let late = match env::timeout(CALL_LIMIT, next.run(request)).await {
        Ok(answer) => return answer,
        Err(_) if reads => ApiError::Unavailable("no answer in time; try again".into()),
        Err(_) => {
            let text = "no answer in time: it may be decided yet, or not; ask again";
            cluster::undecided(&shared, ApiError::Unavailable(text.into())).await
        }
    };
    late.into_response()
}

/// Browsers must not guess types, keep answers, or let other sites embed them.
async fn headers(mut response: Response) -> Response {
    use axum::http::{HeaderValue, header};
    let headers = response.headers_mut();
    let fixed = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, page::POLICY),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The part of a call that is the same for all.
type Server = State<Arc<Shared>>;

/// Waits for the server to be told to stop, or to be gone.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that nobody can tell any more.
    let _ = stop.wait_for(|stop| *stop).await;
}
