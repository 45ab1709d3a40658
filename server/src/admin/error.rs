//! Answers that say what is wrong.

use axum::Json;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use skyschedule_common::ids::InvalidName;
use utoipa::ToSchema;

use crate::coordinator::{AskError, ConfigureError, DeleteError};
use crate::state::SettingsError;

/// Why a call is not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ApiError {
    /// The request is malformed or asks for what is impossible.
    Invalid(String),
    /// Credentials are missing or wrong.
    Unauthorized,
    /// This caller may not do this.
    Forbidden(&'static str),
    /// There is no such thing.
    NotFound(String),
    /// The path knows other methods.
    Method,
    /// It does not go with what is there.
    Conflict(String),
    /// The body is too long.
    TooLarge,
    /// The body is of another type.
    MediaType,
    /// Not now.
    Unavailable(String),
    /// Not now, since it is a leader's to do and none could be asked. It is worth asking again at once: one is elected.
    NoLeader(String),
    /// No answer, as from a server that stops, or from one that leads no more.
    Unanswered(String),
}

/// What every error looks like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(super) struct ErrorBody {
    /// What went wrong.
    error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
struct ErrorDetail {
    /// For programs: one of a few words. `no_leader`: worth asking again at once.
    code: String,
    /// For people: what to do.
    message: String,
}

impl ApiError {
    fn parts(self) -> (StatusCode, &'static str, String) {
        match self {
            Self::Invalid(text) => (StatusCode::BAD_REQUEST, "invalid", text),
            Self::Unauthorized => (
                StatusCode::UNAUTHORIZED,
                "unauthorized",
                "this needs the admin token: as Authorization: Bearer, or as the password of any user".into(),
            ),
            Self::Forbidden(text) => (StatusCode::FORBIDDEN, "forbidden", text.into()),
            Self::NotFound(text) => (StatusCode::NOT_FOUND, "not_found", text),
            Self::Method => (
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this path knows other methods; see /api/v1/openapi.json".into(),
            ),
            Self::Conflict(text) => (StatusCode::CONFLICT, "conflict", text),
            Self::TooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "too_large",
                format!("the body has more than {} bytes", super::MAX_BODY),
            ),
            Self::MediaType => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_media_type",
                "send JSON, with Content-Type: application/json".into(),
            ),
            Self::Unavailable(text) | Self::Unanswered(text) => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable", text)
            }
            Self::NoLeader(text) => (StatusCode::SERVICE_UNAVAILABLE, "no_leader", text),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code, message) = self.parts();
        let error = ErrorDetail {
            code: code.into(),
            message,
        };
        let mut response = (status, Json(ErrorBody { error })).into_response();
        if status == StatusCode::UNAUTHORIZED {
            let challenge =
                HeaderValue::from_static("Basic realm=\"SkySchedule\", charset=\"UTF-8\"");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, challenge);
        }
        response
    }
}

impl From<PathRejection> for ApiError {
    fn from(error: PathRejection) -> Self {
        Self::Invalid(error.body_text())
    }
}

impl From<BytesRejection> for ApiError {
    fn from(error: BytesRejection) -> Self {
        match error.status() {
            StatusCode::PAYLOAD_TOO_LARGE => Self::TooLarge,
            _ => Self::Invalid(error.body_text()),
        }
    }
}

impl From<InvalidName> for ApiError {
    fn from(error: InvalidName) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl From<AskError> for ApiError {
    fn from(error: AskError) -> Self {
        let text = error.to_string();
        match error {
            AskError::Busy => Self::Unavailable(text),
            AskError::NotLeader => Self::NoLeader(text),
            AskError::Stopped => Self::Unanswered(text),
        }
    }
}

impl From<DeleteError> for ApiError {
    fn from(error: DeleteError) -> Self {
        let text = error.to_string();
        match error {
            DeleteError::Unknown(_) => Self::NotFound(text),
            DeleteError::Members { .. } => Self::Conflict(text),
            DeleteError::Ask(error) => error.into(),
        }
    }
}

impl From<ConfigureError> for ApiError {
    fn from(error: ConfigureError) -> Self {
        match error {
            ConfigureError::Ask(error) => error.into(),
            ConfigureError::Settings(
                SettingsError::BecomesExclusive | SettingsError::TooManyGroups,
            ) => Self::Conflict(error.to_string()),
            ConfigureError::Settings(error) => Self::Invalid(error.to_string()),
        }
    }
}
