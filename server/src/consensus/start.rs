//! A replica is put together, looked after, and taken apart.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use openraft::SnapshotPolicy;
use openraft::async_runtime::WatchReceiver as _;
use skyschedule_common::env;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use super::acknowledged::Acknowledged;
use super::change::Changes;
use super::error::ConsensusError;
use super::formation::{Formation, Servers, Statuses};
use super::identity::{ClusterId, Standing};
use super::leadership::{self, Leadership};
use super::log::Log;
use super::machine::{Compaction, Machine};
use super::members::Members;
use super::network::Network;
use super::proposals::{Message, Proposals, Proposer};
use super::raft::{Place, Raft, seeded};
use super::serve::{Answers, Contact, Membership};
use super::split::{self, Alarm, Split};
use super::store::{Contents, Store};
use super::writer::{self, Writer};
use super::{Consensus, Decided, Options, QUEUE, RaftHandle, Storage, Timing};
use crate::peers::{Peers, Roster, Service};
use crate::state::State;

/// Entries that are kept behind a snapshot, for followers that lag a little.
const KEPT: u64 = 16;

/// Entries that are sent to a follower at once.
const MAX_ENTRIES: u64 = 64;

/// How long what was proposed may take to be answered when the replica stops.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

type Opened = Result<(Consensus, mpsc::Receiver<Decided>), ConsensusError>;

/// Starts a replica on a runtime of its own.
pub(super) async fn start(options: Options) -> Opened {
    let (tell, told) = oneshot::channel();
    let place = place(&options.storage);
    let failed = |reason: String| ConsensusError::Panicked {
        place: place.clone(),
        reason,
    };
    let running = seeded(run(options, tell));
    env::spawn_apart("skyschedule-raft", running).map_err(|error| failed(error.to_string()))?;
    told.await
        .unwrap_or_else(|_| Err(failed("it ended during its start".into())))
}

fn place(storage: &Storage) -> String {
    match storage {
        Storage::Folder(path) => path.display().to_string(),
        Storage::Memory(_) => "memory".to_owned(),
    }
}

/// Puts the replica together, and looks after it until it stops.
async fn run(options: Options, tell: oneshot::Sender<Opened>) {
    let place = place(&options.storage);
    let latency = match &options.storage {
        Storage::Folder(_) => Duration::ZERO,
        Storage::Memory(disk) => disk.latency(),
    };
    let (storage, id) = (options.storage.clone(), u64::from(options.replica_id));
    let opening = writer::blocking(&place, move || Store::open(&storage, id)).await;
    let (store, contents) = match opening {
        Ok(opened) => opened,
        // Whoever asked may have gone; so below.
        Err(error) => return drop(tell.send(Err(error))),
    };
    let (writer, writing) = Writer::new(store, latency);
    let (failed, mut failure) = oneshot::channel();
    env::spawn(async move {
        if let Err(error) = writing.await {
            tracing::error!(%error, "the store has failed");
            let _ = failed.send(error);
        }
    });
    match assemble(options, contents, writer.clone(), &place).await {
        Ok((consensus, receiver, parts)) => {
            if tell.send(Ok((consensus, receiver))).is_ok() {
                parts.look_after(writer, failure, place).await;
            }
        }
        Err(error) => {
            // What the disk says is nearer to the cause.
            writer.stop().await;
            let error = failure.try_recv().unwrap_or(error);
            let _ = tell.send(Err(error));
        }
    }
}

/// What runs beside the handle.
struct Parts {
    raft: Raft,
    state: Arc<RwLock<State>>,
    queue: mpsc::Receiver<Message>,
    lost: watch::Sender<u64>,
    compact: Arc<Notify>,
    formation: Option<Formation>,
    /// The place of the last answer.
    last: Option<mpsc::OwnedPermit<Decided>>,
    leadership: watch::Sender<Leadership>,
    proposer: Proposer,
    alarm: Alarm,
    network: Network,
    id: u16,
}

