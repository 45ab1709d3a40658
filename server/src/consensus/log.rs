//! The log as openraft sees it: all of it in memory, each change also on its way to the disk.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{EntryPayload, OptionalSend, RaftLogReader};

use super::raft::{Entry, LogId, TypeConfig, Vote};
use super::store::{Change, Contents};
use super::writer::Writer;

/// Bytes of entries that are sent at once; one entry may be larger.
const MAX_SENT: usize = 1 << 20;

/// About how many bytes an entry has.
pub(super) fn size(entry: &Entry) -> usize {
    match &entry.payload {
        EntryPayload::Normal(batch) => batch.len(),
        EntryPayload::Blank | EntryPayload::Membership(_) => 64,
    }
}

#[derive(Debug, Default)]
struct Cache {
    entries: BTreeMap<u64, Entry>,
    purged: Option<LogId>,
    vote: Option<Vote>,
    committed: Option<LogId>,
}

/// The log. A clone reads and writes the same.
#[derive(Clone)]
pub(super) struct Log {
    cache: Arc<Mutex<Cache>>,
    writer: Writer,
}

impl Log {
    pub(super) fn new(contents: &mut Contents, writer: Writer) -> Self {
        let cache = Cache {
            entries: std::mem::take(&mut contents.log),
            purged: contents.purged,
            vote: contents.vote,
            committed: contents.committed,
        };
        Self {
            cache: Arc::new(Mutex::new(cache)),
            writer,
        }
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last entry, whether it is still there or not.
    pub(super) fn last(&self) -> Option<LogId> {
        let cache = self.cache();
        let last = cache.entries.last_key_value();
        last.map_or(cache.purged, |(_, entry)| Some(entry.log_id))
    }

    /// The newest vote that is durable.
    pub(super) fn vote(&self) -> Option<Vote> {
        self.cache().vote
    }
}

impl RaftLogReader<TypeConfig> for Log {
    async fn try_get_log_entries<R>(&mut self, range: R) -> io::Result<Vec<Entry>>
    where
        R: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        if is_empty(&range) {
            return Ok(Vec::new());
        }
        let cache = self.cache();
        Ok(cache.entries.range(range).map(|(_, e)| e.clone()).collect())
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        if start >= end {
            return Ok(Vec::new());
        }
        let mut left = MAX_SENT;
        let cache = self.cache();
        let entries = cache.entries.range(start..end);
        let fitting = entries.enumerate().map_while(|(at, (_, entry))| {
            let fits = at == 0 || size(entry) <= left;
            left = left.saturating_sub(size(entry));
            fits.then(|| entry.clone())
        });
        Ok(fitting.collect())
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.vote())
    }
}

/// `BTreeMap::range` panics where a range ends before it begins.
fn is_empty(range: &impl RangeBounds<u64>) -> bool {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    match range.end_bound() {
        Bound::Included(&last) => start > last,
        Bound::Excluded(&end) => start >= end,
        Bound::Unbounded => false,
    }
}

impl RaftLogStorage<TypeConfig> for Log {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let last_purged_log_id = self.cache().purged;
        Ok(LogState {
            last_purged_log_id,
            last_log_id: self.last(),
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        self.writer.write(Change::Vote(*vote)).await?;
        self.cache().vote = Some(*vote);
        Ok(())
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        self.cache().committed = committed;
        self.writer.note(Change::Committed(committed)).await
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.cache().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        let read = entries
            .iter()
            .map(|entry| (entry.log_id.index, entry.clone()));
        self.cache().entries.extend(read);
        self.writer.append(entries, callback).await
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let from = last.map_or(0, |last| last.index + 1);
        self.cache().entries.split_off(&from);
        self.writer.write(Change::Truncate(from)).await
    }

    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        {
            let mut cache = self.cache();
            cache.purged = cache.purged.max(Some(upto));
            cache.entries = cache.entries.split_off(&(upto.index + 1));
        }
        self.writer.note(Change::Purge(upto)).await
    }
}
