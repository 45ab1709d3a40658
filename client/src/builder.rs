//! How a client is set up.

use std::time::Duration;

use secrecy::SecretString;
use skyschedule_common::auth::Credentials;
use skyschedule_common::ids::{ClientId, GroupName, HandlerName};
use skyschedule_common::protocol::MAX_WEIGHT;
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::messages::Consistency;

use crate::client::Client;
use crate::config::{Config, MAX_SERVERS, is_address};
use crate::error::{ConfigError, ConnectError};
use crate::identity::default_client_id;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const DEGRADED_AFTER: Duration = Duration::from_secs(5);

/// Sets a client up; made by [`Client::builder`].
///
/// What is wrong with the settings is reported by [`connect`](Self::connect), all at once.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing before connect()"]
pub struct Builder {
    servers: Vec<String>,
    group: Option<String>,
    client_id: Option<String>,
    credentials: Option<(String, SecretString)>,
    consistency: Option<Consistency>,
    weight: u32,
    ring_key: Option<String>,
    handlers: Vec<String>,
    connect_timeout: Duration,
    degraded_after: Duration,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            servers: Vec::new(),
            group: None,
            client_id: None,
            credentials: None,
            consistency: None,
            weight: 1,
            ring_key: None,
            handlers: Vec::new(),
            connect_timeout: CONNECT_TIMEOUT,
            degraded_after: DEGRADED_AFTER,
        }
    }

    /// The servers, each as `host:port`. The client connects to all of them, and works as long as one serves it.
    pub fn servers<S: Into<String>>(mut self, servers: impl IntoIterator<Item = S>) -> Self {
        self.servers.extend(servers.into_iter().map(Into::into));
        self
    }

    /// The group: all clients of a group share one task table. Required.
    pub fn group(mut self, name: impl Into<String>) -> Self {
        self.group = Some(name.into());
        self
    }

    /// User and password. Without them only a server that asks for none lets the client in.
    pub fn credentials(
        mut self,
        user: impl Into<String>,
        password: impl Into<SecretString>,
    ) -> Self {
        self.credentials = Some((user.into(), password.into()));
        self
    }

    /// The client's name in its group, unique among those that live; `host-pid-random` by default.
    ///
    /// A name that is in use is waited for until the [`connect_timeout`](Self::connect_timeout), since its
    /// owner may have died a moment ago.
    pub fn client_id(mut self, id: impl Into<String>) -> Self {
        self.client_id = Some(id.into());
        self
    }

    /// What the client relies on. A group that promises something else refuses it; a new group is made so.
    pub fn consistency(mut self, consistency: Consistency) -> Self {
        self.consistency = Some(consistency);
        self
    }

    /// The client's part of the whole, 1 by default, at most 1,000; with 0 it owns nothing.
    pub fn weight(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }

    /// Where the client stands on the consistent-hash ring for jobs; its client id by default.
    pub fn ring_key(mut self, key: impl Into<String>) -> Self {
        self.ring_key = Some(key.into());
        self
    }

    /// Names of the jobs that this client can run.
    pub fn handlers<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.handlers.extend(names.into_iter().map(Into::into));
        self
    }

    /// How long [`connect`](Self::connect) tries, 30 seconds by default.
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.connect_timeout = limit;
        self
    }

    /// After how long without a server that serves by quorum a client of an available group turns to one
    /// that has none; 5 seconds by default, and no more than a lease.
    pub fn degraded_after(mut self, wait: Duration) -> Self {
        self.degraded_after = wait;
        self
    }

    /// Connects, logs in, and returns once the client is a member of its group. One server that serves is
    /// enough; the others are tried for ever in the background. Needs no particular runtime.
    ///
    /// # Errors
    /// At once when the settings are wrong or the refusal cannot heal with time (credentials, version,
    /// consistency); otherwise when the [`connect_timeout`](Self::connect_timeout) is over, with the last refusal
    /// or each server's trouble.
    pub async fn connect(self) -> Result<Client, ConnectError> {
        let limit = self.connect_timeout;
        let (client, joined) = Client::start(self.check()?, Some(limit))?;
        match joined.await {
            Ok(Ok(())) => Ok(client),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(crate::error::Closed::default().into()),
        }
    }

    /// Returns at once with a client that is no member yet, and connects in the background for as long as it
    /// takes, whatever the refusals: for a process that shall start while every server is away.
    /// [`Client::state`] tells how it goes.
    ///
    /// # Errors
    /// When the settings are wrong, or the thread for the connections cannot be started.
    pub fn connect_in_background(self) -> Result<Client, ConnectError> {
        let (client, _) = Client::start(self.check()?, None)?;
        Ok(client)
    }

    fn check(self) -> Result<Config, ConnectError> {
        let mut errors = Vec::new();
        if self.servers.is_empty() {
            errors.push(ConfigError::NoServers);
        }
        if self.servers.len() > MAX_SERVERS {
            errors.push(ConfigError::TooManyServers(self.servers.len()));
        }
        let mut servers: Vec<String> = Vec::new();
        for server in self.servers {
            if !is_address(&server) {
                errors.push(ConfigError::Address(server));
            } else if !servers.contains(&server) {
                servers.push(server);
            }
        }
        if self.weight > MAX_WEIGHT {
            errors.push(ConfigError::Weight(self.weight));
        }
        let mut note = |error: ConfigError| errors.push(error);
        let group = self
            .group
            .ok_or(ConfigError::NoGroup)
            .and_then(|name| Ok(GroupName::new(name)?));
        let group = group.map_err(&mut note).ok();
        let client = self.client_id.map_or_else(default_client_id, ClientId::new);
        let client = client.map_err(|error| note(error.into())).ok();
        let credentials = self
            .credentials
            .map(|(user, password)| Credentials::new(&user, password))
            .transpose();
        let credentials = credentials.map_err(|error| note(error.into())).ok();
        let ring_key = self.ring_key.map(BoundedString::try_from).transpose();
        let ring_key = ring_key.map_err(|_| note(ConfigError::RingKey)).ok();
        let count = self.handlers.len();
        let names: Result<Vec<_>, _> = self.handlers.into_iter().map(HandlerName::new).collect();
        let names = names
            .map_err(|error| note(error.into()))
            .unwrap_or_default();
        let handlers = BoundedVec::try_from(names)
            .map_err(|_| note(ConfigError::Handlers(count)))
            .ok();
        match (group, client, credentials, ring_key, handlers) {
            (Some(group), Some(client), Some(credentials), Some(ring_key), Some(handlers))
                if errors.is_empty() =>
            {
                Ok(Config {
                    servers,
                    group,
                    client,
                    credentials,
                    consistency: self.consistency,
                    weight: self.weight,
                    ring_key,
                    handlers,
                    degraded_after: self.degraded_after,
                })
            }
            _ => Err(ConnectError::Config(errors)),
        }
    }
}

