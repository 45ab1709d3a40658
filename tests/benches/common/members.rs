//! The role of members: many real clients in one process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use skyschedule_client::{Client, Status};
use skyschedule_common::env::{self, JoinHandle};
use skyschedule_tests::server::{PASSWORD, USER};
use tokio::sync::watch;

use super::Result;
use super::process::{Worker, obey};

/// What the members of a process have together, and since when.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Tally {
    /// By total: how many members have a share of it, and how many numbers these have.
    pub(crate) shares: BTreeMap<u32, (usize, u64)>,
    /// When the last share, or frame of a bare loop, came.
    pub(crate) last: u64,
}

impl Tally {
    /// Adds what another process has.
    fn add(&mut self, other: Self) {
        for (total, (members, numbers)) in other.shares {
            let sum = self.shares.entry(total).or_default();
            *sum = (sum.0 + members, sum.1 + numbers);
        }
        self.last = self.last.max(other.last);
    }

    /// One member has other numbers than before; 0 of them: no share.
    pub(crate) fn change(&mut self, before: (u32, u64), after: (u32, u64)) {
        if before.1 > 0 {
            if let Some((members, numbers)) = self.shares.get_mut(&before.0) {
                *members -= 1;
                *numbers -= before.1;
            }
            self.shares.retain(|_, (members, _)| *members > 0);
        }
        if after.1 > 0 {
            let (members, numbers) = self.shares.entry(after.0).or_default();
            *members += 1;
            *numbers += after.1;
        }
        self.last = env::now().as_nanos();
    }
}

/// The tally of a process, for all its members to change.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Tally>>);

impl Shared {
    pub(crate) fn change(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn look(&self) -> Tally {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// What the members of all these processes have together.
pub(crate) async fn look(processes: &mut [Worker]) -> Result<Tally> {
    let looking = processes
        .iter_mut()
        .map(|worker| worker.ask::<Tally>("look"));
    let mut sum = Tally::default();
    for tally in futures_util::future::try_join_all(looking).await? {
        sum.add(tally);
    }
    Ok(sum)
}

/// Real clients of one server, or of several with commas between.
pub(crate) async fn run(servers: &str) -> Result<()> {
    let tally = Shared::default();
    let mut clients = Vec::new();
    obey(async |words| match words {
        ["connect", group, name, count] => {
            let count: usize = count.parse()?;
            let connecting: Vec<JoinHandle<_>> = (0..count)
                .map(|number| {
                    let client = Client::builder()
                        .servers(servers.split(','))
                        .group(*group)
                        .client_id(format!("{name}-{number}"))
                        .credentials(USER, PASSWORD)
                        .connect_timeout(Duration::from_secs(120));
                    env::spawn(client.connect())
                })
                .collect();
            for client in connecting {
                let client = client.await??;
                // Where the share arrives, so that looking at it costs the least.
                env::io_spawn(follow(client.shares(), tally.clone()))?;
                clients.push(client);
            }
            Ok(json!(env::now().as_nanos()))
        }
        ["look"] => Ok(json!(tally.look())),
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await
}

/// Keeps the tally of one client.
async fn follow(mut shares: watch::Receiver<Status>, tally: Shared) {
    let mut before = (0, 0);
    loop {
        let after = {
            let status = shares.borrow_and_update();
            let share = status.rows.single();
            share.map_or((0, 0), |share| (share.total(), share.numbers().len()))
        };
        if after != before {
            tally.change(|tally| tally.change(before, after));
            before = after;
        }
        if shares.changed().await.is_err() {
            return;
        }
    }
}
