//! One ordered queue to the disk: what waits together is one transaction.

use std::io;
use std::time::Duration;

use skyschedule_common::env;
use tokio::sync::{mpsc, oneshot};

use super::MAX_BATCH;
use super::error::ConsensusError;
use super::raft::{Entry, TypeConfig};
use super::store::{Change, Store};

/// Changes that wait; more wait with those who make them.
const QUEUE: usize = 1_024;

/// Who is told that a change is durable.
enum Done {
    Nobody,
    Raft(openraft::storage::IOFlushed<TypeConfig>),
    Waiting(oneshot::Sender<io::Result<()>>),
}

impl Done {
    fn tell(self, result: io::Result<()>) {
        match self {
            Self::Nobody => {}
            Self::Raft(callback) => callback.io_completed(result),
            // Whoever waited may have gone.
            Self::Waiting(waiting) => drop(waiting.send(result)),
        }
    }
}

enum Message {
    Change(Change, Done),
    Stop(oneshot::Sender<()>),
}

/// Writes to the disk, in the order of the calls. A clone writes to the same.
#[derive(Clone)]
pub(super) struct Writer(mpsc::Sender<Message>);

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Writer")
    }
}

impl Writer {
    /// A writer, and the task behind it, to be spawned.
    pub(super) fn new(
        store: Store,
        latency: Duration,
    ) -> (Self, impl Future<Output = Result<(), ConsensusError>>) {
        let (sender, queue) = mpsc::channel(QUEUE);
        let disk = Disk {
            store,
            latency,
            committed: None,
        };
        (Self(sender), disk.run(queue))
    }

    /// Makes a change; resolves once it is durable.
    pub(super) async fn write(&self, change: Change) -> io::Result<()> {
        let (told, waiting) = oneshot::channel();
        self.put(change, Done::Waiting(told)).await?;
        waiting.await.map_err(|_| failed())?
    }

    /// Appends entries; `callback` is told once they are durable.
    pub(super) async fn append(
        &self,
        entries: Vec<Entry>,
        callback: openraft::storage::IOFlushed<TypeConfig>,
    ) -> io::Result<()> {
        self.put(Change::Append(entries), Done::Raft(callback))
            .await
    }

    /// Makes a change that need not be durable before others.
    pub(super) async fn note(&self, change: Change) -> io::Result<()> {
        self.put(change, Done::Nobody).await
    }

    /// Writes what was put before, and closes the store.
    pub(super) async fn stop(&self) {
        let (told, stopped) = oneshot::channel();
        if self.0.send(Message::Stop(told)).await.is_ok() {
            // An error means that it has failed, and stopped.
            let _ = stopped.await;
        }
    }

    async fn put(&self, change: Change, done: Done) -> io::Result<()> {
        match self.0.send(Message::Change(change, done)).await {
            Ok(()) => Ok(()),
            Err(mpsc::error::SendError(message)) => {
                if let Message::Change(_, done) = message {
                    done.tell(Err(failed()));
                }
                Err(failed())
            }
        }
    }
}

fn failed() -> io::Error {
    io::Error::other("the store has failed, or is closed")
}

struct Disk {
    store: Store,
    /// How long each transaction takes on a simulated disk, beside the work itself.
    latency: Duration,
    /// Waits for a transaction that is worth it.
    committed: Option<Change>,
}

impl Disk {
    async fn run(mut self, mut queue: mpsc::Receiver<Message>) -> Result<(), ConsensusError> {
        let place = self.store.place().to_owned();
        loop {
            let (mut changes, stop) = next(&mut queue).await;
            changes.retain_mut(|(change, _)| {
                let lazy = matches!(change, Change::Committed(_));
                if lazy {
                    self.committed = Some(std::mem::replace(change, Change::Committed(None)));
                }
                !lazy
            });
            let last = stop.is_some();
            if last || !changes.is_empty() {
                if !self.latency.is_zero() {
                    env::sleep(self.latency).await;
                }
                let (changes, done): (Vec<_>, Vec<_>) = changes.into_iter().unzip();
                let committed = self.committed.take();
                let (disk, result) = blocking(&place, move || {
                    let result = self.store.commit(changes.iter().chain(&committed));
                    // From here: this task would be told first, and then they.
                    for done in done {
                        let failed = |error: &ConsensusError| io::Error::other(error.to_string());
                        done.tell(result.as_ref().copied().map_err(failed));
                    }
                    Ok((self, result))
                })
                .await?;
                self = disk;
                result?;
            }
            if let Some(stopped) = stop {
                blocking(&place, move || self.store.close()).await?;
                // Whoever asked may have gone; so may all.
                let _ = stopped.map(|stopped| stopped.send(()));
                return Ok(());
            }
        }
    }
}

type Changes = Vec<(Change, Done)>;

/// The next changes, those that wait together; and whether they are the last, and who wants to know.
async fn next(
    queue: &mut mpsc::Receiver<Message>,
) -> (Changes, Option<Option<oneshot::Sender<()>>>) {
    let mut changes = Vec::new();
    let mut bytes = 0;
    let mut message = queue.recv().await;
    loop {
        match message {
            None => return (changes, Some(None)),
            Some(Message::Stop(stop)) => return (changes, Some(Some(stop))),
            Some(Message::Change(change, done)) => {
                bytes += size(&change);
                changes.push((change, done));
            }
        }
        if bytes >= MAX_BATCH {
            return (changes, None);
        }
        match queue.try_recv() {
            Ok(waiting) => message = Some(waiting),
            Err(_) => return (changes, None),
        }
    }
}

fn size(change: &Change) -> usize {
    match change {
        Change::Append(entries) => entries.iter().map(super::log::size).sum(),
        Change::Snapshot(snapshot) => snapshot.state.len(),
        Change::Note(note) => note.len(),
        _ => 0,
    }
}

/// Runs work that blocks; a panic of it is an error like others.
pub(super) async fn blocking<T: Send + 'static>(
    place: &str,
    work: impl FnOnce() -> Result<T, ConsensusError> + Send + 'static,
) -> Result<T, ConsensusError> {
    env::blocking(work).await.unwrap_or_else(|panicked| {
        Err(ConsensusError::Panicked {
            place: place.to_owned(),
            reason: panicked.to_string(),
        })
    })
}
