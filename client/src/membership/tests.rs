use std::collections::BTreeSet;

use proptest::prelude::*;
use skyschedule_common::ids::{ClientId, GroupName};
use skyschedule_common::protocol::bounded::{BoundedString, BoundedVec};
use skyschedule_common::protocol::messages::{Code, Consistency, Numbering};

use super::*;
use crate::error::ConnectError;
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
        self.event(server, Event::Ready { ends: None });
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

#[test]
fn login_then_attach_then_a_heartbeat_at_once() {
    let mut play = Play::new(1);
    assert_eq!(play.dialed, [0]);
    play.event(0, Event::Ready { ends: None });
    assert!(matches!(
        play.take().as_slice(),
        [(0, ClientMessage::Login(_))]
    ));
    play.hear(0, serving(Serving::Quorum));
    assert_eq!(play.take(), [(0, attach(None, 0))]);
    play.hear(0, welcome(M, 1, share(1, &[0]), AVAILABLE));
    assert_eq!(
        play.mode(),
        Mode::Asking,
        "the lease begins with the first answer"
    );
    assert_eq!(play.heartbeats(), [(0, 1)]);
    play.answer_heartbeats(0);
    assert_eq!(play.mode(), Mode::Leased);
    play.sent.clear();
    play.pass(2_000);
    assert_eq!(play.heartbeats(), [(0, 2)], "each third of the lease");
    play.pass(2_000);
    assert_eq!(
        play.heartbeats(),
        [(0, 2), (0, 3)],
        "an answer is not waited for"
    );
}

#[test]
fn an_answer_renews_from_when_its_own_heartbeat_was_sent() {
    let mut play = Play::member(1, share(1, &[0]), EXCLUSIVE);
    play.pass(4_000);
    let [(_, first), (_, second)] = play.heartbeats()[..] else {
        panic!("two heartbeats")
    };
    let alive = |seq| ServerMessage::Alive {
        membership: M,
        seq,
        lease: LEASE,
        settled: None,
    };
    play.hear(0, alive(first));
    assert_eq!(
        play.permit.inspect(at(play.now)).lease_left,
        Duration::from_millis(4_000)
    );
    play.hear(0, alive(second + 7));
    assert_eq!(
        play.permit.inspect(at(play.now)).lease_left,
        Duration::from_millis(4_000),
        "never sent"
    );
    play.hear(0, alive(second));
    assert_eq!(
        play.permit.inspect(at(play.now)).lease_left,
        Duration::from_millis(6_000)
    );
}

#[test]
fn each_told_is_answered_by_release_and_heartbeat() {
    let mut play = Play::member(1, share(2, &[0]), AVAILABLE);
    play.hear(0, told(2, share(3, &[])));
    let [(0, first), (0, ClientMessage::Heartbeat { epoch, .. })] = &play.take()[..] else {
        panic!("both")
    };
    assert_eq!(*first, released(2, share(3, &[])));
    assert_eq!(*epoch, Epoch::quorum(2));
    play.hear(0, told(2, share(3, &[1])));
    assert!(play.take().is_empty(), "nothing new");
}

#[test]
fn a_release_waits_for_its_rows_and_is_repeated_on_a_new_attachment() {
    let mut play = Play::member(1, share(2, &[0]), AVAILABLE);
    let row = play.begin(2);
    play.hear(0, told(2, share(3, &[0])));
    assert!(
        !play
            .take()
            .iter()
            .any(|(_, message)| matches!(message, ClientMessage::Released { .. }))
    );
    play.pass(6_000);
    assert_eq!(play.mode(), Mode::Asking);
    play.finish(&row);
    assert!(
        play.take().contains(&(0, released(2, share(3, &[])))),
        "the lease does not matter"
    );
    play.lose(0);
    play.pass(200);
    play.open(0, Serving::Quorum);
    assert_eq!(play.take().last(), Some(&(0, attach(Some(M), 2))));
    play.hear(0, welcome(M, 2, share(3, &[0]), AVAILABLE));
    assert_eq!(play.take().first(), Some(&(0, released(2, share(3, &[])))));
}

