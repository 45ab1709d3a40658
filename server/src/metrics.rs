//! What a server counts, for Prometheus.
//!
//! Every name is a constant of [`names`]; there are no globals, so that several servers in one process
//! count apart. Groups are labels only up to [`GROUP_LABELS`]; those beyond share the label `other`.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};
use skyschedule_common::ids::GroupName;

/// Most groups that have a label of their own.
pub const GROUP_LABELS: usize = 1_000;

/// The label of groups beyond [`GROUP_LABELS`].
pub const OTHER: &str = "other";

/// What is counted, by name.
pub mod names {
    /// Connections that are open.
    pub const CONNECTIONS: &str = "skyschedule_connections";
    /// Connections that were turned away before a login, by `reason`.
    pub const CONNECTIONS_REFUSED: &str = "skyschedule_connections_refused_total";
    /// Clients that this server carries on to the one that leads, which they cannot reach themselves.
    pub const RELAYS: &str = "skyschedule_relays";
    /// How many it has ever carried.
    pub const RELAYED: &str = "skyschedule_relayed_total";
    /// Logins, by `result`.
    pub const LOGINS: &str = "skyschedule_logins_total";
    /// Connections closed because of bytes that are no message, or a message out of turn.
    pub const PROTOCOL_ERRORS: &str = "skyschedule_protocol_errors_total";
    /// Connections closed because the peer did not read what it was sent.
    pub const SLOW_READERS: &str = "skyschedule_slow_readers_total";
    /// Heartbeats that were read.
    pub const HEARTBEATS: &str = "skyschedule_heartbeats_total";
    /// Members, by `group`; 0 on a replica that does not lead.
    pub const MEMBERS: &str = "skyschedule_members";
    /// Groups; 0 on a replica that does not lead.
    pub const GROUPS: &str = "skyschedule_groups";
    /// The part of a group's rows that no member is to have although it has members, from 0 to 1, by `group`.
    pub const UNOWNED: &str = "skyschedule_unowned_ratio";
    /// Handovers that are over, by `group`.
    pub const HANDOVERS: &str = "skyschedule_handovers_total";
    /// How long handovers took, in seconds.
    pub const HANDOVER_SECONDS: &str = "skyschedule_handover_seconds";
    /// Shares that members were told.
    pub const TOLD: &str = "skyschedule_told_total";
    /// Members that died, by `group` and `why`.
    pub const EXPIRED: &str = "skyschedule_expired_total";
    /// Members that did not release in time, so that others went on, by `group`.
    pub const OVERTAKEN: &str = "skyschedule_overtaken_total";
    /// Members whose lease is no longer renewed since they do not release, by `group`.
    pub const FENCED: &str = "skyschedule_fenced_total";
    /// Joins put off because the client died too often, by `group`.
    pub const DELAYED_JOINS: &str = "skyschedule_delayed_joins_total";
    /// Commands that were made durable.
    pub const COMMITS: &str = "skyschedule_commits_total";
    /// How long a batch of commands took to become durable, in seconds.
    pub const COMMIT_SECONDS: &str = "skyschedule_commit_seconds";
    /// 1 while this replica numbers by itself, since it has no quorum, else 0.
    pub const DEGRADED: &str = "skyschedule_degraded";
    /// Seconds for which this replica has seen no quorum; 0 while it sees one.
    pub const WITHOUT_QUORUM: &str = "skyschedule_without_quorum_seconds";
    /// Entries of the log that another replica lacks, by `replica`; none on a replica that does not lead.
    pub const REPLICA_LAG: &str = "skyschedule_replica_lag_entries";
    /// Counts leaderships, as far as this replica knows; 0 on one that is alone.
    pub const TERM: &str = "skyschedule_term";
    /// 1 on the leader, else 0.
    pub const LEADER: &str = "skyschedule_leader";

    /// All of them.
    pub const ALL: [&str; 25] = [
        CONNECTIONS,
        CONNECTIONS_REFUSED,
        RELAYS,
        RELAYED,
        LOGINS,
        PROTOCOL_ERRORS,
        SLOW_READERS,
        HEARTBEATS,
        MEMBERS,
        GROUPS,
        UNOWNED,
        HANDOVERS,
        HANDOVER_SECONDS,
        TOLD,
        EXPIRED,
        OVERTAKEN,
        FENCED,
        DELAYED_JOINS,
        COMMITS,
        COMMIT_SECONDS,
        LEADER,
        DEGRADED,
        WITHOUT_QUORUM,
        REPLICA_LAG,
        TERM,
    ];
}

