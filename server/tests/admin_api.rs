//! The JSON calls of the admin interface, as scripts see them.
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

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn a_group_shows_its_members_and_their_numbers() {
    let server = Running::local();
    assert_eq!(
        server.get("/api/v1/groups").json(),
        json!({"groups": [], "stale": false})
    );
    let _a = server.member("orders", "a");
    let shown = server.get("/api/v1/groups/orders");
    assert_eq!(shown.status, 200);
    assert_eq!(shown.header("content-type"), Some("application/json"));
    let group = shown.json();
    let expected = [
        "name",
        "numbering",
        "total",
        "epoch",
        "consistency",
        "degraded",
        "stale",
        "problem",
        "settings",
        "members",
    ];
    assert_eq!(keys(&group), expected.into());
    assert_eq!(group["name"], "orders");
    assert_eq!(group["numbering"], "modulo");
    assert_eq!(group["total"], 1);
    assert_eq!(group["consistency"], "available");
    assert_eq!(group["degraded"], false);
    assert!(group["epoch"].as_str().unwrap().parse::<u64>().unwrap() > 0);
    let [member] = group["members"].as_array().unwrap().as_slice() else {
        panic!("one member in {group}");
    };
    let expected = [
        "client_id",
        "numbers",
        "weight",
        "state",
        "address",
        "heartbeat_age_ms",
        "target",
        "pending_since_ms",
    ];
    assert_eq!(keys(member), expected.into());
    assert_eq!(member["client_id"], "a");
    assert_eq!(member["numbers"], json!([[0, 0]]));
    assert_eq!(member["weight"], 1);
    assert_eq!(member["state"], "active");
    assert!(
        member["address"]
            .as_str()
            .unwrap()
            .starts_with("127.0.0.1:")
    );
    assert_eq!(member["target"], Value::Null);
    assert_eq!(member["pending_since_ms"], Value::Null);
    let list = json!({"groups": [group], "stale": false});
    assert_eq!(server.get("/api/v1/groups").json(), list);
}

#[test]
fn a_release_that_is_waited_for_is_visible() {
    let server = Running::local();
    let _a = server.member("orders", "a");
    // The first member never answers, so that the second gets nothing yet.
    let _b = server.member("orders", "b");
    server.wait("a is asked to release", || {
        let group = server.get("/api/v1/groups/orders").json();
        let members = group["members"].as_array().unwrap().clone();
        members.len() == 2
            && members[0]["pending_since_ms"].is_u64()
            && members[1]["numbers"] == json!([])
            && members[1]["target"] == json!([[1, 1]])
    });
}

#[test]
fn a_member_is_drained_and_shows_how_far_it_is() {
    let server = Running::local();
    let _a = server.member("orders", "a");
    let mut events = server.events();
    let post = |client: &str| {
        let path = format!("/api/v1/groups/orders/members/{client}/drain");
        server.call("POST", &path, &["content-type: application/json"], "")
    };
    let drained = post("a");
    assert_eq!(drained.status, 200, "{drained:?}");
    let member = drained.json();
    assert_eq!(member["client_id"], "a");
    assert_eq!(member["state"], "draining");
    assert_eq!(
        member["numbers"],
        json!([[0, 0]]),
        "it holds its number until it has released it"
    );
    assert_eq!(
        events.until("updated"),
        json!({"event": "updated", "group": "orders", "client_id": "a", "weight": 1, "draining": true})
    );
    // This member never answers.
    server.wait("it is shown for how long that takes", || {
        let group = server.get("/api/v1/groups/orders").json();
        let member = &group["members"][0];
        let pending = member["pending_since_ms"].as_u64();
        member["target"] == json!([]) && pending.is_some_and(|ms| ms > 30)
    });
    assert_eq!(post("a").status, 200, "it drains already");
    let unknown = post("b");
    assert_eq!((unknown.status, unknown.error()), (404, "not_found".into()));
    assert!(unknown.body.contains("group orders has no member b"));
}

#[test]
fn the_cluster_is_shown() {
    let server = Running::local();
    let cluster = server.get("/api/v1/cluster").json();
    let expected = json!({
        "replica_id": 1, "leader": 1, "term": cluster["term"], "degraded": false, "formed": true,
        "replicas": [{
            "id": 1, "address": server.clients.to_string(), "voter": true, "reachable": true, "lag": null,
        }],
    });
    assert_eq!(cluster, expected);
    assert!(cluster["term"].is_u64());
}