#[test]
fn a_membership_that_is_over_is_followed_by_another_incarnation_when_all_rows_are_back() {
    for ending in [
        ServerMessage::Gone { membership: M },
        ServerMessage::Fenced { membership: M },
    ] {
        let mut play = Play::member(2, share(1, &[0]), AVAILABLE);
        play.open(1, Serving::None);
        let before = play.core.incarnation;
        let row = play.begin(7);
        play.sent.clear();
        play.hear(0, ending);
        assert!(play.permit.is_revoked(row.revocation, at(play.now)));
        play.pass(4_000);
        assert!(
            play.logins().is_empty(),
            "a row of the old membership is worked on"
        );
        play.finish(&row);
        let logins = play.logins();
        assert_eq!(logins.len(), 2, "on every connection");
        assert!(
            logins
                .iter()
                .all(|(_, incarnation, membership)| *incarnation != before && membership.is_none())
        );
        assert_eq!(
            play.take(),
            [(0, attach(None, 0))],
            "the epoch is forgotten, and only the first login of a connection is answered"
        );
        play.hear(
            0,
            welcome(Membership::quorum(2), 9, share(1, &[0]), AVAILABLE),
        );
        assert_eq!(
            play.logins()
                .iter()
                .map(|login| (login.0, login.2))
                .collect::<Vec<_>>(),
            [(1, Some(Membership::quorum(2)))]
        );
    }
}

#[test]
fn what_another_membership_is_told_changes_nothing() {
    let mut play = Play::member(1, share(2, &[0]), AVAILABLE);
    let other = Membership::quorum(2);
    play.hear(
        0,
        ServerMessage::Told {
            membership: other,
            epoch: Epoch::quorum(9),
            share: share(1, &[0]),
        },
    );
    play.hear(0, ServerMessage::Gone { membership: other });
    play.hear(0, ServerMessage::Fenced { membership: other });
    assert!(play.take().is_empty());
    assert_eq!(play.permit.holding().unwrap().share, share(2, &[0]));
}

#[test]
fn a_share_is_taken_from_a_standby_connection_too() {
    let mut play = Play::member(2, share(2, &[0]), AVAILABLE);
    play.open(1, Serving::None);
    play.sent.clear();
    play.hear(1, told(2, share(2, &[1])));
    assert_eq!(play.permit.holding().unwrap().epoch, Epoch::quorum(2));
    assert!(
        play.take().iter().all(|(server, _)| *server == 0),
        "and answered on the attached one"
    );
}

#[test]
fn a_lease_on_standby_is_kept_by_pings_a_quarter_as_often() {
    let mut play = Play::member(2, share(1, &[0]), AVAILABLE);
    play.open(1, Serving::None);
    for _ in 0..24 {
        play.pass(1_000);
        play.answer_heartbeats(0);
        let pings: Vec<u64> = play
            .take()
            .into_iter()
            .filter_map(|(server, message)| match message {
                ClientMessage::Ping { seq } if server == 1 => Some(seq),
                _ => None,
            })
            .collect();
        for seq in pings {
            assert_eq!(play.now % 8_000, 0);
            play.hear(1, ServerMessage::Pong { seq });
        }
    }
    assert!(play.ended.is_empty());
    play.pass(15_000);
    assert!(play.ended.contains(&(1, "reset")), "no answer for a lease");
}

#[test]
fn a_silent_server_is_reset_after_a_lease_and_tried_again() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.dialed.clear();
    play.pass(8_000);
    assert!(play.ended.is_empty());
    play.pass(200);
    assert_eq!(play.ended, [(0, "reset")]);
    assert_eq!(play.dialed, [0]);
}

#[test]
fn a_pause_of_the_process_kills_no_connection() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.pass(2_000);
    play.stop(20_000);
    assert!(play.ended.is_empty(), "its answer may be waiting");
    play.answer_heartbeats(0);
    play.pass(1_500);
    assert!(play.ended.is_empty());
}

#[test]
fn attempts_are_made_100_ms_doubling_to_a_third_of_the_lease() {
    let mut play = Play::new(1);
    let mut waits = Vec::new();
    for _ in 0..7 {
        play.dialed.clear();
        play.lose(0);
        let from = play.now;
        while play.dialed.is_empty() {
            play.pass(10);
        }
        waits.push(play.now - from);
    }
    assert_eq!(waits, [100, 200, 400, 800, 1_600, 2_000, 2_000]);
}

