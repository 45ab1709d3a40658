//! The demo, as a user and a script run it; and that its check at the end finds what is wrong.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use skyschedule_common::env;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};

/// Long enough for any step on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A demo that runs, with a folder of its own for temporary files.
struct Demo {
    child: Child,
    stderr: Lines<BufReader<ChildStderr>>,
    folder: TempDir,
}

impl Demo {
    /// 600 tasks, 3 consumers, some 4 seconds.
    fn start(options: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let binaries = std::env::var_os("SKY_BIN_DIR")
            .expect("SKY_BIN_DIR must name the folder with this workspace's binaries: run the tests by tests/run");
        let mut child = Command::new(Path::new(&binaries).join("demo"))
            .args(["--tasks", "600", "--clients", "3", "--seconds", "4"])
            .args(options)
            .env("TMPDIR", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        Self {
            child,
            stderr,
            folder,
        }
    }

    /// Waits until it tells this.
    async fn tells(&mut self, text: &str) {
        let told = async {
            loop {
                let line = self.stderr.next_line().await.unwrap();
                if line.expect("the demo goes on").contains(text) {
                    return;
                }
            }
        };
        env::timeout(PATIENCE, told)
            .await
            .unwrap_or_else(|_| panic!("the demo does not tell: {text}"));
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().unwrap().cast_signed()).unwrap()
    }

    /// Its children's processes that have this part.
    fn children(&self, role: &str) -> Vec<Pid> {
        let parent = self.pid();
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes
            .filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
            .filter(|pid| state(*pid).is_some_and(|(_, its)| its == parent.as_raw_nonzero().get()))
            .filter(|pid| part(*pid).as_deref() == Some(role))
            .collect()
    }

    /// The database that it works on, as somebody else sees it.
    async fn database(&self) -> SqlitePool {
        let file = files(self.folder.path())
            .into_iter()
            .find(|file| file.ends_with("tasks.db"))
            .expect("the demo has made its table");
        let options = SqliteConnectOptions::new().filename(file);
        SqlitePool::connect_with(options.busy_timeout(PATIENCE))
            .await
            .unwrap()
    }

    /// Its end: the exit code and what it printed, which must be one JSON object.
    async fn ended(mut self) -> (ExitStatus, Value) {
        // Somebody must read what it tells.
        let Self { mut stderr, .. } = self;
        let reader = env::spawn(async move { while let Ok(Some(_)) = stderr.next_line().await {} });
        let mut text = String::new();
        let mut stdout = self.child.stdout.take().unwrap();
        let ended = async {
            stdout.read_to_string(&mut text).await.unwrap();
            self.child.wait().await.unwrap()
        };
        let status = env::timeout(PATIENCE, ended).await.expect("the demo ends");
        reader.await.unwrap();
        assert_eq!(
            files(self.folder.path()),
            Vec::<PathBuf>::new(),
            "nothing is left"
        );
        let summary = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("stdout is no JSON object ({error}): {text}"));
        (status, summary)
    }
}

/// The state letter of a process, and its parent.
fn state(pid: Pid) -> Option<(char, i32)> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name, in brackets, may hold anything; after it: state, parent.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// The first argument of a process.
fn part(pid: Pid) -> Option<String> {
    let line = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
    Some(line.split('\0').nth(1)?.to_owned())
}

/// Every file and folder below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .flat_map(|path| [vec![path.clone()], files(&path)].concat())
        .collect()
}

