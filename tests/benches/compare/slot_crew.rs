//! Slots that move among members through etcd, with the promise that none has two owners.
//!
//! One process plans. It learns of a newcomer by a watch, chooses the slots that it shall have from those who have
//! most, and grants them by a key each once they are given up. There are two ways to know that:
//!
//! * **the affected acknowledge**: the planner creates a key for each slot that is to be given up; its owner watches
//!   those of its own, and answers by a key. The least that the promise can cost.
//! * **all acknowledge**: each member watches all members, stops, and acknowledges the change by a key.
//!
//! Members have nothing to finish, so that giving up costs nothing but the messages.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::json;
use skyschedule_common::env;
use tokio::sync::{mpsc, watch};

use crate::common::Result;
use crate::common::process::obey;
use crate::etcd::Etcd;
use crate::rows::Rows;
use crate::store::{Change, Store as _};

const MEMBERS: &str = "/members";
const REVOKED: &str = "/revoked";
const ACKNOWLEDGEMENTS: &str = "/acknowledgements";
const GRANTS: &str = "/grants";

/// Who acknowledges a change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Who {
    Affected,
    All,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Affected => "affected",
            Self::All => "all",
        })
    }
}

impl FromStr for Who {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "affected" => Ok(Self::Affected),
            "all" => Ok(Self::All),
            other => Err(format!("nobody is called {other}")),
        }
    }
}

/// How far the planner is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settled {
    pub(crate) members: usize,
    /// Slots that are on their way.
    pub(crate) moving: usize,
}