#[test]
fn a_client_without_servers_asks_for_a_second_then_works_on() {
    let mut play = Play::member(1, share(2, &[0]), AVAILABLE);
    play.hear(0, told(2, share(3, &[1])));
    play.lose(0);
    play.pass(6_050);
    assert_eq!(play.mode(), Mode::Asking);
    play.pass(850);
    assert_eq!(play.mode(), Mode::Asking);
    play.pass(200);
    assert_eq!(play.mode(), Mode::Autonomous);
    assert!(
        play.permit.may_begin(0.into(), at(play.now))
            && play.permit.may_begin(1.into(), at(play.now))
    );
    play.pass(60_000);
    assert_eq!(play.mode(), Mode::Autonomous);
    // A pause: ask first, whatever was allowed before.
    play.stop(1_500);
    assert_eq!(play.mode(), Mode::Asking);
    play.pass(1_100);
    assert_eq!(play.mode(), Mode::Autonomous);
    // Servers are back.
    play.open(0, Serving::Quorum);
    assert_eq!(play.mode(), Mode::Autonomous, "a login alone is no answer");
    play.hear(0, welcome(M, 2, share(3, &[1]), AVAILABLE));
    assert_eq!(play.mode(), Mode::Asking);
    play.answer_heartbeats(0);
    assert_eq!(play.mode(), Mode::Leased);
}

#[test]
fn a_pause_is_not_time_spent_asking() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.pass(6_100);
    play.stop(60_000);
    assert_eq!(play.mode(), Mode::Asking);
    assert!(!play.heartbeats().is_empty(), "it asks at once");
    play.pass(900);
    assert_eq!(play.mode(), Mode::Asking);
}

#[test]
fn not_leader_is_no_answer() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.pass(6_500);
    for _ in 0..10 {
        play.hear(0, ServerMessage::NotLeader { hint: None });
        play.pass(100);
    }
    assert_eq!(play.mode(), Mode::Autonomous);
}

#[test]
fn an_exclusive_client_asks_for_ever() {
    let mut play = Play::member(1, share(1, &[0]), EXCLUSIVE);
    let row = play.begin(7);
    play.lose(0);
    play.pass(5_999);
    assert!(!play.permit.is_revoked(row.revocation, at(play.now)));
    play.pass(60_001);
    assert_eq!(play.mode(), Mode::Asking);
    assert!(play.permit.is_revoked(row.revocation, at(play.now)));
}

#[test]
fn it_waits_for_a_quorum_before_it_turns_to_a_degraded_server() {
    let mut play = Play::new(2);
    play.open(0, Serving::Degraded);
    play.open(1, Serving::None);
    play.sent.clear();
    play.pass(4_900);
    assert!(play.take().is_empty());
    play.pass(200);
    assert_eq!(play.take(), [(0, attach(None, 0))]);
    let minted = Membership {
        number: 1,
        replica: 1,
    };
    play.hear(0, welcome(minted, 1, share(1, &[0]), AVAILABLE));
    play.answer_heartbeats(0);
    play.sent.clear();
    play.hear(1, serving(Serving::Quorum));
    let detach = ClientMessage::Detach { membership: minted };
    assert_eq!(play.take(), [(0, detach), (1, attach(Some(minted), 1))]);
}

#[test]
fn an_exclusive_client_never_turns_to_a_degraded_server() {
    let mut play = Play::member(2, share(1, &[0]), EXCLUSIVE);
    play.lose(0);
    play.open(1, Serving::Degraded);
    play.sent.clear();
    play.pass(30_000);
    assert!(
        !play
            .take()
            .iter()
            .any(|(_, message)| matches!(message, ClientMessage::Attach { .. }))
    );
}

#[test]
fn of_two_leaders_the_one_that_answers_is_kept() {
    let mut play = Play::member(2, share(1, &[0]), AVAILABLE);
    play.open(1, Serving::None);
    play.pass(100);
    play.sent.clear();
    play.hear(1, serving(Serving::Quorum));
    assert_eq!(play.heartbeats().len(), 1, "the present one is asked");
    play.answer_heartbeats(0);
    play.pass(1_000);
    assert!(play.take().is_empty(), "it answered");

    play.hear(1, serving(Serving::None));
    play.hear(1, serving(Serving::Quorum));
    play.pass(600);
    let sent = play.take();
    assert!(
        sent.contains(&(1, attach(Some(M), 1))),
        "it did not: {sent:?}"
    );
    assert!(sent.contains(&(0, ClientMessage::Detach { membership: M })));
}

