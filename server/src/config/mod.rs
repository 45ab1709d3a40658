//! What a server is told by its operator.
//!
//! [`Config`] is what the library needs, and [`Config::check`] the one place that says which
//! combinations are refused. [`load`] makes it of flags, the environment and a file.

mod file;
mod keys;
mod load;
mod sources;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::{ExposeSecret as _, SecretString};
use skyschedule_common::auth::{AuthError, Credentials, UserName};
use skyschedule_common::ids::GroupName;

use crate::consensus::MAX_REPLICAS;
pub use crate::consensus::Timing;
pub use keys::{ADMIN, ADMIN_TOKEN, ADMIN_TOKEN_FILE, KEYS, Key};
pub use load::{Loaded, Problems, load};
pub use sources::Sources;

/// Fewest characters of an admin token or a cluster secret: nobody guesses that many random ones.
pub const MIN_SECRET: usize = 16;

/// Several elections long, and no longer than a usual lease.
pub(crate) const DEGRADED_AFTER: Duration = Duration::from_secs(5);

/// Descriptors that are not for connections of clients: store, admin interface, logs.
const SPARE_DESCRIPTORS: usize = 512;

/// Most connections unless configured otherwise, where the system allows as many.
const MAX_CONNECTIONS: usize = 20_000;

/// Everything that a server needs to start. Printing it hides what is secret.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where clients and replicas connect. Port 0 lets the system choose.
    pub listen: SocketAddr,
    /// The admin interface; none: there is no such interface.
    pub admin: Option<AdminConfig>,
    /// Folder of the command log, created where it does not exist.
    pub data_dir: PathBuf,
    /// This replica, from 1.
    pub replica_id: u16,
    /// Every replica's `host:port`, this one included; empty: the replica is alone.
    pub peers: BTreeMap<u16, String>,
    /// The `host:port` that clients are told; none: where the server listens.
    pub advertise: Option<String>,
    /// Who may log in; empty: everyone who reaches the loopback interface.
    pub users: Vec<User>,
    /// What replicas prove to each other.
    pub cluster_secret: Option<SecretString>,
    /// How long replicas wait for each other.
    pub timing: Timing,
    /// After so long without a quorum, a replica numbers by itself the clients of available groups that turn to it.
    pub degraded_after: Duration,
    /// Bounds of what peers may use up.
    pub limits: Limits,
    /// How log lines look.
    pub log_format: LogFormat,
}

/// The admin interface.
#[derive(Debug, Clone)]
pub struct AdminConfig {
    /// Where it listens. Port 0 lets the system choose.
    pub listen: SocketAddr,
    /// What callers must present; none: whoever reaches the loopback interface may do everything,
    /// and beyond it only probes are answered.
    pub token: Option<SecretString>,
}

/// Who may log in.
#[derive(Debug, Clone)]
pub struct User {
    /// The name.
    pub name: UserName,
    /// The password, never empty.
    pub password: SecretString,
    /// Groups that the user's clients may be members of; none: all.
    pub groups: Option<Vec<GroupName>>,
}

impl User {
    /// A user of all groups.
    ///
    /// # Errors
    /// When the name is none, or the password is empty.
    pub fn new(name: &str, password: impl Into<SecretString>) -> Result<Self, AuthError> {
        let password = password.into();
        let credentials = Credentials::new(name, password.clone())?;
        Ok(Self {
            name: credentials.user().clone(),
            password,
            groups: None,
        })
    }
}

/// Bounds of what peers may use up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most connections at a time.
    pub max_connections: usize,
    /// Most connections at a time from one address.
    pub max_connections_per_address: usize,
    /// How long a connection may take until its login is done.
    pub login_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let max_connections = open_files()
            .saturating_sub(SPARE_DESCRIPTORS)
            .clamp(1, MAX_CONNECTIONS);
        Self {
            max_connections,
            // One address alone must not lock out all others.
            max_connections_per_address: max_connections.div_ceil(2),
            login_timeout: Duration::from_secs(5),
        }
    }
}

