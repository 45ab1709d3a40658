//! The one task of a client, on the process's I/O thread: carries out what the state machine decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use skyschedule_common::auth::Credentials;
use skyschedule_common::env::{self, Instant, JoinHandle};
use skyschedule_common::ids::Incarnation;
use skyschedule_common::protocol::messages::ClientMessage;
use tokio::sync::{mpsc, oneshot};
use tracing::error;

use crate::config::Config;
use crate::connection::{self, Dial, Outgoing};
use crate::error::ConnectError;
use crate::membership::{Action, Chance, ConnectionId, Core, End, Event, Farewell};
use crate::shared::{Shared, status};

/// Messages that wait to be sent on one connection; a server that reads more slowly is dropped.
const OUTGOING: usize = 256;

/// Events of all connections that wait to be taken in; the connections wait then.
const EVENTS: usize = 256;

/// How long the last connection may take to send the goodbye and to end.
const FINISH: Duration = Duration::from_secs(3);

/// What becomes of the wait for the first membership.
pub(crate) type Joined = Result<(), ConnectError>;

/// A wait for the first membership, and until when.
type Waiting = (oneshot::Sender<Joined>, Instant);

/// See the module.
pub(crate) struct Driver {
    shared: Arc<Shared>,
    core: Core,
    credentials: Option<Credentials>,
    connections: BTreeMap<ConnectionId, Connection>,
    events: mpsc::Receiver<(ConnectionId, Event)>,
    events_from: mpsc::Sender<(ConnectionId, Event)>,
    waiting: Option<Waiting>,
    farewell: Farewell,
}

struct Connection {
    outgoing: mpsc::Sender<Outgoing>,
    task: JoinHandle<bool>,
}

