//! The command line.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done, or asked to stop |
//! | 1 | failed while running, or stopped at once |
//! | 2 | bad configuration or usage |

mod ask;
mod cluster;
mod logs;
mod serve;
mod show;
mod unanswered;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};
use skyschedule_common::ids::{ClientId, GroupName};
use skyschedule_server::config::{ADMIN, ADMIN_TOKEN_FILE, KEYS, Key, Sources};

/// Why a command ends with another code than 0. The text may have several lines; an empty one was told already.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// Exit code 2.
    #[error("{0}")]
    Usage(String),
}

/// Runs what the process was asked for.
pub(crate) fn run() -> ExitCode {
    let matches = command().get_matches();
    let done = match matches.subcommand() {
        Some(("serve", matches)) => serve::serve(matches),
        Some(("cluster", matches)) if matches.subcommand().is_some() => cluster::change(matches),
        Some(("groups", matches)) => match matches.subcommand() {
            Some((_, delete)) => ask::delete_group(delete),
            None => ask::ask("groups", matches),
        },
        Some((name, matches)) => ask::ask(name, matches),
        None => Ok(()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let (text, code) = match failure {
                Failure::Failed(text) => (text, 1),
                Failure::Usage(text) => (text, 2),
            };
            if !text.is_empty() {
                // Nobody may be listening.
                let _ = writeln!(std::io::stderr(), "{text}");
            }
            ExitCode::from(code)
        }
    }
}

/// What does not fit into the line of a flag.
const SERVE_HELP: &str = "\
A flag wins over the environment, that over the file, that over the default. More users, each with the groups that it
may use, are entries [[users]] of the file: name, password_file, groups.
Logs go to stderr; RUST_LOG says of what (info by default). Exit code 0: asked to stop; 1: failed; 2: bad settings.

Three replicas survive the loss of one, five that of two. On each host, with its own number:
  skyschedule serve --replica-id 1 --peers 1=sky-1:9991,2=sky-2:9991,3=sky-3:9991 \\
      --listen 0.0.0.0:9991 --user moon --password-file password --cluster-secret-file secret
They form a cluster when all have been started, in any order; later each may be restarted by itself.
SIGTERM hands the leadership over first, so that no share moves. Without a majority for 5 s, a replica numbers
the clients that turn to it by itself (exclusive groups wait); skyschedule status and /metrics show it.";

fn command() -> Command {
    let serve = Command::new("serve")
        .about("Runs a server")
        .arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .env("SKY_CONFIG")
                .help("TOML file with settings, each named as its flag, with _ for -"),
        )
        .args(KEYS.iter().filter_map(argument))
        .arg(
            Arg::new("print_config")
                .long("print-config")
                .action(ArgAction::SetTrue)
                .help("Prints the settings in force and where each comes from, then ends"),
        )
        .after_help(SERVE_HELP);
    let group = Arg::new("group")
        .value_name("GROUP")
        .help("Name of the group")
        .required(true)
        .value_parser(clap::value_parser!(GroupName));
    let client = Arg::new("client")
        .value_name("CLIENT")
        .help("The client's id, as skyschedule members shows it")
        .required(true)
        .value_parser(clap::value_parser!(ClientId));
    let members = asking(
        "members",
        "Shows the members of a group: what each holds, and who has still to release rows",
    )
    .arg(&group);
    let drain = asking(
        "drain",
        "Lets a member's share move away while it stays connected",
    )
    .args([&group, &client])
    .after_help("It ends by undrain, by Client::drain(false) in the client, or when the client's process is started anew.");
    let undrain = asking(
        "undrain",
        "Takes a drain back: the member gets its part of the rows again",
    )
    .args([&group, &client]);
    let delete = Command::new("delete")
        .about("Deletes a group that has no members, with its settings")
        .arg(&group)
        .after_help(
            "Only when its clients run no more: one that still does makes the group anew, with the settings that groups \
             have at first. Epochs go on where they were.",
        );
    let groups = asking("groups", "Shows all groups; or deletes one")
        // Before and after the name of the command.
        .mut_args(|arg| arg.global(true))
        .subcommand(delete);
    Command::new("skyschedule")
        .about("Numbers the clients of each group: WHERE id % total = num")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(serve)
        .subcommand(asking(
            "status",
            "Shows the replicas, whether the one that is asked serves (else the exit code is 1), and what is wrong with groups",
        ))
        .subcommand(cluster::command())
        .subcommand(groups)
        .subcommand(members)
        .subcommand(drain)
        .subcommand(undrain)
}

/// A command that asks a running server.
fn asking(name: &'static str, about: &'static str) -> Command {
    let admin = Key {
        value: "HOST:PORT|URL",
        help: "Where the server's admin interface is",
        ..ADMIN
    };
    let token = Key {
        help: "File with the token that the admin interface asks for (or SKY_ADMIN_TOKEN)",
        ..ADMIN_TOKEN_FILE
    };
    Command::new(name)
        .about(about)
        .args([admin, token].iter().filter_map(argument))
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Prints JSON instead of a table"),
        )
}

/// The flag of a setting. It is read as text: what it means is checked together with the other layers.
fn argument(key: &Key) -> Option<Arg> {
    let mut help = format!("{} [env: {}]", key.help, key.variable());
    if let Some(default) = key.default {
        help.push_str(&format!(" [default: {default}]"));
    }
    let argument = Arg::new(key.name)
        .long(key.flag()?)
        .value_name(key.value)
        .help(help);
    Some(argument)
}

/// The layers of settings but the file.
fn sources(matches: &ArgMatches, keys: &[Key]) -> Sources {
    let flags = keys
        .iter()
        .filter(|key| !key.secret)
        .filter_map(|key| Some((key.name, matches.get_one::<String>(key.name)?.clone())))
        .collect::<BTreeMap<_, _>>();
    Sources::new(flags, std::env::vars_os())
}

/// Prints to stdout. A reader that has gone away is no failure.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        super::command().debug_assert();
    }
}
