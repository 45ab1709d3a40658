//! The calls, and their description.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::IntoResponse;
use serde::Deserialize;
use skyschedule_common::ids::{ClientId, GroupName};
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::change::change;
use super::cluster::undecided;
use super::error::{ApiError, ErrorBody};
use super::events::{self, Missed};
use super::shapes::{GroupBody, GroupList, MemberBody, SettingsBody};
use super::{Server, Shared, probes};
use crate::coordinator::DeleteError;
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
        .routes(routes!(get_group, put_group, delete_group))
        .routes(routes!(drain_member))
        .routes(routes!(undrain_member))
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
    let present = shared.handle.group(name.clone()).await?;
    let present = present.map_or_else(Settings::default, |group| group.settings);
    let settings = change(&present, &body?).map_err(ApiError::Invalid)?;
    tracing::info!(group = %name, %settings, "asked through the admin interface to change settings");
    match shared.handle.configure(name, settings).await {
        Ok(group) => Ok(Json(group.into())),
        Err(error) => Err(undecided(&shared, error.into()).await),
    }
}

/// Deletes a group that has no members. The settings are gone; epochs go on where they were if a group of this name is
/// made again, as the login of a client that still runs does, and what was available stays so.
#[utoipa::path(delete, path = "/api/v1/groups/{group}", tag = "groups",
    params(("group" = String, Path, description = "Name of the group")),
    responses(
        (status = 200, body = GroupBody, description = "As it was"),
        (status = 400, body = ErrorBody, description = "This is no name of a group"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It has members"),
        (status = 415, body = ErrorBody, description = "Calls that change something must say that they are JSON, also without a body"),
        (status = 503, body = ErrorBody),
    ))]
async fn delete_group(
    State(shared): Server,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<GroupBody>, ApiError> {
    let name = group_name(path)?;
    let Some(group) = shared.handle.group(name.clone()).await? else {
        return Err(DeleteError::Unknown(name).into());
    };
    tracing::info!(group = %name, "asked through the admin interface to delete a group");
    match shared.handle.delete(name).await {
        Ok(()) => Ok(Json(group.into())),
        Err(error) => Err(undecided(&shared, error.into()).await),
    }
}

/// Lets a member's share move away while it stays connected. It drains until that is taken back, here or by its
/// client, or its client logs in as a new process; its numbers, and for how long their release has been waited for, show how far it is.
#[utoipa::path(post, path = "/api/v1/groups/{group}/members/{client_id}/drain", tag = "groups",
    params(MemberPath),
    responses(
        (status = 200, body = MemberBody, description = "It drains"),
        (status = 400, body = ErrorBody, description = "This is no name of a group or of a client"),
        (status = 404, body = ErrorBody),
        (status = 415, body = ErrorBody, description = "Calls that change something must say that they are JSON, also without a body"),
        (status = 503, body = ErrorBody),
    ))]
async fn drain_member(
    State(shared): Server,
    path: Result<Path<MemberPath>, PathRejection>,
) -> Result<Json<MemberBody>, ApiError> {
    drains(&shared, path, true).await
}

/// Takes back that a member's share moves away: the numbering that follows gives it one. One that does not drain is left
/// as it is; one whose client itself asked for it drains again when that client connects anew.
#[utoipa::path(post, path = "/api/v1/groups/{group}/members/{client_id}/undrain", tag = "groups",
    params(MemberPath),
    responses(
        (status = 200, body = MemberBody, description = "It does not drain"),
        (status = 400, body = ErrorBody, description = "This is no name of a group or of a client"),
        (status = 404, body = ErrorBody),
        (status = 415, body = ErrorBody, description = "Calls that change something must say that they are JSON, also without a body"),
        (status = 503, body = ErrorBody),
    ))]
async fn undrain_member(
    State(shared): Server,
    path: Result<Path<MemberPath>, PathRejection>,
) -> Result<Json<MemberBody>, ApiError> {
    drains(&shared, path, false).await
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

/// Where a member is among the calls.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct MemberPath {
    /// Name of the group
    group: String,
    /// The client
    client_id: String,
}

/// Has a member drain, or takes that back.
async fn drains(
    shared: &Shared,
    path: Result<Path<MemberPath>, PathRejection>,
    drains: bool,
) -> Result<Json<MemberBody>, ApiError> {
    let Path(MemberPath { group, client_id }) = path?;
    let (group, client) = (GroupName::new(group)?, ClientId::new(client_id)?);
    let (handle, at) = (&shared.handle, (group.clone(), client.clone()));
    let member = if drains {
        tracing::info!(%group, %client, "asked through the admin interface to drain a member");
        handle.drain(at.0, at.1).await
    } else {
        tracing::info!(%group, %client, "asked through the admin interface to take the drain of a member back");
        handle.undrain(at.0, at.1).await
    };
    match member {
        Ok(Some(member)) => Ok(Json(member.into())),
        Ok(None) => Err(ApiError::NotFound(format!(
            "group {group} has no member {client}"
        ))),
        Err(error) => Err(undecided(shared, error.into()).await),
    }
}

fn group_name(path: Result<Path<String>, PathRejection>) -> Result<GroupName, ApiError> {
    let Path(text) = path?;
    Ok(GroupName::new(text)?)
}
