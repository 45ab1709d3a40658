//! Clients whose servers and clock are played by the test.

mod hostile;
mod relay;
mod rules;
mod servers;

use skyschedule_common::ids::{ClientId, GroupName, Membership};
use skyschedule_common::protocol::bounded::BoundedVec;
use skyschedule_common::protocol::messages::{Code, Consistency, Numbering, Terms};

use super::*;
use crate::observe::Mode;

const M: Membership = Membership::quorum(1);
const LEASE: Millis = Millis(6_000);

fn at(millis: u64) -> Instant {
    Instant::from_nanos(1_000_000_000 + millis * 1_000_000)
}

fn share(total: u32, numbers: &[u32]) -> Share {
    Share::new(total, numbers.iter().copied().collect()).unwrap()
}

fn refusal(code: Code, retry_after: Option<u64>) -> Refusal {
    Refusal::new(code, "no", retry_after.map(Duration::from_millis))
}

const AVAILABLE: Terms = Terms {
    consistency: Consistency::Available,
    numbering: Numbering::Modulo,
    drain_timeout: Millis(5_000),
};
const EXCLUSIVE: Terms = Terms {
    consistency: Consistency::Exclusive,
    ..AVAILABLE
};

fn welcome(membership: Membership, epoch: u64, share: Share, terms: Terms) -> ServerMessage {
    ServerMessage::Welcome {
        membership,
        epoch: Epoch::quorum(epoch),
        share,
        terms,
        lease: LEASE,
    }
}

fn told(epoch: u64, share: Share) -> ServerMessage {
    ServerMessage::Told {
        membership: M,
        epoch: Epoch::quorum(epoch),
        share,
    }
}

fn serving(mode: Serving) -> ServerMessage {
    ServerMessage::Serving { mode, hint: None }
}

/// A client whose servers and clock are played by the test.
struct Play {
    core: Core,
    permit: Permit,
    now: u64,
    /// What was sent and not looked at yet.
    sent: Vec<(usize, ClientMessage)>,
    dialed: Vec<usize>,
    ended: Vec<(usize, &'static str)>,
    /// Sequence numbers of all heartbeats and pings.
    seqs: Vec<u64>,
}

impl Play {
    fn new(servers: usize) -> Self {
        let config = Config {
            servers: (1..=servers).map(|n| format!("sky-{n}:9991")).collect(),
            group: GroupName::new("orders").unwrap(),
            client: ClientId::new("one").unwrap(),
            credentials: None,
            consistency: None,
            weight: 1,
            ring_key: None,
            handlers: BoundedVec::new(),
            degraded_after: Duration::from_secs(5),
        };
        static COUNTER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let incarnation = || {
            Incarnation(u128::from(
                COUNTER.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            ))
        };
        let core = Core::new(
            config,
            Chance {
                jitter: |duration| duration,
                incarnation,
            },
            at(0),
        );
        let (sent, dialed, ended, seqs) = Default::default();
        let mut play = Self {
            core,
            permit: Permit::new(),
            now: 0,
            sent,
            dialed,
            ended,
            seqs,
        };
        play.tick();
        play
    }

    /// A client that is a member by server 0, with an answered heartbeat and nothing unsaid.
    fn member(servers: usize, share: Share, terms: Terms) -> Self {
        let mut play = Self::new(servers);
        play.open(0, Serving::Quorum);
        play.hear(0, welcome(M, 1, share, terms));
        play.answer_heartbeats(0);
        play.sent.clear();
        play
    }

    fn tick(&mut self) {
        self.core.tick(&mut self.permit, at(self.now));
        for action in self.core.take_actions() {
            match action {
                Action::Dial { connection, .. } => self.dialed.push(connection.server),
                Action::Send {
                    connection,
                    message,
                } => {
                    if let ClientMessage::Heartbeat { seq, .. } | ClientMessage::Ping { seq } =
                        message
                    {
                        self.seqs.push(seq);
                    }
                    self.sent.push((connection.server, message));
                }
                Action::Finish { connection } => self.ended.push((connection.server, "fin")),
                Action::Close { connection } => self.ended.push((connection.server, "reset")),
            }
        }
    }