async fn assemble(
    options: Options,
    mut contents: Contents,
    writer: Writer,
    place: &str,
) -> Result<(Consensus, mpsc::Receiver<Decided>, Parts), ConsensusError> {
    let fatal = |reason: &dyn std::fmt::Display| ConsensusError::Damaged {
        place: place.to_owned(),
        reason: reason.to_string(),
    };
    if contents.identity.standing == Standing::Removed {
        return Err(ConsensusError::Removed {
            place: place.to_owned(),
            replica: options.replica_id,
        });
    }
    for entry in contents.log.values() {
        // What cannot be applied later is better known now.
        super::machine::verify(entry, place)?;
    }
    let Options {
        replica_id: id,
        advertise,
        cluster,
        timing,
        snapshot_every,
        ..
    } = options;
    let state = Arc::new(RwLock::new(State::default()));
    let compact = Arc::new(Notify::new());
    let compaction = Compaction {
        every: snapshot_every.max(1),
        due: Arc::clone(&compact),
    };
    let snapshot = contents.snapshot.take();
    let machine = Machine::new(Arc::clone(&state), snapshot, writer.clone(), compaction)
        .map_err(|error| fatal(&error))?;
    let (applied, decided_members) = (machine.index(), machine.membership());
    let log = Log::new(&mut contents, writer.clone());
    let membership = Membership::new(contents.identity, writer.clone());
    let peers = cluster
        .as_ref()
        .filter(|cluster| cluster.replicas.len() > 1);
    let peers = peers.map(|cluster| {
        Peers::start(Roster {
            id,
            key: cluster.key.clone(),
        })
    });
    let alarm = Alarm::default();
    let network = Network {
        peers: peers.clone(),
        membership: membership.clone(),
        limit: timing.election_max,
        acknowledged: Acknowledged::default(),
        log: log.clone(),
        alarm: alarm.clone(),
    };
    let config = Arc::new(config(&timing).validate().map_err(|error| fatal(&error))?);
    let raft = Raft::new(u64::from(id), config, network.clone(), log.clone(), machine)
        .await
        .map_err(|error| fatal(&error))?;
    let configured = cluster
        .filter(|_| peers.is_some())
        .map(|cluster| cluster.replicas)
        .unwrap_or_default();
    let members = Members::new(id, raft.clone(), decided_members, configured);
    members
        .known_to_openraft()
        .await
        .map_err(|error| fatal(&error))?;
    check_members(&members, id, place)?;
    raft.runtime_config()
        .elect(contents.identity.standing == Standing::Full);

    let contact = Contact::default();
    let answers = Answers {
        contact: contact.clone(),
        raft: raft.clone(),
        log,
        membership,
        members: members.clone(),
        advertise: advertise.clone(),
        alarm: alarm.clone(),
    };
    let (statuses, changes) = (Statuses::default(), Changes::default());
    let servers = Servers::new(id, &advertise);
    let told_servers = servers.tell.subscribe();
    let formation = peers.as_ref().map(|peers| {
        peers.serve(Service::Consensus, answers.clone().handler());
        Formation {
            id,
            peers: peers.clone(),
            members: members.clone(),
            network: network.clone(),
            answers: answers.clone(),
            statuses: Arc::clone(&statuses),
            servers,
            changes: changes.clone(),
            place: place.to_owned(),
            found: None,
        }
    });
    if formation.is_none() {
        alone(&answers, u64::from(id))
            .await
            .map_err(|error| fatal(&error))?;
    }

    // One more, for the failure.
    let (decided, receiver) = mpsc::channel(QUEUE + 1);
    let (leadership, leads) = watch::channel(Leadership::default());
    let lost = watch::Sender::new(0);
    let (proposer, handle, queue) = Proposer::new(&decided, leads.clone());
    let consensus = Consensus {
        id,
        state: Arc::clone(&state),
        applied,
        membership: answers.membership.clone(),
        proposer: proposer.clone(),
        queue: handle,
        raft: RaftHandle(raft.clone()),
        leadership: leads,
        peers,
        members,
        network: network.clone(),
        changes,
        servers: told_servers,
        statuses,
        advertise,
        contact,
        writer,
        note: contents.note.take(),
        lost: lost.clone(),
        alarm: alarm.clone(),
    };
    let parts = Parts {
        raft,
        state,
        queue,
        lost,
        compact,
        formation,
        last: decided.try_reserve_owned().ok(),
        leadership,
        proposer,
        alarm,
        network,
        id,
    };
    Ok((consensus, receiver, parts))
}

fn config(timing: &Timing) -> openraft::Config {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    openraft::Config {
        cluster_name: "skyschedule".to_owned(),
        heartbeat_interval: millis(timing.heartbeat),
        election_timeout_min: millis(timing.election_min),
        election_timeout_max: millis(timing.election_max),
        enable_pre_vote: Some(true),
        // A restart in the same term is a new leader.
        enable_leader_restore: Some(false),
        // `identity` sees to it that a replica that lost its disk does no harm.
        allow_log_reversion: Some(true),
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: KEPT,
        max_payload_entries: MAX_ENTRIES,
        backoff: "20ms 40ms ...300ms".to_owned(),
        ..openraft::Config::default()
    }
}

