//! What probes and Prometheus ask.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use skyschedule_common::env;
use utoipa::ToSchema;

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
    match alive(&shared).await?.leader {
        Some(_) => Ok(Probe::ok()),
        None => Err(ApiError::Unavailable(
            "there is no leader yet; clients work on with what they have".into(),
        )),
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