/// Descriptors that the system lets this process have.
fn open_files() -> usize {
    rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .current
        .and_then(|limit| usize::try_from(limit).ok())
        .unwrap_or(usize::MAX)
}

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Why a server does not start with this configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Strangers would be let in.
    #[error(
        "listen: {0} can be reached from other machines, and no user is configured, so that anyone could log in: \
         set user and password_file, or listen on 127.0.0.1"
    )]
    Open(SocketAddr),
    /// Replicas are numbered from 1.
    #[error("replica_id: must be from 1 to 65535")]
    ReplicaId,
    /// The list of replicas lacks this one.
    #[error("peers: must list every replica, this one (replica_id {0}) included")]
    NotAPeer(u16),
    /// A number of replicas that is of no use.
    #[error(
        "peers: lists {0} replicas; use one, three or five: more than {MAX_REPLICAS} only make each decision slower"
    )]
    Replicas(usize),
    /// Strangers could take part in decisions.
    #[error(
        "peers: {0} can be reached from other machines, and there is no cluster_secret, so that anyone could pass for a replica: \
         set --cluster-secret-file FILE (or SKY_CLUSTER_SECRET_FILE, or cluster_secret_file in the file of settings) on every \
         replica, each with the same secret of at least {MIN_SECRET} characters, such as `openssl rand -base64 32 > FILE` makes; or \
         listen on 127.0.0.1"
    )]
    OpenCluster(SocketAddr),
    /// Not a place to connect to.
    #[error("{key}: {text:?} is not host:port with a port from 1 to 65535")]
    HostAndPort {
        /// Which setting.
        key: &'static str,
        /// What it says.
        text: String,
    },
    /// Two passwords for one name.
    #[error("users: {0} is there twice; give each user one entry")]
    UserTwice(UserName),
    /// A user who may do nothing.
    #[error("users: {0} has an empty list of groups; name some, or leave groups out to allow all")]
    NoGroups(UserName),
    /// Nobody may log in with nothing.
    #[error("users: the password of {0} is empty; set one")]
    EmptyPassword(UserName),
    /// A secret that can be guessed.
    #[error("{0}: has fewer than {MIN_SECRET} characters; use at least as many random ones")]
    ShortSecret(&'static str),
    /// Limits that let nobody in.
    #[error("{0}: must be at least 1")]
    Zero(&'static str),
    /// More connections than descriptors.
    #[error(
        "max_connections: {asked} connections do not fit into the {allowed} files that this process may open; \
         raise the limit (ulimit -n) or lower max_connections"
    )]
    Descriptors {
        /// Connections asked for.
        asked: usize,
        /// Descriptors allowed.
        allowed: usize,
    },
}

impl Config {
    /// A server embedded in another process: on the loopback interface at a port that the system
    /// chooses, alone, without users and without an admin interface.
    pub fn embedded(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            admin: None,
            data_dir: data_dir.into(),
            replica_id: 1,
            peers: BTreeMap::new(),
            advertise: None,
            users: Vec::new(),
            cluster_secret: None,
            timing: Timing::default(),
            degraded_after: DEGRADED_AFTER,
            limits: Limits::default(),
            log_format: LogFormat::default(),
        }
    }

    /// Everything that is impossible or unsafe in this configuration; empty: nothing.
    pub fn check(&self) -> Vec<ConfigError> {
        let mut wrong = Vec::new();
        if !self.listen.ip().is_loopback() && self.users.is_empty() {
            wrong.push(ConfigError::Open(self.listen));
        }
        self.check_replicas(&mut wrong);
        self.check_users(&mut wrong);
        let token = self.admin.as_ref().and_then(|admin| admin.token.as_ref());
        let secrets = [
            ("admin_token", token),
            ("cluster_secret", self.cluster_secret.as_ref()),
        ];
        for (key, secret) in secrets {
            if secret.is_some_and(|s| s.expose_secret().chars().count() < MIN_SECRET) {
                wrong.push(ConfigError::ShortSecret(key));
            }
        }
        self.limits.check(&mut wrong);
        wrong
    }

    fn check_replicas(&self, wrong: &mut Vec<ConfigError>) {
        if self.replica_id == 0 {
            wrong.push(ConfigError::ReplicaId);
        }
        if !self.peers.is_empty() && !self.peers.contains_key(&self.replica_id) {
            wrong.push(ConfigError::NotAPeer(self.replica_id));
        }
        if self.peers.len() > MAX_REPLICAS {
            wrong.push(ConfigError::Replicas(self.peers.len()));
        }
        let loopback = self.listen.ip().is_loopback();
        if self.peers.len() > 1 && self.cluster_secret.is_none() && !loopback {
            wrong.push(ConfigError::OpenCluster(self.listen));
        }
        let advertised = self.advertise.iter().map(|text| ("advertise", text));
        for (key, text) in self
            .peers
            .values()
            .map(|text| ("peers", text))
            .chain(advertised)
        {
            if !is_host_and_port(text) {
                let text = text.clone();
                wrong.push(ConfigError::HostAndPort { key, text });
            }
        }
    }

    fn check_users(&self, wrong: &mut Vec<ConfigError>) {
        for (at, user) in self.users.iter().enumerate() {
            let name = || user.name.clone();
            if self.users[..at].iter().any(|other| other.name == user.name) {
                wrong.push(ConfigError::UserTwice(name()));
            }
            if user.groups.as_ref().is_some_and(Vec::is_empty) {
                wrong.push(ConfigError::NoGroups(name()));
            }
            if user.password.expose_secret().trim().is_empty() {
                wrong.push(ConfigError::EmptyPassword(name()));
            }
        }
    }
}

