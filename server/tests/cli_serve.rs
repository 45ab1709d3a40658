//! `skyschedule serve` as a process: its configuration, its signals, its exit codes.

mod cli_common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use cli_common::{Serving, run, skyschedule, stderr, stdout};
use rustix::process::Signal;
use tempfile::TempDir;

#[test]
fn the_configuration_is_printed_with_its_origins_and_without_secrets() {
    let dir = TempDir::new().unwrap();
    std::fs::write(
        dir.path().join("sky.toml"),
        "listen = '127.0.0.1:3'\nadmin = 'off'\nreplica_id = 2\n",
    )
    .unwrap();
    let environment = [
        ("SKY_CONFIG", "sky.toml"),
        ("SKY_LISTEN", "127.0.0.1:2"),
        ("SKY_ADMIN", "127.0.0.1:22"),
        ("SKY_PASSWORD", "walker"),
        ("SKY_PORT", "tcp://10.0.0.1:9991"),
    ];
    let output = run(
        &dir,
        &[
            "serve",
            "--listen",
            "127.0.0.1:1",
            "--user=moon",
            "--print-config",
        ],
        &environment,
    );
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = stdout(&output);
    for line in [
        "listen = \"127.0.0.1:1\" # --listen",
        "admin = \"127.0.0.1:22\" # SKY_ADMIN",
        "replica_id = \"2\" # sky.toml: replica_id",
        "user = \"moon\" # --user",
        "password = \"(redacted)\" # SKY_PASSWORD",
        "log_format = \"text\" # default of log_format",
    ] {
        assert!(
            printed.lines().any(|found| found == line),
            "{line:?} in\n{printed}"
        );
    }
    assert!(!printed.contains("walker"), "{printed}");
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        1,
        "nothing but the file is there"
    );
}

#[test]
fn bad_configurations_end_with_2_and_everything_that_is_wrong() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("sky.toml"), "colour = 'blue'\n").unwrap();
    let arguments = [
        "serve",
        "--config=sky.toml",
        "--listen=0.0.0.0:0",
        "--peers=1=a:1,2=a:2,3=a:3,4=a:4,5=a:5,6=a:6,7=a:7,8=a:8,9=a:9,10=a:10",
    ];
    let output = run(&dir, &arguments, &[("SKY_LOG_FORMAT", "xml")]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(2), ""));
    let lines: Vec<_> = stderr(&output).lines().collect();
    let expected = [
        "sky.toml: unknown key \"colour\"",
        "SKY_LOG_FORMAT: \"xml\"",
        "listen: 0.0.0.0:0 can be reached from other machines",
        "peers: lists 10 replicas",
        "peers: 0.0.0.0:0 can be reached from other machines, and there is no cluster_secret",
    ];
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "{expected:?} in {lines:#?}");
    }
}

#[test]
fn several_replicas_without_a_secret_are_told_what_to_set() {
    let dir = TempDir::new().unwrap();
    let arguments = [
        "serve",
        "--listen=0.0.0.0:0",
        "--user=moon",
        "--peers=1=a:1,2=a:2,3=a:3",
    ];
    let output = run(&dir, &arguments, &[("SKY_PASSWORD", "walker")]);
    let text = stderr(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1));
    for part in [
        "--cluster-secret-file FILE",
        "SKY_CLUSTER_SECRET_FILE",
        "on every replica",
        "the same secret of at least 16 characters",
        "openssl rand -base64 32 > FILE",
        "listen on 127.0.0.1",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[test]
fn usage_errors_end_with_2() {
    let dir = TempDir::new().unwrap();
    let cases: [&[&str]; 6] = [
        &[],
        &["server"],
        &["serve", "--password=walker"],
        &["serve", "--listen"],
        &["members"],
        &["members", "no group"],
    ];
    for arguments in cases {
        let output = run(&dir, arguments, &[]);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!stderr(&output).is_empty(), "{arguments:?}");
    }
    let output = run(&dir, &["serve"], &[("RUST_LOG", "sky=loud")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).starts_with("RUST_LOG: "),
        "{}",
        stderr(&output)
    );
}

#[test]
fn every_setting_is_in_the_help_and_no_secret_has_a_flag() {
    let dir = TempDir::new().unwrap();
    let output = run(&dir, &["serve", "--help"], &[("SKY_PASSWORD", "walker")]);
    let help = stdout(&output);
    assert_eq!(output.status.code(), Some(0));
    for key in skyschedule_server::config::KEYS {
        let shown = help.contains(&format!("--{} <", key.name.replace('_', "-")));
        assert_eq!(shown, !key.secret, "{}", key.name);
    }
    assert!(!help.contains("walker"));
}

#[test]
fn asked_to_stop_it_ends_with_0() {
    for signal in [Signal::TERM, Signal::INT] {
        let dir = TempDir::new().unwrap();
        let mut serving = Serving::start(&dir, &[], &[]);
        serving.signal(signal);
        serving.logged("stopped");
        assert_eq!(serving.code(), Some(0), "{signal:?}");
    }
}

