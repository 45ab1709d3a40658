//! Who may call what, over real connections.

mod admin_common;

use std::io::{Read as _, Write as _};

use admin_common::{PATIENCE, Running, connect_from};
use serde_json::json;
use tokio::runtime::Runtime;

const TOKEN: &str = "a-token-of-the-tests";

#[test]
fn beyond_loopback_without_a_token_only_probes_answer() {
    let server = Running::start([0, 0, 0, 0], None);
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in [
        "/",
        "/page.js",
        "/api/v1/cluster",
        "/api/v1/groups",
        "/api/v1/events",
        "/api/v1/openapi.json",
        "/none",
    ] {
        let refused = server.get(path);
        assert_eq!(
            (refused.status, refused.error()),
            (403, "forbidden".into()),
            "{path}"
        );
    }
    assert_eq!(server.put("/api/v1/groups/orders", &json!({})).status, 403);
}

#[test]
fn a_token_opens_everything_and_its_lack_nothing_but_probes() {
    let server = Running::start([0, 0, 0, 0], Some(TOKEN));
    let bearer = format!("authorization: Bearer {TOKEN}");
    for path in ["/", "/api/v1/groups", "/none"] {
        let refused = server.get(path);
        assert_eq!(
            (refused.status, refused.error()),
            (401, "unauthorized".into()),
            "{path}"
        );
        assert!(
            refused
                .header("www-authenticate")
                .unwrap()
                .starts_with("basic")
        );
        let wrong = server.call(
            "GET",
            path,
            &["authorization: Bearer a-token-of-others---"],
            "",
        );
        assert_eq!(wrong.status, 401, "{path}");
    }
    assert_eq!(server.get("/healthz").status, 200);
    assert_eq!(
        server.call("GET", "/api/v1/groups", &[&bearer], "").status,
        200
    );
    let json = "content-type: application/json";
    let put = |head: &[&str]| {
        server
            .call("PUT", "/api/v1/groups/orders", head, "{}")
            .status
    };
    assert_eq!(put(&[&bearer, json]), 200);
    assert_eq!(put(&[&bearer, json, "origin: http://evil.example"]), 403);
    assert_eq!(put(&[json]), 401);
}

#[test]
fn a_name_that_was_pointed_here_is_refused() {
    let server = Running::local();
    let ask = |host: &str| {
        let mut stream = server.connect();
        let request =
            format!("GET /api/v1/groups HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(ask("localhost").starts_with("HTTP/1.1 200"));
    assert!(ask("evil.example").starts_with("HTTP/1.1 403"));
}

#[test]
fn silent_callers_keep_nobody_out_and_are_closed() {
    let server = Running::local();
    // Some say nothing, some stop within the head.
    let mut silent: Vec<_> = (0..110)
        .map(|number| {
            let mut stream = server.connect();
            if number % 2 == 0 {
                stream.write_all(b"GET /healthz HTTP/1.1\r\nho").unwrap();
            }
            stream
        })
        .collect();
    // Another address gets its answer meanwhile.
    let runtime = Runtime::new().unwrap();
    let mut other = connect_from([127, 0, 0, 2].into(), server.admin, &runtime).unwrap();
    other
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    other.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // And each silent one sees the end of its connection by itself.
    let start = skyschedule_common::env::now();
    for stream in &mut silent {
        let mut rest = Vec::new();
        if let Err(error) = stream.read_to_end(&mut rest) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
        }
    }
    assert!(start.elapsed() < PATIENCE);
    assert_eq!(server.get("/healthz").status, 200);
}

#[test]
fn a_head_that_never_ends_is_refused() {
    let server = Running::local();
    let mut stream = server.connect();
    stream.write_all(b"GET /healthz HTTP/1.1\r\n").unwrap();
    let line = format!("x: {}\r\n", "y".repeat(1_000));
    // Once refused, nothing more is taken.
    while stream.write_all(line.as_bytes()).is_ok() {}
}

#[test]
fn a_caller_that_does_not_read_is_closed() {
    let server = Running::local();
    let mut stream = server.connect();
    let calls = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(100);
    // Blocks once all buffers are full, and fails only when the server gives up.
    while stream.write_all(calls.as_bytes()).is_ok() {}
    assert_eq!(server.get("/healthz").status, 200);
}