/// Dropped, a connection is reset.
impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Driver {
    /// Starts a client; with a limit, the receiver hears when it is a member, or why it gave up.
    pub(crate) fn start(
        config: Config,
        shared: Arc<Shared>,
        limit: Option<Duration>,
    ) -> Result<oneshot::Receiver<Joined>, ConnectError> {
        let (events_from, events) = mpsc::channel(EVENTS);
        let (joined, wait) = oneshot::channel();
        env::io_spawn(async move {
            let now = env::now();
            let driver = Self {
                shared,
                credentials: config.credentials.clone(),
                core: Core::new(config, CHANCE, now),
                connections: BTreeMap::new(),
                events,
                events_from,
                waiting: limit.map(|limit| (joined, now + limit)),
                farewell: Farewell::Unheard,
            };
            driver.run().await;
        })?;
        Ok(wait)
    }

    async fn run(mut self) {
        loop {
            let now = env::now();
            self.step(now);
            if self.is_over(now) {
                return self.finish().await;
            }
            let mut next = self.core.next_tick().unwrap_or(now);
            if let Some((_, until)) = &self.waiting {
                next = next.min(*until);
            }
            let shared = Arc::clone(&self.shared);
            tokio::select! {
                biased;
                event = self.events.recv() => {
                    if let Some((from, event)) = event {
                        self.take_in(from, event);
                    }
                }
                () = shared.driver_woken() => {}
                () = env::sleep_until(next) => {}
            }
        }
    }

    fn take_in(&mut self, from: ConnectionId, event: Event) {
        let now = env::now();
        self.heard(from, event, now);
        // All that has arrived is one step: what it changes is answered once.
        for _ in 1..EVENTS {
            let Ok((from, event)) = self.events.try_recv() else {
                break;
            };
            self.heard(from, event, now);
        }
    }

    fn heard(&mut self, from: ConnectionId, event: Event, now: Instant) {
        if matches!(event, Event::Closed(_)) {
            self.connections.remove(&from);
        }
        self.core.event(from, event, &mut self.shared.permit(), now);
    }

    fn step(&mut self, now: Instant) {
        let requests = self.shared.requests();
        let (status, state, answer) = {
            let mut permit = self.shared.permit();
            self.core.wish(requests.wishes, requests.pulls);
            self.core.tick(&mut permit, now);
            let answer = permit
                .holding()
                .map(|holding| (holding.epoch, holding.share.clone()));
            (status(&permit, now), self.core.state(&permit), answer)
        };
        for action in self.core.take_actions() {
            self.carry_out(action, now);
        }
        self.shared.publish_status(status);
        self.shared.state.send_if_modified(|known| {
            let changed = *known != state;
            if changed {
                *known = state;
            }
            changed
        });
        if let Some((epoch, share)) = answer {
            let answered = self.core.pulls_answered();
            self.shared.pulled.send_if_modified(|known| {
                let news = known.0 < answered;
                if news {
                    *known = (answered, epoch, share);
                }
                news
            });
        }
        self.shared.announce();
    }

    fn carry_out(&mut self, action: Action, now: Instant) {
        match action {
            Action::Dial {
                connection,
                address,
                relay,
            } => {
                let (outgoing, queue) = mpsc::channel(OUTGOING);
                let dial = Dial {
                    address,
                    relay,
                    credentials: self.credentials.clone(),
                };
                let task = env::spawn(connection::run(
                    connection,
                    dial,
                    queue,
                    self.events_from.clone(),
                ));
                self.connections
                    .insert(connection, Connection { outgoing, task });
            }
            Action::Send {
                connection,
                message,
            } => self.send(connection, message, now),
            Action::Finish { connection } => {
                let queued = self
                    .connections
                    .get(&connection)
                    .map(|open| open.outgoing.try_send(Outgoing::Finish));
                if queued.is_some_and(|queued| queued.is_err()) {
                    self.connections.remove(&connection);
                }
            }
            Action::Close { connection } => {
                self.connections.remove(&connection);
            }
        }
    }

    fn send(&mut self, to: ConnectionId, message: ClientMessage, now: Instant) {
        let Some(connection) = self.connections.get(&to) else {
            return;
        };
        if connection
            .outgoing
            .try_send(Outgoing::Frame(message))
            .is_err()
        {
            self.connections.remove(&to);
            let end = End::Failed(format!("it does not read: {OUTGOING} messages wait for it"));
            self.core
                .event(to, Event::Closed(end), &mut self.shared.permit(), now);
        }
    }

    /// Whether the client has come to its end; tells those who wait for its beginning.
    fn is_over(&mut self, now: Instant) -> bool {
        if let Some((joined, until)) = self.waiting.take() {
            let outcome = if self.core.joined_once() {
                Some(Ok(()))
            } else if let Some(error) = self.core.hopeless() {
                Some(Err(error))
            } else if until <= now {
                Some(Err(self.core.obstacle()))
            } else {
                None
            };
            match outcome {
                None => self.waiting = Some((joined, until)),
                Some(outcome) => {
                    let failed = outcome.is_err();
                    // Nobody listens any more: then the handle is dropped, too.
                    let _ = joined.send(outcome);
                    if failed {
                        return true;
                    }
                }
            }
        }
        if let Some(why) = self.core.expelled() {
            error!("this client ends: {why}");
            self.shared.expel(why);
            // There is no membership that a goodbye could end.
            self.farewell = Farewell::Said;
            return true;
        }
        if let Some(farewell) = self.core.farewell() {
            self.farewell = farewell;
        }
        self.core.farewell().is_some() || self.shared.requests().abandoned
    }

    /// Waits for the connection that says goodbye, if one does; all others are reset.
    async fn finish(mut self) {
        if self.core.farewell().is_none() {
            return;
        }
        for connection in self.connections.values_mut() {
            if !matches!(
                env::timeout(FINISH, &mut connection.task).await,
                Ok(Ok(true))
            ) {
                self.farewell = Farewell::Unheard;
            }
        }
    }
}

/// Whatever ends the driver ends the client: nobody waits for rows for ever.
impl Drop for Driver {
    fn drop(&mut self) {
        if self.core.farewell().is_none()
            && !self.shared.requests().abandoned
            && self.core.joined_once()
            && self.core.expelled().is_none()
        {
            error!("the client's task ended before the client did: its runtime is gone");
        }
        self.connections.clear();
        self.shared.end(self.farewell);
    }
}

const CHANCE: Chance = Chance {
    jitter: |duration| env::rng::jitter(duration, 0.5),
    incarnation: || {
        let mut bytes = [0; 16];
        env::rng::fill(&mut bytes);
        Incarnation(u128::from_le_bytes(bytes))
    },
};
