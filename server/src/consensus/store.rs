//! Log, vote, snapshot and identity in redb.
//!
//! | table | key | value |
//! |---|---|---|
//! | `skyschedule` | `format`, `writes` | number of the format, which also tells a store of ours from other files; how many transactions there were |
//! | `records` | `identity`, `vote`, `committed`, `purged`, `lineage`, `note` | version of the record (1 byte), then the value in bincode |
//! | `log` | index, without gaps | version of the record (1 byte), then the entry in bincode |
//! | `snapshot` | 0 | version of the record (1 byte), then what it covers and the state in bincode |
//!
//! All changes that wait together are one transaction. redb keeps a checksum of every page, and all are
//! verified when the store is opened.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::ErrorKind;
use std::path::Path;

use bytes::Bytes;
use redb::{
    Builder, Database, DatabaseError, Durability, ReadableDatabase as _, ReadableTable as _,
    StorageError, TableDefinition, TableError,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use skyschedule_common::protocol::codec;

use super::error::ConsensusError;
use super::folder::Folder;
use super::identity::Identity;
use super::lineage::Known;
use super::raft::{Entry, LogId, SnapshotMeta, Vote};
use super::{MAX_BATCH, Storage, mark};

const ABOUT: TableDefinition<'_, &str, u64> = TableDefinition::new("skyschedule");
const RECORDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("records");
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const SNAPSHOT: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("snapshot");

/// Raised when an older version would misread the tables.
const FORMAT: u64 = 3;
const FORMAT_KEY: &str = "format";
const WRITES_KEY: &str = "writes";

const IDENTITY: &str = "identity";
const VOTE: &str = "vote";
const COMMITTED: &str = "committed";
const PURGED: &str = "purged";
const LINEAGE: &str = "lineage";
const NOTE: &str = "note";

/// First byte of a record. A later form gets the next number, and this one stays readable.
const VERSION: u8 = 1;

/// Far above what the most groups and members need.
pub(super) const MAX_SNAPSHOT: usize = 1 << 30;

/// An entry is its batch and little more.
const MAX_ENTRY: usize = MAX_BATCH + 4_096;
const MAX_RECORD: usize = 64 << 10;

/// Most bytes of the note that a replica keeps for itself.
const MAX_NOTE: usize = 16 << 20;

const CACHE: usize = 16 << 20;

/// A snapshot as it is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoredSnapshot {
    /// What it covers.
    pub(super) meta: SnapshotMeta,
    /// The state.
    pub(super) state: Bytes,
}

/// A change of what is on disk.
#[derive(Debug)]
pub(super) enum Change {
    /// Entries follow the last one.
    Append(Vec<Entry>),
    /// All entries from this index on are dropped.
    Truncate(u64),
    /// All entries up to this one are dropped; a snapshot has them.
    Purge(LogId),
    /// A new vote.
    Vote(Vote),
    /// All entries up to this one are decided. Never worth a transaction of its own.
    Committed(Option<LogId>),
    /// Replaces the snapshot.
    Snapshot(StoredSnapshot),
    /// A new identity.
    Identity(Identity),
    /// The leaderships of entries that are dropped.
    Lineage(Known),
    /// What this replica keeps for itself, and no other learns.
    Note(Bytes),
}

/// What a store holds.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) identity: Identity,
    pub(super) vote: Option<Vote>,
    pub(super) committed: Option<LogId>,
    pub(super) purged: Option<LogId>,
    pub(super) lineage: Known,
    pub(super) log: BTreeMap<u64, Entry>,
    pub(super) snapshot: Option<StoredSnapshot>,
    pub(super) note: Option<Bytes>,
}

/// The open store.
#[derive(Debug)]
pub(super) struct Store {
    database: Database,
    /// None for a disk in memory. It outlives the database, and with it the lock.
    folder: Option<Folder>,
    place: String,
    /// Transactions that there were.
    writes: u64,
}

