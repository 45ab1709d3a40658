//! The calls, and their description.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use skyschedule_common::ids::{ClientId, GroupName};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::change::change;
use super::error::{ApiError, ErrorBody};
use super::events::{self, Missed};
use super::shapes::{GroupBody, GroupList, MemberBody, SettingsBody};
use super::{Server, Shared, probes};
use crate::state::Settings;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "SkySchedule",
        description = "What a server shows of itself. Every call can also answer 401 or 403, as the error that the others have."
    ),
    components(schemas(Missed))
)]
struct Description;

/// All calls but the page.
pub(super) fn routes() -> OpenApiRouter<std::sync::Arc<Shared>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(probes::healthz))
        .routes(routes!(probes::readyz))
        .routes(routes!(probes::metrics))
        .merge(super::cluster::routes())
        .routes(routes!(list_groups))
        .routes(routes!(get_group, put_group))
        .routes(routes!(drain_member))
        .routes(routes!(events::events))
        .routes(routes!(openapi))
}

/// All groups and their members.
#[utoipa::path(get, path = "/api/v1/groups", tag = "groups", responses(
    (status = 200, body = GroupList),
    (status = 503, body = ErrorBody),
))]
async fn list_groups(State(shared): Server) -> Result<Json<GroupList>, ApiError> {
    Ok(Json(shared.handle.groups().await?.into()))
}

/// A group and its members.
#[utoipa::path(get, path = "/api/v1/groups/{group}", tag = "groups",
    params(("group" = String, Path, description = "Name of the group")),
    responses(
        (status = 200, body = GroupBody),
        (status = 400, body = ErrorBody, description = "This is no name of a group"),
        (status = 404, body = ErrorBody),
        (status = 503, body = ErrorBody),
    ))]
async fn get_group(
    State(shared): Server,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<GroupBody>, ApiError> {
    let name = group_name(path)?;
    match shared.handle.group(name.clone()).await? {
        Some(group) => Ok(Json(group.into())),
        None => Err(ApiError::NotFound(format!("there is no group {name}"))),
    }
}

/// Changes the settings that the body names; the others stay. A group that does not exist is created.
#[utoipa::path(put, path = "/api/v1/groups/{group}", tag = "groups",
    params(("group" = String, Path, description = "Name of the group")),
    request_body(content = SettingsBody, description = "Any of these; none is required"),
    responses(
        (status = 200, body = GroupBody),
        (status = 400, body = ErrorBody, description = "All that is unknown or impossible"),
        (status = 409, body = ErrorBody, description = "An available group that ever had members cannot become exclusive"),
        (status = 413, body = ErrorBody),
        (status = 415, body = ErrorBody),
        (status = 503, body = ErrorBody),
    ))]
async fn put_group(
    State(shared): Server,
    path: Result<Path<String>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<GroupBody>, ApiError> {
    let name = group_name(path)?;
    let body = body.map_err(|error| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::TooLarge,
        _ => ApiError::Invalid(error.body_text()),
    })?;
    let present = shared.handle.group(name.clone()).await?;
    let present = present.map_or_else(Settings::default, |group| group.settings);
    let settings = change(&present, &body).map_err(ApiError::Invalid)?;
    tracing::info!(group = %name, ?settings, "settings are changed through the admin interface");
    Ok(Json(shared.handle.configure(name, settings).await?.into()))
}

/// Lets a member's share move away while it stays connected. It drains until its client takes that back, or logs in as
/// a new process; its numbers, and for how long their release has been waited for, show how far it is.
#[utoipa::path(post, path = "/api/v1/groups/{group}/members/{client_id}/drain", tag = "groups",
    params(
        ("group" = String, Path, description = "Name of the group"),
        ("client_id" = String, Path, description = "The client"),
    ),
    responses(
        (status = 200, body = MemberBody, description = "It drains"),
        (status = 400, body = ErrorBody, description = "This is no name of a group or of a client"),
        (status = 404, body = ErrorBody),
        (status = 415, body = ErrorBody, description = "Calls that change something must say that they are JSON, also without a body"),
        (status = 503, body = ErrorBody),
    ))]
async fn drain_member(
    State(shared): Server,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Result<Json<MemberBody>, ApiError> {
    let Path((group, client)) = path.map_err(|error| ApiError::Invalid(error.body_text()))?;
    let group = GroupName::new(group).map_err(|error| ApiError::Invalid(error.to_string()))?;
    let client = ClientId::new(client).map_err(|error| ApiError::Invalid(error.to_string()))?;
    tracing::info!(%group, %client, "a member is drained through the admin interface");
    match shared.handle.drain(group.clone(), client.clone()).await? {
        Some(member) => Ok(Json(member.into())),
        None => Err(ApiError::NotFound(format!(
            "group {group} has no member {client}"
        ))),
    }
}

/// This description.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "cluster", responses(
    (status = 200, body = serde_json::Value),
))]
async fn openapi(State(shared): Server) -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, "application/json")],
        shared.openapi.clone(),
    )
}

fn group_name(path: Result<Path<String>, PathRejection>) -> Result<GroupName, ApiError> {
    let Path(text) = path.map_err(|error| ApiError::Invalid(error.body_text()))?;
    GroupName::new(text).map_err(|error| ApiError::Invalid(error.to_string()))
}
