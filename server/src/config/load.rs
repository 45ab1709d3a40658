//! Layers of settings become a [`Config`], or a list of everything that is wrong.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use secrecy::SecretString;

use super::file::{self, FileUser};
use super::keys::{ADMIN, ADMIN_TOKEN, ADMIN_TOKEN_FILE, KEYS, Key};
use super::sources::{Given, Origin, Sources};
use super::{AdminConfig, Config, ConfigError, DEGRADED_AFTER, Limits, LogFormat, Timing, User};

/// Everything that is wrong with a configuration; printed a line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.0.iter().enumerate() {
            let newline = if at > 0 { "\n" } else { "" };
            write!(f, "{newline}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// A configuration, and where its parts come from.
pub struct Loaded {
    /// What the server needs.
    pub config: Config,
    sources: Sources,
    users: Vec<FileUser>,
}

/// Reads the file at `path`, if any, and puts the layers together.
///
/// # Errors
/// All problems at once.
pub fn load(mut sources: Sources, path: Option<&Path>) -> Result<Loaded, Problems> {
    let mut problems = Vec::new();
    let mut users = Vec::new();
    if let Some(path) = path {
        let content = file::parse(path, &mut problems);
        sources.file = content.values;
        sources.path = Some(path.to_owned());
        users = content.users;
    }
    let mut reader = Reader {
        sources: &sources,
        problems,
        failed: Vec::new(),
    };
    let config = reader.config(&users);
    let Reader {
        mut problems,
        failed,
        ..
    } = reader;
    let follows_from_another = |error: &ConfigError| match error {
        ConfigError::Open(_) => failed.contains(&"user"),
        ConfigError::NotAPeer(_) => failed.contains(&"replica_id") || failed.contains(&"peers"),
        _ => false,
    };
    let wrong = config.check();
    problems.extend(
        wrong
            .iter()
            .filter(|error| !follows_from_another(error))
            .map(ToString::to_string),
    );
    if problems.is_empty() {
        Ok(Loaded {
            config,
            sources,
            users,
        })
    } else {
        Err(Problems(problems))
    }
}

/// Takes settings one by one, and goes on after a problem.
struct Reader<'a> {
    sources: &'a Sources,
    problems: Vec<String>,
    failed: Vec<&'static str>,
}

