//! How replicas become a cluster, how one that lost its disk comes back, and how one learns that it was removed.
//!
//! Each asks the others again and again how they are, which also shows who is reachable. When all are empty,
//! the one with the lowest id draws the id of their cluster, tells it to all, and only when all have it on
//! their disks writes the first entry, the list of the voters. Where a cluster is, no other one forms: a replica
//! with an empty disk comes back to it, if it was a member, and otherwise waits to be added. See `identity`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use skyschedule_common::env;
use tokio::sync::watch;

use super::change::Changes;
use super::error::ConsensusError;
use super::identity::{ClusterId, Standing};
use super::members::Members;
use super::network::Network;
use super::raft::Place;
use super::serve::Answers;
use super::twin;
use super::wire::{Known, Reply, Request, Status};
use crate::peers::Peers;

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
    pub(super) peers: Peers,
    pub(super) members: Members,
    pub(super) network: Network,
    pub(super) answers: Answers,
    pub(super) statuses: Statuses,
    pub(super) servers: Servers,
    pub(super) changes: Changes,
    pub(super) place: String,
    /// The newest list of replicas that another one told.
    pub(super) found: Option<Known>,
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
    /// Goes on for ever, unless this replica's disk belongs to another cluster, or another process is this replica.
    pub(super) async fn run(self) -> ConsensusError {
        let (tell, own) = watch::channel(BTreeSet::new());
        let twin = twin::watch(self.id, self.peers.clone(), own);
        tokio::select! {
            biased;
            error = self.follow(tell) => error,
            error = twin => error,
        }
    }

    async fn follow(mut self, own: watch::Sender<BTreeSet<String>>) -> ConsensusError {
        let mut said = Said::default();
        loop {
            let found = self.found.as_ref();
            self.peers.connect(self.members.routes(found));
            let at = self.members.own_addresses(found);
            own.send_if_modified(|known| {
                let changed = *known != at;
                *known = at;
                changed
            });
            let statuses = self.ask_all().await;
            self.found = newest(&statuses).cloned();
            self.check_peers(&statuses, &mut said);
            let checked = self.check_cluster(&statuses, &mut said);
            if let Err(error) = checked.and(self.check_member(&statuses).await) {
                return error;
            }
            self.servers.update(&self.members, &statuses);
            self.changes.finish(&self.answers.raft, &self.members);
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
            let pause = env::sleep(if done { EVERY } else { FORMING_EVERY });
            tokio::select! {
                biased;
                () = self.members.changed() => {}
                () = pause => {}
            }
        }
    }

    async fn ask_all(&self) -> BTreeMap<u16, Status> {
        let others = self.peers.others();
        let asked = others.iter().map(async |&id| {
            let reply = self.network.call(u64::from(id), Request::Status, LIMIT);
            match reply.await {
                Ok(Reply::Status(status)) => Some((id, status)),
                _ => None,
            }
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Before there is a cluster, says once of each replica that its configuration lists others. Afterwards it may.
    fn check_peers(&self, statuses: &BTreeMap<u16, Status>, said: &mut Said) {
        let me = self.answers.status();
        let mine = &me.replicas;
        let others = statuses
            .iter()
            .filter(|(_, status)| status.replicas != *mine)
            .filter(|(_, status)| me.known.is_none() && status.known.is_none());
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
        if foreign.len() * 2 > self.peers.others().len() + 1 {
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

    /// A replica without which the cluster goes on ends, and its disk is of no use any more.
    async fn check_member(&self, statuses: &BTreeMap<u16, Status>) -> Result<(), ConsensusError> {
        let me = self.answers.status();
        let (Standing::Full, Some(cluster)) = (me.standing, me.cluster) else {
            return Ok(());
        };
        let others = statuses
            .values()
            .filter(|status| status.cluster == Some(cluster));
        let known = others
            .chain([&me])
            .filter_map(|status| status.known.as_ref());
        let newest = known
            .filter(|known| known.decided)
            .max_by_key(|known| known.since);
        if newest.is_none_or(|known| known.places.contains_key(&self.id)) {
            return Ok(());
        }
        tracing::error!(
            replica = self.id,
            "this replica was removed from the cluster; it stops, and takes part no more"
        );
        let removed = ConsensusError::Removed {
            place: self.place.clone(),
            replica: self.id,
        };
        let membership = &self.answers.membership;
        match membership.set(cluster, Standing::Removed).await {
            Ok(()) => Err(removed),
            // The disk has failed, which says more.
            Err(_) => std::future::pending().await,
        }
    }

    async fn form_or_return(&self, statuses: &BTreeMap<u16, Status>) -> Result<(), String> {
        let me = self.answers.status();
        let listed = self.others_listed();
        let missing = listed.iter().filter(|id| !statuses.contains_key(id));
        let missing: Vec<_> = missing.collect();
        if self.found.is_none() && listed.len() == 1 {
            return Err(format!(
                "looks for the cluster of replica {listed:?}: two servers form none, since both would stop when either does. List \
                 one, three or five in --peers; two only for a cluster that has shrunk to them"
            ));
        }
        if self.found.is_none() && !missing.is_empty() {
            return Err(format!(
                "waits for replicas {missing:?}: a cluster forms, or takes an empty disk in, when all are there"
            ));
        }
        let is_empty = |id: &u16| statuses.get(id).is_some_and(|status| status.empty);
        if me.empty && listed.iter().all(is_empty) {
            self.form(me.cluster, &listed, statuses).await
        } else if me.standing == Standing::Blank {
            self.come_back(statuses).await
        } else {
            Ok(())
        }
    }

    /// The others of the configuration.
    fn others_listed(&self) -> BTreeSet<u16> {
        let all = self.members.configured().keys().copied();
        all.filter(|id| *id != self.id).collect()
    }

    async fn form(
        &self,
        cluster: Option<ClusterId>,
        others: &BTreeSet<u16>,
        statuses: &BTreeMap<u16, Status>,
    ) -> Result<(), String> {
        if others.iter().any(|other| *other < self.id) {
            return Ok(());
        }
        let cluster = cluster.unwrap_or_else(|| {
            let random = || u128::from(env::rng::u64());
            ClusterId(random() << 64 | random())
        });
        let replicas: BTreeSet<u16> = self.members.configured().keys().copied().collect();
        for &other in others {
            let request = Request::Form {
                cluster,
                replicas: replicas.clone(),
            };
            let reply = self.network.call(u64::from(other), request, LIMIT).await;
            if !matches!(reply.map_err(|error| error.to_string())?, Reply::Done) {
                return Err(format!("replica {other} gives a wrong answer"));
            }
        }
        let membership = &self.answers.membership;
        let set = membership.set(cluster, Standing::Full).await;
        set.map_err(|error| error.to_string())?;
        let listed = self.members.configured().iter();
        let voters: BTreeMap<u64, Place> = listed
            .map(|(id, address)| {
                let status = statuses.get(id);
                let advertise = status.map_or(&self.answers.advertise, |status| &status.advertise);
                let place = Place {
                    address: address.clone(),
                    advertise: advertise.clone(),
                    added: false,
                };
                (u64::from(*id), place)
            })
            .collect();
        tracing::info!(%cluster, voters = ?voters.keys(), "a new cluster forms");
        self.answers.raft.runtime_config().elect(true);
        let first = self.answers.raft.initialize(voters).await;
        first.map_err(|error| error.to_string())
    }

    /// Nobody but the others knows what this replica has forgotten: it comes back when all voters have told, or
    /// waits to be added if it is no member. A list of voters that is out of date does no harm: at least one of
    /// them knows the next one.
    ///
    /// Others may have lost their disks, too, as long as each majority has one that has forgotten nothing: until one is
    /// brought up it does not vote, so that a new leader has the votes of a majority that has forgotten nothing, and that one
    /// has a replica in common with each majority that ever decided or voted.
    async fn come_back(&self, statuses: &BTreeMap<u16, Status>) -> Result<(), String> {
        let Some(known) = &self.found else {
            return Ok(());
        };
        if !known.places.contains_key(&self.id) {
            let address = self.members.configured().get(&self.id);
            return Err(format!(
                "its disk is empty, and it is not in the cluster of the others: `skyschedule cluster add {} {}` adds it",
                self.id,
                address.map_or("HOST:PORT", String::as_str)
            ));
        }
        let voters: Vec<u16> = known.voters.iter().copied().collect();
        let others = voters.iter().filter(|id| **id != self.id);
        let statuses: Option<BTreeMap<u16, &Status>> =
            others.map(|id| Some((*id, statuses.get(id)?))).collect();
        let Some(statuses) = statuses else {
            return Ok(());
        };
        let blank: BTreeSet<u16> = statuses
            .iter()
            .filter(|(_, status)| status.standing != Standing::Full)
            .map(|(id, _)| *id)
            .collect();
        let full = statuses.iter().filter(|(id, _)| !blank.contains(id));
        let full: Vec<&Status> = full.map(|(_, status)| *status).collect();
        if voters.len() - full.len() > voters.len() / 2 {
            return Err(format!(
                "replicas {blank:?} have lost their disks as well as this one: give a majority of the replicas their disks \
                 back, or begin anew with empty disks for all; clients that know of later decisions then make the cluster \
                 go on above them"
            ));
        }
        let clusters: Vec<_> = full.iter().map(|status| status.cluster).collect();
        let Some(Some(cluster)) = clusters.first() else {
            return Ok(());
        };
        if clusters.iter().any(|other| *other != Some(*cluster)) {
            return Err("the other replicas are of different clusters".into());
        }
        let term = full.iter().map(|status| status.term).max();
        let term = term.unwrap_or(0);
        tracing::warn!(%cluster, term, "this replica's disk is empty; the others bring it up");
        let standing = Standing::Returning { term };
        let set = self.answers.membership.set(*cluster, standing).await;
        set.map_err(|error| error.to_string())
    }
}

/// The newest list of replicas that any of them tells.
fn newest(statuses: &BTreeMap<u16, Status>) -> Option<&Known> {
    let known = statuses.values().filter_map(|status| status.known.as_ref());
    known.max_by_key(|known| known.since)
}

/// Where clients find the replicas that may lead, for those who tell them.
pub(super) struct Servers {
    id: u16,
    pub(super) tell: watch::Sender<Vec<String>>,
    /// What each replica said last.
    advertised: BTreeMap<u16, String>,
}

impl Servers {
    pub(super) fn new(id: u16, advertise: &str) -> Self {
        Self {
            id,
            tell: watch::Sender::default(),
            advertised: BTreeMap::from([(id, advertise.to_owned())]),
        }
    }

    fn update(&mut self, members: &Members, statuses: &BTreeMap<u16, Status>) {
        for (id, status) in statuses {
            self.advertised.insert(*id, status.advertise.clone());
        }
        let Some(known) = members.effective() else {
            return;
        };
        self.advertised
            .retain(|id, _| *id == self.id || known.places.contains_key(id));
        let address = |id: &u16| {
            let place = known.places.get(id).map(|place| &place.advertise);
            self.advertised.get(id).or(place).cloned()
        };
        let servers: Vec<String> = known.voters.iter().filter_map(address).collect();
        self.tell.send_if_modified(|present| {
            let changed = *present != servers;
            *present = servers;
            changed
        });
    }
}
