//! Flag over environment over file over default; everything that is wrong is said at once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::ExposeSecret as _;
use skyschedule_server::config::{
    Config, KEYS, Limits, Loaded, LogFormat, Problems, Sources, load,
};
use tempfile::TempDir;

type Pairs<'a> = &'a [(&'static str, &'a str)];

/// Loads what is given; `{dir}` in a value stands for the folder, and the texts of `files` are in it.
struct Given {
    dir: TempDir,
}

impl Given {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = TempDir::new().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        Self { dir }
    }

    fn fill(&self, text: &str) -> String {
        text.replace("{dir}", self.dir.path().to_str().unwrap())
    }

    fn load(
        &self,
        flags: Pairs,
        environment: Pairs,
        file: Option<&str>,
    ) -> Result<Loaded, Vec<String>> {
        let flags = flags
            .iter()
            .map(|(name, value)| (*name, self.fill(value)))
            .collect();
        let environment = environment
            .iter()
            .map(|(name, value)| (OsString::from(name), OsString::from(self.fill(value))));
        let path = file.map(|content| {
            let path: PathBuf = self.dir.path().join("sky.toml");
            fs::write(&path, self.fill(content)).unwrap();
            path
        });
        load(Sources::new(flags, environment), path.as_deref()).map_err(|Problems(texts)| {
            let dir = self.dir.path().to_str().unwrap();
            texts
                .iter()
                .map(|text| text.replace(dir, "{dir}"))
                .collect()
        })
    }

    fn config(&self, flags: Pairs, environment: Pairs, file: Option<&str>) -> Config {
        match self.load(flags, environment, file) {
            Ok(loaded) => loaded.config,
            Err(problems) => panic!("{problems:?}"),
        }
    }

    fn problems(&self, flags: Pairs, environment: Pairs, file: Option<&str>) -> Vec<String> {
        self.load(flags, environment, file)
            .err()
            .expect("this should not load")
    }
}

#[test]
fn defaults_are_those_of_the_manual() {
    let config = Given::new(&[]).config(&[], &[], None);
    assert_eq!(config.listen.to_string(), "127.0.0.1:9991");
    assert_eq!(config.admin.unwrap().listen.to_string(), "127.0.0.1:9980");
    assert_eq!(config.data_dir.to_str(), Some("./skyschedule-data"));
    assert_eq!(config.replica_id, 1);
    assert_eq!(config.limits, Limits::default());
    assert_eq!(config.log_format, LogFormat::Text);
    assert!(config.users.is_empty() && config.peers.is_empty() && config.advertise.is_none());
}

#[test]
fn the_first_layer_that_has_a_value_wins() {
    const FLAG: (&str, &str) = ("listen", "127.0.0.1:1");
    const VARIABLE: (&str, &str) = ("SKY_LISTEN", "127.0.0.1:2");
    const FILE: &str = "listen = '127.0.0.1:3'";
    let given = Given::new(&[]);
    let cases: [(Pairs, Pairs, Option<&str>, u16); 5] = [
        (&[FLAG], &[VARIABLE], Some(FILE), 1),
        (&[FLAG], &[], Some(FILE), 1),
        (&[], &[VARIABLE], Some(FILE), 2),
        (&[], &[], Some(FILE), 3),
        (&[], &[], Some(""), 9991),
    ];
    for (flags, environment, file, port) in cases {
        let config = given.config(flags, environment, file);
        assert_eq!(
            config.listen.port(),
            port,
            "{flags:?} {environment:?} {file:?}"
        );
    }
}