type Label<V> = (&'static str, V);
type ByReason = Family<[Label<&'static str>; 1], Counter>;
type ByGroup<M> = Family<[Label<Arc<str>>; 1], M>;
type ByGroupAndWhy = Family<[Label<Arc<str>>; 2], Counter>;
type Ratio = Gauge<f64, AtomicU64>;

/// How members die: see [`Metrics::expired`].
const DEATHS: [&str; 3] = ["lease", "fin", "reset"];

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
    members: ByGroup<Gauge>,
    groups: Gauge,
    unowned: ByGroup<Ratio>,
    handovers: ByGroup<Counter>,
    handover_seconds: Histogram,
    told: Counter,
    expired: ByGroupAndWhy,
    overtaken: ByGroup<Counter>,
    fenced: ByGroup<Counter>,
    delayed_joins: ByGroup<Counter>,
    commits: Counter,
    commit_seconds: Histogram,
    leader: Gauge,
    degraded: Gauge,
    without_quorum: Gauge,
    replica_lag: Family<[Label<u16>; 1], Gauge>,
    term: Gauge,
    known: Mutex<Known>,
}

/// The groups that are counted, and how many members of each are in its gauge.
#[derive(Debug)]
struct Known {
    labels: HashMap<GroupName, Arc<str>>,
    members: HashMap<GroupName, i64>,
    other: Arc<str>,
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
            members: register(r, names::MEMBERS, "Members of the group"),
            groups: register(r, names::GROUPS, "Groups"),
            unowned: register(
                r,
                names::UNOWNED,
                "The part of the rows that no member is to have",
            ),
            handovers: register(r, names::HANDOVERS, "Handovers that are over"),
            handover_seconds: add(
                r,
                names::HANDOVER_SECONDS,
                "Length of handovers",
                handover_seconds,
            ),
            told: register(r, names::TOLD, "Shares that members were told"),
            expired: register(r, names::EXPIRED, "Members that died"),
            overtaken: register(r, names::OVERTAKEN, "Members that did not release in time"),
            fenced: register(r, names::FENCED, "Members whose lease is no longer renewed"),
            delayed_joins: register(
                r,
                names::DELAYED_JOINS,
                "Joins put off since the client died too often",
            ),
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
            known: Mutex::new(Known {
                labels: HashMap::new(),
                members: HashMap::new(),
                other: OTHER.into(),
            }),
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

    /// The group has so many members now. From here on it has all its counters.
    pub fn members(&self, group: &GroupName, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let mut known = self.known();
        let label = known.label(group);
        if !known.members.contains_key(group) {
            self.begin(&label);
        }
        let before = known.members.insert(group.clone(), count).unwrap_or(0);
        // A difference, because groups may share a label.
        self.0
            .members
            .get_or_create(&[("group", label)])
            .inc_by(count.saturating_sub(before));
        self.count_groups(&known);
    }

    /// A group's counters begin with 0, not with their first event: only so is that one seen to raise them.
    fn begin(&self, label: &Arc<str>) {
        let group = [("group", Arc::clone(label))];
        for counter in self.counters_by_group() {
            drop(counter.get_or_create(&group));
        }
        for why in DEATHS {
            let labels = [("group", Arc::clone(label)), ("why", why.into())];
            drop(self.0.expired.get_or_create(&labels));
        }
    }

    /// There is no such group any more.
    pub fn forget(&self, group: &GroupName) {
        let mut known = self.known();
        known.members.remove(group);
        self.count_groups(&known);
        // Groups that share a label go on.
        let Some(label) = known.labels.remove(group) else {
            return;
        };
        let group = [("group", Arc::clone(&label))];
        self.0.members.remove(&group);
        self.0.unowned.remove(&group);
        for counter in self.counters_by_group() {
            counter.remove(&group);
        }
        for why in DEATHS {
            let labels = [("group", Arc::clone(&label)), ("why", why.into())];
            self.0.expired.remove(&labels);
        }
    }

    fn counters_by_group(&self) -> [&ByGroup<Counter>; 4] {
        let Inner {
            handovers,
            overtaken,
            fenced,
            delayed_joins,
            ..
        } = &*self.0;
        [handovers, overtaken, fenced, delayed_joins]
    }

    fn count_groups(&self, known: &Known) {
        let groups = known.members.len();
        self.0.groups.set(i64::try_from(groups).unwrap_or(i64::MAX));
    }

    /// The part of the group's rows that no member is to have, from 0 to 1. Of groups that share a label, the last one's.
    pub fn unowned(&self, group: &GroupName, ratio: f64) {
        self.0.unowned.get_or_create(&self.group(group)).set(ratio);
    }

    /// This replica leads, or does so no longer: then it has no groups to count.
    pub fn leader(&self, leads: bool) {
        self.0.leader.set(leads.into());
        if !leads {
            self.known().members.clear();
            self.0.members.clear();
            self.0.unowned.clear();
            self.0.groups.set(0);
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

    /// A handover is over.
    pub fn handover(&self, group: &GroupName, took: Duration) {
        self.0.handovers.get_or_create(&self.group(group)).inc();
        self.0.handover_seconds.observe(took.as_secs_f64());
    }

    /// Members were told shares.
    pub fn told(&self, count: u64) {
        self.0.told.inc_by(count);
    }

    /// A member died. `why` is one of a few words.
    pub fn expired(&self, group: &GroupName, why: &'static str) {
        let label = self.known().label(group);
        self.0
            .expired
            .get_or_create(&[("group", label), ("why", why.into())])
            .inc();
    }

    /// A member did not release in time.
    pub fn overtaken(&self, group: &GroupName) {
        self.0.overtaken.get_or_create(&self.group(group)).inc();
    }

    /// A member's lease is no longer renewed.
    pub fn fenced(&self, group: &GroupName) {
        self.0.fenced.get_or_create(&self.group(group)).inc();
    }

    /// A join was put off.
    pub fn delayed_join(&self, group: &GroupName) {
        self.0.delayed_joins.get_or_create(&self.group(group)).inc();
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

    fn group(&self, group: &GroupName) -> [Label<Arc<str>>; 1] {
        [("group", self.known().label(group))]
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn label(&mut self, group: &GroupName) -> Arc<str> {
        if let Some(label) = self.labels.get(group) {
            return Arc::clone(label);
        }
        if self.labels.len() >= GROUP_LABELS {
            return Arc::clone(&self.other);
        }
        let label: Arc<str> = group.as_str().into();
        self.labels.insert(group.clone(), Arc::clone(&label));
        label
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
    use super::*;

    fn group(name: &str) -> GroupName {
        GroupName::new(name).unwrap()
    }

    fn line<'a>(text: &'a str, start: &str) -> Option<&'a str> {
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

    #[test]
    fn labels_are_bounded_and_the_rest_adds_up() {
        let metrics = Metrics::new();
        for number in 0..GROUP_LABELS + 2 {
            metrics.members(&group(&number.to_string()), 10);
        }
        metrics.members(&group(&GROUP_LABELS.to_string()), 4);
        metrics.members(&group("7"), 1);
        let text = metrics.encode();
        let members = |label: &str| {
            line(&text, &format!("skyschedule_members{{group=\"{label}\"}}")).map(str::to_owned)
        };
        assert_eq!(members(OTHER).as_deref(), Some("14"));
        assert_eq!(members("7").as_deref(), Some("1"));
        assert_eq!(members(&GROUP_LABELS.to_string()), None);
        assert_eq!(line(&text, names::GROUPS), Some("1002"));
    }

    #[test]
    fn a_group_has_its_counters_from_the_beginning_to_its_end() {
        let metrics = Metrics::new();
        metrics.members(&group("orders"), 0);
        let text = metrics.encode();
        for name in [
            names::HANDOVERS,
            names::OVERTAKEN,
            names::FENCED,
            names::DELAYED_JOINS,
        ] {
            let counter = format!(r#"{name}{{group="orders"}}"#);
            assert_eq!(line(&text, &counter), Some("0"), "{name}");
        }
        for why in DEATHS {
            let counter = format!(r#"{}{{group="orders",why="{why}"}}"#, names::EXPIRED);
            assert_eq!(line(&text, &counter), Some("0"), "{why}");
        }
        metrics.forget(&group("orders"));
        let text = metrics.encode();
        assert!(!text.contains("orders"), "{text}");
        assert_eq!(line(&text, names::GROUPS), Some("0"));
    }

    #[test]
    fn a_replica_that_leads_no_longer_counts_no_members() {
        let metrics = Metrics::new();
        metrics.leader(true);
        metrics.members(&group("orders"), 3);
        metrics.unowned(&group("orders"), 0.0);
        metrics.leader(false);
        let text = metrics.encode();
        assert_eq!(line(&text, names::LEADER), Some("0"));
        for gauge in [names::MEMBERS, names::UNOWNED] {
            assert_eq!(line(&text, &format!(r#"{gauge}{{group="orders"}}"#)), None);
        }
        let handovers = format!(r#"{}{{group="orders"}}"#, names::HANDOVERS);
        assert_eq!(line(&text, &handovers), Some("0"), "counters never vanish");
        metrics.leader(true);
        metrics.members(&group("orders"), 2);
        assert_eq!(
            line(&metrics.encode(), r#"skyschedule_members{group="orders"}"#),
            Some("2")
        );
    }
}
