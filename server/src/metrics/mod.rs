//! What a server counts, for Prometheus.
//!
//! Every name is a constant of [`names`]; there are no globals, so that several servers in one process
//! count apart. Groups are labels only up to [`GROUP_LABELS`]; those beyond share the label `other`.

mod groups;
pub mod names;

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};

use groups::Groups;
pub use groups::{GROUP_LABELS, OTHER};

type Label<V> = (&'static str, V);
type ByReason = Family<[Label<&'static str>; 1], Counter>;

/// The counters of one server. Cheap to clone; clones count together.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    connections: Gauge,
    connections_refused: ByReason,
    relays: Gauge,
    relayed: Counter,
    logins: ByReason,
    protocol_errors: Counter,
    slow_readers: Counter,
    heartbeats: Counter,
    groups: Groups,
    handover_seconds: Histogram,
    told: Counter,
    commits: Counter,
    commit_seconds: Histogram,
    leader: Gauge,
    degraded: Gauge,
    without_quorum: Gauge,
    replica_lag: Family<[Label<u16>; 1], Gauge>,
    term: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at 0.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let r = &mut registry;
        // From a millisecond to half a minute, and from 50 microseconds to 1.6 seconds.
        let handover_seconds = Histogram::new(exponential_buckets(0.001, 2.0, 16));
        let commit_seconds = Histogram::new(exponential_buckets(0.000_05, 2.0, 16));
        let inner = Inner {
            connections: register(r, names::CONNECTIONS, "Open connections"),
            connections_refused: register(
                r,
                names::CONNECTIONS_REFUSED,
                "Connections turned away before a login",
            ),
            relays: register(r, names::RELAYS, "Clients carried on to the leader"),
            relayed: register(r, names::RELAYED, "Clients that were carried on so far"),
            logins: register(r, names::LOGINS, "Logins by result"),
            protocol_errors: register(
                r,
                names::PROTOCOL_ERRORS,
                "Connections closed for what the peer sent",
            ),
            slow_readers: register(
                r,
                names::SLOW_READERS,
                "Connections closed since the peer did not read",
            ),
            heartbeats: register(r, names::HEARTBEATS, "Heartbeats read"),
            groups: Groups::new(r),
            handover_seconds: add(
                r,
                names::HANDOVER_SECONDS,
                "Length of handovers",
                handover_seconds,
            ),
            told: register(r, names::TOLD, "Shares that members were told"),
            commits: register(r, names::COMMITS, "Commands made durable"),
            commit_seconds: add(
                r,
                names::COMMIT_SECONDS,
                "Time to make a batch of commands durable",
                commit_seconds,
            ),
            leader: register(r, names::LEADER, "Whether this replica leads"),
            degraded: register(
                r,
                names::DEGRADED,
                "Whether this replica numbers without a quorum",
            ),
            without_quorum: register(
                r,
                names::WITHOUT_QUORUM,
                "Seconds for which no quorum was seen",
            ),
            replica_lag: register(r, names::REPLICA_LAG, "Entries that another replica lacks"),
            term: register(r, names::TERM, "The term that this replica knows"),
            registry,
        };
        Self(Arc::new(inner))
    }

    /// A connection was accepted; it is counted until the guard is dropped.
    #[must_use]
    pub fn connection(&self) -> OpenConnection {
        self.0.connections.inc();
        OpenConnection(self.0.connections.clone())
    }

    /// A connection was turned away before its login. `reason` is one of a few words.
    pub fn connection_refused(&self, reason: &'static str) {
        self.0
            .connections_refused
            .get_or_create(&[("reason", reason)])
            .inc();
    }

    /// A client is carried on to the leader; it is counted until the guard is dropped.
    #[must_use]
    pub fn relay(&self) -> OpenConnection {
        self.0.relayed.inc();
        self.0.relays.inc();
        OpenConnection(self.0.relays.clone())
    }

    /// A login ended. `result` is one of a few words.
    pub fn login(&self, result: &'static str) {
        self.0.logins.get_or_create(&[("result", result)]).inc();
    }

    /// A peer sent what is no message, or a message out of turn.
    pub fn protocol_error(&self) {
        self.0.protocol_errors.inc();
    }

    /// A connection was closed because the peer did not read.
    pub fn slow_reader(&self) {
        self.0.slow_readers.inc();
    }

    /// Heartbeats were read.
    pub fn heartbeats(&self, count: u64) {
        self.0.heartbeats.inc_by(count);
    }

    /// This replica leads, or does so no longer: then it has no groups to count.
    pub fn leader(&self, leads: bool) {
        self.0.leader.set(leads.into());
        if !leads {
            self.0.groups.clear();
        }
    }

    /// This replica numbers by itself, or does so no longer.
    pub fn degraded(&self, degraded: bool) {
        self.0.degraded.set(degraded.into());
    }

    /// For so long no quorum was seen.
    pub fn without_quorum(&self, length: Duration) {
        let seconds = i64::try_from(length.as_secs()).unwrap_or(i64::MAX);
        self.0.without_quorum.set(seconds);
    }

    /// The present term, and how many entries each other replica lacks, where this one leads.
    pub fn replicas(&self, term: u64, lags: impl Iterator<Item = (u16, u64)>) {
        let clamp = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.0.term.set(clamp(term));
        self.0.replica_lag.clear();
        for (replica, lag) in lags {
            let lags = &self.0.replica_lag;
            lags.get_or_create(&[("replica", replica)]).set(clamp(lag));
        }
    }

    /// Members were told shares.
    pub fn told(&self, count: u64) {
        self.0.told.inc_by(count);
    }

    /// A batch of commands is durable.
    pub fn commit(&self, commands: u64, took: Duration) {
        self.0.commits.inc_by(commands);
        self.0.commit_seconds.observe(took.as_secs_f64());
    }

    /// Everything as OpenMetrics text, which Prometheus reads.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.0.registry);
        text
    }
}

