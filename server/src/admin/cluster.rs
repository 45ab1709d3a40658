//! The replicas, and calls that change them.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use skyschedule_common::env;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, ErrorBody};
use super::forward::{self, Call};
use super::{Server, Shared};
use crate::config::is_host_and_port;
use crate::consensus::{Added, ChangeError, Removed};
use crate::view::ClusterView;

/// How often a new leader is asked to remove the one that handed over to it, and the pause between.
const ATTEMPTS: usize = 10;
const PAUSE: Duration = Duration::from_millis(100);

/// How long is looked for the reason why something is not decided.
const LOOK: Duration = Duration::from_secs(1);

/// A replica to be added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewReplica {
    /// `host:port` at which the other replicas reach it.
    #[schema(example = "sky-4:9991")]
    address: String,
}

/// Who shall lead.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewLeader {
    /// A voter; null: the one that knows most.
    to: Option<u16>,
}

/// The calls.
pub(super) fn routes() -> OpenApiRouter<Arc<Shared>> {
    OpenApiRouter::new()
        .routes(routes!(cluster))
        .routes(routes!(replicas))
        .routes(routes!(add_replica, remove_replica))
        .routes(routes!(transfer))
}

/// The replicas.
#[utoipa::path(get, path = "/api/v1/cluster", tag = "cluster", responses(
    (status = 200, body = ClusterView),
    (status = 503, body = ErrorBody),
))]
async fn cluster(State(shared): Server) -> Result<Json<ClusterView>, ApiError> {
    Ok(Json(shared.handle.cluster().await?))
}

/// The replicas as the one that leads sees them, which alone knows how much each of them lacks; without one that answers, as
/// this one does.
#[utoipa::path(get, path = "/api/v1/cluster/replicas", tag = "cluster", responses(
    (status = 200, body = ClusterView),
    (status = 503, body = ErrorBody),
))]
async fn replicas(State(shared): Server) -> Result<Json<ClusterView>, ApiError> {
    Ok(Json(shared.handle.cluster().await?))
}

/// Adds a replica that runs with an empty data folder: as a learner first, and when it has caught up, as a voter. Asked
/// again, it goes on where it was.
#[utoipa::path(put, path = "/api/v1/cluster/replicas/{id}", tag = "cluster",
    params(("id" = u16, Path, description = "Its id: a number that no replica of this cluster has. That of a removed one may be used again, once its old data folder is gone for good")),
    request_body = NewReplica,
    responses(
        (status = 200, body = ClusterView, description = "It votes"),
        (status = 202, body = ClusterView, description = "It is a learner and catches up: ask again"),
        (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It does not go with the replicas that there are"),
        (status = 415, body = ErrorBody),
        (status = 503, body = ErrorBody, description = "It does not answer, or too few replicas do"),
    ))]
async fn add_replica(
    State(shared): Server,
    path: Result<Path<u16>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<ClusterView>), ApiError> {
    let id = replica(path.as_ref())?;
    let NewReplica { address } = parse(body)?;
    if !is_host_and_port(&address) {
        return Err(ApiError::Invalid(format!(
            "address: {address:?} is not host:port with a port from 1 to 65535"
        )));
    }
    tracing::info!(
        replica = id,
        address,
        "asked through the admin interface to add a replica"
    );
    let status = match shared.handle.consensus().add(id, &address).await {
        Ok(Added::Voter) => StatusCode::OK,
        Ok(Added::CatchesUp) => StatusCode::ACCEPTED,
        Err(why) => return Err(not_done(&shared, "a replica was not added", Some(id), why).await),
    };
    Ok((status, Json(shared.handle.cluster().await?)))
}

/// Removes a replica for good. One that leads hands the leadership over first.
#[utoipa::path(delete, path = "/api/v1/cluster/replicas/{id}", tag = "cluster",
    params(
        ("id" = u16, Path, description = "The replica"),
        ("force" = Option<bool>, Query, description = "Also where too few voters that can be reached would be left"),
    ),
    responses(
        (status = 200, body = ClusterView, description = "The replicas without it"),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "Too few voters that can be reached would be left"),
        (status = 415, body = ErrorBody, description = "Calls that change something must say that they are JSON, also without a body"),
        (status = 503, body = ErrorBody),
    ))]
async fn remove_replica(
    State(shared): Server,
    path: Result<Path<u16>, PathRejection>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let id = replica(path.as_ref())?;
    let force = match uri.query() {
        None | Some("" | "force=false") => false,
        Some("force=true") => true,
        Some(_) => {
            return Err(ApiError::Invalid(
                "expected force=true, force=false or nothing after the ?".into(),
            ));
        }
    };
    tracing::info!(
        replica = id,
        force,
        "asked through the admin interface to remove a replica"
    );
    match shared.handle.consensus().remove(id, force).await {
        Ok(Removed::Done) => Ok(Json(shared.handle.cluster().await?).into_response()),
        Ok(Removed::LeadBy(leader)) => {
            let target = format!("/api/v1/cluster/replicas/{id}?force={force}");
            ask_new_leader(&shared, leader, target).await
        }
        Err(why) => Err(not_done(&shared, "a replica was not removed", Some(id), why).await),
    }
}

