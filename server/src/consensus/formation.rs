//! How replicas become a cluster, and how one that lost its disk comes back.
//!
//! Each asks the others again and again how they are, which also shows who is reachable. When all are empty,
//! the one with the lowest id draws the id of their cluster, tells it to all, and only when all have it on
//! their disks writes the first entry, the list of the voters. See `identity` for one that lost its disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use skyschedule_common::env;

use super::error::ConsensusError;
use super::identity::{ClusterId, Standing};
use super::network::Network;
use super::serve::Answers;
use super::wire::{Reply, Request, Status};

/// How often the others are asked, while there is something to form.
const FORMING_EVERY: Duration = Duration::from_millis(100);
/// How often the others are asked afterwards.
const EVERY: Duration = Duration::from_millis(500);
/// How long an answer may take.
const LIMIT: Duration = Duration::from_millis(500);

/// How the others are, as far as they answered lately.
pub(super) type Statuses = Arc<Mutex<BTreeMap<u16, Status>>>;

/// Forms the cluster, or finds it.
pub(super) struct Formation {
    pub(super) id: u16,
    pub(super) others: Vec<u16>,
    pub(super) network: Network,
    pub(super) answers: Answers,
    pub(super) statuses: Statuses,
    pub(super) place: String,
}

/// What was said last about each matter: what goes on for days is logged once.
#[derive(Debug, Default)]
struct Said(BTreeMap<&'static str, String>);

impl Said {
    /// Whether this is something, and something else than before.
    fn is_new(&mut self, matter: &'static str, text: &str) -> bool {
        let last = self.0.insert(matter, text.to_owned());
        !text.is_empty() && last.as_deref() != Some(text)
    }
}

impl Formation {
    /// Goes on for ever, unless this replica's disk belongs to another cluster.
    pub(super) async fn run(self) -> ConsensusError {
        let mut said = Said::default();
        loop {
            let statuses = self.ask_all().await;
            self.check_peers(&statuses, &mut said);
            if let Err(error) = self.check_cluster(&statuses, &mut said) {
                return error;
            }
            let done = match self.answers.status() {
                Status {
                    standing: Standing::Full,
                    empty: false,
                    ..
                }
                | Status {
                    standing: Standing::Returning { .. },
                    ..
                } => true,
                _ => {
                    let result = self.form_or_return(&statuses).await;
                    let why = result.err().unwrap_or_default();
                    if said.is_new("forming", &why) {
                        tracing::warn!(why, "cannot take part in the cluster yet");
                    }
                    false
                }
            };
            *self.statuses.lock().unwrap_or_else(PoisonError::into_inner) = statuses;
            env::sleep(if done { EVERY } else { FORMING_EVERY }).await;
        }
    }

    async fn ask_all(&self) -> BTreeMap<u16, Status> {
        let asked = self.others.iter().map(async |&id| {
            let reply = self.network.call(u64::from(id), Request::Status, LIMIT);
            match reply.await {
                Ok(Reply::Status(status)) => Some((id, status)),
                _ => None,
            }
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Says once of each replica that its configuration lists others.
    fn check_peers(&self, statuses: &BTreeMap<u16, Status>, said: &mut Said) {
        let mine = &self.answers.replicas;
        let others = statuses
            .iter()
            .filter(|(_, status)| status.replicas != *mine);
        let theirs: BTreeMap<_, _> = others.map(|(id, status)| (id, &status.replicas)).collect();
        let text = theirs.iter().next().map(|_| format!("{theirs:?}"));
        if said.is_new("peers", &text.unwrap_or_default()) {
            tracing::error!(?theirs, ours = ?mine, "other replicas have other peers; give all replicas the same peers");
        }
    }

    /// One replica with the disk of another cluster gives up; those that find it need not.
    fn check_cluster(
        &self,
        statuses: &BTreeMap<u16, Status>,
        said: &mut Said,
    ) -> Result<(), ConsensusError> {
        let me = self.answers.status();
        let Some(mine) = me.cluster.filter(|_| !me.empty) else {
            return Ok(());
        };
        let foreign: Vec<u16> = statuses
            .iter()
            .filter(|(_, status)| !status.empty && status.cluster.is_some_and(|id| id != mine))
            .map(|(id, _)| *id)
            .collect();
        if foreign.len() * 2 > self.others.len() + 1 {
            return Err(ConsensusError::OtherCluster {
                place: self.place.clone(),
            });
        }
        let text = foreign.first().map(|_| format!("{foreign:?}"));
        if said.is_new("foreign", &text.unwrap_or_default()) {
            tracing::error!(replicas = ?foreign, "the disk of another replica is from another cluster; give it its own disk back, or an empty one");
        }
        Ok(())
    }

    async fn form_or_return(&self, statuses: &BTreeMap<u16, Status>) -> Result<(), String> {
        let missing = self.others.iter().filter(|id| !statuses.contains_key(id));
        let missing: Vec<_> = missing.collect();
        if !missing.is_empty() {
            return Err(format!(
                "waits for replicas {missing:?}: a cluster forms, or takes an empty disk in, when all are there"
            ));
        }
        let me = self.answers.status();
        if me.empty && statuses.values().all(|status| status.empty) {
            self.form(me.cluster).await
        } else if me.standing == Standing::Blank {
            self.come_back(statuses).await
        } else {
            Ok(())
        }
    }

    async fn form(&self, cluster: Option<ClusterId>) -> Result<(), String> {
        if self.others.iter().any(|other| *other < self.id) {
            return Ok(());
        }
        let cluster = cluster.unwrap_or_else(|| {
            let random = || u128::from(env::rng::u64());
            ClusterId(random() << 64 | random())
        });
        let membership = &self.answers.membership;
        let set = membership.set(cluster, Standing::Full).await;
        set.map_err(|error| error.to_string())?;
        for &other in &self.others {
            let replicas = self.answers.replicas.clone();
            let request = Request::Form { cluster, replicas };
            let reply = self.network.call(u64::from(other), request, LIMIT).await;
            if !matches!(reply.map_err(|error| error.to_string())?, Reply::Done) {
                return Err(format!("replica {other} gives a wrong answer"));
            }
        }
        let voters: BTreeMap<u64, ()> = self
            .others
            .iter()
            .chain([&self.id])
            .map(|id| (u64::from(*id), ()))
            .collect();
        tracing::info!(%cluster, voters = ?voters.keys(), "a new cluster forms");
        self.answers.raft.runtime_config().elect(true);
        let first = self.answers.raft.initialize(voters).await;
        first.map_err(|error| error.to_string())
    }

    /// Nobody but the others knows what this replica has forgotten.
    async fn come_back(&self, statuses: &BTreeMap<u16, Status>) -> Result<(), String> {
        let blank: BTreeSet<u16> = statuses
            .iter()
            .filter(|(_, status)| status.standing != Standing::Full)
            .map(|(id, _)| *id)
            .collect();
        if !blank.is_empty() {
            return Err(format!(
                "replicas {blank:?} have lost their disks as well as this one: give at least all but one of the \
                 replicas their disks back, or begin anew with empty disks for all; clients that know of later \
                 decisions then make the cluster go on above them"
            ));
        }
        let clusters: Vec<_> = statuses.values().map(|status| status.cluster).collect();
        let Some(Some(cluster)) = clusters.first() else {
            return Ok(());
        };
        if clusters.iter().any(|other| *other != Some(*cluster)) {
            return Err("the other replicas are of different clusters".into());
        }
        let term = statuses.values().map(|status| status.term).max();
        let term = term.unwrap_or(0);
        tracing::warn!(%cluster, term, "this replica's disk is empty; the others bring it up");
        let standing = Standing::Returning { term };
        let set = self.answers.membership.set(*cluster, standing).await;
        set.map_err(|error| error.to_string())
    }
}
