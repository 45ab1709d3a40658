//! What the comparison needs of a coordination store.

use std::future::Future;

use tokio::sync::mpsc;

use crate::common::Result;

/// A change directly below a watched folder; the name there.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Created(String),
    Removed(String),
}

/// One connection to the store, with a session that ends when its process is silent for too long.
pub(crate) trait Store: Clone + Send + Sync + 'static {
    /// To one server, or to several with commas between.
    fn connect(servers: &str) -> impl Future<Output = Result<Self>> + Send;

    /// Makes sure of a folder.
    fn folder(&self, path: &str) -> impl Future<Output = Result<()>> + Send;

    /// Creates an entry; one of the session's own ends with it.
    fn create(&self, path: &str, own: bool) -> impl Future<Output = Result<()>> + Send;

    fn remove(&self, path: &str) -> impl Future<Output = Result<()>> + Send;

    /// The names in a folder.
    fn list(&self, folder: &str) -> impl Future<Output = Result<Vec<String>>> + Send;

    /// All changes in a folder from now on.
    fn watch(
        &self,
        folder: &str,
    ) -> impl Future<Output = Result<mpsc::UnboundedReceiver<Change>>> + Send;
}