#[test]
fn every_setting_can_be_given_in_every_layer() {
    let given = Given::new(&[("secret", "0123456789abcdef\n")]);
    let value = |name: &str| match name {
        "listen" | "admin" => "localhost:7",
        "data_dir" => "{dir}",
        "replica_id" => "3",
        "peers" => "3=sky-3:9991",
        "advertise" => "sky-3:9991",
        "user" => "moon",
        "password" | "admin_token" | "cluster_secret" => "fedcba9876543210",
        "password_file" | "admin_token_file" | "cluster_secret_file" => "{dir}/secret",
        "max_connections" => "12",
        "max_connections_per_address" => "5",
        "login_timeout_ms" => "700",
        "log_format" => "json",
        other => panic!("no value for {other}"),
    };
    let shown = |config: &Config| {
        let secret = |secret: &secrecy::SecretString| secret.expose_secret().to_owned();
        let admin = config.admin.as_ref().unwrap();
        let texts = [
            config.listen.to_string(),
            admin.listen.to_string(),
            admin.token.as_ref().map(secret).unwrap(),
            config.peers[&3].clone(),
            config.advertise.clone().unwrap(),
            config.users[0].name.to_string(),
            secret(&config.users[0].password),
            config.cluster_secret.as_ref().map(secret).unwrap(),
        ];
        assert_eq!(config.data_dir, given.dir.path());
        let expected = Limits {
            max_connections: 12,
            max_connections_per_address: 5,
            login_timeout: Duration::from_millis(700),
        };
        assert_eq!((config.replica_id, config.limits), (3, expected));
        assert_eq!(config.log_format, LogFormat::Json);
        texts
    };
    let expected = |secret: &'static str| {
        [
            "127.0.0.1:7",
            "127.0.0.1:7",
            secret,
            "sky-3:9991",
            "sky-3:9991",
            "moon",
            secret,
            secret,
        ]
    };
    for (secrets, secret) in [(true, "fedcba9876543210"), (false, "0123456789abcdef")] {
        let wanted: Vec<_> = KEYS
            .iter()
            .filter(|key| {
                let is_file = key.name.ends_with("_file");
                if secrets { !is_file } else { !key.secret }
            })
            .collect();
        let variables: Vec<_> = wanted
            .iter()
            .map(|key| {
                let name: &'static str = key.variable().leak();
                (name, value(key.name))
            })
            .collect();
        assert_eq!(
            shown(&given.config(&[], &variables, None)),
            expected(secret)
        );
        let file: String = wanted
            .iter()
            .map(|key| match value(key.name).parse::<u32>() {
                Ok(number) => format!("{} = {number}\n", key.name),
                Err(_) => format!("{} = '{}'\n", key.name, value(key.name)),
            })
            .collect();
        assert_eq!(
            shown(&given.config(&[], &[], Some(&file))),
            expected(secret)
        );
        if !secrets {
            let flags: Vec<_> = wanted
                .iter()
                .map(|key| (key.name, value(key.name)))
                .collect();
            assert_eq!(shown(&given.config(&flags, &[], None)), expected(secret));
        }
    }
}

#[test]
fn more_users_come_from_the_file() {
    let given = Given::new(&[("sun", "beam")]);
    let file = "
        user = 'moon'
        password = 'walker'
        [[users]]
        name = 'sun'
        password_file = '{dir}/sun'
        groups = ['orders', '1000']
    ";
    let config = given.config(&[], &[("SKY_PASSWORD", "runner")], Some(file));
    let users: Vec<_> = config
        .users
        .iter()
        .map(|user| {
            let groups = user.groups.as_ref().map(|groups| {
                let names: Vec<_> = groups.iter().map(ToString::to_string).collect();
                names.join(",")
            });
            (
                user.name.to_string(),
                user.password.expose_secret().to_owned(),
                groups,
            )
        })
        .collect();
    let owned = str::to_owned;
    assert_eq!(
        users,
        [
            (owned("moon"), owned("runner"), None),
            (owned("sun"), owned("beam"), Some(owned("orders,1000"))),
        ]
    );
}

#[test]
fn variables_that_orchestrators_inject_are_ignored() {
    let injected: Pairs = &[
        ("SKY_PORT", "tcp://10.0.0.1:9991"),
        ("SKY_SERVICE_HOST", "10.0.0.1"),
        ("SKY_ADMIN_PORT_9980_TCP", "tcp://10.0.0.1:9980"),
        ("PATH", "/bin"),
    ];
    Given::new(&[]).config(&[], injected, None);
}

