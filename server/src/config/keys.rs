//! The settings that a server has, under their names.

/// One setting. Its name is the key of the file; upper case after `SKY_` it is the variable, and with
/// hyphens the flag.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The name, in lower case with underscores.
    pub name: &'static str,
    /// What the value is, in a word for the help.
    pub value: &'static str,
    /// What applies when it is not set, as text.
    pub default: Option<&'static str>,
    /// Whether it is a secret: then it is never shown, and has no flag, because flags are visible to
    /// everyone on the machine.
    pub secret: bool,
    /// What it does.
    pub help: &'static str,
}

impl Key {
    /// The environment variable.
    pub fn variable(&self) -> String {
        variable(self.name)
    }

    /// The flag, without its two hyphens; secrets have none.
    pub fn flag(&self) -> Option<String> {
        (!self.secret).then(|| flag(self.name))
    }
}

/// The environment variable of the setting `name`.
pub(super) fn variable(name: &str) -> String {
    format!("SKY_{}", name.to_ascii_uppercase())
}

/// The flag of the setting `name`, without its two hyphens.
pub(super) fn flag(name: &str) -> String {
    name.replace('_', "-")
}

const fn key(name: &'static str, value: &'static str, help: &'static str) -> Key {
    Key {
        name,
        value,
        default: None,
        secret: false,
        help,
    }
}

const fn or(key: Key, default: &'static str) -> Key {
    Key {
        default: Some(default),
        ..key
    }
}

const fn secret(key: Key) -> Key {
    Key {
        secret: true,
        ..key
    }
}

/// Where the admin interface is, for the server and for those who ask it.
pub const ADMIN: Key = or(
    key(
        "admin",
        "IP:PORT",
        "Where the admin interface listens; off for none",
    ),
    "127.0.0.1:9980",
);

/// The secret of the admin interface.
pub const ADMIN_TOKEN: Key = secret(key(
    "admin_token",
    "SECRET",
    "What callers of the admin interface must present",
));

/// The file of [`ADMIN_TOKEN`].
pub const ADMIN_TOKEN_FILE: Key = key(
    "admin_token_file",
    "FILE",
    "File with the token that callers of the admin interface must present (or SKY_ADMIN_TOKEN)",
);

/// All settings of a server, in the order in which they are shown.
pub const KEYS: [Key; 17] = [
    or(
        key(
            "listen",
            "IP:PORT",
            "Where clients connect; beyond loopback a user is needed",
        ),
        "127.0.0.1:9991",
    ),
    ADMIN,
    ADMIN_TOKEN,
    ADMIN_TOKEN_FILE,
    or(
        key("data_dir", "DIR", "Folder of the command log"),
        "./skyschedule-data",
    ),
    or(
        key("replica_id", "N", "Number of this replica among its peers"),
        "1",
    ),
    key(
        "peers",
        "N=HOST:PORT,…",
        "Every replica, this one included, and the same list for all; without, this one is alone",
    ),
    key(
        "advertise",
        "HOST:PORT",
        "The address that clients are told; where it listens by default",
    ),
    key(
        "user",
        "NAME",
        "Who may log in, to every group; more users go in the file",
    ),
    secret(key("password", "SECRET", "The password of the user")),
    key(
        "password_file",
        "FILE",
        "File with the password of the user (or SKY_PASSWORD)",
    ),
    secret(key(
        "cluster_secret",
        "SECRET",
        "What replicas prove to each other",
    )),
    key(
        "cluster_secret_file",
        "FILE",
        "File with the secret that replicas prove to each other, the same for all (or SKY_CLUSTER_SECRET)",
    ),
    key(
        "max_connections",
        "N",
        "Most connections; by default 20000, or what the limit on open files allows",
    ),
    key(
        "max_connections_per_address",
        "N",
        "Most connections from one address; by default half of all",
    ),
    or(
        key(
            "login_timeout_ms",
            "MS",
            "How long a connection may take to log in",
        ),
        "5000",
    ),
    or(key("log_format", "text|json", "How log lines look"), "text"),
];