impl Store {
    /// Opens or makes the store of this replica, verifies it, and reads all that it holds.
    pub(super) fn open(
        storage: &Storage,
        replica: u64,
    ) -> Result<(Self, Contents), ConsensusError> {
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
                let database = open_in(&folder, &place, replica)?;
                (place, Some(folder), database)
            }
        };
        let mut store = Self {
            database,
            folder,
            place,
            writes: 0,
        };
        let mut contents = store.read(replica)?;
        store.check_mark()?;
        // One that was started with a wrong id, and has taken part in nothing, may be started with the right one.
        if contents.identity == Identity::blank(contents.identity.replica) {
            contents.identity = Identity::blank(replica);
            initialise(&store.database, &contents.identity).map_err(|e| store.failed(&e))?;
        }
        if contents.identity.replica != replica {
            return Err(ConsensusError::OtherReplica {
                place: store.place,
                found: contents.identity.replica,
                given: replica,
            });
        }
        Ok((store, contents))
    }

    fn read(&mut self, replica: u64) -> Result<Contents, ConsensusError> {
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
            let identity = Identity::blank(replica);
            initialise(&self.database, &identity).map_err(|e| self.failed(&e))?;
            return self.read(replica);
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
            Some(found @ 1..FORMAT) => {
                return Err(ConsensusError::Older {
                    place: place.clone(),
                    found,
                });
            }
            found => return Err(damaged(&format!("format {found:?}"))),
        }
        let writes = about.get(WRITES_KEY).map_err(|e| damaged(&e))?;
        self.writes = writes.map_or(0, |writes| writes.value());

        let records = read.open_table(RECORDS).map_err(|e| damaged(&e))?;
        let record = |key| records.get(key).map_err(|e| damaged(&e));
        let identity = record(IDENTITY)?.ok_or_else(|| damaged(&"it has no identity"))?;
        let mut contents = Contents {
            identity: self.parse(IDENTITY, identity.value(), MAX_RECORD)?,
            vote: self.parse_some(VOTE, record(VOTE)?)?,
            committed: self.parse_some(COMMITTED, record(COMMITTED)?)?,
            purged: self.parse_some(PURGED, record(PURGED)?)?,
            lineage: self
                .parse_some(LINEAGE, record(LINEAGE)?)?
                .unwrap_or_default(),
            log: BTreeMap::new(),
            snapshot: None,
            note: None,
        };
        if let Some(bytes) = record(NOTE)? {
            contents.note = Some(self.parse(NOTE, bytes.value(), MAX_NOTE)?);
        }
        let snapshots = read.open_table(SNAPSHOT).map_err(|e| damaged(&e))?;
        if let Some(bytes) = snapshots.get(0).map_err(|e| damaged(&e))? {
            contents.snapshot = Some(self.parse("snapshot", bytes.value(), MAX_SNAPSHOT)?);
        }
        let log = read.open_table(LOG).map_err(|e| damaged(&e))?;
        let mut next = contents.purged.map(|purged| purged.index + 1);
        for entry in log.iter().map_err(|e| damaged(&e))? {
            let (index, bytes) = entry.map_err(|e| damaged(&e))?;
            let index = index.value();
            if next.is_some_and(|next| index != next) {
                return Err(damaged(&format!("entry {index} in place of {next:?}")));
            }
            next = Some(index + 1);
            let entry: Entry = self.parse("entry", bytes.value(), MAX_ENTRY)?;
            contents.log.insert(index, entry);
        }
        Ok(contents)
    }

    fn check_mark(&self) -> Result<(), ConsensusError> {
        match self.folder.as_ref().and_then(|folder| folder.marked) {
            Some(durable) if durable > self.writes => Err(ConsensusError::Shortened {
                place: self.place.clone(),
                last: self.writes,
                durable,
                mark: mark::NAME,
            }),
            _ => Ok(()),
        }
    }

    /// Makes changes durable, all or none, in their order.
    pub(super) fn commit<'a>(
        &mut self,
        changes: impl Iterator<Item = &'a Change>,
    ) -> Result<(), ConsensusError> {
        let writes = self.writes + 1;
        self.write(changes, writes)
            .map_err(|error| self.failed(&error))?;
        self.writes = writes;
        let marked = self
            .folder
            .as_mut()
            .map_or(Ok(()), |folder| folder.mark.set(writes));
        marked.map_err(|error| self.failed(&error.into()))
    }

    fn write<'a>(
        &self,
        changes: impl Iterator<Item = &'a Change>,
        writes: u64,
    ) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            let mut records = transaction.open_table(RECORDS)?;
            let mut log = transaction.open_table(LOG)?;
            for change in changes {
                match change {
                    Change::Append(entries) => {
                        for entry in entries {
                            let bytes = record(entry, MAX_ENTRY)?;
                            log.insert(entry.log_id.index, bytes.as_ref())?;
                        }
                    }
                    Change::Truncate(from) => log.retain_in(*from.., |_, _| false)?,
                    Change::Purge(upto) => {
                        log.retain_in(..=upto.index, |_, _| false)?;
                        records.insert(PURGED, record(upto, MAX_RECORD)?.as_ref())?;
                    }
                    Change::Vote(vote) => {
                        records.insert(VOTE, record(vote, MAX_RECORD)?.as_ref())?;
                    }
                    Change::Committed(Some(committed)) => {
                        records.insert(COMMITTED, record(committed, MAX_RECORD)?.as_ref())?;
                    }
                    Change::Committed(None) => {
                        records.remove(COMMITTED)?;
                    }
                    Change::Snapshot(snapshot) => {
                        let bytes = record(snapshot, MAX_SNAPSHOT)?;
                        let mut snapshots = transaction.open_table(SNAPSHOT)?;
                        snapshots.insert(0, bytes.as_ref())?;
                    }
                    Change::Identity(identity) => {
                        records.insert(IDENTITY, record(identity, MAX_RECORD)?.as_ref())?;
                    }
                    Change::Lineage(known) => {
                        records.insert(LINEAGE, record(known, MAX_RECORD)?.as_ref())?;
                    }
                    Change::Note(note) => {
                        records.insert(NOTE, record(note, MAX_NOTE)?.as_ref())?;
                    }
                }
            }
            let mut about = transaction.open_table(ABOUT)?;
            about.insert(WRITES_KEY, writes)?;
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

    fn parse_some<T: DeserializeOwned>(
        &self,
        what: &str,
        value: Option<redb::AccessGuard<'_, &'static [u8]>>,
    ) -> Result<Option<T>, ConsensusError> {
        value
            .map(|bytes| self.parse(what, bytes.value(), MAX_RECORD))
            .transpose()
    }

    fn parse<T: DeserializeOwned>(
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
            Some((&VERSION, value)) => {
                codec::decode(value, limit).map_err(|error| damaged(format!("{what}: {error}")))
            }
            Some((&found, _)) if found > VERSION => Err(ConsensusError::Newer {
                place: self.place.clone(),
                found: u64::from(found),
                known: u64::from(VERSION),
            }),
            _ => Err(damaged(format!("{what} has no version"))),
        }
    }
}

