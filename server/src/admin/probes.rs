//! What probes and Prometheus ask.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use skyschedule_common::env;
use utoipa::ToSchema;

use super::cluster::no_majority;
use super::error::{ApiError, ErrorBody};
use super::{Server, Shared};
use crate::view::ClusterView;

/// How long a probe waits for the server's parts.
const PATIENCE: Duration = Duration::from_secs(2);

/// The answer to a probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(super) struct Probe {
    /// Always `ok`; everything else is an error.
    status: String,
}

impl Probe {
    fn ok() -> Json<Self> {
        let status = "ok".into();
        Json(Self { status })
    }
}

/// The coordinator's answer, if all tasks live and it comes soon.
async fn alive(shared: &Shared) -> Result<ClusterView, ApiError> {
    if shared
        .tasks
        .iter()
        .any(tokio::task::AbortHandle::is_finished)
    {
        return Err(ApiError::Unavailable(
            "a part of the server has ended; it will be restarted, or is being stopped".into(),
        ));
    }
    match env::timeout(PATIENCE, shared.handle.cluster()).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(ApiError::Unavailable(
            "the coordinator does not answer".into(),
        )),
    }
}

/// Whether every task of the process lives.
#[utoipa::path(get, path = "/healthz", tag = "probes", responses(
    (status = 200, body = Probe),
    (status = 503, body = ErrorBody),
))]
pub(super) async fn healthz(State(shared): Server) -> Result<Json<Probe>, ApiError> {
    alive(&shared).await?;
    Ok(Probe::ok())
}

/// Whether the server can number clients.
#[utoipa::path(get, path = "/readyz", tag = "probes", responses(
    (status = 200, body = Probe),
    (status = 503, body = ErrorBody, description = "With the reason"),
))]
pub(super) async fn readyz(State(shared): Server) -> Result<Json<Probe>, ApiError> {
    if *shared.stop.borrow() {
        return Err(ApiError::Unavailable("the server stops".into()));
    }
    match alive(&shared).await? {
        ClusterView {
            leader: Some(_), ..
        }
        | ClusterView { degraded: true, .. } => Ok(Probe::ok()),
        ClusterView { formed: false, .. } => Err(ApiError::Unavailable(
            "this replica is in no cluster yet; its log says what it waits for".into(),
        )),
        cluster => {
            let why = no_majority(&cluster).unwrap_or_else(|| {
                "there is no leader that most of the replicas follow; one is elected".to_owned()
            });
            Err(ApiError::Unavailable(format!(
                "{why}. Clients of available groups work on with what they have"
            )))
        }
    }
}

/// What the server counts, for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "probes", responses(
    (status = 200, body = String, content_type = "application/openmetrics-text"),
))]
pub(super) async fn metrics(State(shared): Server) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shared.metrics.encode())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{Semaphore, watch};

    use super::*;
    use crate::Server;
    use crate::admin::access::Access;
    use crate::config::Config;

    #[tokio::test]
    async fn a_server_that_lacks_a_part_is_neither_healthy_nor_ready() {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(Config::embedded(dir.path())).await.unwrap();
        let ended = env::spawn(async {});
        let (stopping, stop) = watch::channel(false);
        let shared = |tasks| {
            State(Arc::new(Shared {
                handle: server.handle().clone(),
                metrics: server.metrics().clone(),
                access: Access::new(server.local_addr(), None),
                tasks,
                watchers: Arc::new(Semaphore::new(1)),
                stop: stop.clone(),
                openapi: String::new(),
            }))
        };
        let whole = shared(vec![]);
        let broken = shared(vec![ended.abort_handle()]);
        ended.await.unwrap();
        assert!(healthz(whole.clone()).await.is_ok());
        assert!(healthz(broken.clone()).await.is_err());
        assert!(readyz(broken).await.is_err());

        stopping.send(true).unwrap();
        let text = |error: ApiError| format!("{error:?}");
        assert!(healthz(whole.clone()).await.is_ok());
        assert!(text(readyz(whole.clone()).await.unwrap_err()).contains("stops"));

        server.shutdown().await.unwrap();
        assert!(healthz(whole.clone()).await.is_err());
    }
}
