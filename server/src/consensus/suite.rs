//! openraft's own tests of storage, on ours.

#![allow(
    clippy::unwrap_used,
    reason = "a helper of a test may fail like the test itself"
)]

use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use skyschedule_common::env;

use super::identity::Identity;
use super::log::Log;
use super::machine::{Compaction, Machine};
use super::raft::TypeConfig;
use super::store::Store;
use super::writer::Writer;
use super::{MemoryDisk, Storage};

struct Stores;

impl StoreBuilder<TypeConfig, Log, Machine, ()> for Stores {
    async fn build(&self) -> Result<((), Log, Machine), StorageError<TypeConfig>> {
        let storage = Storage::Memory(MemoryDisk::new());
        let (store, mut contents) = Store::open(&storage, 1).unwrap();
        assert_eq!(contents.identity, Identity::blank(1));
        let (writer, writing) = Writer::new(store, std::time::Duration::ZERO);
        env::spawn(writing);
        let log = Log::new(&mut contents, writer.clone());
        let compaction = Compaction {
            every: u64::MAX,
            due: std::sync::Arc::default(),
        };
        let machine = Machine::new(std::sync::Arc::default(), None, writer, compaction).unwrap();
        Ok(((), log, machine))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn storage_is_as_openraft_needs_it() {
    Suite::test_all(Stores).await.unwrap();
}