#[test]
fn probes_and_metrics_answer() {
    let server = Running::local();
    for path in ["/healthz", "/readyz"] {
        let answer = server.get(path);
        assert_eq!(
            (answer.status, answer.json()),
            (200, json!({"status": "ok"})),
            "{path}"
        );
    }
    let _a = server.member("orders", "a");
    let metrics = server.get("/metrics");
    assert_eq!(metrics.status, 200);
    assert!(
        metrics
            .header("content-type")
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    assert!(metrics.body.ends_with("# EOF\n"), "{}", metrics.body);
    for line in [
        "skyschedule_leader 1",
        "skyschedule_members{group=\"orders\"} 1",
        "skyschedule_connections 1",
    ] {
        assert!(
            metrics.body.lines().any(|found| found == line),
            "{line} in {}",
            metrics.body
        );
    }
}

#[test]
fn settings_are_changed_one_by_one() {
    let server = Running::local();
    let path = "/api/v1/groups/orders";
    let created = server.put(
        path,
        &json!({"numbering": "slots", "slots": 64, "consistency": "exclusive"}),
    );
    assert_eq!(created.status, 200, "{created:?}");
    assert_eq!(created.json()["numbering"], "slots");
    assert_eq!(created.json()["total"], 64);
    let changed = server.put(path, &json!({"lease_ms": 8_000, "max_slots": 9}));
    assert_eq!(changed.status, 200, "{changed:?}");
    let settings = server.get(path).json()["settings"].clone();
    let expected = json!({
        "numbering": "slots", "slots": 64, "consistency": "exclusive", "trust_fin": false,
        "drain_timeout_ms": 5_000, "max_drain_ms": 60_000, "settle_ms": 20, "rejoin_grace_ms": 0,
        "reset_grace_ms": 1_000, "lease_ms": 8_000, "max_slots": 9,
    });
    assert_eq!(settings, expected);
    let same = server.put(path, &settings);
    assert_eq!(
        (same.status, &same.json()["settings"]),
        (200, &settings),
        "what is read can be written"
    );
}

#[test]
fn impossible_settings_are_refused_and_change_nothing() {
    let server = Running::local();
    let path = "/api/v1/groups/orders";
    assert_eq!(server.put(path, &json!({})).status, 200);
    let before = server.get(path).json();
    let refused = server.put(
        path,
        &json!({"lease_ms": 100, "settle_ms": "x", "colour": 1}),
    );
    assert_eq!((refused.status, refused.error()), (400, "invalid".into()));
    for part in [
        "lease_ms must be at least 2000",
        "settle_ms: expected",
        "colour: unknown",
    ] {
        assert!(refused.body.contains(part), "{part} in {}", refused.body);
    }
    let json = "content-type: application/json";
    for body in ["", "[]", "{\"settle_ms\":", "\u{0}"] {
        let refused = server.call("PUT", path, &[json], body);
        assert_eq!(
            (refused.status, refused.error()),
            (400, "invalid".into()),
            "{body:?}"
        );
    }
    assert_eq!(server.get(path).json(), before);
}

#[test]
fn an_available_group_that_had_members_does_not_become_exclusive() {
    let server = Running::local();
    let exclusive = json!({"consistency": "exclusive"});
    let _a = server.member("orders", "a");
    let refused = server.put("/api/v1/groups/orders", &exclusive);
    assert_eq!((refused.status, refused.error()), (409, "conflict".into()));
    assert_eq!(server.put("/api/v1/groups/mails", &exclusive).status, 200);
}

#[test]
fn what_is_not_there_is_an_error_of_the_same_shape() {
    let server = Running::local();
    let json = "content-type: application/json";
    let long = "x".repeat(70_000);
    let group = "/api/v1/groups/orders";
    let drain = "/api/v1/groups/orders/members/a/drain";
    /// Method, path, more head lines and body; status and code.
    type Case<'a> = (&'a str, &'a str, &'a [&'a str], &'a str, u16, &'a str);
    let cases: &[Case] = &[
        ("GET", group, &[], "", 404, "not_found"),
        ("GET", "/api/v1/groups/a%20b", &[], "", 400, "invalid"),
        ("PUT", "/api/v1/groups/a%2Fb", &[json], "{}", 400, "invalid"),
        ("GET", "/api/v1/groups/%ff", &[], "", 400, "invalid"),
        ("GET", "/api/v1/group", &[], "", 404, "not_found"),
        ("POST", drain, &[json], "", 404, "not_found"),
        ("POST", drain, &[], "", 415, "unsupported_media_type"),
        ("GET", drain, &[], "", 405, "method_not_allowed"),
        (
            "POST",
            "/api/v1/groups/orders/members/a%20b/drain",
            &[json],
            "",
            400,
            "invalid",
        ),
        ("GET", "/../etc/passwd", &[], "", 404, "not_found"),
        ("DELETE", group, &[json], "", 404, "not_found"),
        (
            "POST",
            "/api/v1/groups",
            &[json],
            "{}",
            405,
            "method_not_allowed",
        ),
        ("OPTIONS", group, &[json], "", 405, "method_not_allowed"),
        ("PUT", group, &[json], &long, 413, "too_large"),
        ("PUT", group, &[], "{}", 415, "unsupported_media_type"),
        (
            "PUT",
            group,
            &["content-type: text/plain"],
            "{}",
            415,
            "unsupported_media_type",
        ),
        (
            "PUT",
            group,
            &[json, "origin: http://evil.example"],
            "{}",
            403,
            "forbidden",
        ),
        (
            "PUT",
            group,
            &[json, "sec-fetch-site: cross-site"],
            "{}",
            403,
            "forbidden",
        ),
        (
            "GET",
            group,
            &["x-forwarded-for: 10.0.0.1"],
            "",
            403,
            "forbidden",
        ),
    ];
    for (method, path, head, body, status, code) in cases {
        let answer = server.call(method, path, head, body);
        let found = (answer.status, answer.error());
        assert_eq!(
            found,
            (*status, (*code).to_owned()),
            "{method} {path} {head:?}"
        );
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    }
    assert_eq!(
        server.get("/api/v1/groups").json(),
        json!({"groups": [], "stale": false}),
        "nothing was created"
    );
}