#[cfg(all(test, not(sim)))]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_setting_is_named_at_once() {
        let wrong = Client::builder()
            .servers(["sky-1", ":9991", "sky-1:0"])
            .group("a group")
            .client_id("")
            .credentials("moon", "")
            .weight(1_001)
            .ring_key("x".repeat(257))
            .handlers(["a b"]);
        let Err(ConnectError::Config(errors)) = wrong.check() else {
            panic!("refused")
        };
        assert_eq!(errors.len(), 9, "{errors:?}");
        let Err(ConnectError::Config(errors)) = Client::builder().check() else {
            panic!("refused")
        };
        assert!(matches!(
            errors.as_slice(),
            [ConfigError::NoServers, ConfigError::NoGroup]
        ));
    }

    #[test]
    fn a_client_without_a_name_gets_one_of_its_own() {
        let named = || {
            Client::builder()
                .servers(["sky-1:9991"])
                .group("orders")
                .check()
                .unwrap()
                .client
        };
        let (one, other) = (named(), named());
        assert_ne!(one, other);
        assert!(one.as_str().contains(&std::process::id().to_string()));
    }

    #[test]
    fn printing_a_builder_hides_the_password() {
        let builder = Client::builder().credentials("moon", "walker");
        assert!(!format!("{builder:?}").contains("walker"));
    }
}