/// Counts a connection while it exists.
#[derive(Debug)]
pub struct OpenConnection(Gauge);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

fn register<M>(registry: &mut Registry, name: &str, help: &str) -> M
where
    M: Metric + Clone + Default,
{
    add(registry, name, help, M::default())
}

fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    // The encoder puts the ending of counters back.
    let name = name.strip_suffix("_total").unwrap_or(name);
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use skyschedule_common::ids::GroupName;

    use super::*;

    pub(super) fn group(name: &str) -> GroupName {
        GroupName::new(name).unwrap()
    }

    pub(super) fn line<'a>(text: &'a str, start: &str) -> Option<&'a str> {
        text.lines()
            .find_map(|line| line.strip_prefix(start)?.strip_prefix(' '))
    }

    #[test]
    fn every_name_is_exported_once_something_happened() {
        let metrics = Metrics::new();
        let orders = group("orders");
        let _open = metrics.connection();
        metrics.connection_refused("limit");
        metrics.login("ok");
        metrics.members(&orders, 3);
        metrics.unowned(&orders, 0.0);
        metrics.handover(&orders, Duration::from_millis(5));
        metrics.replicas(1, [(2, 0)].into_iter());
        metrics.expired(&orders, "lease");
        metrics.overtaken(&orders);
        metrics.fenced(&orders);
        metrics.delayed_join(&orders);
        metrics.commit(2, Duration::from_micros(300));
        let text = metrics.encode();
        for name in names::ALL {
            let exported = text.lines().any(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with([' ', '{', '_']))
            });
            assert!(exported, "{name} is missing in\n{text}");
        }
        assert_eq!(line(&text, names::COMMITS), Some("2"));
        assert_eq!(
            line(
                &text,
                r#"skyschedule_expired_total{group="orders",why="lease"}"#
            ),
            Some("1")
        );
    }

    #[test]
    fn a_connection_counts_until_its_guard_is_dropped() {
        let metrics = Metrics::new();
        let open = (metrics.connection(), metrics.clone().connection());
        assert_eq!(line(&metrics.encode(), names::CONNECTIONS), Some("2"));
        drop(open);
        assert_eq!(line(&metrics.encode(), names::CONNECTIONS), Some("0"));
    }
}
