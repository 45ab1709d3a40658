//! The commands that ask a running server.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

mod cli_common;

use cli_common::{Serving, run, stderr, stdout};
use serde_json::{Value, json};
use tempfile::TempDir;

const TOKEN: &str = "a-token-of-the-tests";

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
}

/// Creates a group through the interface.
fn create(serving: &Serving, group: &str) {
    let url = format!("http://{}/api/v1/groups/{group}", serving.admin);
    let request = ureq::put(url).header("content-type", "application/json");
    request
        .send("{\"numbering\":\"slots\",\"slots\":16}")
        .unwrap();
}

/// Asks until the server is ready.
fn until_ready(dir: &TempDir, admin: &str) {
    let deadline = skyschedule_common::env::now() + std::time::Duration::from_secs(20);
    while run(dir, &["status", "--admin", admin], &[]).status.code() != Some(0) {
        assert!(
            skyschedule_common::env::now() < deadline,
            "the server is never ready"
        );
    }
}

#[test]
fn status_groups_and_members_as_tables_and_as_json() {
    let dir = TempDir::new().unwrap();
    let serving = Serving::start(&dir, &["--replica-id=7"], &[]);
    let admin = serving.admin.to_string();
    until_ready(&dir, &admin);
    create(&serving, "orders");
    let ask = |arguments: &[&str]| {
        let output = run(&dir, arguments, &[("SKY_ADMIN", &admin)]);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{arguments:?}: {}",
            stderr(&output)
        );
        stdout(&output).to_owned()
    };
    let status = json(&ask(&["status", "--json"]));
    assert_eq!(
        (&status["ready"], &status["reason"]),
        (&json!(true), &Value::Null)
    );
    assert_eq!(status["cluster"]["leader"], 7);
    let status = ask(&["status"]);
    assert!(status.starts_with("replica 7, term "), "{status}");
    assert!(status.contains(&serving.clients.to_string()), "{status}");

    let groups = json(&ask(&["groups", "--json"]));
    assert_eq!(groups["groups"][0]["name"], "orders");
    let groups = ask(&["groups"]);
    let row: Vec<_> = groups.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(
        row,
        ["orders", "slots", "16", "0", "available", "0"],
        "{groups}"
    );

    let group = json(&ask(&["members", "orders", "--json"]));
    assert_eq!(
        (&group["name"], &group["members"]),
        (&json!("orders"), &json!([]))
    );
    let members = ask(&["members", "orders"]);
    assert!(
        members.starts_with("group orders: total 16, epoch 0, slots, available"),
        "{members}"
    );
}

#[test]
fn the_help_says_which_number_a_new_replica_may_have() {
    let dir = TempDir::new().unwrap();
    let output = run(&dir, &["cluster", "add", "--help"], &[]);
    let help = stdout(&output);
    for said in [
        "a number that no replica of this cluster has",
        "That of a removed one may be used again",
    ] {
        assert!(help.contains(said), "{help}");
    }
}

#[test]
fn the_address_is_a_host_and_port_or_a_url() {
    let dir = TempDir::new().unwrap();
    let serving = Serving::start(&dir, &[], &[]);
    until_ready(&dir, &serving.admin.to_string());
    let port = serving.admin.port();
    for admin in [
        format!("localhost:{port}"),
        format!("http://127.0.0.1:{port}"),
        format!("http://127.0.0.1:{port}/"),
    ] {
        let output = run(&dir, &["groups", "--admin", &admin], &[]);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{admin}: {}",
            stderr(&output)
        );
    }
    for admin in [
        "",
        "https://localhost:9980",
        "http://user@localhost:9980",
        "localhost:9980?x",
        "a b",
    ] {
        let output = run(&dir, &["groups", "--admin", admin], &[]);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{admin:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn what_cannot_be_done_ends_with_1_and_the_reason() {
    let dir = TempDir::new().unwrap();
    let serving = Serving::start(&dir, &[], &[]);
    let admin = serving.admin.to_string();
    let output = run(&dir, &["members", "none", "--admin", &admin], &[]);
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(1), "there is no group none\n")
    );
    let output = run(&dir, &["drain", "none", "a", "--admin", &admin], &[]);
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(1), "group none has no member a\n")
    );
    // The address of its clients instead.
    let clients = serving.clients.to_string();
    let output = run(&dir, &["status", "--admin", &clients], &[]);
    let said = stderr(&output);
    assert!(
        said.contains(&clients) && said.contains("of its clients"),
        "{said}"
    );
    drop(serving);
    for command in [
        &["status"][..],
        &["groups"],
        &["members", "none"],
        &["drain", "none", "a"],
    ] {
        let output = run(&dir, command, &[("SKY_ADMIN", &admin)]);
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        assert!(
            stderr(&output).contains(&format!(
                "nothing listens at {admin}: is the server running"
            )),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn a_token_is_taken_from_a_file_or_the_environment() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("token"), format!("{TOKEN}\n")).unwrap();
    let serving = Serving::start(&dir, &["--admin-token-file=token"], &[]);
    let admin = serving.admin.to_string();
    let groups = |more: &[&str], environment: &[(&str, &str)]| {
        run(
            &dir,
            &[&["groups", "--admin", &admin], more].concat(),
            environment,
        )
    };
    assert_eq!(
        groups(&["--admin-token-file=token"], &[]).status.code(),
        Some(0)
    );
    assert_eq!(
        groups(&[], &[("SKY_ADMIN_TOKEN", TOKEN)]).status.code(),
        Some(0)
    );
    let refused = groups(&[], &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("needs the admin token"),
        "{}",
        stderr(&refused)
    );
    assert_eq!(
        groups(&["--admin-token-file=none"], &[]).status.code(),
        Some(2)
    );
}
