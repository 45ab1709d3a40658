//! The command log and its snapshots in redb.
//!
//! | table | key | value |
//! |---|---|---|
//! | `skyschedule` | `format` | number of the format; also tells a store of ours from other files |
//! | `log` | index, from 1 without gaps | version of the record (1 byte), then the entry in bincode |
//! | `snapshot` | index of the last entry in it | version of the record (1 byte), then the state in bincode |
//!
//! A commit is one transaction; a snapshot and the removal of what it makes needless are another.
//! redb keeps a checksum of every page, and all are verified when the store is opened.

use std::fmt::Display;
use std::io::ErrorKind;
use std::path::Path;

use bytes::Bytes;
use redb::{
    Builder, Database, DatabaseError, Durability, ReadableDatabase as _, ReadableTable as _,
    StorageError, TableDefinition, TableError,
};
use serde::{Deserialize, Serialize};
use skyschedule_common::protocol::codec;

use super::Storage;
use super::error::ConsensusError;
use super::folder::Folder;
use super::{MAX_BATCH, mark};
use crate::state::{Command, State};

const ABOUT: TableDefinition<'_, &str, u64> = TableDefinition::new("skyschedule");
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const SNAPSHOT: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("snapshot");

/// Raised when an older version would misread the tables.
const FORMAT: u64 = 1;
const FORMAT_KEY: &str = "format";

/// First byte of a log entry and of a snapshot. A later form gets the next number, and this one stays readable.
const VERSION: u8 = 1;

/// Far above what the most groups and members need.
const MAX_SNAPSHOT: usize = 1 << 30;

/// A snapshot is due, whatever the number of entries, when they outgrow this.
const MAX_LOG_BYTES: usize = 16 << 20;

const CACHE: usize = 16 << 20;

/// One entry of the log.
#[derive(Deserialize)]
struct Entry {
    term: u64,
    command: Command,
}

#[derive(Serialize)]
struct EntryRef<'a> {
    term: u64,
    command: &'a Command,
}

/// The state after all entries up to an index.
#[derive(Deserialize)]
struct Snapshot {
    term: u64,
    state: State,
}

#[derive(Serialize)]
struct SnapshotRef<'a> {
    term: u64,
    state: &'a State,
}

/// The open store.
#[derive(Debug)]
pub(super) struct Store {
    database: Database,
    /// None for a disk in memory. It outlives the database, and with it the lock.
    folder: Option<Folder>,
    place: String,
    /// Index of the last durable entry.
    last: u64,
    /// Entries since the last snapshot, and their bytes.
    entries: u64,
    bytes: usize,
    snapshot_every: u64,
}

/// What a store holds.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// All that was decided.
    pub(super) state: State,
    /// The last leadership.
    pub(super) term: u64,
}

/// The bytes of a command as an entry of the log.
pub(super) fn encode_entry(term: u64, command: &Command) -> Result<Bytes, codec::CodecError> {
    record(&EntryRef { term, command }, MAX_BATCH)
}

impl Store {
    /// Opens or makes the store, verifies it, and replays it.
    pub(super) fn open(
        storage: &Storage,
        snapshot_every: u64,
    ) -> Result<(Self, Memory), ConsensusError> {
        let (place, folder, database) = match storage {
            Storage::Memory(disk) => {
                let place = "memory".to_owned();
                let database = builder().create_with_backend(disk.attach());
                let database = database.map_err(|error| refused(&place, error))?;
                (place, None, database)
            }
            Storage::Folder(path) => {
                let place = path.display().to_string();
                let folder = Folder::open(path)?;
                let database = open_in(&folder, &place)?;
                (place, Some(folder), database)
            }
        };
        let mut store = Self {
            database,
            folder,
            place,
            last: 0,
            entries: 0,
            bytes: 0,
            snapshot_every: snapshot_every.max(1),
        };
        let memory = store.replay()?;
        store.check_mark()?;
        Ok((store, memory))
    }