#[test]
fn a_server_that_cannot_serve_now_is_asked_again_later_and_its_hint_followed() {
    let mut play = Play::new(1);
    play.open(0, Serving::Quorum);
    play.sent.clear();
    let hint = Some(BoundedString::try_from("sky-9:9991").unwrap());
    play.hear(0, ServerMessage::NotLeader { hint: hint.clone() });
    assert_eq!(play.dialed, [0, 1], "a server that nobody listed");
    play.pass(100);
    assert_eq!(play.take(), [(0, attach(None, 0))]);
    play.hear(0, ServerMessage::NotLeader { hint });
    play.pass(150);
    assert!(play.take().is_empty());
    play.pass(50);
    assert_eq!(play.take(), [(0, attach(None, 0))]);
}

#[test]
fn hints_cannot_fill_the_memory() {
    let mut play = Play::new(1);
    play.open(0, Serving::None);
    for port in 1..200 {
        let hint = Some(BoundedString::truncated(&format!("sky:{port}")));
        play.hear(0, ServerMessage::NotLeader { hint });
    }
    assert_eq!(play.core.servers.len(), 1 + MAX_LEARNED);
}

#[test]
fn a_server_asks_to_wait_and_is_asked_again_then() {
    let mut play = Play::new(1);
    play.open(0, Serving::Quorum);
    play.sent.clear();
    play.hear(
        0,
        ServerMessage::Wait(refusal(Code::ID_IN_USE, Some(1_500))),
    );
    assert!(matches!(
        play.core.obstacle(),
        ConnectError::Refused {
            code: Code::ID_IN_USE,
            ..
        }
    ));
    assert!(play.core.hopeless().is_none());
    play.pass(1_499);
    assert!(play.take().is_empty());
    play.pass(1);
    assert_eq!(play.take(), [(0, attach(None, 0))]);
}

#[test]
fn a_refusal_that_time_does_not_heal_is_final_unless_another_server_may_serve() {
    let mut play = Play::new(2);
    play.event(
        0,
        Event::Closed(End::Refused(refusal(Code::CREDENTIALS, None))),
    );
    assert!(
        play.core.hopeless().is_none(),
        "the other one is still tried"
    );
    play.lose(1);
    assert!(matches!(
        play.core.hopeless(),
        Some(ConnectError::Refused {
            code: Code::CREDENTIALS,
            ..
        })
    ));

    let mut play = Play::new(1);
    play.event(
        0,
        Event::Closed(End::Refused(refusal(Code::TOO_MANY, None))),
    );
    assert!(play.core.hopeless().is_none());
}

#[test]
fn closing_releases_says_goodbye_and_ends_with_a_fin() {
    let mut play = Play::member(2, share(1, &[0]), AVAILABLE);
    play.open(1, Serving::None);
    let row = play.begin(7);
    play.hear(0, told(2, share(2, &[0])));
    play.answer_heartbeats(0);
    play.sent.clear();
    play.permit.begin_closing();
    play.pass(1_000);
    assert!(play.core.farewell().is_none() && play.ended.is_empty());
    play.finish(&row);
    let goodbye = ClientMessage::Goodbye { membership: M };
    assert_eq!(play.take(), [(0, released(2, share(2, &[]))), (0, goodbye)]);
    assert_eq!(play.ended, [(0, "fin"), (1, "reset")]);
    assert_eq!(play.core.farewell(), Some(Farewell::Said));
    play.pass(20_000);
    assert!(
        play.take().is_empty(),
        "after the goodbye it acts on nothing"
    );
}

#[test]
fn a_goodbye_that_nobody_can_hear_is_given_up_after_a_lease() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.lose(0);
    play.permit.begin_closing();
    play.pass(5_900);
    assert_eq!(play.core.farewell(), None);
    play.pass(200);
    assert_eq!(play.core.farewell(), Some(Farewell::Unheard));
    assert!(play.ended.iter().all(|(_, how)| *how == "reset"));
}

