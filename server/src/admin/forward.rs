//! Calls about groups, and those that change the replicas, are the leader's to answer: any replica passes them on to it.
//!
//! Without a leader that answers, reads are answered with what this replica knows, which says that it is stale.

use std::sync::Arc;

use axum::Router;
use axum::body::{self, Body};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, Response as HttpResponse, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use skyschedule_common::protocol::codec;

use super::error::ApiError;
use super::{CALL_LIMIT, MAX_BODY, Shared, cluster};
use crate::peers::{Answering, Peers, Service};

/// What is passed on.
const FORWARDED: [&str; 2] = ["/api/v1/groups", "/api/v1/cluster/"];

/// Largest answer, in bytes: ten thousand members take some megabytes.
const MAX_ANSWER: usize = 64 << 20;

/// A call on its way to the leader. Whoever passes it on has checked that the caller may make it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Call {
    method: String,
    target: String,
    content_type: Option<String>,
    body: Bytes,
}

impl Call {
    /// A call without a body, that says that it is JSON.
    pub(super) fn json(method: &Method, target: String) -> Self {
        Self {
            method: method.to_string(),
            target,
            content_type: Some("application/json".to_owned()),
            body: Bytes::new(),
        }
    }
}

/// The leader's answer.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    status: u16,
    content_type: Option<String>,
    body: Bytes,
}

/// Passes a call on to the leader, where that is another replica.
pub(super) async fn pass_on(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    let concerns_leader = FORWARDED.iter().any(|prefix| path.starts_with(prefix));
    let consensus = shared.handle.consensus();
    let leader = consensus.leadership().leader;
    let other = leader.filter(|leader| *leader != consensus.id() && concerns_leader);
    let (Some(leader), Some(peers)) = (other, consensus.peers()) else {
        return next.run(request).await;
    };
    let reads = request.method() == Method::GET;
    let (parts, body) = request.into_parts();
    let Ok(body) = body::to_bytes(body, MAX_BODY).await else {
        return ApiError::TooLarge.into_response();
    };
    let call = Call {
        method: parts.method.to_string(),
        target: parts.uri.to_string(),
        content_type: text(parts.headers.get(header::CONTENT_TYPE)),
        body: body.clone(),
    };
    match ask(peers, leader, &call).await {
        Ok(answer) => answer,
        Err(why) if reads => {
            tracing::info!(
                leader,
                why,
                "the leader does not answer a call; answers itself"
            );
            next.run(Request::from_parts(parts, Body::from(body))).await
        }
        Err(why) => {
            let text =
                format!("replica {leader} leads, as far as this one knows: {why}; try again");
            cluster::undecided(&shared, ApiError::NoLeader(text))
                .await
                .into_response()
        }
    }
}

pub(super) async fn ask(peers: &Peers, leader: u16, call: &Call) -> Result<Response, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let body = codec::encode(call, MAX_ANSWER).map_err(|error| text(&error))?;
    let asked = peers.ask(leader, Service::Admin, body, CALL_LIMIT).await;
    let answer = asked.map_err(|error| text(&error))?;
    let answer: Answer = codec::decode(&answer, MAX_ANSWER).map_err(|error| text(&error))?;
    let status = StatusCode::from_u16(answer.status).map_err(|error| text(&error))?;
    let mut response = HttpResponse::new(Body::from(answer.body));
    *response.status_mut() = status;
    let content_type = answer
        .content_type
        .and_then(|kind| HeaderValue::try_from(kind).ok());
    if let Some(kind) = content_type {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    Ok(response)
}

/// Answers calls that other replicas pass on.
pub(super) fn answer_others(peers: &Peers, router: Router) {
    let router = TowerToHyperService::new(router);
    peers.serve(
        Service::Admin,
        Arc::new(move |_, body| -> Answering {
            let router = router.clone();
            Box::pin(async move { answer(&router, &body).await })
        }),
    );
}

async fn answer(router: &TowerToHyperService<Router>, body: &[u8]) -> Result<Bytes, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let call: Call = codec::decode(body, MAX_ANSWER).map_err(|error| text(&error))?;
    let mut request = Request::builder()
        .method(call.method.as_str())
        .uri(&call.target);
    if let Some(kind) = &call.content_type {
        request = request.header(header::CONTENT_TYPE, kind);
    }
    let request = request
        .body(Body::from(call.body))
        .map_err(|error| text(&error))?;
    let Ok(response) = router.call(request).await;
    let (parts, body) = response.into_parts();
    let answer = Answer {
        status: parts.status.as_u16(),
        content_type: self::text(parts.headers.get(header::CONTENT_TYPE)),
        body: body::to_bytes(body, MAX_ANSWER)
            .await
            .map_err(|error| text(&error))?,
    };
    codec::encode(&answer, MAX_ANSWER).map_err(|error| text(&error))
}

fn text(value: Option<&HeaderValue>) -> Option<String> {
    value
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned)
}