impl Limits {
    fn check(&self, wrong: &mut Vec<ConfigError>) {
        let zeros = [
            ("max_connections", self.max_connections == 0),
            (
                "max_connections_per_address",
                self.max_connections_per_address == 0,
            ),
            ("login_timeout_ms", self.login_timeout.is_zero()),
        ];
        wrong.extend(
            zeros
                .into_iter()
                .filter(|(_, zero)| *zero)
                .map(|(key, _)| ConfigError::Zero(key)),
        );
        let (asked, allowed) = (self.max_connections, open_files());
        if asked >= allowed {
            wrong.push(ConfigError::Descriptors { asked, allowed });
        }
    }
}

/// Whether this is a host (a name, an IPv4 address, or an IPv6 address in brackets) and a port.
pub(crate) fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    let plain = host
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    let host_ok = if bracketed {
        text.parse::<SocketAddr>().is_ok()
    } else {
        !host.is_empty() && plain
    };
    host_ok && port.parse::<u16>().is_ok_and(|port| port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(change: impl FnOnce(&mut Config)) -> Vec<ConfigError> {
        let mut config = Config::embedded("data");
        change(&mut config);
        config.check()
    }

    #[test]
    fn an_embedded_server_may_start() {
        assert_eq!(wrong(|_| {}), []);
    }

    #[test]
    fn beyond_loopback_only_with_users() {
        let open: SocketAddr = "0.0.0.0:9991".parse().unwrap();
        assert_eq!(wrong(|c| c.listen = open), [ConfigError::Open(open)]);
        assert_eq!(
            wrong(|c| {
                c.listen = open;
                c.users.push(User::new("moon", "walker").unwrap());
            }),
            []
        );
    }

    #[test]
    fn everything_wrong_is_said_at_once() {
        let name = UserName::try_from("moon").unwrap();
        let found = wrong(|c| {
            c.replica_id = 0;
            c.peers = (1..10).map(|id| (id, format!("a:{id}"))).collect();
            c.peers.insert(10, "b".to_owned());
            c.advertise = Some("c:0".into());
            c.users = vec![User::new("moon", "walker").unwrap(); 2];
            c.users[1].groups = Some(vec![]);
            c.users[1].password = " ".into();
            c.cluster_secret = Some("short".into());
            c.limits.login_timeout = Duration::ZERO;
            c.limits.max_connections = usize::MAX;
        });
        let texts = |key, text: &str| ConfigError::HostAndPort {
            key,
            text: text.into(),
        };
        assert_eq!(
            found,
            [
                ConfigError::ReplicaId,
                ConfigError::NotAPeer(0),
                ConfigError::Replicas(10),
                texts("peers", "b"),
                texts("advertise", "c:0"),
                ConfigError::UserTwice(name.clone()),
                ConfigError::NoGroups(name.clone()),
                ConfigError::EmptyPassword(name),
                ConfigError::ShortSecret("cluster_secret"),
                ConfigError::Zero("login_timeout_ms"),
                ConfigError::Descriptors {
                    asked: usize::MAX,
                    allowed: open_files()
                },
            ]
        );
    }

    #[test]
    fn hosts_and_ports() {
        for good in ["sky-1:9991", "10.0.0.1:1", "[::1]:9991", "a.b_c:65535"] {
            assert!(is_host_and_port(good), "{good}");
        }
        for bad in [
            "",
            "sky",
            ":1",
            "sky:0",
            "sky:65536",
            "::1:9991",
            "[::1]",
            "a b:1",
            "http://a:1",
        ] {
            assert!(!is_host_and_port(bad), "{bad}");
        }
    }

    #[test]
    fn printing_hides_secrets() {
        let mut config = Config::embedded("data");
        config.users.push(User::new("moon", "walker").unwrap());
        config.cluster_secret = Some("0123456789abcdef".into());
        config.admin = Some(AdminConfig {
            listen: config.listen,
            token: Some("fedcba9876543210".into()),
        });
        let text = format!("{config:?}");
        assert!(text.contains("moon"));
        for secret in ["walker", "0123456789abcdef", "fedcba9876543210"] {
            assert!(!text.contains(secret), "{text}");
        }
    }
}