#[test]
fn wishes_are_told_once_on_each_attachment() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.core.wish(
        Wishes {
            weight: Some(3),
            drain: Some(true),
        },
        1,
    );
    play.tick();
    let update = ClientMessage::Update {
        membership: M,
        weight: Some(3),
        handlers: None,
        drain: Some(true),
    };
    assert_eq!(
        play.take(),
        [
            (0, update.clone()),
            (0, ClientMessage::Pull { membership: M })
        ]
    );
    assert_eq!(play.core.pulls_answered(), 0);
    play.hear(0, told(1, share(1, &[0])));
    assert_eq!(
        play.core.pulls_answered(),
        1,
        "also by a share that is not new"
    );
    play.lose(0);
    play.pass(200);
    play.open(0, Serving::Quorum);
    play.hear(0, welcome(M, 1, share(1, &[0]), AVAILABLE));
    assert_eq!(
        play.take()
            .iter()
            .filter(|(_, message)| *message == update)
            .count(),
        1
    );
}

#[test]
fn a_second_membership_beside_the_first_ends_the_connection() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.hear(
        0,
        welcome(Membership::quorum(2), 9, share(1, &[0]), AVAILABLE),
    );
    assert_eq!(play.ended, [(0, "reset")]);
    assert_eq!(play.permit.holding().unwrap().membership, M);
}

#[test]
fn a_server_that_tells_without_end_and_answers_nothing_is_left() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    for epoch in 2..200 {
        play.hear(0, told(epoch, share(1, &[0])));
    }
    assert_eq!(play.ended.first(), Some(&(0, "reset")));
}

#[derive(Debug, Clone)]
enum Input {
    Pass(u64),
    Stop(u64),
    Ready(usize),
    Lose(usize),
    Say(usize, ServerMessage),
    Answer(usize),
    Begin(i64),
    Finish,
    Close,
}

fn messages() -> impl Strategy<Value = ServerMessage> {
    // Mostly what an honest server would say: the rest is refused before it reaches anything.
    let membership = prop_oneof![
        12 => Just(M),
        1 => (1..4u64, 0..2u16).prop_map(|(number, replica)| Membership { number, replica }),
    ];
    let mode = prop_oneof![6 => Just(Serving::Quorum), 1 => Just(Serving::Degraded), 1 => Just(Serving::None)];
    let rows = (1..4u32).prop_flat_map(|total| {
        proptest::collection::btree_set(0..total, 0..3).prop_map(move |set: BTreeSet<u32>| {
            Share::new(total, set.into_iter().collect()).unwrap()
        })
    });
    let epoch = (0..40u64, 0..2u32).prop_map(|(quorum, degraded)| Epoch {
        quorum,
        degraded,
        replica: 0,
    });
    let terms = prop_oneof![3 => Just(AVAILABLE), 1 => Just(EXCLUSIVE)];
    let lease = prop_oneof![1 => Just(Millis(0)), 9 => Just(LEASE), 1 => Just(Millis(u32::MAX))];
    let refusal = prop_oneof![
        Just(refusal(Code::ID_IN_USE, Some(50))),
        Just(refusal(Code::FORBIDDEN, None))
    ];
    let alive = (
        membership.clone(),
        0..20u64,
        lease.clone(),
        proptest::option::of(epoch.clone()),
    );
    let welcome = (
        membership.clone(),
        epoch.clone(),
        rows.clone(),
        terms,
        lease,
    );
    prop_oneof![
        8 => mode.prop_map(serving),
        8 => welcome.prop_map(|(membership, epoch, share, terms, lease)| {
            ServerMessage::Welcome { membership, epoch, share, terms, lease }
        }),
        12 => (membership.clone(), epoch, rows)
            .prop_map(|(membership, epoch, share)| ServerMessage::Told { membership, epoch, share }),
        2 => alive.prop_map(|(membership, seq, lease, settled)| {
            ServerMessage::Alive { membership, seq, lease, settled }
        }),
        2 => (0..20u64).prop_map(|seq| ServerMessage::Pong { seq }),
        1 => refusal.clone().prop_map(ServerMessage::Wait),
        1 => refusal.prop_map(ServerMessage::Refused),
        1 => Just(ServerMessage::NotLeader { hint: None }),
        1 => membership.clone().prop_map(|membership| ServerMessage::Gone { membership }),
        1 => membership.prop_map(|membership| ServerMessage::Fenced { membership }),
        1 => Just(ServerMessage::AuthDone { signature: [0; 32] }),
    ]
}

