//! Events, the page, and the description of the interface.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

mod admin_common;

use std::collections::BTreeSet;

use admin_common::Running;
use serde_json::{Value, json};

#[test]
fn those_who_watch_hear_of_joins_and_renumberings() {
    let server = Running::local();
    let mut events = server.events();
    let _a = server.member("orders", "a");
    assert_eq!(
        events.until("joined"),
        json!({"event": "joined", "group": "orders", "client_id": "a"})
    );
    let renumbered = events.until("renumbered");
    assert_eq!(
        (&renumbered["group"], &renumbered["total"]),
        (&json!("orders"), &json!(1))
    );
    assert!(renumbered["epoch"].is_string());
    server.put("/api/v1/groups/mails", &json!({}));
    assert_eq!(events.until("configured")["group"], "mails");
}

#[test]
fn too_many_watchers_are_refused_and_calls_still_answered() {
    let server = Running::local();
    let watchers: Vec<_> = (0..64).map(|_| server.events()).collect();
    let refused = server.get("/api/v1/events");
    assert_eq!(
        (refused.status, refused.error()),
        (503, "unavailable".into())
    );
    assert_eq!(server.get("/api/v1/groups").status, 200);
    drop(watchers);
}

#[test]
fn a_stop_ends_the_streams() {
    let server = Running::local();
    let mut events = server.events();
    server.stop();
    while events.next().is_some() {}
}

#[test]
fn the_page_loads_only_its_own_files() {
    let server = Running::local();
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy").unwrap();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self';"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-frame-options"), Some("deny"));
    // What the policy would stop must not be there: scripts, styles or handlers within the page.
    for inline in ["<script>", "<style", " style=", " onclick=", " onload="] {
        assert!(!page.body.contains(inline), "{inline}");
    }
    for (path, kind) in [("/page.js", "text/javascript"), ("/page.css", "text/css")] {
        assert!(page.body.contains(path), "{path} is part of the page");
        let file = server.get(path);
        assert_eq!(file.status, 200, "{path}");
        assert!(file.header("content-type").unwrap().starts_with(kind));
    }
    let script = server.get("/page.js").body;
    for unsafe_way in [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ] {
        assert!(!script.contains(unsafe_way), "{unsafe_way}");
    }
}

/// The schema that a `$ref` names, or the schema itself.
fn resolve<'a>(api: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(name) => api.pointer(name.strip_prefix('#').unwrap()).unwrap(),
        None => schema,
    }
}

/// Checks that a value is as its schema says, with exactly the properties that it names.
fn check(api: &Value, schema: &Value, value: &Value, place: &str) {
    let schema = resolve(api, schema);
    if let Some(choices) = schema["oneOf"].as_array() {
        let null = |schema: &&Value| schema["type"] == "null";
        let other = choices.iter().find(|schema| !null(schema)).unwrap();
        return if value.is_null() {
            assert!(
                choices.iter().any(|schema| null(&schema)),
                "{place} is null"
            );
        } else {
            check(api, other, value, place);
        };
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(many) => many.iter().map(|kind| kind.as_str().unwrap()).collect(),
        _ => return,
    };
    let is = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    assert!(
        types.contains(&is),
        "{place} is {is}, and should be one of {types:?}"
    );
    if let Some(known) = schema["enum"].as_array() {
        assert!(known.contains(value), "{place}: {value} in {known:?}");
    }
    if let (Some(properties), Some(found)) = (schema["properties"].as_object(), value.as_object()) {
        let named: BTreeSet<_> = properties.keys().collect();
        assert_eq!(named, found.keys().collect(), "{place}");
        for (name, schema) in properties {
            check(api, schema, &found[name], &format!("{place}.{name}"));
        }
    }
    for item in value.as_array().into_iter().flatten() {
        check(api, &schema["items"], item, &format!("{place}[]"));
    }
}

#[test]
fn the_description_matches_what_is_answered() {
    let server = Running::local();
    let _members = (server.member("orders", "a"), server.member("orders", "b"));
    let api = server.get("/api/v1/openapi.json").json();
    let paths = api["paths"].as_object().unwrap();
    let expected = [
        "/healthz",
        "/readyz",
        "/metrics",
        "/api/v1/cluster",
        "/api/v1/cluster/replicas",
        "/api/v1/cluster/replicas/{id}",
        "/api/v1/cluster/transfer",
        "/api/v1/groups",
        "/api/v1/groups/{group}",
        "/api/v1/groups/{group}/members/{client_id}/drain",
        "/api/v1/groups/{group}/members/{client_id}/undrain",
        "/api/v1/events",
        "/api/v1/openapi.json",
    ];
    assert_eq!(
        paths.keys().map(String::as_str).collect::<BTreeSet<_>>(),
        expected.into()
    );
    let mut checked = 0;
    for (path, methods) in paths {
        if path == "/api/v1/events" {
            continue;
        }
        for (method, described) in methods.as_object().unwrap() {
            let path = path
                .replace("{group}", "orders")
                .replace("{client_id}", "a")
                .replace("{id}", "1");
            let json = &["content-type: application/json"];
            let replicas = path.contains("/replicas/");
            // A server alone has no others, and must stay.
            let (answer, status) = match method.as_str() {
                "get" => (server.get(&path), 200),
                "post" if path.ends_with("/transfer") => {
                    (server.call("POST", &path, json, r#"{"to": 1}"#), 200)
                }
                "post" => (server.call("POST", &path, json, ""), 200),
                "put" if replicas => (server.put(&path, &json!({"address": "sky-2:9991"})), 409),
                "put" => (server.put(&path, &json!({"settle_ms": 30})), 200),
                "delete" if replicas => (server.call("DELETE", &path, json, ""), 409),
                "delete" => {
                    // One without members, which is not needed any more.
                    server.put("/api/v1/groups/spare", &json!({}));
                    (server.call("DELETE", "/api/v1/groups/spare", json, ""), 200)
                }
                other => panic!("{other} {path} is not checked"),
            };
            assert_eq!(answer.status, status, "{method} {path}");
            let content = described["responses"][status.to_string()]["content"]
                .as_object()
                .unwrap();
            let (kind, content) = content.iter().next().unwrap();
            assert!(
                answer.header("content-type").unwrap().starts_with(kind),
                "{method} {path}"
            );
            if kind == "application/json" {
                check(
                    &api,
                    &content["schema"],
                    &answer.json(),
                    &format!("{method} {path}"),
                );
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 14);
    let error = &api["paths"]["/api/v1/groups/{group}"]["get"]["responses"]["404"];
    let schema = &error["content"]["application/json"]["schema"];
    check(
        &api,
        schema,
        &server.get("/api/v1/groups/none").json(),
        "404",
    );
    // Every setting that the description names can be written, and no other.
    let body = &api["paths"]["/api/v1/groups/{group}"]["put"]["requestBody"]["content"]["application/json"]
        ["schema"];
    let settings = server.get("/api/v1/groups/orders").json()["settings"].clone();
    check(&api, body, &settings, "settings");
}
