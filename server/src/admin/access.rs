//! Who may call what.
//!
//! Probes and metrics answer everyone. For the rest:
//!
//! - With a token, every call must present it.
//! - Without one, only callers on this machine are let in, judged by the address that the server
//!   *listens* at. The address of the caller would say less: behind a proxy everyone comes from loopback.
//!   So a call that a proxy has marked is refused too.
//! - Without a token, the `Host` must be this machine by its loopback address or as `localhost`. Otherwise a web page
//!   whose name was pointed at 127.0.0.1 (DNS rebinding) could call through a visitor's browser.
//! - Calls that change something must not come from another site's page, and must be JSON, which
//!   browsers send to another site only after asking it, and it does not agree.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use secrecy::{ExposeSecret as _, SecretString};
use subtle::ConstantTimeEq as _;

use super::Shared;
use super::error::ApiError;

/// What everyone may ask.
const PROBES: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

/// What proxies add.
const FORWARDED: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "via"];

/// The rules of one server.
pub(super) struct Access {
    token: Option<SecretString>,
    loopback: bool,
}

impl Access {
    pub(super) fn new(listen: SocketAddr, token: Option<SecretString>) -> Self {
        Self {
            token,
            loopback: listen.ip().is_loopback(),
        }
    }

    /// Whether nothing but probes is answered.
    pub(super) fn is_closed(&self) -> bool {
        self.token.is_none() && !self.loopback
    }

    fn allows(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        let reads = method == Method::GET || method == Method::HEAD;
        if reads && PROBES.contains(&path) {
            return Ok(());
        }
        match &self.token {
            Some(token) if presents(headers, token) => {}
            Some(_) => return Err(ApiError::Unauthorized),
            None => self.only_this_machine(headers)?,
        }
        if reads { Ok(()) } else { same_site(headers) }
    }

    fn only_this_machine(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.loopback {
            return Err(ApiError::Forbidden(
                "this server can be reached from other machines and has no admin token: set admin_token_file, or let admin listen on 127.0.0.1",
            ));
        }
        if FORWARDED.iter().any(|name| headers.contains_key(*name)) {
            return Err(ApiError::Forbidden(
                "this call came through a proxy, and the server has no admin token: set admin_token_file",
            ));
        }
        let host = text(headers, &header::HOST).and_then(host_of);
        if !host.is_some_and(is_this_machine) {
            return Err(ApiError::Forbidden(
                "this server has no admin token and answers only calls to 127.0.0.1 or localhost: use one of these, or set admin_token_file",
            ));
        }
        Ok(())
    }
}

