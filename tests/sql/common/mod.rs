//! What tests on databases have in common: a place in each database for each test, and groups of consumers.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "each test program uses a part of this, and what goes wrong here fails the test"
)]

pub(crate) mod consumers;
pub(crate) mod crew;
pub(crate) mod place;
pub(crate) mod session;

/// A test on each of the databases, as three tests.
#[macro_export]
macro_rules! on_each_database {
    ($($(#[$note:meta])* async fn $name:ident($place:ident: &Place) $body:block)*) => {$(
        $(#[$note])*
        mod $name {
            use super::*;

            async fn test($place: &Place) $body

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                let place = Place::postgres().await;
                test(&place).await;
                place.remove().await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn mariadb() {
                let place = Place::mariadb().await;
                test(&place).await;
                place.remove().await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                let place = Place::sqlite().await;
                test(&place).await;
                place.remove().await;
            }
        }
    )*};
}
