//! Members that coordinate themselves through a store, many in one process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use skyschedule_common::env;
use tokio::sync::mpsc;

use crate::common::Result;
use crate::common::members::Shared;
use crate::common::process::obey;
use crate::store::{Change, Store};

const MEMBERS: &str = "/members";
const ACKNOWLEDGEMENTS: &str = "/acknowledgements";
const GRANTS: &str = "/grants";

/// Carries out what the benchmark asks of this process.
pub(crate) async fn run<S: Store>(server: &str) -> Result<()> {
    let tally = Shared::default();
    let acknowledges = Arc::new(AtomicBool::new(false));
    let mut members: Vec<(String, S)> = Vec::new();
    let mut known = 0;
    obey(async |words| match words {
        ["found"] => {
            let store = S::connect(server).await?;
            for folder in [MEMBERS, ACKNOWLEDGEMENTS, GRANTS] {
                store.folder(folder).await?;
            }
            let counter = Counter::new(store).await?;
            env::spawn(counter.follow());
            Ok(json!(()))
        }
        // Members come to be; `join` makes them known.
        ["connect", name, count] => {
            let connecting: Vec<_> = (0..count.parse::<usize>()?)
                .map(|number| {
                    let id = format!("{name}-{number}");
                    let connecting = connect(server.to_owned(), id.clone(), acknowledges.clone());
                    (id, env::spawn(connecting))
                })
                .collect();
            for (id, connecting) in connecting {
                let member: Member<S> = connecting.await??;
                members.push((id, member.store.clone()));
                env::spawn(member.follow(tally.clone()));
            }
            Ok(json!(()))
        }
        ["join"] => {
            let began = env::now().as_nanos();
            for (id, store) in &members[known..] {
                store.create(&format!("{MEMBERS}/{id}"), true).await?;
            }
            known = members.len();
            Ok(json!(began))
        }
        ["leave"] => {
            let (id, store) = members.pop().ok_or("nobody is there")?;
            known = members.len();
            let began = env::now().as_nanos();
            store.remove(&format!("{MEMBERS}/{id}")).await?;
            Ok(json!(began))
        }
        ["acknowledge"] => {
            acknowledges.store(true, Ordering::Relaxed);
            Ok(json!(()))
        }
        ["look"] => Ok(json!(tally.look())),
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await
}

/// A member with its own connection, that knows the others.
struct Member<S> {
    id: String,
    store: S,
    changes: mpsc::UnboundedReceiver<Change>,
    grants: mpsc::UnboundedReceiver<Change>,
    present: BTreeSet<String>,
    acknowledges: Arc<AtomicBool>,
}

async fn connect<S: Store>(
    server: String,
    id: String,
    acknowledges: Arc<AtomicBool>,
) -> Result<Member<S>> {
    let store = S::connect(&server).await?;
    Ok(Member {
        id,
        changes: store.watch(MEMBERS).await?,
        grants: store.watch(GRANTS).await?,
        present: store.list(MEMBERS).await?.into_iter().collect(),
        store,
        acknowledges,
    })
}

impl<S: Store> Member<S> {
    /// Takes the newest numbering; at once, or when all have acknowledged it.
    async fn follow(mut self, tally: Shared) -> Result<()> {
        let mut taken = 0;
        let mut take = |size: usize| {
            let size = u32::try_from(size).unwrap_or(u32::MAX);
            tally.change(|tally| tally.change((taken, taken.min(1).into()), (size, 1)));
            taken = size;
        };
        loop {
            tokio::select! {
                Some(change) = self.changes.recv() => {
                    let label = apply(&mut self.present, change);
                    if self.acknowledges.load(Ordering::Relaxed) {
                        let path = format!("{ACKNOWLEDGEMENTS}/{label}!{}", self.id);
                        self.store.create(&path, false).await?;
                    } else {
                        take(self.present.len());
                    }
                }
                Some(_) = self.grants.recv() => take(self.present.len()),
                else => return Ok(()),
            }
        }
    }
}

/// Counts acknowledgements, and grants.
struct Counter<S> {
    store: S,
    changes: mpsc::UnboundedReceiver<Change>,
    acknowledgements: mpsc::UnboundedReceiver<Change>,
}

impl<S: Store> Counter<S> {
    async fn new(store: S) -> Result<Self> {
        Ok(Self {
            changes: store.watch(MEMBERS).await?,
            acknowledgements: store.watch(ACKNOWLEDGEMENTS).await?,
            store,
        })
    }

    async fn follow(mut self) -> Result<()> {
        let mut present = BTreeSet::new();
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        loop {
            let label = tokio::select! {
                Some(change) = self.changes.recv() => apply(&mut present, change),
                Some(change) = self.acknowledgements.recv() => {
                    let Change::Created(name) = change else { continue };
                    let label = name.split('!').next().unwrap_or_default().to_owned();
                    *counts.entry(label.clone()).or_default() += 1;
                    label
                }
                else => return Ok(()),
            };
            if counts
                .get(&label)
                .is_some_and(|count| *count >= present.len())
            {
                counts.remove(&label);
                self.store
                    .create(&format!("{GRANTS}/{label}"), false)
                    .await?;
            }
        }
    }
}

/// Makes the change, and names it.
fn apply(present: &mut BTreeSet<String>, change: Change) -> String {
    match change {
        Change::Created(id) => {
            let label = format!("with-{id}");
            present.insert(id);
            label
        }
        Change::Removed(id) => {
            present.remove(&id);
            format!("without-{id}")
        }
    }
}
