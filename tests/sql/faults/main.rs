//! Sixty seconds of faults, on real processes: three replicas and eight consumers work through a table, while each of
//! them is killed, paused, restarted and cut off at times that dice say. Then the ledger is judged.
//!
//! `SKY_FAULT_SEED=N` plays the faults of a run again that printed this seed, `SKY_FAULT_SECONDS=N` plays longer, and
//! `SKY_FAULT_LOGS=FOLDER` keeps what all processes logged.
//!
//! | file | one idea |
//! |---|---|
//! | `dice` | chance that comes again with its seed |
//! | `play` | the faults, and who meets them |
//! | `story` | what was done to whom, and when |
//! | `told` | what else befell consumers, as logs tell |
//! | `judge` | what ran twice, and which fault explains it |
//! | `holds` | whether two processes held one row |

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a helper of a test may fail like the test itself"
)]

#[path = "../common/mod.rs"]
mod common;
mod dice;
mod holds;
mod judge;
mod play;
mod story;
mod told;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::consumers::prepare;
use common::place::Place;
use dice::Dice;
use futures_util::future::{join, join_all};
use holds::Hold;
use judge::{Executions, Twice};
use play::{Cast, Consumer};
use serde_json::{Value, json};
use skyschedule_client::Dialect;
use skyschedule_common::env;
use skyschedule_tests::mesh::{Doors, Mesh};
use story::{Fault, Kind, Story};
use tempfile::TempDir;

const GROUP: &str = "1000";
const CONSUMERS: usize = 8;

/// So many reach the servers through doors of their own, which are shut at times.
const BEHIND_DOORS: usize = 4;

/// Rows that a consumer may have executed and not yet marked.
const BATCH: usize = 100;

/// After how long a member of an available group that does not release is overtaken.
const DRAIN_TIMEOUT_MS: i64 = 1_000;

/// How long faults go on, unless SKY_FAULT_SECONDS says otherwise.
const SECONDS: u64 = 60;

/// How long what is left may take when all faults are over.
const LIMIT: Duration = Duration::from_secs(120);

/// Where the processes of a run write their logs.
enum Logs {
    Kept(PathBuf),
    Gone(TempDir),
}

impl Logs {
    fn new(run: &str) -> Self {
        let Some(folder) = std::env::var_os("SKY_FAULT_LOGS") else {
            return Self::Gone(TempDir::new().unwrap());
        };
        let folder = PathBuf::from(folder).join(run.replace(", ", "-"));
        std::fs::create_dir_all(&folder).unwrap();
        Self::Kept(folder)
    }

    fn path(&self) -> &Path {
        match self {
            Self::Kept(folder) => folder,
            Self::Gone(folder) => folder.path(),
        }
    }
}

/// One run.
struct Run {
    name: &'static str,
    tasks: u64,
    settings: Value,
    flags: &'static [&'static str],
}

/// What is left of it, after it was checked that nothing is lost: each task is done, and somebody did it.
struct Outcome {
    executions: Executions,
    holds: Vec<Hold>,
    faults: Vec<Fault>,
}

fn seconds() -> u64 {
    let given = std::env::var("SKY_FAULT_SECONDS").ok();
    given.map_or(SECONDS, |text| text.parse().expect("a number of seconds"))
}

fn seed() -> u64 {
    let given = std::env::var("SKY_FAULT_SEED").ok();
    given.map_or_else(env::rng::u64, |text| {
        text.parse().expect("a seed is a number")
    })
}

impl Run {
    async fn play(self, place: &Place) -> Outcome {
        let Self { name, tasks, .. } = self;
        let seed = seed();
        println!("{name}: SKY_FAULT_SEED={seed}");
        let mut dice = Dice::new(seed);
        prepare(place, tasks).await;
        let mut mesh = Mesh::start().await;
        let admin = mesh.cluster.servers[0].admin();
        admin.configure(GROUP, &self.settings).await;

        let servers = &mesh.cluster.servers;
        let story = Story::default();
        let cast = Cast {
            place,
            flags: self.flags,
            servers: servers.iter().map(|server| server.address()).collect(),
            logs: Logs::new(name),
            story: story.clone(),
        };
        due_over(place, tasks, seconds()).await;
        let begun = env::unix_micros();
        let mut consumers = Vec::new();
        for at in 0..CONSUMERS {
            let doors = match at < BEHIND_DOORS {
                true => Some(Doors::to(&mesh.cluster).await),
                false => None,
            };
            consumers.push(Consumer::start(&cast, at, doors, dice.fork()));
        }

        let until = env::now() + Duration::from_secs(seconds());
        let Mesh { cluster, network } = &mut mesh;
        let replicas = cluster
            .servers
            .iter_mut()
            .enumerate()
            .map(|(at, server)| play::replica(server, at, network, &story, dice.fork(), until));
        let replicas = join_all(replicas.collect::<Vec<_>>());
        join(
            replicas,
            join_all(consumers.iter_mut().map(|one| one.play(until))),
        )
        .await;

        let left = place.with_status(0).await;
        let drained = env::now();
        while place.with_status(0).await > 0 {
            consumers.iter_mut().for_each(Consumer::look_after);
            assert!(drained.elapsed() < LIMIT, "{name}: tasks are left alone");
            env::sleep(Duration::from_millis(200)).await;
        }
        println!(
            "{name}: {left} of {tasks} tasks were left, and done {:?} after the last fault",
            drained.elapsed()
        );
        println!("{name}: {story}");
        mesh.cluster.ready().await;
        join_all(consumers.iter_mut().map(Consumer::stop)).await;

        let mut faults = story.faults();
        for (at, server) in mesh.cluster.servers.iter().enumerate() {
            faults.extend(told::overtaken(&server.log(), begun));
            let log = cast.logs.path().join(format!("replica-{}", at + 1));
            std::fs::write(log, server.log()).unwrap();
        }
        for consumer in &consumers {
            let logs = consumer
                .logs()
                .map(|log| std::fs::read_to_string(log).unwrap());
            faults.extend(logs.flat_map(|log| told::alone(&consumer.id, &log, begun)));
        }
        faults.sort_by_key(|fault| fault.from);
        let executions = judge::executions(place).await;
        let lost = tasks - u64::try_from(executions.len()).unwrap();
        assert_eq!(
            place.with_status(1).await,
            i64::try_from(tasks).unwrap(),
            "{name}"
        );
        assert_eq!(lost, 0, "{name}: marked and never executed");
        let logs = consumers.iter().flat_map(Consumer::logs);
        Outcome {
            executions,
            holds: logs.flat_map(|log| holds::read(&log)).collect(),
            faults,
        }
    }
}

