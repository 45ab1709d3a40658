//! A server that is attacked, and an honest client that must not notice.

#![allow(
    clippy::print_stdout,
    reason = "what was measured is shown with the test"
)]

use std::time::Duration;

use skyschedule_client::Client;
use skyschedule_common::env::{self, net::Stream};

use crate::member::Member;
use crate::numbering::{numbered, settled};
use crate::server::{PASSWORD, Server, USER};

/// The honest client's group.
pub const GROUP: &str = "1000";

/// A server gives a stranger so much time for its login.
pub const LOGIN_DEADLINE: Duration = Duration::from_secs(5);

/// How much later than its deadline a connection may be closed on a busy machine.
pub const SLACK: Duration = Duration::from_secs(10);

/// Ten times what is aimed at on an idle machine.
const NUMBERED: Duration = Duration::from_secs(10);

/// By so much the server's memory may grow, whatever strangers do.
const MEMORY: u64 = 64 * 1024 * 1024;

/// A server with an honest client that works all the time.
#[derive(Debug)]
pub struct Scene {
    /// The server.
    pub server: Server,
    honest: Member,
    epoch: Option<String>,
    memory: u64,
}

impl Scene {
    /// Starts both.
    pub async fn new() -> Self {
        let server = Server::start().await;
        server.admin().short_leases(GROUP).await;
        let honest = Member::start(server.address(), GROUP, "honest");
        let epoch = settled(&[&honest]).await.rows[0].epoch.clone();
        let memory = server.memory();
        Self {
            server,
            honest,
            epoch,
            memory,
        }
    }

    /// A connection that says nothing yet.
    pub async fn stranger(&self) -> Stream {
        Stream::connect(self.server.address())
            .await
            .expect("the server accepts connections")
    }

    /// A new client becomes a member of a group of its own at once, whatever goes on.
    pub async fn numbers_a_newcomer(&self) {
        let start = env::now();
        let client = Client::builder()
            .servers([self.server.address().to_string()])
            .group("newcomers")
            .credentials(USER, PASSWORD)
            .connect()
            .await
            .expect("a newcomer is let in");
        client.acquire().await.expect("it has rows");
        println!("numbered within {:?}", start.elapsed());
        assert!(start.elapsed() < NUMBERED, "{:?}", start.elapsed());
        client.close().await.expect("it leaves in good order");
    }

    /// The honest client noticed nothing, and the server's memory has not grown much.
    pub async fn is_undisturbed(&self) {
        let now = numbered(&[&self.honest]).await;
        assert_eq!(now.rows[0].epoch, self.epoch, "{}", self.honest);
        let history = self.honest.history();
        let mut since = history.iter().skip_while(|rows| !rows.is_leased());
        assert!(
            since.all(|rows| rows.is_leased()),
            "its lease did not last: {}",
            self.honest
        );
        self.memory_is_bounded();
    }

    /// The server's memory has not grown much.
    pub fn memory_is_bounded(&self) {
        let grown = self.server.memory().saturating_sub(self.memory);
        println!("memory grew by {} KiB", grown / 1_024);
        assert!(grown < MEMORY, "memory grew by {grown} bytes");
    }
}
