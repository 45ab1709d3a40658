//! Commands that change the replicas of a running cluster.

use std::io::Write as _;
use std::thread::sleep;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::{Value, json};
use skyschedule_common::env;

use super::ask::{Method, PAUSE, Server, pretty};
use super::{Failure, asking, print, show};

/// How long a new replica may take to catch up.
const CATCH_UP: Duration = Duration::from_secs(600);

const REPLICA_ID: &str = "Its --replica-id: a number that no replica of this cluster has. That of a removed one may be used again, \
     once its old data folder is gone for good";

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
        .arg(id(REPLICA_ID).required(true))
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
        "Shows the replicas, as the one that is asked sees them, and what each lacks, as the leader knows; or adds one, removes one, has another one lead",
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
            Some(add(&server, id, address.map_or("", String::as_str))?)
        }
        ("remove", Some(id)) => {
            let force = matches.get_flag("force");
            let path = format!("{}?force={force}", path(id));
            server.change(Method::Delete, &path, None)?
        }
        _ => {
            let body = json!({ "to": id });
            let path = "api/v1/cluster/transfer";
            server.change(Method::Post, path, Some(&body))?
        }
    };
    let cluster = match cluster {
        Some(mut cluster) => {
            server.add_lags(&mut cluster);
            cluster
        }
        None => server.cluster()?,
    };
    let text = match matches.get_flag("json") {
        true => pretty(&cluster),
        false => show::cluster(&cluster),
    };
    print(&text);
    Ok(())
}

/// Asks until the new replica votes.
fn add(server: &Server, id: u16, address: &str) -> Result<Value, Failure> {
    let path = format!("api/v1/cluster/replicas/{id}");
    let until = env::now() + CATCH_UP;
    loop {
        let body = json!({ "address": address });
        let cluster = server.change(Method::Put, &path, Some(&body))?;
        let cluster = cluster.unwrap_or_default();
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
        let lag = new.and_then(|replica| replica["lag"].as_u64());
        let lag = lag.map(|lag| format!(", {lag} entries to go"));
        // Nobody may be listening.
        let _ = writeln!(
            std::io::stderr(),
            "replica {id} catches up{}",
            lag.unwrap_or_default()
        );
        sleep(PAUSE);
    }
}