/// The tasks become due one by one over so many seconds, so that there is work as long as there are faults.
async fn due_over(place: &Place, tasks: u64, seconds: u64) {
    let micros = seconds * 1_000_000 / tasks;
    let due = match place.dialect {
        Dialect::MySql => format!("NOW(6) + INTERVAL id * {micros} MICROSECOND"),
        _ => format!("now() + id * {micros} * INTERVAL '1 microsecond'"),
    };
    place
        .execute(&format!("UPDATE task_info SET task_time = {due}"))
        .await;
}

async fn available(place: &Place) {
    let run = Run {
        name: "available, PostgreSQL",
        tasks: 20_000,
        settings: json!({ "lease_ms": 3_000, "drain_timeout_ms": DRAIN_TIMEOUT_MS }),
        flags: &[],
    };
    let name = run.name;
    let Outcome {
        executions, faults, ..
    } = run.play(place).await;
    let twice = Twice::of(&executions, &faults);
    let of = |kind| twice.count(kind);
    println!(
        "{name}: executed twice by owners that were killed {}, paused {}, overtaken {}, cut off {}, without any server {}, \
         numbered without a quorum {}; unexplained {}",
        of(Kind::Killed),
        of(Kind::Paused),
        of(Kind::Overtaken),
        of(Kind::CutOff),
        of(Kind::Alone),
        twice.degraded,
        twice.unexplained.len()
    );
    for (task, first, second) in twice.unexplained.iter().take(20) {
        println!("  task {task}: {first:?}, {second:?}");
    }
    if !twice.unexplained.is_empty() {
        faults.iter().for_each(|fault| println!("  {fault:?}"));
    }
    assert!(
        twice.unexplained.is_empty(),
        "{name}: executed twice without need"
    );
    assert!(
        twice.beyond(BATCH).is_empty(),
        "{name}: more than a batch: {:?}",
        twice.beyond(BATCH)
    );
}

async fn exclusive(name: &'static str, place: &Place) {
    let run = Run {
        name,
        tasks: 6_000,
        settings: json!({
            "lease_ms": 3_000, "drain_timeout_ms": DRAIN_TIMEOUT_MS, "consistency": "exclusive", "numbering": "slots", "slots": 64,
        }),
        flags: &["--delivery", "exactly-once", "--consistency", "exclusive"],
    };
    let Outcome {
        executions, holds, ..
    } = run.play(place).await;
    let twice = executions
        .values()
        .filter(|executions| executions.len() > 1)
        .count();
    let overlaps = holds::overlaps(&holds);
    println!(
        "{name}: {} handlers began, {twice} tasks took effect twice, {} rows were held by two",
        holds.len(),
        overlaps.len()
    );
    for (first, second) in overlaps.iter().take(20) {
        println!("  {first:?}, {second:?}");
    }
    assert_eq!(twice, 0, "{name}: effects that happened twice");
    assert!(
        holds.len() >= executions.len(),
        "{name}: executions that are not in the logs"
    );
    assert!(overlaps.is_empty(), "{name}: rows held by two at a time");
}

/// All three at the same time: it is one minute for all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_minute_of_faults_nothing_is_lost_and_nothing_runs_twice_beyond_the_guarantees() {
    let (one, two, three) = (
        Place::postgres().await,
        Place::postgres().await,
        Place::mariadb().await,
    );
    let both = join(
        exclusive("exclusive, PostgreSQL", &two),
        exclusive("exclusive, MariaDB", &three),
    );
    join(available(&one), both).await;
    for place in [one, two, three] {
        place.remove().await;
    }
}