    fn replay(&mut self) -> Result<Memory, ConsensusError> {
        let place = self.place.clone();
        let damaged = |reason: &dyn Display| ConsensusError::Damaged {
            place: place.clone(),
            reason: reason.to_string(),
        };
        let read = self.database.begin_read().map_err(|e| damaged(&e))?;
        let fresh = read
            .list_tables()
            .map_err(|e| damaged(&e))?
            .next()
            .is_none();
        if fresh && self.folder.is_none() {
            drop(read);
            initialise(&self.database).map_err(|e| self.failed(&e))?;
            return Ok(Memory::default());
        }
        let about = read.open_table(ABOUT).map_err(|error| match error {
            TableError::Storage(error) => damaged(&error),
            other => ConsensusError::Foreign {
                place: place.clone(),
                reason: other.to_string(),
            },
        })?;
        let format = about.get(FORMAT_KEY).map_err(|e| damaged(&e))?;
        match format.map(|format| format.value()) {
            Some(FORMAT) => {}
            Some(found) if found > FORMAT => {
                return Err(ConsensusError::Newer {
                    place: place.clone(),
                    found,
                    known: FORMAT,
                });
            }
            found => return Err(damaged(&format!("format {found:?}"))),
        }

        let mut memory = Memory::default();
        let snapshots = read.open_table(SNAPSHOT).map_err(|e| damaged(&e))?;
        if let Some((index, bytes)) = snapshots.last().map_err(|e| damaged(&e))? {
            let snapshot: Snapshot = self.parse("snapshot", bytes.value(), MAX_SNAPSHOT)?;
            self.last = index.value();
            memory.state = snapshot.state;
            memory.term = snapshot.term;
        }
        let log = read.open_table(LOG).map_err(|e| damaged(&e))?;
        for entry in log.iter().map_err(|e| damaged(&e))? {
            let (index, bytes) = entry.map_err(|e| damaged(&e))?;
            if index.value() != self.last + 1 {
                let reason = format!("entry {} follows {}", index.value(), self.last);
                return Err(damaged(&reason));
            }
            let entry: Entry = self.parse("entry", bytes.value(), MAX_BATCH)?;
            memory.state.apply(&entry.command);
            memory.term = entry.term;
            self.last += 1;
            self.entries += 1;
            self.bytes += bytes.value().len();
        }
        Ok(memory)
    }

    fn check_mark(&self) -> Result<(), ConsensusError> {
        match self.folder.as_ref().and_then(|folder| folder.marked) {
            Some(durable) if durable > self.last => Err(ConsensusError::Shortened {
                place: self.place.clone(),
                last: self.last,
                durable,
                mark: mark::NAME,
            }),
            _ => Ok(()),
        }
    }

    /// Makes entries durable, all or none.
    pub(super) fn append(&mut self, entries: &[Bytes]) -> Result<(), ConsensusError> {
        if entries.is_empty() {
            return Ok(());
        }
        let last = self
            .write_entries(entries)
            .map_err(|error| self.failed(&error))?;
        self.last = last;
        self.entries += entries.len() as u64;
        self.bytes += entries.iter().map(Bytes::len).sum::<usize>();
        let marked = self
            .folder
            .as_mut()
            .map_or(Ok(()), |folder| folder.mark.set(last));
        marked.map_err(|error| self.failed(&error.into()))
    }

