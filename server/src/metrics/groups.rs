//! What is counted of each group, and under which label.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use skyschedule_common::ids::GroupName;

use super::{Label, Metrics, names, register};

/// Most groups that have a label of their own.
pub const GROUP_LABELS: usize = 1_000;

/// The label of groups beyond [`GROUP_LABELS`].
pub const OTHER: &str = "other";

type ByGroup<M> = Family<[Label<Arc<str>>; 1], M>;
type ByGroupAndWhy = Family<[Label<Arc<str>>; 2], Counter>;
type Ratio = Gauge<f64, AtomicU64>;

/// How members die: see [`Metrics::expired`].
const DEATHS: [&str; 3] = ["lease", "fin", "reset"];

/// The counters of groups.
#[derive(Debug)]
pub(super) struct Groups {
    count: Gauge,
    members: ByGroup<Gauge>,
    unowned: ByGroup<Ratio>,
    handovers: ByGroup<Counter>,
    expired: ByGroupAndWhy,
    overtaken: ByGroup<Counter>,
    fenced: ByGroup<Counter>,
    delayed_joins: ByGroup<Counter>,
    known: Mutex<Known>,
}

/// The groups that are counted, and how many members of each are in its gauge.
#[derive(Debug)]
struct Known {
    labels: HashMap<GroupName, Arc<str>>,
    members: HashMap<GroupName, i64>,
    other: Arc<str>,
}

impl Groups {
    pub(super) fn new(r: &mut Registry) -> Self {
        Self {
            count: register(r, names::GROUPS, "Groups"),
            members: register(r, names::MEMBERS, "Members of the group"),
            unowned: register(
                r,
                names::UNOWNED,
                "The part of the rows that no member is to have",
            ),
            handovers: register(r, names::HANDOVERS, "Handovers that are over"),
            expired: register(r, names::EXPIRED, "Members that died"),
            overtaken: register(r, names::OVERTAKEN, "Members that did not release in time"),
            fenced: register(r, names::FENCED, "Members whose lease is no longer renewed"),
            delayed_joins: register(
                r,
                names::DELAYED_JOINS,
                "Joins put off since the client died too often",
            ),
            known: Mutex::new(Known {
                labels: HashMap::new(),
                members: HashMap::new(),
                other: OTHER.into(),
            }),
        }
    }

    /// There are none to be counted here any more; what happened stays counted.
    pub(super) fn clear(&self) {
        self.known().members.clear();
        self.members.clear();
        self.unowned.clear();
        self.count.set(0);
    }

    /// A group's counters begin with 0, not with their first event: only so is that one seen to raise them.
    fn begin(&self, label: &Arc<str>) {
        let group = [("group", Arc::clone(label))];
        for counter in self.counters() {
            drop(counter.get_or_create(&group));
        }
        for why in DEATHS {
            let labels = [("group", Arc::clone(label)), ("why", why.into())];
            drop(self.expired.get_or_create(&labels));
        }
    }

    fn end(&self, label: Arc<str>) {
        for why in DEATHS {
            let labels = [("group", Arc::clone(&label)), ("why", why.into())];
            self.expired.remove(&labels);
        }
        let group = [("group", label)];
        self.members.remove(&group);
        self.unowned.remove(&group);
        for counter in self.counters() {
            counter.remove(&group);
        }
    }

    fn counters(&self) -> [&ByGroup<Counter>; 4] {
        [
            &self.handovers,
            &self.overtaken,
            &self.fenced,
            &self.delayed_joins,
        ]
    }

    fn recount(&self, known: &Known) {
        let groups = known.members.len();
        self.count.set(i64::try_from(groups).unwrap_or(i64::MAX));
    }

    fn label(&self, group: &GroupName) -> [Label<Arc<str>>; 1] {
        [("group", self.known().label(group))]
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
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

impl Metrics {
    /// The group has so many members now. From here on it has all its counters.
    pub fn members(&self, group: &GroupName, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let groups = &self.0.groups;
        let mut known = groups.known();
        let label = known.label(group);
        if !known.members.contains_key(group) {
            groups.begin(&label);
        }
        let before = known.members.insert(group.clone(), count).unwrap_or(0);
        // A difference, because groups may share a label.
        groups
            .members
            .get_or_create(&[("group", label)])
            .inc_by(count.saturating_sub(before));
        groups.recount(&known);
    }

    /// There is no such group any more.
    pub fn forget(&self, group: &GroupName) {
        let groups = &self.0.groups;
        let mut known = groups.known();
        known.members.remove(group);
        groups.recount(&known);
        // Groups that share a label go on.
        if let Some(label) = known.labels.remove(group) {
            groups.end(label);
        }
    }

    /// The part of the group's rows that no member is to have, from 0 to 1. Of groups that share a label, the last one's.
    pub fn unowned(&self, group: &GroupName, ratio: f64) {
        let groups = &self.0.groups;
        groups
            .unowned
            .get_or_create(&groups.label(group))
            .set(ratio);
    }

    /// A handover is over.
    pub fn handover(&self, group: &GroupName, took: Duration) {
        self.count_one(group, |groups| &groups.handovers);
        self.0.handover_seconds.observe(took.as_secs_f64());
    }

    /// A member died. `why` is one of a few words.
    pub fn expired(&self, group: &GroupName, why: &'static str) {
        let groups = &self.0.groups;
        let [label] = groups.label(group);
        groups
            .expired
            .get_or_create(&[label, ("why", why.into())])
            .inc();
    }

    /// A member did not release in time.
    pub fn overtaken(&self, group: &GroupName) {
        self.count_one(group, |groups| &groups.overtaken);
    }

    /// A member's lease is no longer renewed.
    pub fn fenced(&self, group: &GroupName) {
        self.count_one(group, |groups| &groups.fenced);
    }

    /// A join was put off.
    pub fn delayed_join(&self, group: &GroupName) {
        self.count_one(group, |groups| &groups.delayed_joins);
    }

    fn count_one(&self, group: &GroupName, of: impl Fn(&Groups) -> &ByGroup<Counter>) {
        let groups = &self.0.groups;
        of(groups).get_or_create(&groups.label(group)).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{group, line};
    use super::*;

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