#[test]
fn asked_twice_it_ends_at_once_with_1() {
    let dir = TempDir::new().unwrap();
    let mut serving = Serving::start(&dir, &[], &[]);
    // A call that waits for the rest of its body keeps the server from being quicker than the second signal.
    let mut call = TcpStream::connect(serving.admin).unwrap();
    let head = "PUT /api/v1/groups/a HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n";
    call.write_all(head.as_bytes()).unwrap();
    // The server asks for the body: from here on the call is in progress.
    std::io::Read::read_exact(&mut call, &mut [0; 12]).unwrap();
    serving.signal(Signal::TERM);
    serving.logged("once more stops it at once");
    serving.signal(Signal::TERM);
    assert_eq!(serving.code(), Some(1));
}

#[test]
fn a_port_in_use_ends_it_with_1_and_the_reason() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flag in ["--listen", "--admin"] {
        let dir = TempDir::new().unwrap();
        let mut arguments = vec!["serve", "--listen=127.0.0.1:0", "--admin=off"];
        arguments.retain(|argument| !argument.starts_with(flag));
        arguments.extend([flag, &address]);
        arguments.push("--log-format=json");
        let output = run(&dir, &arguments, &[]);
        assert_eq!(output.status.code(), Some(1), "{flag}");
        let reason = format!("cannot listen at {address}");
        let last = stderr(&output).lines().last().unwrap();
        let line: serde_json::Value = serde_json::from_str(last).unwrap();
        assert_eq!(line["level"], "ERROR", "{last}");
        let why = line["fields"]["why"].as_str().unwrap();
        assert!(why.starts_with(&reason), "{last}");
        // Also where the log is turned off.
        let output = run(&dir, &arguments, &[("RUST_LOG", "off")]);
        let said = stderr(&output);
        assert!(
            said.starts_with(&reason) && said.lines().count() == 1,
            "{said}"
        );
    }
}

#[test]
fn a_server_with_a_user_may_listen_everywhere() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("password"), "walker\n").unwrap();
    let arguments = [
        "--listen=0.0.0.0:0",
        "--user=moon",
        "--password-file=password",
    ];
    let fixed = ["serve", "--admin=127.0.0.1:0", "--log-format=json"];
    let child = skyschedule(&dir, &[&fixed[..], &arguments].concat())
        .stderr(Stdio::piped())
        .spawn();
    let mut serving = Serving::of(child.unwrap());
    assert!(!serving.clients.ip().is_loopback());
    serving.signal(Signal::TERM);
    serving.logged("stopped");
    assert_eq!(serving.code(), Some(0));
}

#[test]
fn it_takes_as_many_open_files_as_the_system_grants() {
    let dir = TempDir::new().unwrap();
    let binary = skyschedule(&dir, &[]).get_program().to_owned();
    let serve = |script: &str| {
        std::process::Command::new("sh")
            .current_dir(dir.path())
            .args(["-c", script, "sh"])
            .arg(&binary)
            .output()
            .unwrap()
    };
    let ask = "exec \"$1\" serve --max-connections 900 --print-config";
    let soft = serve(&format!("ulimit -Hn 1000; ulimit -Sn 256; {ask}"));
    assert_eq!(soft.status.code(), Some(0), "{}", stderr(&soft));
    assert!(
        stdout(&soft).contains("max_connections_per_address = \"450\""),
        "{}",
        stdout(&soft)
    );
    let hard = serve(&format!("ulimit -n 256; {ask}"));
    assert_eq!(hard.status.code(), Some(2));
    assert!(
        stderr(&hard).starts_with("max_connections: 900 connections do not fit into the 256 files"),
        "{}",
        stderr(&hard)
    );
}

#[test]
fn a_broken_file_is_reported_by_line_and_its_secrets_are_not_shown() {
    let dir = TempDir::new().unwrap();
    let text = "listen = '127.0.0.1:0'\npassword = \"hunter2secret\n";
    std::fs::write(dir.path().join("sky.toml"), text).unwrap();
    let output = run(&dir, &["serve", "--config=sky.toml"], &[]);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("sky.toml: line 2: is no TOML"), "{said}");
    assert!(!said.contains("hunter2secret"), "{said}");
}

#[test]
fn a_log_that_nobody_reads_does_not_hold_up_the_server() {
    let dir = TempDir::new().unwrap();
    let serving = Serving::start(&dir, &[], &[]);
    // Each stranger costs a line; a pipe holds some hundred, and its reader waits.
    for _ in 0..2_000 {
        let mut stranger = TcpStream::connect(serving.clients).unwrap();
        stranger.write_all(&[0; 8]).unwrap();
        // It may have been closed already.
        let _ = stranger.read(&mut [0; 64]);
    }
    let limit = Some(Duration::from_secs(10));
    let mut admin = TcpStream::connect(serving.admin).unwrap();
    admin.set_read_timeout(limit).unwrap();
    write!(admin, "GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    admin.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
}
