//! Commands that change the replicas of a running cluster.

use std::io::Write as _;
use std::thread::sleep;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::{Value, json};
use skyschedule_common::env;

use super::ask::{Method, Server, pretty};
use super::{Failure, asking, print, show};

/// How long a new replica may take to catch up.
const CATCH_UP: Duration = Duration::from_secs(600);
/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(500);
/// How long is asked again while there is no leader: many elections fit in.
const ELECTED: Duration = Duration::from_secs(6);

/// `skyschedule cluster`, which shows the replicas, and its commands.
pub(super) fn command() -> Command {
    let id = |help| {
        Arg::new("id")
            .value_name("ID")
            .help(help)
            .value_parser(value_parser!(u16).range(1..))
    };
    let add = Command::new("add")
        .about("Adds a replica: first as a learner, then, when it has caught up, as a voter")
        .arg(id("Its --replica-id: a number that no replica of this cluster has, or ever had").required(true))
        .arg(
            Arg::new("address")
                .value_name("HOST:PORT")
                .required(true)
                .help("Where the other replicas reach it"),
        )
        .after_help(
            "Start the new replica first: with --replica-id ID, an empty data folder, the cluster's secret, and --peers that \
             list it beside the others. It waits until it is added. Repeat the command if it was interrupted.",
        );
    let remove = Command::new("remove")
        .about("Removes a replica for good; one that leads hands over first")
        .arg(id("Which").required(true))
        .arg(
            Arg::new("force")
                .long("force")
                .action(ArgAction::SetTrue)
                .help("Also where too few voters that can be reached would be left: then nothing is numbered until enough are back"),
        );
    let transfer = Command::new("transfer")
        .about("Has another replica lead")
        .arg(id("Which; the one that knows most by default"));
    asking(
        "cluster",
        "Shows the replicas, as the one that is asked sees them; or adds one, removes one, has another one lead",
    )
    // Before and after the name of the command.
    .mut_args(|arg| arg.global(true))
    .subcommands([add, remove, transfer])
}

/// Runs a command of `skyschedule cluster`.
pub(super) fn change(matches: &ArgMatches) -> Result<(), Failure> {
    let Some((name, matches)) = matches.subcommand() else {
        return Ok(());
    };
    let server = Server::of(matches)?;
    let id = matches.get_one::<u16>("id").copied();
    let path = |id: u16| format!("api/v1/cluster/replicas/{id}");
    let cluster = match (name, id) {
        ("add", Some(id)) => {
            let address = matches.get_one::<String>("address");
            add(&server, id, address.map_or("", String::as_str))?
        }
        ("remove", Some(id)) => {
            let force = matches.get_flag("force");
            let path = format!("{}?force={force}", path(id));
            ask_leader(&server, Method::Delete, &path, None)?
        }
        _ => {
            let body = json!({ "to": id });
            let path = "api/v1/cluster/transfer";
            ask_leader(&server, Method::Post, path, Some(&body))?
        }
    };
    let text = match matches.get_flag("json") {
        true => pretty(&cluster),
        false => show::cluster(&cluster),
    };
    print(&text);
    Ok(())
}

/// Changes are the leader's to decide, and any server passes them on to it. While the servers elect one, asks again.
fn ask_leader(
    server: &Server,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Value, Failure> {
    let until = env::now() + ELECTED;
    let mut asked = 0;
    loop {
        asked += 1;
        let refusal = match server.call(method, path, body)? {
            Ok(cluster) => return Ok(cluster),
            Err(refusal) => refusal,
        };
        let is_removal = matches!(method, Method::Delete);
        match refusal.code.as_str() {
            "no_leader" if env::now() < until => sleep(PAUSE),
            // The answer to an earlier question was lost with the leader that gave it.
            "not_found" if is_removal && asked > 1 => {
                return server.must(Method::Get, "api/v1/cluster", None);
            }
            _ => return Err(Failure::Failed(refusal.text)),
        }
    }
}

/// Asks until the new replica votes.
fn add(server: &Server, id: u16, address: &str) -> Result<Value, Failure> {
    let path = format!("api/v1/cluster/replicas/{id}");
    let until = env::now() + CATCH_UP;
    loop {
        let body = json!({ "address": address });
        let cluster = ask_leader(server, Method::Put, &path, Some(&body))?;
        let mut replicas = cluster["replicas"].as_array().into_iter().flatten();
        let new = replicas.find(|replica| replica["id"] == id);
        if new.is_some_and(|replica| replica["voter"] == true) {
            return Ok(cluster);
        }
        if env::now() >= until {
            return Err(Failure::Failed(format!(
                "replica {id} has not caught up yet; it goes on, and the same command finishes it"
            )));
        }
        let lag = new.map_or(&Value::Null, |replica| &replica["lag"]);
        // Nobody may be listening.
        let _ = writeln!(
            std::io::stderr(),
            "replica {id} catches up, {lag} entries to go"
        );
        sleep(PAUSE);
    }
}
