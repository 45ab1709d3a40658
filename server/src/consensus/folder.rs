//! The data folder: one process has it, and a store appears in it complete or not at all.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::error::ConsensusError;
use super::mark::Mark;

const LOCK: &str = "skyschedule.lock";
const STORE: &str = "skyschedule.redb";
/// Where a new store is made ready before it gets its name.
const DRAFT: &str = "skyschedule.redb.new";

/// A data folder that this process has for itself until the value is dropped.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Held, not read: the lock ends with it, also when the process is killed.
    _lock: File,
    pub(super) mark: Mark,
    /// Last durable write as the mark knew it.
    pub(super) marked: Option<u64>,
}

impl Folder {
    /// Makes the folder where needed, and locks it.
    pub(super) fn open(path: &Path) -> Result<Self, ConsensusError> {
        let place = path.display().to_string();
        let inaccessible = |source| ConsensusError::Inaccessible {
            place: place.clone(),
            source,
        };
        fs::create_dir_all(path).map_err(inaccessible)?;
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path.join(LOCK))
            .map_err(inaccessible)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(ConsensusError::Locked { place }),
            Err(TryLockError::Error(source)) => return Err(inaccessible(source)),
        }
        let (mark, marked) = Mark::open(path).map_err(inaccessible)?;
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            mark,
            marked,
        })
    }

    /// Path of the store.
    pub(super) fn store(&self) -> PathBuf {
        self.path.join(STORE)
    }

    /// Has `make` write a new store, durably, and gives it its name.
    pub(super) fn create_store(
        &self,
        make: impl FnOnce(&Path) -> Result<(), ConsensusError>,
    ) -> Result<(), ConsensusError> {
        let inaccessible = |source| ConsensusError::Inaccessible {
            place: self.path.display().to_string(),
            source,
        };
        let draft = self.path.join(DRAFT);
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(inaccessible(error));
            }
            _ => make(&draft)?,
        }
        fs::rename(&draft, self.store()).map_err(inaccessible)?;
        self.sync().map_err(inaccessible)
    }

    /// Makes the names in the folder durable; where a folder cannot be opened, the system sees to it.
    fn sync(&self) -> io::Result<()> {
        #[cfg(unix)]
        File::open(&self.path)?.sync_all()?;
        Ok(())
    }
}