    /// Index of the last of them.
    fn write_entries(&self, entries: &[Bytes]) -> Result<u64, redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        let mut index = self.last;
        {
            let mut log = transaction.open_table(LOG)?;
            for entry in entries {
                index += 1;
                log.insert(index, entry.as_ref())?;
            }
        }
        transaction.commit()?;
        Ok(index)
    }

    /// Whether the log is long enough to be replaced by a snapshot.
    pub(super) fn wants_snapshot(&self) -> bool {
        self.entries >= self.snapshot_every || self.bytes >= MAX_LOG_BYTES
    }

    /// Replaces the log by the state after its last entry.
    pub(super) fn snapshot(&mut self, term: u64, state: &State) -> Result<(), ConsensusError> {
        let bytes = record(&SnapshotRef { term, state }, MAX_SNAPSHOT)
            .map_err(|error| self.failed(&redb::Error::Io(std::io::Error::other(error))))?;
        self.write_snapshot(&bytes)
            .map_err(|error| self.failed(&error))?;
        self.entries = 0;
        self.bytes = 0;
        Ok(())
    }

    fn write_snapshot(&self, bytes: &[u8]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            let mut snapshots = transaction.open_table(SNAPSHOT)?;
            snapshots.retain(|_, _| false)?;
            snapshots.insert(self.last, bytes)?;
            let mut log = transaction.open_table(LOG)?;
            log.retain_in(..=self.last, |_, _| false)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Ends the use of the store, so that the next start need not repair it.
    pub(super) fn close(self) -> Result<(), ConsensusError> {
        let failed = |error: &dyn Display| ConsensusError::Write {
            place: self.place.clone(),
            reason: error.to_string(),
        };
        self.database.close().map_err(|error| failed(&error))?;
        if let Some(folder) = &self.folder {
            folder.mark.sync().map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    fn failed(&self, error: &redb::Error) -> ConsensusError {
        ConsensusError::Write {
            place: self.place.clone(),
            reason: error.to_string(),
        }
    }

    fn parse<T: serde::de::DeserializeOwned>(
        &self,
        what: &str,
        bytes: &[u8],
        limit: usize,
    ) -> Result<T, ConsensusError> {
        let damaged = |reason| ConsensusError::Damaged {
            place: self.place.clone(),
            reason,
        };
        match bytes.split_first() {
            Some((&VERSION, value)) => codec::decode(value, limit)
                .map_err(|error| damaged(format!("{what} after {}: {error}", self.last))),
            Some((&found, _)) if found > VERSION => Err(ConsensusError::Newer {
                place: self.place.clone(),
                found: u64::from(found),
                known: u64::from(VERSION),
            }),
            _ => Err(damaged(format!(
                "{what} after {} has no version",
                self.last
            ))),
        }
    }
}

/// Version and value as they are stored.
fn record<T: Serialize>(value: &T, limit: usize) -> Result<Bytes, codec::CodecError> {
    let value = codec::encode(value, limit)?;
    Ok([&[VERSION], value.as_ref()].concat().into())
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder
        .set_cache_size(CACHE)
        .set_check_integrity_on_open(true);
    builder
}

fn open_in(folder: &Folder, place: &str) -> Result<Database, ConsensusError> {
    let path = folder.store();
    if !path.exists() && folder.marked.is_none_or(|durable| durable == 0) {
        folder.create_store(|draft| create(draft).map_err(|error| refused(place, error)))?;
    }
    builder().open(&path).map_err(|error| refused(place, error))
}

fn create(path: &Path) -> Result<(), DatabaseError> {
    let database = builder().create(path)?;
    let storage = |error: redb::Error| match error {
        redb::Error::Io(error) => StorageError::Io(error),
        other => StorageError::Corrupted(other.to_string()),
    };
    initialise(&database).map_err(storage)?;
    database.close()
}

fn initialise(database: &Database) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(ABOUT)?.insert(FORMAT_KEY, FORMAT)?;
    transaction.open_table(LOG)?;
    transaction.open_table(SNAPSHOT)?;
    transaction.commit()?;
    Ok(())
}

/// Why redb does not open a file, in our words.
fn refused(place: &str, error: DatabaseError) -> ConsensusError {
    let place = place.to_owned();
    let kind = match &error {
        DatabaseError::Storage(StorageError::Io(error)) => Some(error.kind()),
        _ => None,
    };
    match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            ConsensusError::Locked { place }
        }
        DatabaseError::Storage(StorageError::Io(error)) if kind == Some(ErrorKind::InvalidData) => {
            let reason = error.to_string();
            ConsensusError::Foreign { place, reason }
        }
        DatabaseError::Storage(StorageError::Io(source))
            if kind != Some(ErrorKind::UnexpectedEof) =>
        {
            ConsensusError::Inaccessible { place, source }
        }
        other => ConsensusError::Damaged {
            place,
            reason: other.to_string(),
        },
    }
}
