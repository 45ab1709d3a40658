//! A disk in memory that can fail, crash and be copied: for simulations and tests.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redb::StorageBackend;

/// A disk that outlives the process that uses it. A clone is the same disk.
///
/// What was not synced is at risk: [`crash`](Self::crash) decides which of it survives. After a crash
/// whoever had the disk open can write to it no more, so that a driver first crashes the disk and then
/// drops the process.
#[derive(Debug, Clone, Default)]
pub struct MemoryDisk {
    inner: Arc<Mutex<Inner>>,
    latency: Duration,
}

#[derive(Default)]
struct Inner {
    /// What a reader sees.
    seen: Vec<u8>,
    /// What a loss of power leaves.
    synced: Vec<u8>,
    /// Done since the last sync, in order.
    unsynced: Vec<Change>,
    /// Counts crashes: whoever attached before the last one is dead.
    life: u64,
    /// Writes and syncs that succeed before all fail.
    failing_after: Option<u64>,
}

enum Change {
    Write(usize, Vec<u8>),
    Length(usize),
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Length(length) => bytes.resize(*length, 0),
            Self::Write(at, data) => {
                let end = at + data.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*at..end].copy_from_slice(data);
            }
        }
    }
}

/// Without the bytes: they fill screens.
impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("length", &self.seen.len())
            .field("unsynced", &self.unsynced.len())
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

impl MemoryDisk {
    /// An empty disk.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same disk, on which each commit takes this long.
    #[must_use]
    pub fn with_latency(self, latency: Duration) -> Self {
        Self { latency, ..self }
    }

    /// How long each commit takes.
    pub(super) fn latency(&self) -> Duration {
        self.latency
    }

    /// The process that uses the disk dies, by a loss of power. Each write that was not synced, in order,
    /// is kept where `survives` says so: `|| false` forgets all, `|| true` is what a killed process leaves.
    pub fn crash(&self, mut survives: impl FnMut() -> bool) {
        let mut inner = self.lock();
        let unsynced = std::mem::take(&mut inner.unsynced);
        for change in unsynced.iter().filter(|_| survives()) {
            change.apply(&mut inner.synced);
        }
        inner.seen = inner.synced.clone();
        inner.life += 1;
        inner.failing_after = None;
    }

    /// Another disk with what a reader of this one sees now: a backup, to be restored later by using it instead.
    pub fn copy(&self) -> Self {
        let seen = self.lock().seen.clone();
        let inner = Inner {
            synced: seen.clone(),
            seen,
            ..Inner::default()
        };
        Self {
            inner: Arc::new(Mutex::new(inner)),
            latency: self.latency,
        }
    }

    /// All writes and syncs fail once `operations` more have succeeded, until the next crash.
    pub fn fail_after(&self, operations: u64) {
        self.lock().failing_after = Some(operations);
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.lock().seen.len()
    }

    /// The end that a process opens.
    pub(super) fn attach(&self) -> Attached {
        let life = self.lock().life;
        Attached {
            disk: self.clone(),
            life,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk as one process sees it.
#[derive(Debug)]
pub(super) struct Attached {
    disk: MemoryDisk,
    life: u64,
}

impl Attached {
    fn alive(&self) -> io::Result<MutexGuard<'_, Inner>> {
        let inner = self.disk.lock();
        if inner.life == self.life {
            Ok(inner)
        } else {
            Err(io::Error::other("this process died with the disk's crash"))
        }
    }

    fn changing(&self) -> io::Result<MutexGuard<'_, Inner>> {
        let mut inner = self.alive()?;
        match &mut inner.failing_after {
            Some(0) => return Err(io::Error::from(io::ErrorKind::StorageFull)),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(inner)
    }

    fn change(&self, change: Change) -> io::Result<()> {
        let mut inner = self.changing()?;
        change.apply(&mut inner.seen);
        inner.unsynced.push(change);
        Ok(())
    }
}

fn position(at: u64) -> io::Result<usize> {
    usize::try_from(at).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))
}

impl StorageBackend for Attached {
    fn len(&self) -> io::Result<u64> {
        u64::try_from(self.alive()?.seen.len()).map_err(io::Error::other)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let at = position(offset)?;
        let inner = self.alive()?;
        let bytes = inner.seen.get(at..at.saturating_add(out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Change::Length(position(len)?))
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut inner = self.changing()?;
        let unsynced = std::mem::take(&mut inner.unsynced);
        for change in unsynced {
            change.apply(&mut inner.synced);
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Change::Write(position(offset)?, data.to_vec()))
    }
}