impl Reader<'_> {
    fn config(&mut self, users: &[FileUser]) -> Config {
        let limits = Limits::default();
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        let max_connections = self.number("max_connections");
        Config {
            listen: self.parsed("listen", address).unwrap_or(loopback),
            admin: self.admin(),
            data_dir: self.text("data_dir").unwrap_or_default().into(),
            replica_id: self.parsed("replica_id", number).unwrap_or(1),
            peers: self.parsed("peers", peers).unwrap_or_default(),
            advertise: self.text("advertise"),
            users: self.users(users),
            cluster_secret: self.secret("cluster_secret", "cluster_secret_file"),
            timing: Timing::default(),
            degraded_after: DEGRADED_AFTER,
            limits: Limits {
                max_connections: max_connections.unwrap_or(limits.max_connections),
                max_connections_per_address: self
                    .number("max_connections_per_address")
                    .unwrap_or_else(|| {
                        max_connections
                            .map_or(limits.max_connections_per_address, |most| most.div_ceil(2))
                    }),
                login_timeout: self
                    .parsed("login_timeout_ms", number)
                    .map_or(limits.login_timeout, Duration::from_millis),
            },
            log_format: self
                .parsed("log_format", |text| match text {
                    "text" => Ok(LogFormat::Text),
                    "json" => Ok(LogFormat::Json),
                    _ => Err("is neither text nor json".into()),
                })
                .unwrap_or_default(),
        }
    }

    fn admin(&mut self) -> Option<AdminConfig> {
        let listen = self.parsed(ADMIN.name, |text| match text {
            "off" => Ok(None),
            text => address(text)
                .map(Some)
                .map_err(|error| format!("{error}, or off")),
        });
        let token = self.secret(ADMIN_TOKEN.name, ADMIN_TOKEN_FILE.name);
        Some(AdminConfig {
            listen: listen??,
            token,
        })
    }

    fn users(&mut self, of_file: &[FileUser]) -> Vec<User> {
        let name = self.text("user");
        let password = self.secret("password", "password_file");
        let mut users = Vec::new();
        match (name, password) {
            (Some(name), Some(password)) => match User::new(&name, password) {
                Ok(user) => users.push(user),
                Err(error) => self.problem("user", format!("user: {error}")),
            },
            (Some(name), None) if !self.failed.contains(&"password") => {
                self.problem(
                    "user",
                    format!("user: {name:?} has no password; set password_file (or SKY_PASSWORD)"),
                );
            }
            (None, Some(_)) => {
                self.problem("user", "password: belongs to no user; set user".into());
            }
            _ => {}
        }
        for user in of_file {
            match user.to_user() {
                Ok(user) => users.push(user),
                Err(error) => self.problem("user", error),
            }
        }
        if self.failed.contains(&"password") {
            self.failed.push("user");
        }
        users
    }

    fn text(&mut self, name: &'static str) -> Option<String> {
        self.parsed(name, |text| Ok(text.to_owned()))
    }

    fn number(&mut self, name: &'static str) -> Option<usize> {
        self.parsed(name, number)
    }

    fn parsed<T>(
        &mut self,
        name: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let given = match self.sources.get(find(name)?) {
            Ok(given) => given?,
            Err(problem) => {
                self.problem(name, problem);
                return None;
            }
        };
        let Given { text, origin } = given;
        let parsed = if text.is_empty() {
            Err("is empty; give a value, or leave it out".into())
        } else {
            parse(&text).map_err(|error| format!("{text:?} {error}"))
        };
        parsed
            .map_err(|error| self.problem(name, format!("{origin}: {error}")))
            .ok()
    }

    fn secret(&mut self, direct: &'static str, file: &str) -> Option<SecretString> {
        self.sources
            .secret(find(direct)?, find(file)?)
            .unwrap_or_else(|problem| {
                self.problem(direct, problem);
                None
            })
    }

    fn problem(&mut self, name: &'static str, text: String) {
        self.failed.push(name);
        self.problems.push(text);
    }
}

fn find(name: &str) -> Option<&'static Key> {
    const ALL: &[Key] = &KEYS;
    ALL.iter().find(|key| key.name == name)
}

fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| "is no whole number in the range of this setting".into())
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let loopback = |port| format!("127.0.0.1:{port}");
    let text = text
        .strip_prefix("localhost:")
        .map_or(text.into(), loopback);
    text.parse().map_err(|_| {
        "is no address to listen on; expected IP:PORT, such as 127.0.0.1:9991 or [::]:9991".into()
    })
}

fn peers(text: &str) -> Result<BTreeMap<u16, String>, String> {
    let mut peers = BTreeMap::new();
    for entry in text.split(',') {
        let parsed = entry
            .trim()
            .split_once('=')
            .and_then(|(id, at)| Some((id.parse::<u16>().ok()?, at)));
        let Some((id, at)) = parsed else {
            return Err("is no list of replicas; expected 1=host:9991,2=host:9991".into());
        };
        if peers.insert(id, at.to_owned()).is_some() {
            return Err(format!("lists replica {id} twice"));
        }
    }
    Ok(peers)
}

impl Loaded {
    /// The settings that are in force as a configuration file, each with its origin; secrets are
    /// replaced by a word.
    pub fn print(&self) -> String {
        let mut text = String::new();
        for key in &KEYS {
            // What could not be read was a problem already.
            let (value, origin) = match self.sources.get(key) {
                Ok(Some(given)) => (given.text, given.origin),
                _ => match self.derived(key.name) {
                    Some(value) => (value, Origin::Default(key.name)),
                    None => continue,
                },
            };
            let value = if key.secret { REDACTED } else { &value };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{} = {} # {origin}", key.name, file::quoted(value));
        }
        for user in &self.users {
            let _ = write!(text, "\n{user}");
        }
        text
    }

    /// Defaults that depend on the machine.
    fn derived(&self, name: &str) -> Option<String> {
        let limits = &self.config.limits;
        match name {
            "max_connections" => Some(limits.max_connections.to_string()),
            "max_connections_per_address" => Some(limits.max_connections_per_address.to_string()),
            _ => None,
        }
    }
}

/// What is shown in place of a secret.
pub(super) const REDACTED: &str = "(redacted)";