    fn event(&mut self, server: usize, event: Event) {
        let connection = ConnectionId {
            server,
            attempt: self.core.servers[server].attempt,
        };
        self.core
            .event(connection, event, &mut self.permit, at(self.now));
        self.tick();
    }

    fn hear(&mut self, server: usize, message: ServerMessage) {
        self.event(server, Event::Message(message));
    }

    fn lose(&mut self, server: usize) {
        self.event(server, Event::Closed(End::Failed("reset".to_owned())));
    }

    /// The handshake is done, and the login accepted.
    fn open(&mut self, server: usize, mode: Serving) {
        self.event(
            server,
            Event::Ready {
                ends: None,
                features: 0,
            },
        );
        self.hear(server, serving(mode));
    }

    /// Time passes, with all the ticks that the client asked for.
    fn pass(&mut self, millis: u64) {
        let end = at(self.now + millis);
        while let Some(next) = self.core.next_tick().filter(|next| *next <= end) {
            self.now = (next.as_nanos() - at(0).as_nanos()).div_ceil(1_000_000);
            self.tick();
        }
        self.now = (end.as_nanos() - at(0).as_nanos()) / 1_000_000;
        self.tick();
    }

    /// Time passes in which the process does not run.
    fn stop(&mut self, millis: u64) {
        self.now += millis;
        self.tick();
    }

    fn heartbeats(&self) -> Vec<(usize, u64)> {
        let seq = |(server, message): &(usize, ClientMessage)| match message {
            ClientMessage::Heartbeat { seq, .. } => Some((*server, *seq)),
            _ => None,
        };
        self.sent.iter().filter_map(seq).collect()
    }

    fn answer_heartbeats(&mut self, server: usize) {
        let seqs: Vec<u64> = self
            .heartbeats()
            .into_iter()
            .filter(|(to, _)| *to == server)
            .map(|(_, seq)| seq)
            .collect();
        self.sent
            .retain(|(_, message)| !matches!(message, ClientMessage::Heartbeat { .. }));
        for seq in seqs {
            let membership = self
                .permit
                .holding()
                .map_or(M, |holding| holding.membership);
            self.hear(
                server,
                ServerMessage::Alive {
                    membership,
                    seq,
                    lease: LEASE,
                    settled: None,
                },
            );
        }
    }

    /// What was sent since the last look.
    fn take(&mut self) -> Vec<(usize, ClientMessage)> {
        std::mem::take(&mut self.sent)
    }

    /// Logins since the last look; the rest of what was sent stays.
    fn logins(&mut self) -> Vec<(usize, Incarnation, Option<Membership>)> {
        let mut logins = Vec::new();
        self.sent.retain(|(server, message)| {
            let ClientMessage::Login(login) = message else {
                return true;
            };
            logins.push((*server, login.incarnation, login.membership));
            false
        });
        logins
    }

    fn mode(&self) -> Mode {
        self.permit.mode(at(self.now))
    }

    fn begin(&mut self, id: i64) -> crate::permit::Begun {
        let work = self.permit.acquire(at(self.now)).unwrap();
        self.permit
            .begin(work.tenure, id.into(), at(self.now))
            .unwrap()
    }

    fn finish(&mut self, row: &crate::permit::Begun) {
        self.permit.finish_row(row.guard);
        self.tick();
    }
}

fn attach(membership: Option<Membership>, epoch: u64) -> ClientMessage {
    ClientMessage::Attach {
        membership,
        epoch: Epoch::quorum(epoch),
    }
}

fn released(epoch: u64, keeping: Share) -> ClientMessage {
    ClientMessage::Released {
        membership: M,
        epoch: Epoch::quorum(epoch),
        keeping,
    }
}
