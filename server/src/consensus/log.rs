//! The log as openraft sees it: all of it in memory, each change also on its way to the disk.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::{EntryPayload, OptionalSend, RaftLogReader};

use super::lineage::{Lineage, Seen};
use super::raft::{Entry, LogId, TypeConfig, Vote};
use super::split::{self, Claim};
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
    lineage: Lineage,
}

impl Cache {
    fn last(&self) -> Option<LogId> {
        let last = self.entries.last_key_value();
        last.map_or(self.purged, |(_, entry)| Some(entry.log_id))
    }
}

/// The log. A clone reads and writes the same.
#[derive(Clone)]
pub(super) struct Log {
    cache: Arc<Mutex<Cache>>,
    writer: Writer,
}

impl Log {
    pub(super) fn new(contents: &mut Contents, writer: Writer) -> Self {
        let lineage = std::mem::take(&mut contents.lineage);
        let cache = Cache {
            lineage: Lineage::new(lineage, contents.log.values()),
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
        self.cache().last()
    }

    /// The newest vote that is durable.
    pub(super) fn vote(&self) -> Option<Vote> {
        self.cache().vote
    }

    /// The last entry that is known to be decided.
    pub(super) fn decided(&self) -> Option<LogId> {
        let cache = self.cache();
        cache.committed.max(cache.purged)
    }

    /// The leaderships that it has seen.
    pub(super) fn lineage(&self) -> Seen {
        let cache = self.cache();
        Seen {
            upto: cache.last().map_or(0, |last| last.index),
            began: cache.lineage.all(),
        }
    }

    /// A leader's snapshot is about to replace all up to this entry, and these leaderships were before.
    pub(super) async fn adopt(&self, seen: &Seen, upto: LogId) -> io::Result<()> {
        let known = self.cache().lineage.adopt(seen, upto.index);
        self.writer.write(Change::Lineage(known)).await
    }

    /// How what a leader says shows that its log and this one are not one. An earlier leader may not know what was decided
    /// after it; any other one has all of it.
    pub(super) fn contradicts(&self, claim: &Claim<'_>) -> Option<String> {
        let cache = self.cache();
        let own = cache.vote?;
        if let Some(why) = split::rivals(&own, claim.vote) {
            return Some(why);
        }
        let decided = cache.committed.max(cache.purged)?;
        if claim.vote.leader_id.term < own.leader_id.term {
            return None;
        }
        let found = |what: &dyn std::fmt::Display| {
            format!("this one's entries up to {decided} are decided, and that one has {what}")
        };
        if let Some(id) = claim.is_out_of_order_with(decided) {
            return Some(found(&format!("{id}")));
        }
        let differs = |entry: &&Entry| {
            let own = cache.entries.get(&entry.log_id.index);
            entry.log_id.index <= decided.index && own.is_some_and(|own| own != *entry)
        };
        if let Some(entry) = claim.entries.iter().find(differs) {
            return Some(found(&format!("another {}", entry.log_id)));
        }
        let began = cache.lineage.contradicts(claim.seen, decided.index);
        began.map(|began| {
            format!(
                "of their decisions up to entry {}, only one of the two had {began}",
                decided.index
            )
        })
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
        {
            let mut cache = self.cache();
            entries.iter().for_each(|entry| cache.lineage.append(entry));
            cache.entries.extend(read);
        }
        self.writer.append(entries, callback).await
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let from = last.map_or(0, |last| last.index + 1);
        {
            let mut cache = self.cache();
            cache.lineage.truncate(from);
            cache.entries.split_off(&from);
        }
        self.writer.write(Change::Truncate(from)).await
    }

    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        let known = {
            let mut cache = self.cache();
            cache.purged = cache.purged.max(Some(upto));
            cache.entries = cache.entries.split_off(&(upto.index + 1));
            cache.lineage.purge(upto.index)
        };
        self.writer.note(Change::Lineage(known)).await?;
        self.writer.note(Change::Purge(upto)).await
    }
}