/// Version and value as they are stored.
fn record<T: Serialize>(value: &T, limit: usize) -> Result<Bytes, redb::Error> {
    let value = codec::encode(value, limit)
        .map_err(|error| redb::Error::Io(std::io::Error::other(error)))?;
    Ok([&[VERSION], value.as_ref()].concat().into())
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder
        .set_cache_size(CACHE)
        .set_check_integrity_on_open(true);
    builder
}

fn open_in(folder: &Folder, place: &str, replica: u64) -> Result<Database, ConsensusError> {
    let path = folder.store();
    if !path.exists() && folder.marked.is_none_or(|durable| durable == 0) {
        folder
            .create_store(|draft| create(draft, replica).map_err(|error| refused(place, error)))?;
    }
    builder().open(&path).map_err(|error| refused(place, error))
}

fn create(path: &Path, replica: u64) -> Result<(), DatabaseError> {
    let database = builder().create(path)?;
    let storage = |error: redb::Error| match error {
        redb::Error::Io(error) => StorageError::Io(error),
        other => StorageError::Corrupted(other.to_string()),
    };
    initialise(&database, &Identity::blank(replica)).map_err(storage)?;
    database.close()
}

fn initialise(database: &Database, identity: &Identity) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(ABOUT)?.insert(FORMAT_KEY, FORMAT)?;
    transaction
        .open_table(RECORDS)?
        .insert(IDENTITY, record(identity, MAX_RECORD)?.as_ref())?;
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