#[test]
fn what_is_wrong_is_named_with_its_place() {
    let given = Given::new(&[("blank", " \n"), ("ok", "walker\n")]);
    let user: Pairs = &[("user", "moon"), ("password_file", "{dir}/ok")];
    /// Flags, environment and file; the beginnings of the problems.
    type Case<'a> = (Pairs<'a>, Pairs<'a>, Option<&'a str>, &'a [&'a str]);
    let cases: &[Case] = &[
        // Values.
        (
            &[("listen", "nowhere")],
            &[],
            None,
            &["--listen: \"nowhere\" is no address"],
        ),
        (&[], &[("SKY_LISTEN", "")], None, &["SKY_LISTEN: is empty"]),
        (
            &[],
            &[],
            Some("listen = '9991'"),
            &["{dir}/sky.toml: listen: \"9991\" is no address"],
        ),
        (
            &[("admin", "on")],
            &[],
            None,
            &["--admin: \"on\" is no address to listen on; expected IP:PORT"],
        ),
        (
            &[("replica_id", "70000")],
            &[],
            None,
            &["--replica-id: \"70000\" is no whole number"],
        ),
        (
            &[("login_timeout_ms", "5s")],
            &[],
            None,
            &["--login-timeout-ms: \"5s\" is no whole number"],
        ),
        (
            &[("log_format", "xml")],
            &[],
            None,
            &["--log-format: \"xml\" is neither text nor json"],
        ),
        (
            &[("peers", "sky-1:9991")],
            &[],
            None,
            &["--peers: \"sky-1:9991\" is no list of replicas"],
        ),
        (
            &[("peers", "1=a:1,1=b:1")],
            &[],
            None,
            &["--peers: \"1=a:1,1=b:1\" lists replica 1 twice"],
        ),
        (
            &[("max_connections", "0")],
            &[],
            None,
            &[
                "max_connections: must be at least 1",
                "max_connections_per_address: must be at least 1",
            ],
        ),
        // Combinations.
        (
            &[("listen", "0.0.0.0:9991")],
            &[],
            None,
            &["listen: 0.0.0.0:9991 can be reached from other machines"],
        ),
        (
            &[(
                "peers",
                "1=a:1,2=a:2,3=a:3,4=a:4,5=a:5,6=a:6,7=a:7,8=a:8,9=a:9,10=a:10",
            )],
            &[],
            None,
            &["peers: lists 10 replicas; use one, three or five"],
        ),
        (
            &[("peers", "2=b:1")],
            &[],
            None,
            &["peers: must list every replica, this one (replica_id 1) included"],
        ),
        (
            &[("user", "moon")],
            &[],
            None,
            &["user: \"moon\" has no password"],
        ),
        (
            &[],
            &[("SKY_PASSWORD", "walker")],
            None,
            &["password: belongs to no user"],
        ),
        (
            &[],
            &[("SKY_PASSWORD", "x"), ("SKY_PASSWORD_FILE", "{dir}/ok")],
            None,
            &["SKY_PASSWORD and SKY_PASSWORD_FILE exclude each other"],
        ),
        (
            user,
            &[],
            Some("[[users]]\nname = 'moon'\npassword = 'x'"),
            &["users: moon is there twice"],
        ),
        // Secrets fail closed, and a listener without users is not complained about on top.
        (
            &[("listen", "0.0.0.0:9991"), ("user", "moon")],
            &[("SKY_PASSWORD", "")],
            None,
            &["SKY_PASSWORD: is blank"],
        ),
        (
            &[
                ("listen", "0.0.0.0:9991"),
                ("user", "moon"),
                ("password_file", "{dir}/blank"),
            ],
            &[],
            None,
            &["--password-file: the file \"{dir}/blank\": is blank"],
        ),
        (
            &[("user", "moon"), ("password_file", "{dir}/none")],
            &[],
            None,
            &["--password-file: cannot read \"{dir}/none\""],
        ),
        (
            &[],
            &[("SKY_ADMIN_TOKEN", "short")],
            None,
            &["admin_token: has fewer than 16 characters"],
        ),
        (
            &[],
            &[("SKY_CLUSTER_SECRET", "  ")],
            None,
            &["SKY_CLUSTER_SECRET: is blank"],
        ),
        // The file.
        (
            &[],
            &[],
            Some("listen = "),
            &["{dir}/sky.toml: line 1: is no TOML"],
        ),
        (
            &[],
            &[],
            Some("data-dir = 'x'"),
            &["{dir}/sky.toml: unknown key \"data-dir\"; write data_dir"],
        ),
        (
            &[],
            &[],
            Some("[tls]\ncert = 'x'"),
            &["{dir}/sky.toml: unknown key \"tls\"; known are listen, admin"],
        ),
        (
            &[],
            &[],
            Some("listen = ['a']"),
            &["{dir}/sky.toml: listen: expected a text or a number"],
        ),
        (
            &[],
            &[],
            Some("users = 'moon'"),
            &["{dir}/sky.toml: users: expected entries"],
        ),
        (
            &[],
            &[],
            Some("[[users]]\nname = 'a'\npassword = 'x'\nrole = 'admin'"),
            &["{dir}/sky.toml: unknown key \"users.role\""],
        ),
        (
            &[],
            &[],
            Some("[[users]]\npassword = 'x'"),
            &["{dir}/sky.toml: users[0]: has no name"],
        ),
        (
            &[],
            &[],
            Some("[[users]]\nname = 'a'"),
            &["{dir}/sky.toml: users[0]: \"a\" has no password"],
        ),
        (
            &[],
            &[],
            Some("[[users]]\nname = 'a'\npassword = ''"),
            &["{dir}/sky.toml: users[0].password: is blank"],
        ),
        (
            &[],
            &[],
            Some("[[users]]\nname = 'a'\npassword = 'x'\ngroups = []"),
            &["users: a has an empty list of groups"],
        ),
        (
            &[],
            &[],
            Some("[[users]]\nname = 'a'\npassword = 'x'\ngroups = ['a b']"),
            &["{dir}/sky.toml: users[0].groups: \"a b\" is no group name"],
        ),
        // All at once.
        (
            &[("listen", "x"), ("replica_id", "y")],
            &[("SKY_LOG_FORMAT", "z"), ("SKY_ADVERTISE", "w")],
            Some("colour = 1\nmax_connections = 'many'\n[[users]]\nname = 'a'"),
            &[
                "{dir}/sky.toml: unknown key \"colour\"",
                "{dir}/sky.toml: max_connections: \"many\" is no whole number",
                "--listen: \"x\"",
                "--replica-id: \"y\"",
                "{dir}/sky.toml: users[0]: \"a\" has no password",
                "SKY_LOG_FORMAT: \"z\"",
                "advertise: \"w\" is not host:port",
            ],
        ),
    ];
    for (flags, environment, file, expected) in cases {
        let problems = given.problems(flags, environment, *file);
        let case = format!("{flags:?} {environment:?} {file:?}\n{problems:#?}");
        assert_eq!(problems.len(), expected.len(), "{case}");
        for (problem, expected) in problems.iter().zip(*expected) {
            assert!(
                problem.starts_with(expected),
                "expected {expected:?}: {case}"
            );
        }
    }
}