/// The new leader removes the one that led before.
async fn ask_new_leader(
    shared: &Shared,
    leader: u16,
    target: String,
) -> Result<Response, ApiError> {
    let call = Call::json(&Method::DELETE, target);
    let mut last = "it does not answer".to_owned();
    for _ in 0..ATTEMPTS {
        let Some(peers) = shared.handle.consensus().peers() else {
            break;
        };
        match forward::ask(peers, leader, &call).await {
            Ok(answer) if answer.status() != StatusCode::SERVICE_UNAVAILABLE => return Ok(answer),
            Ok(_) => last = "it is not ready yet".to_owned(),
            Err(why) => last = why,
        }
        env::sleep(PAUSE).await;
    }
    Err(ApiError::Unavailable(format!(
        "replica {leader} leads now, and could not be asked ({last}); ask again"
    )))
}

/// Has another replica lead.
#[utoipa::path(post, path = "/api/v1/cluster/transfer", tag = "cluster",
    request_body = NewLeader,
    responses(
        (status = 200, body = ClusterView, description = "With the new leader"),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It cannot lead"),
        (status = 415, body = ErrorBody),
        (status = 503, body = ErrorBody, description = "It did not take over"),
    ))]
async fn transfer(
    State(shared): Server,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<ClusterView>, ApiError> {
    let NewLeader { to } = parse(body)?;
    if let Err(why) = shared.handle.consensus().transfer(to).await {
        return Err(not_done(&shared, "the leadership was not transferred", to, why).await);
    }
    Ok(Json(shared.handle.cluster().await?))
}

/// Why a change is not done, for the log and for the caller.
async fn not_done(shared: &Shared, what: &str, replica: Option<u16>, why: ChangeError) -> ApiError {
    tracing::warn!(replica, %why, "{what}");
    undecided(shared, why.into()).await
}

/// Why a change was not decided. Where nothing can be decided at all, the caller is told that, whatever else is in the way.
pub(super) async fn undecided(shared: &Shared, error: ApiError) -> ApiError {
    let cluster = match env::timeout(LOOK, shared.handle.cluster()).await {
        Ok(Ok(cluster)) => cluster,
        _ => return error,
    };
    let error = match error {
        // It does not stop: it leads no more.
        ApiError::Unanswered(_) if !*shared.stop.borrow() => ChangeError::NotLeader.into(),
        error => error,
    };
    match (error, no_majority(&cluster)) {
        (ApiError::NoLeader(_), _) if !cluster.formed => ChangeError::NotMember.into(),
        (ApiError::NoLeader(_) | ApiError::Conflict(_), Some(why)) => ApiError::Unavailable(why),
        // It may be decided later.
        (ApiError::Unavailable(text), Some(why)) => ApiError::Unavailable(format!("{text}; {why}")),
        (error, _) => error,
    }
}

/// That most of the voters cannot be reached, and which, where it is so. Before there are voters nothing is said of them.
pub(super) fn no_majority(cluster: &ClusterView) -> Option<String> {
    let own = cluster.replica_id;
    let (mut there, mut away) = (0, Vec::new());
    let mut votes = false;
    for replica in cluster.replicas.iter().filter(|replica| replica.voter) {
        votes |= replica.id == own;
        match replica.reachable || replica.id == own {
            true => there += 1,
            false => away.push(format!("{} ({})", replica.id, replica.address)),
        }
    }
    let included = if votes { ", itself included" } else { "" };
    (!away.is_empty() && there <= away.len()).then(|| {
        format!(
            "no majority: replica {own} reaches {there} of {} voters{included}, and nothing can be decided, not even who the \
             replicas are. Away: {}. Start those again, or mend the network to them, then ask again; if their disks are lost, see \
             Restore in the README",
            there + away.len(),
            away.join(", "),
        )
    })
}

fn replica(path: Result<&Path<u16>, &PathRejection>) -> Result<u16, ApiError> {
    match path {
        Ok(&Path(0)) | Err(_) => Err(ApiError::Invalid(
            "the id of a replica is a number from 1 to 65535".into(),
        )),
        Ok(&Path(id)) => Ok(id),
    }
}

fn parse<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, ApiError> {
    serde_json::from_slice(&body?).map_err(|error| ApiError::Invalid(format!("the body: {error}")))
}

impl From<ChangeError> for ApiError {
    fn from(error: ChangeError) -> Self {
        let text = error.to_string();
        match error {
            ChangeError::Unknown(_) => Self::NotFound(text),
            ChangeError::Alone | ChangeError::Conflict(_) => Self::Conflict(text),
            ChangeError::NotLeader => Self::NoLeader(text),
            _ => Self::Unavailable(text),
        }
    }
}