fn inputs() -> impl Strategy<Value = Input> {
    prop_oneof![
        4 => (0..3_000u64).prop_map(Input::Pass),
        1 => (0..20_000u64).prop_map(Input::Stop),
        5 => (0..2usize).prop_map(Input::Ready),
        1 => (0..2usize).prop_map(Input::Lose),
        8 => (0..2usize, messages()).prop_map(|(server, message)| Input::Say(server, message)),
        8 => (0..2usize).prop_map(Input::Answer),
        8 => (0..6i64).prop_map(Input::Begin),
        3 => Just(Input::Finish),
        1 => Just(Input::Close),
    ]
}

proptest! {
    /// Whatever servers say, in whatever order: what the client sends follows the rules.
    #[test]
    fn nothing_that_servers_say_makes_the_client_break_a_rule(
        terms in prop_oneof![Just(AVAILABLE), Just(EXCLUSIVE)],
        inputs in proptest::collection::vec(inputs(), 1..150),
    ) {
        let mut play = Play::member(2, share(1, &[0]), terms);
        let mut rows: Vec<(crate::permit::Begun, skyschedule_common::share::RowKey)> = Vec::new();
        let mut goodbye = false;
        for input in inputs {
            let before = play.permit.holding().map(|holding| (holding.membership, holding.epoch));
            match input {
                Input::Pass(millis) => play.pass(millis),
                Input::Stop(millis) => play.stop(millis),
                Input::Ready(server) => play.event(server, Event::Ready { ends: None }),
                Input::Lose(server) => play.lose(server),
                Input::Say(server, message) => play.hear(server, message),
                Input::Answer(server) => play.answer_heartbeats(server),
                Input::Begin(id) => if let Some(work) = play.permit.acquire(at(play.now))
                    && let Some(row) = play.permit.begin(work.tenure, id.into(), at(play.now))
                {
                    let inspection = play.permit.inspect(at(play.now));
                    prop_assert!(matches!(inspection.mode, Mode::Leased | Mode::Autonomous));
                    rows.push((row, id.into()));
                },
                Input::Finish => if let Some((row, _)) = rows.pop() {
                    play.finish(&row);
                },
                Input::Close => {
                    play.permit.begin_closing();
                    play.tick();
                }
            }
            let holding = play.permit.holding();
            if let (Some((membership, epoch)), Some(now)) = (before, holding)
                && membership == now.membership
            {
                prop_assert!(epoch <= now.epoch, "an epoch went back");
            }
            for (_, message) in &play.sent {
                prop_assert!(!goodbye, "it acts after its goodbye");
                match message {
                    ClientMessage::Released { epoch, keeping, .. } => {
                        let holding = holding.filter(|holding| holding.epoch == *epoch);
                        let share = holding.map(|holding| &holding.share);
                        let kept = |key| keeping.contains(key) || share.is_some_and(|share| share.contains(key));
                        prop_assert!(share.is_none() || rows.iter().all(|(_, key)| kept(*key)));
                    }
                    ClientMessage::Login(login) => {
                        prop_assert!(login.membership.is_some() || rows.is_empty(), "rows of the last one are out");
                    }
                    ClientMessage::Goodbye { .. } => {
                        prop_assert!(rows.is_empty());
                        goodbye = true;
                    }
                    _ => {}
                }
            }
            prop_assert!(play.ended.iter().all(|(_, how)| *how == "reset" || goodbye), "a FIN without goodbye");
            prop_assert!(play.seqs.is_sorted_by(|a, b| a < b), "a sequence number repeats");
            // Heartbeats stay until they are answered; the rest was looked at.
            play.sent.retain(|(_, message)| matches!(message, ClientMessage::Heartbeat { .. }));
            if goodbye {
                play.sent.clear();
            }
        }
    }
}
