//! The page: three files that are part of the binary.

use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::routing::get;

use super::Shared;

/// What the page may do: load its own two files and ask this server. Nothing else, whatever a name contains.
pub(super) const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(super) fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/", file("text/html", include_str!("page/index.html")))
        .route(
            "/page.js",
            file("text/javascript", include_str!("page/page.js")),
        )
        .route("/page.css", file("text/css", include_str!("page/page.css")))
}

fn file(kind: &'static str, content: &'static str) -> axum::routing::MethodRouter<Arc<Shared>> {
    let kind = format!("{kind}; charset=utf-8");
    get(async move || ([(header::CONTENT_TYPE, kind)], content))
}
