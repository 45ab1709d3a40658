//! The demo: several consumers work through one SQL table, while one of them is killed, one joins and the leading
//! server is killed, too.
//!
//! The parent process makes the table, starts servers and consumers as child processes of its own binary (so that a
//! kill is a real one), and checks the table at the end.
//!
//! | file | one idea |
//! |---|---|
//! | `options` | the command line, and how fast to work |
//! | `folder`, `table` | the temporary SQLite file with tasks and ledger |
//! | `worker` | a consumer: the only part that a service would have |
//! | `replica` | a server: three of them are one cluster |
//! | `pipe`, `report` | what children and parent say to each other |
//! | `crew`, `client`, `replicas` | the children as their parent sees them |
//! | `script` | what happens when |
//! | `director` | the one loop that hears, shows and acts; `happening` is what it hears of |
//! | `screen` | bars and lines while it runs |
//! | `audit`, `summary` | what the table and the ledger say at the end |

mod audit;
mod client;
mod crew;
mod director;
mod folder;
mod happening;
mod options;
mod pipe;
mod replica;
mod replicas;
mod report;
mod screen;
mod script;
mod signals;
mod summary;
mod table;
mod worker;

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use audit::{Audit, Expected};
use director::{Director, Ended};
use folder::Folder;
use indicatif::HumanCount;
use options::{Numbering, Options, Role};
use replicas::Replicas;
use screen::Screen;
use signals::Signals;
use skyschedule_common::env;
use skyschedule_server::stderr::{Format, Stderr};
use summary::Summary;
use table::{Table, ids};
use tokio::sync::mpsc;

pub use options::Cli;

/// As in the examples of the documentation.
const GROUP: &str = "1000";
const USER: &str = "moon";
const PASSWORD: &str = "walker";

/// Of what goes to stderr.
const FORMAT: Format = Format::Text { colours: false };

/// Exit code of a demo that was stopped by a signal.
const STOPPED: u8 = 130;

/// Why the demo cannot be shown.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("no temporary folder can be made: {0}; set TMPDIR to a folder that can be written")]
    Folder(#[source] io::Error),
    #[error("the system refuses: {0}")]
    System(#[from] io::Error),
    #[error("the SQLite table cannot be used: {0}")]
    Table(#[from] sqlx::Error),
    #[error("the summary cannot be written: {0}")]
    Json(#[from] serde_json::Error),
}

/// Shows the demo, or is one of its consumers. Exit code 0 only if every task was executed, and none of them twice but
/// those that a killed consumer had no time to mark.
pub async fn run(cli: Cli) -> ExitCode {
    // Nobody may read it: the demo goes on.
    let stderr = Stderr::start(FORMAT);
    let shown = match cli.role {
        Some(Role::Worker(options)) => return worker::run(options, &stderr).await,
        Some(Role::Replica(options)) => return replica::run(options, &stderr).await,
        None => show(cli.options, &stderr).await,
    };
    shown.unwrap_or_else(|failure| {
        stderr.say(&format!("The demo cannot be shown: {failure}"));
        ExitCode::FAILURE
    })
}

async fn show(options: Options, stderr: &Stderr) -> Result<ExitCode, Failure> {
    let mut signals = Signals::new()?;
    let json = options.json || !io::stdout().is_terminal();
    let screen = if json || console::is_dumb() {
        Screen::Lines(stderr.lines())
    } else {
        Screen::bars(options.tasks.into(), options.clients.into())
    };
    introduce(&screen, &options);

    let folder = Folder::new().map_err(Failure::Folder)?;
    let ids = ids(options.tasks);
    let table = Table::open(&folder.database(), 1).await?;
    let slots = options.numbering.slots();
    table.fill(&ids, slots).await?;
    let (tell, inbox) = mpsc::channel(happening::WAITING);
    let program = std::env::current_exe()?;
    let replicas = Replicas::start(program.clone(), &folder, slots, tell.clone()).await?;
    let pace = options.pace();
    let (tasks, name) = (options.tasks, options.numbering.name());
    let director = Director {
        options,
        pace,
        program,
        folder,
        table,
        replicas,
        screen,
        tell,
        inbox,
        began: env::now(),
    };
    let Ended {
        folder,
        table,
        story,
    } = director.play(&mut signals).await;

    let (statuses, ledger) = (table.statuses().await?, table.ledger().await?);
    let killed = story.kill.as_ref().map(|kill| kill.consumer.as_str());
    let expected = Expected {
        ids: &ids,
        killed,
        batch: pace.batch,
        complete: story.complete,
    };
    let audit = Audit::of(&statuses, &ledger, expected);
    table.close().await;
    drop(folder);
    let summary = Summary::new(tasks, pace.batch, name, audit, story);
    tell_end(&summary, json, stderr)
}

fn introduce(screen: &Screen, options: &Options) {
    let title = format!(
        "SkySchedule: {} due tasks in one SQLite table, {}, three servers",
        HumanCount(options.tasks.into()),
        counted(options.clients.into(), "consumer")
    );
    let numbered = match options.numbering {
        Numbering::Modulo => [
            "Each consumer is a process. The servers number them, so that each one knows",
            "which rows are its own: id % total = number. They never touch the table.",
        ],
        Numbering::Slots => [
            "Each consumer is a process. The servers give it some of 1,024 slots, and so",
            "its own rows: slot = id & 1023. A change of members moves few of them.",
        ],
    };
    let plan = "Soon one is killed, another one joins, and the leading server is killed.";
    screen.title(&title, &[numbered[0], numbered[1], plan]);
}

/// `1 task`, `2 tasks`.
fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {what}{plural}", HumanCount(count))
}

fn tell_end(summary: &Summary, json: bool, stderr: &Stderr) -> Result<ExitCode, Failure> {
    let mut out = io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(summary)?)?;
        for trouble in &summary.trouble {
            stderr.say(trouble);
        }
    } else {
        write!(out, "{}", summary.text())?;
    }
    out.flush()?;
    Ok(if summary.ok {
        ExitCode::SUCCESS
    } else if summary.interrupted && summary.trouble.is_empty() && summary.lost == 0 {
        ExitCode::from(STOPPED)
    } else {
        ExitCode::FAILURE
    })
}