fn number(summary: &Value, key: &str) -> u64 {
    summary[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key} is no count: {summary:#}"))
}

/// A demo in which nothing was lost, though a consumer was killed, one joined, and the leading server was killed.
fn assert_good(status: ExitStatus, summary: &Value) {
    assert!(status.success() && summary["ok"] == true, "{summary:#}");
    assert_eq!(number(summary, "tasks"), 600);
    assert_eq!(number(summary, "executed"), 600);
    for nothing in ["lost", "left", "failed"] {
        assert_eq!(number(summary, nothing), 0, "{nothing}: {summary:#}");
    }
    let twice = number(summary, "executed_twice");
    assert_eq!(twice, number(summary, "executed_twice_allowed"));
    assert!(twice <= number(summary, "batch"), "{summary:#}");

    let by = summary["executed_by"].as_object().unwrap();
    let executions: u64 = by.values().filter_map(Value::as_u64).sum();
    assert_eq!((by.len(), executions), (4, 600 + twice), "{summary:#}");

    assert_eq!(summary["killed"]["consumer"], "consumer-2");
    assert!(
        summary["killed"]["renumbered_ms"].is_number(),
        "{summary:#}"
    );
    let renumberings = summary["renumberings"].as_array().unwrap();
    for cause in ["start", "killed", "joined"] {
        let found = renumberings.iter().any(|one| one["cause"] == cause);
        assert!(found, "no renumbering for {cause}: {summary:#}");
    }
    let leader = &summary["leader_killed"];
    assert!(
        leader["next"].is_number() && leader["next"] != leader["replica"],
        "{summary:#}"
    );
    assert!(leader["without_ms"].is_number(), "{summary:#}");
    assert_eq!(
        (&leader["rows_moved"], &leader["back"]),
        (&Value::Bool(false), &Value::Bool(true)),
        "{summary:#}"
    );
    assert_eq!(summary["trouble"], Value::Array(Vec::new()));
}

#[tokio::test]
async fn the_demo_loses_nothing_and_says_so_in_one_json_object() {
    let (status, summary) = Demo::start(&["--json"]).ended().await;
    assert_good(status, &summary);
    assert_eq!(summary["numbering"], "modulo");
}

#[tokio::test]
async fn the_demo_loses_nothing_with_slots_and_prints_json_where_there_is_no_terminal() {
    let (status, summary) = Demo::start(&["--numbering", "slots"]).ended().await;
    assert_good(status, &summary);
    assert_eq!(summary["numbering"], "slots");
    let renumberings = summary["renumberings"].as_array().unwrap();
    assert!(
        renumberings.iter().all(|one| one["total"] == 1_024),
        "{summary:#}"
    );
}

#[tokio::test]
async fn tasks_that_were_marked_without_execution_or_deleted_are_found() {
    let mut demo = Demo::start(&["--json"]);
    demo.tells("consumers joined").await;
    let database = demo.database().await;
    // The last ones in their order: nobody has begun them.
    for change in [
        "UPDATE task_info SET status = 1 WHERE id >= 297",
        "DELETE FROM task_info WHERE id IN (295, 296)",
    ] {
        sqlx::query(change).execute(&database).await.unwrap();
    }
    database.close().await;
    let (status, summary) = demo.ended().await;
    assert_eq!(status.code(), Some(1), "{summary:#}");
    assert_eq!(number(&summary, "lost"), 5, "{summary:#}");
    assert_eq!(summary["ok"], false);
}

#[tokio::test]
async fn tasks_that_were_executed_twice_without_need_are_found() {
    let mut demo = Demo::start(&["--json"]);
    demo.tells("the leader, is killed").await;
    let database = demo.database().await;
    // As if its owner had executed it, and nobody else had known: marked tasks are due again.
    let again = "UPDATE task_info SET status = 0 WHERE status = 1 AND id IN
        (SELECT task_id FROM task_log WHERE client_id = 'consumer-1' ORDER BY started_us LIMIT 3)";
    sqlx::query(again).execute(&database).await.unwrap();
    database.close().await;
    let (status, summary) = demo.ended().await;
    assert_eq!(status.code(), Some(1), "{summary:#}");
    assert_eq!(number(&summary, "lost"), 0, "{summary:#}");
    let (twice, allowed) = (
        number(&summary, "executed_twice"),
        number(&summary, "executed_twice_allowed"),
    );
    assert_eq!(twice - allowed, 3, "{summary:#}");
}

#[tokio::test]
async fn a_consumer_that_fails_is_named_and_ends_the_demo() {
    let mut demo = Demo::start(&["--json"]);
    demo.tells("consumers joined").await;
    let victim = demo.children("worker")[0];
    kill_process(victim, Signal::KILL).unwrap();
    let (status, summary) = demo.ended().await;
    assert_eq!(status.code(), Some(1), "{summary:#}");
    let trouble = summary["trouble"][0].as_str().unwrap();
    assert!(
        trouble.starts_with("consumer-") && trouble.contains("SIGKILL"),
        "{trouble}"
    );
    assert_eq!(number(&summary, "lost"), 0, "{summary:#}");
}

#[tokio::test]
async fn a_server_that_fails_is_named_and_ends_the_demo() {
    let mut demo = Demo::start(&["--json"]);
    demo.tells("consumers joined").await;
    let victim = demo.children("replica")[0];
    kill_process(victim, Signal::KILL).unwrap();
    let (status, summary) = demo.ended().await;
    assert_eq!(status.code(), Some(1), "{summary:#}");
    let trouble = summary["trouble"][0].as_str().unwrap();
    assert!(
        trouble.starts_with("server-") && trouble.contains("SIGKILL"),
        "{trouble}"
    );
    assert_eq!(number(&summary, "lost"), 0, "{summary:#}");
}

#[tokio::test]
async fn a_demo_that_is_interrupted_ends_in_order_and_sums_up() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut demo = Demo::start(&["--json"]);
        demo.tells("consumers joined").await;
        kill_process(demo.pid(), signal).unwrap();
        let (status, summary) = demo.ended().await;
        assert_eq!(status.code(), Some(130), "{summary:#}");
        assert_eq!(summary["interrupted"], true);
        assert_eq!(number(&summary, "lost"), 0, "{summary:#}");
        assert_eq!(number(&summary, "executed_twice"), 0, "{summary:#}");
        let (executed, left) = (number(&summary, "executed"), number(&summary, "left"));
        assert_eq!(executed + left, 600, "{summary:#}");
        assert!(left > 0, "{summary:#}");
    }
}

#[tokio::test]
async fn children_and_files_do_not_outlive_a_killed_demo() {
    let mut demo = Demo::start(&["--json"]);
    demo.tells("consumers joined").await;
    let children = [demo.children("worker"), demo.children("replica")].concat();
    assert_eq!(children.len(), 6);
    demo.child.kill().await.unwrap();
    let deadline = env::now() + PATIENCE;
    // Whoever takes orphans here may not ask for their ends: they are dead all the same.
    let alive = |pid: &Pid| state(*pid).is_some_and(|(state, _)| state != 'Z');
    while children.iter().any(alive) || !files(demo.folder.path()).is_empty() {
        assert!(
            env::now() < deadline,
            "left behind: {:?}",
            files(demo.folder.path())
        );
        env::sleep(Duration::from_millis(10)).await;
    }
}