/// Carries out what the benchmark asks of this process.
pub(crate) async fn run(servers: &str, table: &str) -> Result<()> {
    // When the first row of the newest slot was read; 0: not since the last join.
    let first = Arc::new(AtomicU64::new(0));
    let rows = Rows::open(Path::new(table)).await?;
    let mut members: Vec<(String, Etcd)> = Vec::new();
    let (settled, settling) = watch::channel(Settled::default());
    let mut settled = Some(settled);
    obey(async |words| match words {
        ["plan", slots, who] => {
            let settled = settled.take().ok_or("it plans already")?;
            let planner = Planner::new(servers, slots.parse()?, who.parse()?, settled).await?;
            env::spawn(planner.follow());
            Ok(json!(()))
        }
        ["settled"] => Ok(json!(*settling.borrow())),
        ["connect", name, count] => {
            let connecting: Vec<_> = (0..count.parse::<usize>()?)
                .map(|number| {
                    let servers = servers.to_owned();
                    let connecting = env::spawn(async move { Etcd::connect(&servers).await });
                    (format!("{name}-{number}"), connecting)
                })
                .collect();
            for (id, connecting) in connecting {
                members.push((id, connecting.await??));
            }
            Ok(json!(()))
        }
        // From now on they take and acknowledge; those who are there at the start acknowledge nobody's entry.
        ["follow", who] => {
            let who: Who = who.parse()?;
            for (id, store) in &members {
                let member = Member {
                    store: store.clone(),
                    id: id.clone(),
                    who,
                    rows: rows.clone(),
                    first: first.clone(),
                };
                let watches = member.watch().await?;
                env::spawn(member.follow(watches));
            }
            Ok(json!(()))
        }
        ["join"] => {
            first.store(0, Ordering::Relaxed);
            let began = env::now().as_nanos();
            for (id, store) in &members {
                store.create(&format!("{MEMBERS}/{id}"), true).await?;
            }
            Ok(json!(began))
        }
        ["first"] => {
            let at = first.load(Ordering::Relaxed);
            Ok(json!((at > 0).then_some(at)))
        }
        ["leave"] => {
            for (id, store) in &members {
                store.remove(&format!("{MEMBERS}/{id}")).await?;
            }
            Ok(json!(()))
        }
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await
}

/// A member with its own connection, that acknowledges and takes.
struct Member {
    store: Etcd,
    id: String,
    who: Who,
    rows: Rows,
    first: Arc<AtomicU64>,
}

/// What a member has to answer, and what it is given.
struct Watches {
    news: mpsc::UnboundedReceiver<Change>,
    grants: mpsc::UnboundedReceiver<Change>,
}

impl Member {
    async fn watch(&self) -> Result<Watches> {
        let news = match self.who {
            Who::Affected => format!("{REVOKED}/{}", self.id),
            Who::All => MEMBERS.to_owned(),
        };
        Ok(Watches {
            news: self.store.watch(&news).await?,
            grants: self.store.watch(&format!("{GRANTS}/{}", self.id)).await?,
        })
    }

    async fn follow(self, mut watches: Watches) -> Result<()> {
        loop {
            tokio::select! {
                Some(change) = watches.news.recv() => self.acknowledge(change).await?,
                Some(grant) = watches.grants.recv() => self.take(grant).await?,
                else => return Ok(()),
            }
        }
    }

    async fn acknowledge(&self, change: Change) -> Result<()> {
        let label = match (self.who, change) {
            (Who::Affected, Change::Created(slot)) => slot,
            (Who::All, Change::Created(joined)) => with(&joined),
            (Who::All, Change::Removed(left)) if left != self.id => without(&left),
            (_, Change::Removed(_)) => return Ok(()),
        };
        let path = format!("{ACKNOWLEDGEMENTS}/{label}!{}", self.id);
        self.store.create(&path, false).await
    }

    async fn take(&self, grant: Change) -> Result<()> {
        if let Change::Created(slot) = grant
            && self.first.load(Ordering::Relaxed) == 0
        {
            self.rows.first(slot.parse()?).await?;
            self.first.store(env::now().as_nanos(), Ordering::Relaxed);
        }
        Ok(())
    }
}

fn with(id: &str) -> String {
    format!("with-{id}")
}

fn without(id: &str) -> String {
    format!("without-{id}")
}

/// Slots that move once enough have acknowledged it.
struct Moves {
    acknowledgements: usize,
    slots: Vec<usize>,
    to: String,
}

/// Decides who has which slots.
struct Planner {
    store: Etcd,
    who: Who,
    changes: mpsc::UnboundedReceiver<Change>,
    acknowledgements: mpsc::UnboundedReceiver<Change>,
    /// The slots of each member.
    shares: BTreeMap<String, Vec<usize>>,
    slots: usize,
    /// By what the acknowledgements are called.
    waiting: BTreeMap<String, Moves>,
    counts: BTreeMap<String, usize>,
    settled: watch::Sender<Settled>,
}

impl Planner {
    /// Shares the slots out among those who are there.
    async fn new(
        servers: &str,
        slots: usize,
        who: Who,
        settled: watch::Sender<Settled>,
    ) -> Result<Self> {
        let store = Etcd::connect(servers).await?;
        let changes = store.watch(MEMBERS).await?;
        let acknowledgements = store.watch(ACKNOWLEDGEMENTS).await?;
        let present = store.list(MEMBERS).await?;
        let share = |at| (at..slots).step_by(present.len().max(1)).collect();
        let shares = present.iter().cloned().zip((0..).map(share)).collect();
        Ok(Self {
            store,
            who,
            changes,
            acknowledgements,
            shares,
            slots,
            waiting: BTreeMap::new(),
            counts: BTreeMap::new(),
            settled,
        })
    }

    async fn follow(mut self) -> Result<()> {
        loop {
            self.tell();
            tokio::select! {
                Some(change) = self.changes.recv() => match change {
                    Change::Created(id) => self.joined(id).await?,
                    Change::Removed(id) => self.left(&id).await?,
                },
                Some(change) = self.acknowledgements.recv() => {
                    let Change::Created(name) = change else { continue };
                    let label = name.split('!').next().unwrap_or_default().to_owned();
                    *self.counts.entry(label.clone()).or_default() += 1;
                    self.grant_if_acknowledged(&label).await?;
                }
                else => return Ok(()),
            }
        }
    }

    fn tell(&self) {
        let moving = self.waiting.values().map(|moves| moves.slots.len()).sum();
        let members = self.shares.len();
        self.settled.send_replace(Settled { members, moving });
    }

    async fn joined(&mut self, id: String) -> Result<()> {
        self.shares.insert(id.clone(), Vec::new());
        let mut given_up = Vec::new();
        for _ in 0..self.slots / self.shares.len() {
            let richest = self.shares.iter_mut().max_by_key(|(_, slots)| slots.len());
            if let Some((owner, slot)) =
                richest.and_then(|(owner, slots)| Some((owner, slots.pop()?)))
            {
                given_up.push((owner.clone(), slot));
            }
        }
        match self.who {
            Who::All => {
                let moves = Moves {
                    acknowledgements: self.shares.len(),
                    slots: given_up.into_iter().map(|(_, slot)| slot).collect(),
                    to: id.clone(),
                };
                self.wait(with(&id), moves).await
            }
            Who::Affected => {
                for (_, slot) in &given_up {
                    let moves = Moves {
                        acknowledgements: 1,
                        slots: vec![*slot],
                        to: id.clone(),
                    };
                    self.waiting.insert(slot.to_string(), moves);
                }
                let store = &self.store;
                let revoking = given_up.into_iter().map(|(owner, slot)| async move {
                    store
                        .create(&format!("{REVOKED}/{owner}/{slot}"), false)
                        .await
                });
                futures_util::future::try_join_all(revoking).await?;
                Ok(())
            }
        }
    }

    /// Gives its slots to one of those who have fewest; there are few of them where there are many members.
    async fn left(&mut self, id: &str) -> Result<()> {
        let slots = self.shares.remove(id).unwrap_or_default();
        let poorest = self.shares.iter().min_by_key(|(_, slots)| slots.len());
        let Some((to, _)) = poorest else {
            return Ok(());
        };
        let moves = Moves {
            acknowledgements: match self.who {
                Who::Affected => 0,
                Who::All => self.shares.len(),
            },
            slots,
            to: to.clone(),
        };
        self.wait(without(id), moves).await
    }

    async fn wait(&mut self, label: String, moves: Moves) -> Result<()> {
        self.waiting.insert(label.clone(), moves);
        self.grant_if_acknowledged(&label).await
    }

    async fn grant_if_acknowledged(&mut self, label: &str) -> Result<()> {
        let count = self.counts.get(label).copied().unwrap_or(0);
        let is_enough = |moves: &&Moves| count >= moves.acknowledgements;
        if self.waiting.get(label).filter(is_enough).is_none() {
            return Ok(());
        }
        self.counts.remove(label);
        let Some(Moves { slots, to, .. }) = self.waiting.remove(label) else {
            return Ok(());
        };
        let store = &self.store;
        let granting = slots.iter().map(|slot| {
            let path = format!("{GRANTS}/{to}/{slot}");
            async move { store.create(&path, false).await }
        });
        futures_util::future::try_join_all(granting).await?;
        if let Some(share) = self.shares.get_mut(&to) {
            share.extend(slots);
        }
        Ok(())
    }
}
