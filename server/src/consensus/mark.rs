//! The high-water mark: a small file beside the store that knows the last durable write.
//!
//! After a crash redb goes back to its last intact commit, and it cannot tell one that was never
//! finished from a finished one that was damaged later. The mark can: it is written after each commit,
//! so it never names a write that was not durable, and a store that ends before it has lost something.
//! It need not be synced: an old mark only knows less.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

/// Name of the file within the data folder.
pub(super) const NAME: &str = "skyschedule.mark";

const MAGIC: [u8; 8] = *b"skymark1";

/// The open file.
#[derive(Debug)]
pub(super) struct Mark {
    file: File,
}

impl Mark {
    /// Opens or makes the mark in `folder`, and reads the last durable write. None if there is no mark yet,
    /// or a power loss or damage left it unreadable: then the store speaks for itself.
    pub(super) fn open(folder: &Path) -> io::Result<(Self, Option<u64>)> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(folder.join(NAME))?;
        let mut bytes = Vec::new();
        (&mut file).take(64).read_to_end(&mut bytes)?;
        Ok((Self { file }, decode(&bytes)))
    }

    /// Notes that all writes up to `index` are durable.
    pub(super) fn set(&mut self, index: u64) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&encode(index))
    }

    /// Makes the mark itself durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Magic, index, and the index once more, inverted: any flipped bit shows.
fn encode(index: u64) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&index.to_le_bytes());
    bytes[16..].copy_from_slice(&(!index).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<u64> {
    let index = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    (bytes == encode(index)).then_some(index)
}
