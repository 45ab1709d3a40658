//! The temporary folder: the table, and the memory of the replicas.

use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// Names inside the folder.
const DATABASE: &str = "tasks.db";
const SERVERS: &str = "skyschedule-data";

/// The demo's folder, which goes with it.
#[derive(Debug)]
pub(super) struct Folder(TempDir);

impl Folder {
    pub(super) fn new() -> io::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("skyschedule-demo-")
            .tempdir()?;
        Ok(Self(folder))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn database(&self) -> PathBuf {
        database(self.path())
    }

    /// Where this replica remembers.
    pub(super) fn replica(&self, id: u16) -> PathBuf {
        self.path().join(SERVERS).join(id.to_string())
    }
}

/// The table's file in a demo's folder.
pub(super) fn database(folder: &Path) -> PathBuf {
    folder.join(DATABASE)
}

/// Removes a demo's folder in the place of a parent that was killed: what the demo puts there and nothing
/// else, whatever folder it is.
pub(super) fn remove_orphaned(folder: &Path) {
    // Every child does this at the same time, and each may find it done.
    let gone = |result: io::Result<()>| drop(result);
    for suffix in ["", "-wal", "-shm", "-journal"] {
        gone(std::fs::remove_file(
            folder.join(format!("{DATABASE}{suffix}")),
        ));
    }
    gone(std::fs::remove_dir_all(folder.join(SERVERS)));
    gone(std::fs::remove_dir(folder));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_demo_put_there_is_removed() {
        let folder = Folder::new().unwrap();
        std::fs::write(folder.database(), "").unwrap();
        std::fs::create_dir_all(folder.replica(1)).unwrap();
        let foreign = folder.path().join("letter.txt");
        std::fs::write(&foreign, "").unwrap();
        remove_orphaned(folder.path());
        assert!(foreign.exists() && !folder.database().exists() && !folder.replica(1).exists());
        std::fs::remove_file(&foreign).unwrap();
        remove_orphaned(folder.path());
        assert!(!folder.path().exists());
    }
}
