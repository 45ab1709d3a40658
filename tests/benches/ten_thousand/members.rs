//! The roles of members: many in one process.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use skyschedule_client::{Client, Status};
use skyschedule_common::env::{self, JoinHandle};
use skyschedule_tests::server::{PASSWORD, USER};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::common::Result;
use crate::common::process::obey;
use crate::frame::{BEAT, FRAME, Frame, frame, kind};

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
    pub(crate) fn add(&mut self, other: Self) {
        for (total, (members, numbers)) in other.shares {
            let sum = self.shares.entry(total).or_default();
            *sum = (sum.0 + members, sum.1 + numbers);
        }
        self.last = self.last.max(other.last);
    }

    fn change(&mut self, before: (u32, u64), after: (u32, u64)) {
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

type Shared = Arc<Mutex<Tally>>;

fn look(tally: &Shared) -> Tally {
    tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Real clients.
pub(crate) async fn real(server: &str) -> Result<()> {
    let tally = Shared::default();
    let mut clients = Vec::new();
    obey(async |words| match words {
        ["connect", group, name, count] => {
            let count: usize = count.parse()?;
            let connecting: Vec<JoinHandle<_>> = (0..count)
                .map(|number| {
                    let client = Client::builder()
                        .servers([server])
                        .group(*group)
                        .client_id(format!("{name}-{number}"))
                        .credentials(USER, PASSWORD)
                        .connect_timeout(Duration::from_secs(120));
                    env::spawn(client.connect())
                })
                .collect();
            for client in connecting {
                let client = client.await??;
                env::spawn(follow(client.shares(), tally.clone()));
                clients.push(client);
            }
            Ok(json!(env::now().as_nanos()))
        }
        ["look"] => Ok(json!(look(&tally))),
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
            let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
            tally.change(before, after);
            before = after;
        }
        if shares.changed().await.is_err() {
            return;
        }
    }
}

/// Bare sockets that answer each frame, and send heartbeats when asked to.
pub(crate) async fn bare(server: &str) -> Result<()> {
    let server: SocketAddr = server.parse()?;
    let tally = Shared::default();
    let (beat, beats) = watch::channel(None);
    obey(async |words| match words {
        ["connect", count] => {
            let count: usize = count.parse()?;
            let connecting: Vec<_> = (0..count).map(|_| env::spawn(greet(server))).collect();
            let mut streams = Vec::new();
            for stream in connecting {
                streams.push(stream.await??);
            }
            let at = env::now().as_nanos();
            for stream in streams {
                env::spawn(answer(stream, tally.clone(), beats.clone()));
            }
            Ok(json!(at))
        }
        ["beat", millis] => {
            beat.send_replace(Some(Duration::from_millis(millis.parse()?)));
            Ok(json!(()))
        }
        ["look"] => Ok(json!(look(&tally))),
        other => Err(format!("unknown command {other:?}").into()),
    })
    .await
}

/// Connects; two frames each way.
async fn greet(server: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let mut answer: Frame = [0; FRAME];
    for _ in 0..2 {
        stream.write_all(&frame(BEAT)).await?;
        stream.read_exact(&mut answer).await?;
    }
    Ok(stream)
}

async fn answer(
    mut stream: TcpStream,
    tally: Shared,
    mut beats: watch::Receiver<Option<Duration>>,
) -> Result<()> {
    let mut incoming: Frame = [0; FRAME];
    let mut period = None;
    loop {
        let beat = async {
            match period {
                Some(period) => env::sleep(period).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            read = stream.read_exact(&mut incoming) => {
                read?;
                if kind(&incoming) != BEAT {
                    tally.lock().unwrap_or_else(PoisonError::into_inner).last = env::now().as_nanos();
                    stream.write_all(&frame(BEAT)).await?;
                }
            }
            () = beat => stream.write_all(&frame(BEAT)).await?,
            changed = beats.changed() => {
                changed?;
                period = *beats.borrow_and_update();
            }
        }
    }
}