#[test]
fn a_missing_file_is_a_problem() {
    let given = Given::new(&[]);
    let path = given.dir.path().join("none.toml");
    let sources = Sources::new([].into(), []);
    let Problems(texts) = load(sources, Some(&path)).err().unwrap();
    assert_eq!(texts.len(), 1);
    assert!(texts[0].contains("none.toml: cannot be read"), "{texts:?}");
}

#[test]
fn what_is_printed_can_be_read_back_and_holds_no_secret() {
    let given = Given::new(&[("sun", "beam")]);
    let file = "
        data_dir = 'a \"quoted\" dir'
        max_connections = 7
        password = 'walker'
        [[users]]
        name = 'sun'
        password = 'sunbeam'
        groups = ['orders']
    ";
    let environment: Pairs = &[
        ("SKY_USER", "moon"),
        ("SKY_ADMIN_TOKEN", "fedcba9876543210"),
    ];
    let loaded = given
        .load(&[("listen", "localhost:7")], environment, Some(file))
        .ok()
        .unwrap();
    let printed = loaded.print();
    for secret in ["walker", "sunbeam", "fedcba9876543210"] {
        assert!(!printed.contains(secret), "{printed}");
    }
    for line in [
        "listen = \"localhost:7\" # --listen",
        "user = \"moon\" # SKY_USER",
        "admin_token = \"(redacted)\" # SKY_ADMIN_TOKEN",
        "admin = \"127.0.0.1:9980\" # default of admin",
    ] {
        assert!(
            printed.lines().any(|printed| printed == line),
            "{line:?} in\n{printed}"
        );
    }
    let again = given.load(
        &[],
        &[],
        Some(&printed.replace("(redacted)", "0123456789abcdef")),
    );
    let again = again.unwrap_or_else(|problems| panic!("{problems:?}"));
    assert_eq!(again.config.data_dir, loaded.config.data_dir);
    assert_eq!(again.config.limits, loaded.config.limits);
    assert_eq!(again.config.users.len(), 2);
    assert_eq!(again.config.users[1].groups, loaded.config.users[1].groups);
}
