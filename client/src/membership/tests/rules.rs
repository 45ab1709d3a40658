//! One rule, one test.

use skyschedule_common::protocol::bounded::BoundedString;
use skyschedule_common::protocol::features;

use super::*;
use crate::error::ConnectError;

#[test]
fn login_then_attach_then_a_heartbeat_at_once() {
    let mut play = Play::new(1);
    assert_eq!(play.dialed, [0]);
    play.event(
        0,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
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

/// A client that is served nowhere asks with its first login: whoever leads need not be asked again, and nobody else is
/// taken for the one that serves.
#[test]
fn a_login_asks_whoever_leads_where_that_is_understood() {
    let ready = |features| Event::Ready {
        ends: None,
        features,
    };
    let asked = |play: &mut Play| -> Vec<usize> {
        let asks = |message: &ClientMessage| {
            *message
                == ClientMessage::AttachToLeader {
                    membership: None,
                    epoch: Epoch::ZERO,
                }
        };
        let sent = play.take();
        assert!(matches!(sent.first(), Some((_, ClientMessage::Login(_)))));
        assert!(
            sent[1..].iter().all(|(_, message)| asks(message)),
            "{sent:?}"
        );
        sent[1..].iter().map(|(server, _)| *server).collect()
    };
    let mut play = Play::new(4);
    play.event(0, ready(features::ATTACH_TO_LEADER));
    assert_eq!(asked(&mut play), [0]);
    play.event(1, ready(features::ALL));
    assert_eq!(asked(&mut play), [1]);
    play.event(2, ready(features::ALL & !features::ATTACH_TO_LEADER));
    assert_eq!(asked(&mut play), [0; 0]);

    play.hear(0, serving(Serving::None));
    play.hear(0, welcome(M, 1, share(1, &[0]), AVAILABLE));
    assert!(play.permit.holding().is_none(), "it does not serve");
    play.hear(1, serving(Serving::Quorum));
    assert_eq!(play.take(), [], "it was asked");
    play.event(3, ready(features::ALL));
    assert_eq!(asked(&mut play), [0; 0], "another one serves");
    play.hear(1, welcome(M, 1, share(1, &[0]), AVAILABLE));
    play.answer_heartbeats(1);
    assert_eq!(play.mode(), Mode::Leased);
    // One that comes to lead later was not asked as such, and this client is served.
    play.sent.clear();
    play.hear(0, serving(Serving::Quorum));
    assert!(
        !play
            .take()
            .iter()
            .any(|(_, message)| matches!(message, ClientMessage::Attach { .. }))
    );
}

/// One that leads only after its first word was not asked as the leader.
#[test]
fn a_server_that_comes_to_lead_is_asked_anew() {
    let mut play = Play::new(1);
    play.event(
        0,
        Event::Ready {
            ends: None,
            features: features::ALL,
        },
    );
    play.hear(0, serving(Serving::None));
    play.sent.clear();
    play.hear(0, serving(Serving::Quorum));
    assert_eq!(play.take(), [(0, attach(None, 0))]);
    // Nor is one that numbers without a quorum.
    let mut play = Play::new(1);
    play.event(
        0,
        Event::Ready {
            ends: None,
            features: features::ALL,
        },
    );
    play.hear(0, serving(Serving::Degraded));
    play.sent.clear();
    play.pass(10_000);
    assert!(play.take().contains(&(0, attach(None, 0))));
}

/// Servers that were restored from an older copy, and went on with somebody else first, may give out an epoch that this
/// client knows with another share.
#[test]
fn a_known_epoch_with_another_share_leaves_nothing_and_asks_for_one_above_it() {
    for terms in [AVAILABLE, EXCLUSIVE] {
        let mut play = Play::member(1, share(4, &[0, 1]), terms);
        let row = play.begin(1);
        play.lose(0);
        play.pass(500);
        play.open(0, Serving::Quorum);
        play.sent.clear();
        play.hear(0, welcome(M, 1, share(4, &[0, 2]), terms));
        let holding = play.permit.holding().unwrap();
        assert!(holding.share.is_empty(), "{:?}", holding.share);
        let sent = play.take();
        let is_beyond = |message: &ClientMessage| match message {
            ClientMessage::Heartbeat { epoch, .. } | ClientMessage::Released { epoch, .. } => {
                *epoch == Epoch::quorum(2)
            }
            _ => true,
        };
        assert!(
            sent.iter().all(|(_, message)| is_beyond(message)),
            "{sent:?}"
        );
        let heartbeat = |(_, message): &(usize, ClientMessage)| {
            matches!(message, ClientMessage::Heartbeat { .. })
        };
        assert!(sent.iter().any(heartbeat), "{sent:?}");
        play.finish(&row);
        play.hear(0, told(1_000, share(4, &[0, 2])));
        assert_eq!(play.permit.holding().unwrap().share, share(4, &[0, 2]));
        let sent = play.take();
        let is_release = |(_, message): &(usize, ClientMessage)| match message {
            ClientMessage::Released { epoch, keeping, .. } => {
                *epoch == Epoch::quorum(1_000) && keeping.is_empty()
            }
            _ => false,
        };
        assert!(sent.iter().any(is_release), "{sent:?}");
    }
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
fn each_told_is_answered_by_a_release() {
    let mut play = Play::member(1, share(2, &[0]), AVAILABLE);
    play.hear(0, told(2, share(3, &[])));
    assert_eq!(play.take(), [(0, released(2, share(3, &[])))]);
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
    play.stop(6_000);
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
fn a_standby_connection_made_before_the_lease_was_known_is_kept_by_its_pings() {
    let mut play = Play::new(2);
    play.open(1, Serving::None);
    play.open(0, Serving::Quorum);
    let (epoch, share, lease) = (Epoch::quorum(1), share(1, &[0]), Millis(2_000));
    let (membership, terms) = (M, AVAILABLE);
    play.hear(
        0,
        ServerMessage::Welcome {
            membership,
            epoch,
            share,
            terms,
            lease,
        },
    );
    play.take();
    let ping = |play: &mut Play| {
        let mut sent = play.take().into_iter();
        sent.any(|(server, message)| server == 1 && matches!(message, ClientMessage::Ping { .. }))
    };
    play.pass(600);
    play.answer_heartbeats(0);
    play.pass(2_100);
    assert!(
        ping(&mut play),
        "servers close what is silent for three leases"
    );
}

#[test]
fn a_silent_server_is_reset_after_half_a_lease_and_tried_again() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.dialed.clear();
    play.pass(5_000);
    assert!(play.ended.is_empty());
    play.pass(200);
    assert_eq!(play.ended, [(0, "reset")]);
    play.pass(200);
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
fn a_leader_that_found_out_late_that_it_has_no_quorum_is_not_waited_for_again() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    play.answer_heartbeats(0);
    let answered = play.now;
    play.pass(900);
    play.hear(0, serving(Serving::None));
    play.pass(900);
    play.hear(0, serving(Serving::Degraded));
    play.sent.clear();
    play.pass(5_000 - (play.now - answered) - 100);
    assert!(play.take().is_empty());
    play.pass(100);
    assert_eq!(play.take(), [(0, attach(Some(M), 1))]);
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
fn a_group_that_promises_something_else_is_final_whatever_other_servers_there_are() {
    let mut play = Play::new(2);
    play.open(1, Serving::None);
    play.event(
        0,
        Event::Closed(End::Refused(refusal(Code::CONSISTENCY, None))),
    );
    assert!(matches!(
        play.core.hopeless(),
        Some(ConnectError::Refused {
            code: Code::CONSISTENCY,
            ..
        })
    ));
}

#[test]
fn a_member_whose_group_was_made_again_with_another_promise_ends() {
    let mismatch = || Event::Closed(End::Refused(refusal(Code::CONSISTENCY, None)));
    let mut play = Play::member(1, share(1, &[0]), EXCLUSIVE);
    play.lose(0);
    play.event(
        0,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
    play.event(0, mismatch());
    assert!(
        play.core.expelled().is_none(),
        "no group with a member can have been deleted: its lease runs"
    );
    play.pass(11_000);
    assert_eq!(play.mode(), Mode::Asking);
    play.event(
        0,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
    play.event(0, mismatch());
    assert!(matches!(
        play.core.expelled(),
        Some(ConnectError::Refused {
            code: Code::CONSISTENCY,
            ..
        })
    ));
}

#[test]
fn a_server_that_leads_no_more_ends_no_client_that_another_one_serves() {
    let mut play = Play::member(2, share(1, &[0]), EXCLUSIVE);
    play.event(
        1,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
    // It has not answered for a lease, but says that it leads.
    play.stop(6_500);
    assert_eq!(play.mode(), Mode::Asking);
    play.hear(1, ServerMessage::Refused(refusal(Code::CONSISTENCY, None)));
    assert!(play.core.expelled().is_none());
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
            drain: Some(Drain {
                away: true,
                call: 1,
            }),
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
fn a_drain_that_was_taken_back_is_not_taken_back_again_unasked() {
    let mut play = Play::member(1, share(1, &[0]), AVAILABLE);
    let back = |play: &mut Play, call| {
        let drain = Some(Drain { away: false, call });
        play.core.wish(
            Wishes {
                weight: None,
                drain,
            },
            0,
        );
        play.tick();
    };
    let said = |play: &mut Play| {
        let update = ClientMessage::Update {
            membership: M,
            weight: None,
            handlers: None,
            drain: Some(false),
        };
        let sent = play.take();
        sent.iter()
            .filter(|(_, message)| *message == update)
            .count()
    };
    back(&mut play, 1);
    assert_eq!(said(&mut play), 1);
    play.hear(0, welcome(M, 1, share(1, &[0]), AVAILABLE));
    assert_eq!(said(&mut play), 1, "nobody has answered a heartbeat since");
    play.pass(2_000);
    play.answer_heartbeats(0);
    play.hear(0, welcome(M, 1, share(1, &[0]), AVAILABLE));
    assert_eq!(said(&mut play), 0, "an operator may have drained it");
    back(&mut play, 2);
    assert_eq!(said(&mut play), 1, "each call is a wish of its own");
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
    assert!(play.heartbeats().is_empty(), "nothing piles up");
    play.pass(5_200);
    assert_eq!(play.ended.first(), Some(&(0, "reset")));
}