/// Lets a call through, or answers why not.
pub(super) async fn check(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    match shared
        .access
        .allows(request.method(), path, request.headers())
    {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Whether the call shows the token: as a bearer, or as the password of any user, which browsers can ask for.
fn presents(headers: &HeaderMap, token: &SecretString) -> bool {
    let Some((scheme, value)) =
        text(headers, &header::AUTHORIZATION).and_then(|value| value.split_once(' '))
    else {
        return false;
    };
    let value = value.trim();
    let shown = if scheme.eq_ignore_ascii_case("bearer") {
        Some(value.as_bytes().to_vec())
    } else if scheme.eq_ignore_ascii_case("basic") {
        BASE64.decode(value).ok().and_then(|pair| {
            let colon = pair.iter().position(|byte| *byte == b':')?;
            Some(pair[colon + 1..].to_vec())
        })
    } else {
        None
    };
    shown.is_some_and(|shown| shown.ct_eq(token.expose_secret().as_bytes()).into())
}

/// Refuses what a page of another site makes a browser send.
fn same_site(headers: &HeaderMap) -> Result<(), ApiError> {
    const OTHER_SITE: ApiError =
        ApiError::Forbidden("this call comes from the page of another site");
    let site = HeaderName::from_static("sec-fetch-site");
    if headers.contains_key(&site) && !matches!(text(headers, &site), Some("same-origin" | "none"))
    {
        return Err(OTHER_SITE);
    }
    if headers.contains_key(header::ORIGIN) {
        let origin = text(headers, &header::ORIGIN).unwrap_or_default();
        let place = origin.split_once("://").map(|(_, place)| place);
        let host = text(headers, &header::HOST);
        let same =
            matches!((place, host), (Some(place), Some(host)) if place.eq_ignore_ascii_case(host));
        if !same {
            return Err(OTHER_SITE);
        }
    }
    let kind = text(headers, &header::CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        Ok(())
    } else {
        Err(ApiError::MediaType)
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// The host of `host:port`, without the brackets of IPv6.
fn host_of(text: &str) -> Option<&str> {
    if let Some(rest) = text.strip_prefix('[') {
        return Some(rest.split_once(']')?.0);
    }
    Some(text.split(':').next().unwrap_or(text))
}

fn is_this_machine(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn allows(
        listen: &str,
        token: Option<&str>,
        method: &Method,
        path: &str,
        given: &[(&'static str, &str)],
    ) -> u16 {
        let access = Access::new(listen.parse().unwrap(), token.map(Into::into));
        let mut headers = HeaderMap::new();
        for (name, value) in given {
            headers.insert(*name, value.parse().unwrap());
        }
        match access.allows(method, path, &headers) {
            Ok(()) => 200,
            Err(error) => error.into_response().status().as_u16(),
        }
    }

    const LOCAL: &str = "127.0.0.1:9980";
    const GROUP: &str = "/api/v1/groups/1000";
    const JSON: (&str, &str) = ("content-type", "application/json");

    #[test]
    fn probes_answer_everyone() {
        for path in PROBES {
            for token in [None, Some(TOKEN)] {
                let given = [("host", "evil.example"), ("x-forwarded-for", "1.2.3.4")];
                assert_eq!(
                    allows("0.0.0.0:9980", token, &Method::GET, path, &given),
                    200
                );
            }
        }
        assert_eq!(
            allows("0.0.0.0:9980", None, &Method::PUT, "/metrics", &[JSON]),
            403
        );
    }

    #[test]
    fn without_a_token_only_this_machine() {
        let get = |listen, given: &[_]| allows(listen, None, &Method::GET, GROUP, given);
        for host in [
            "127.0.0.1:9980",
            "localhost",
            "LOCALHOST:1",
            "[::1]:9980",
            "127.0.0.9",
        ] {
            assert_eq!(get(LOCAL, &[("host", host)]), 200, "{host}");
        }
        for host in [
            "evil.example:9980",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "",
            "[::1",
            "localhost.evil.example",
        ] {
            assert_eq!(get(LOCAL, &[("host", host)]), 403, "{host}");
        }
        assert_eq!(get(LOCAL, &[]), 403);
        for proxy in FORWARDED {
            assert_eq!(
                get(LOCAL, &[("host", "localhost"), (proxy, "10.0.0.1")]),
                403
            );
        }
        for listen in ["0.0.0.0:9980", "10.0.0.1:9980", "[::]:9980"] {
            assert_eq!(get(listen, &[("host", "localhost")]), 403, "{listen}");
        }
    }

    #[test]
    fn with_a_token_only_who_presents_it() {
        let basic = |pair: &str| format!("Basic {}", BASE64.encode(pair));
        let get = |value: &str| {
            let given = [("host", "sky.example"), ("authorization", value)];
            allows("0.0.0.0:9980", Some(TOKEN), &Method::GET, GROUP, &given)
        };
        assert_eq!(get(&format!("Bearer {TOKEN}")), 200);
        assert_eq!(get(&format!("bearer  {TOKEN}")), 200);
        assert_eq!(get(&basic(&format!("anyone:{TOKEN}"))), 200);
        let wrong = [
            String::new(),
            TOKEN.into(),
            "Bearer".into(),
            "Bearer ".into(),
            "Bearer 0123456789abcde".into(),
            "Bearer 0123456789abcdefg".into(),
            basic(TOKEN),
            basic("anyone:"),
            "Basic ???".into(),
            format!("Digest {TOKEN}"),
        ];
        for value in wrong {
            assert_eq!(get(&value), 401, "{value:?}");
        }
        let none = [("host", "localhost")];
        assert_eq!(allows(LOCAL, Some(TOKEN), &Method::GET, GROUP, &none), 401);
    }

    #[test]
    fn changes_come_from_no_other_site() {
        let put = |given: &[(&'static str, &str)]| {
            let given = [&[("host", LOCAL), JSON], given].concat();
            allows(LOCAL, None, &Method::PUT, GROUP, &given)
        };
        assert_eq!(put(&[]), 200);
        assert_eq!(
            put(&[("content-type", "Application/JSON; charset=utf-8")]),
            200
        );
        assert_eq!(put(&[("origin", "http://127.0.0.1:9980")]), 200);
        assert_eq!(put(&[("sec-fetch-site", "same-origin")]), 200);
        for origin in [
            "http://evil.example",
            "null",
            "http://127.0.0.1:80",
            "http://127.0.0.1:9980.evil.example",
        ] {
            assert_eq!(put(&[("origin", origin)]), 403, "{origin}");
        }
        for site in ["cross-site", "same-site"] {
            assert_eq!(put(&[("sec-fetch-site", site)]), 403, "{site}");
        }
        for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
            assert_eq!(put(&[("content-type", kind)]), 415, "{kind}");
        }
    }
}