/// Who the replicas are is in the log. A configuration that says otherwise is out of date, or names replicas that are
/// about to be added; but a replica of several cannot go on alone.
fn check_members(members: &Members, id: u16, place: &str) -> Result<(), ConsensusError> {
    let Some(known) = members.effective() else {
        return Ok(());
    };
    let configured = members.configured();
    let list = |places: Vec<(&u16, &String)>| {
        let texts: Vec<_> = places
            .iter()
            .map(|(id, address)| format!("{id}={address}"))
            .collect();
        texts.join(",")
    };
    let stored = known.places.iter();
    let stored: Vec<_> = stored.map(|(id, place)| (id, &place.address)).collect();
    let given: Vec<_> = configured.iter().collect();
    if configured.is_empty() {
        return match known.places.keys().eq([&id]) {
            true => Ok(()),
            false => Err(ConsensusError::OtherPeers {
                place: place.to_owned(),
                stored: list(stored),
            }),
        };
    }
    if stored != given {
        tracing::warn!(
            peers = list(given),
            replicas = list(stored),
            "the list of peers is out of date, or names replicas that are not added yet; what the cluster has decided counts"
        );
    }
    Ok(())
}

/// A replica alone is a cluster of one, and leads at once. All that is on its disk is decided.
async fn alone(answers: &Answers, id: u64) -> Result<(), String> {
    let membership = &answers.membership;
    let identity = membership.identity();
    if identity.cluster.is_none() || identity.standing != Standing::Full {
        let random = || u128::from(env::rng::u64());
        let cluster = ClusterId(random() << 64 | random());
        let set = membership.set(identity.cluster.unwrap_or(cluster), Standing::Full);
        set.await.map_err(|error| error.to_string())?;
    }
    let raft = &answers.raft;
    raft.runtime_config().elect(true);
    let last = answers.log.last();
    if last.is_none() {
        let place = Place {
            address: answers.advertise.clone(),
            advertise: answers.advertise.clone(),
            added: false,
        };
        let voters = BTreeMap::from([(id, place)]);
        let first = raft.initialize(voters).await;
        return first.map_err(|error| error.to_string());
    }
    let elected = raft.trigger().elect(false).await;
    elected.map_err(|error| error.to_string())?;
    let mut metrics = raft.metrics();
    loop {
        {
            let metrics = metrics.borrow_watched();
            metrics
                .running_state
                .as_ref()
                .map_err(ToString::to_string)?;
            if metrics.last_applied >= last {
                return Ok(());
            }
        }
        metrics.changed().await.map_err(|error| error.to_string())?;
    }
}

impl Parts {
    async fn look_after(
        mut self,
        writer: Writer,
        mut failure: oneshot::Receiver<ConsensusError>,
        place: String,
    ) {
        let leadership = self.leadership.subscribe();
        let follow = leadership::follow(
            self.raft.clone(),
            self.proposer,
            self.leadership,
            self.lost.subscribe(),
        );
        let following = env::spawn(seeded(follow));
        let raft = self.raft.clone();
        let compact = self.compact;
        let compacting = env::spawn(seeded(async move {
            loop {
                compact.notified().await;
                if raft.trigger().snapshot().await.is_err() {
                    return;
                }
            }
        }));
        let formation = async {
            match self.formation {
                Some(formation) => formation.run().await,
                None => std::future::pending().await,
            }
        };
        let proposals = Proposals {
            raft: self.raft.clone(),
            state: self.state,
            leadership,
            lost: self.lost,
        };
        let proposing = proposals.run(self.queue);
        let ended = tokio::select! {
            biased;
            Ok(error) = &mut failure => Err(error),
            Split { other, why } = self.alarm.raised() => {
                let replica = self.id;
                Err(ConsensusError::Split { place, replica, other, why })
            }
            error = formation => Err(error),
            reason = broken_down(&self.raft) => {
                // What the disk says is nearer to the cause.
                let cause = env::timeout(LAST_ANSWERS, failure).await;
                Err(match cause {
                    Ok(Ok(error)) => error,
                    _ => ConsensusError::Panicked { place, reason },
                })
            }
            stop = proposing => Ok(stop),
        };
        following.abort();
        compacting.abort();
        // It has ended by itself where it cannot be told.
        let _ = env::timeout(LAST_ANSWERS, self.raft.shutdown()).await;
        if let Some(split) = self.alarm.split() {
            split::tell(&self.network, &split).await;
        }
        match ended {
            Ok(stop) => {
                writer.stop().await;
                drop(self.last);
                // Whoever asked may have gone.
                let _ = stop.map(|stop| stop.send(()));
            }
            Err(error) => {
                if let Some(last) = self.last.take() {
                    last.send(Decided::Failed(error));
                }
            }
        }
    }
}

/// Resolves when openraft ended by itself.
async fn broken_down(raft: &Raft) -> String {
    let mut metrics = raft.metrics();
    loop {
        if let Err(fatal) = &metrics.borrow_watched().running_state {
            break fatal.to_string();
        }
        if metrics.changed().await.is_err() {
            break "it ended".to_owned();
        }
    }
}
