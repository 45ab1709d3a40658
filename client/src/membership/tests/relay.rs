//! The way around, through a server that follows.

use super::*;

const LEADER: &str = "sky-1:9991";

fn follows(leader: &str) -> ServerMessage {
    ServerMessage::Serving {
        mode: Serving::None,
        hint: Some(leader.try_into().unwrap()),
    }
}

/// A member by server 0, which servers 1 and 2 follow.
fn member(terms: Terms) -> Play {
    let mut play = Play::member(3, share(2, &[0]), terms);
    for follower in [1, 2] {
        play.event(
            follower,
            Event::Ready {
                ends: None,
                features: 0,
            },
        );
        play.hear(follower, follows(LEADER));
    }
    play.sent.clear();
    play.dialed.clear();
    play
}

/// The place of the way around, and the address of the server that carries it.
fn relay(play: &Play) -> Option<(usize, String)> {
    let mut servers = play.core.servers.iter().enumerate();
    let (at, server) = servers.find(|(_, server)| server.is_relay() && !server.is_forgotten())?;
    Some((at, server.through.as_ref()?.address.clone()))
}

fn opened(play: &Play) -> (usize, String) {
    relay(play).expect("a way around")
}

/// Standby connections live, the one to the leader answers nothing.
fn silent(play: &mut Play, millis: u64) {
    for _ in 0..millis.div_ceil(50) {
        play.pass(50);
        for seq in std::mem::take(&mut play.seqs) {
            for follower in [1, 2] {
                play.hear(follower, ServerMessage::Pong { seq });
            }
        }
    }
}

/// The heartbeat that goes unanswered, and the time after which another way is looked for.
fn cut_off(play: &mut Play) -> (usize, String) {
    silent(play, 2_000 + 1_400);
    assert_eq!(relay(play), None, "it may only be late");
    silent(play, 200);
    opened(play)
}

/// The connection through another server is there, and the leader serves over it.
fn served(play: &mut Play, at: usize, terms: Terms) {
    play.open(at, Serving::Quorum);
    play.hear(at, welcome(M, 1, share(2, &[0]), terms));
    play.answer_heartbeats(at);
}

#[test]
fn a_silent_leader_is_reached_through_a_follower_before_the_lease_ends_and_the_share_stays() {
    for terms in [AVAILABLE, EXCLUSIVE] {
        let mut play = member(terms);
        let (at, through) = cut_off(&mut play);
        assert!(["sky-2:9991", "sky-3:9991"].contains(&through.as_str()));
        assert_eq!(play.dialed.last(), Some(&at));
        play.sent.clear();
        play.event(
            at,
            Event::Ready {
                ends: None,
                features: 0,
            },
        );
        let said = play.take();
        let [(to, ClientMessage::Login(login))] = said.as_slice() else {
            panic!("{said:?}")
        };
        assert_eq!((*to, login.membership, login.ends), (at, Some(M), None));
        play.hear(at, serving(Serving::Quorum));
        assert_eq!(play.take().last(), Some(&(at, attach(Some(M), 1))));
        play.hear(at, welcome(M, 1, share(2, &[0]), terms));
        assert_eq!(play.mode(), Mode::Leased);
        // What it sent is what counts, whichever way it went.
        let asked = play.now;
        play.pass(300);
        play.answer_heartbeats(at);
        let left = play.permit.inspect(at_lease_end(asked)).lease_left;
        assert_eq!(left, Duration::ZERO);
        assert!(
            !play
                .permit
                .inspect(super::at(asked + 5_999))
                .lease_left
                .is_zero()
        );
        let link = |address: &str| {
            let state = play.core.state(&play.permit);
            let mut servers = state.servers.into_iter();
            servers
                .find(|server| server.address == address)
                .unwrap()
                .link
        };
        assert_eq!(link(&through), crate::observe::Link::Relaying);
        assert_eq!(play.core.state(&play.permit).servers.len(), 3);
    }
}

fn at_lease_end(asked: u64) -> Instant {
    at(asked + u64::from(LEASE.0))
}

#[test]
fn the_direct_way_is_taken_again_when_the_leader_answers_there_and_the_relay_ends_then() {
    let mut play = member(AVAILABLE);
    let (at, _) = cut_off(&mut play);
    served(&mut play, at, AVAILABLE);
    assert!(play.ended.contains(&(0, "reset")), "the silent connection");
    play.pass(500);
    assert_eq!(play.dialed.last(), Some(&0), "it is tried again");
    play.open(0, Serving::Quorum);
    let said = play.take();
    assert!(said.contains(&(at, ClientMessage::Detach { membership: M })));
    assert_eq!(said.last(), Some(&(0, attach(Some(M), 1))));
    assert_eq!(relay(&play).map(|(at, _)| at), Some(at), "until it serves");
    play.hear(0, welcome(M, 1, share(2, &[0]), AVAILABLE));
    assert_eq!(relay(&play), None);
    assert_eq!(play.ended.last(), Some(&(at, "reset")));
    play.answer_heartbeats(0);
    play.sent.clear();
    play.pass(1_900);
    assert_eq!(play.dialed.last(), Some(&0), "no way around is needed");
}

#[test]
fn when_a_relay_ends_another_server_is_asked_at_once() {
    let mut play = member(AVAILABLE);
    let (at, first) = cut_off(&mut play);
    served(&mut play, at, AVAILABLE);
    // The server between is killed.
    let follower = play
        .core
        .servers
        .iter()
        .position(|server| server.address == first)
        .unwrap();
    play.lose(follower);
    play.lose(at);
    let (_, second) = opened(&play);
    assert_ne!(first, second);
    assert_eq!(play.mode(), Mode::Leased);
}

#[test]
fn a_server_that_refuses_is_left_alone_for_a_while_and_none_is_asked_in_a_hurry() {
    let mut play = member(AVAILABLE);
    cut_off(&mut play);
    let refuse_both = |play: &mut Play| {
        let refused = || Event::Closed(End::Refused(refusal(Code::NO_RELAY, Some(1_000))));
        let (at, first) = opened(play);
        play.event(at, refused());
        let (at, second) = opened(play);
        assert_ne!(first, second, "the other one is asked at once");
        play.event(at, refused());
        assert_eq!(relay(play), None);
    };
    // Each time for longer, up to a bound.
    for pause in [2_000, 4_000, 8_000, 16_000, 16_000] {
        refuse_both(&mut play);
        silent(&mut play, pause - 100);
        assert_eq!(relay(&play), None);
        silent(&mut play, 200);
    }
    opened(&play);
}

#[test]
fn a_relay_that_does_not_answer_is_given_up_in_time() {
    let mut play = member(AVAILABLE);
    let (at, first) = cut_off(&mut play);
    silent(&mut play, 1_900);
    assert_eq!(opened(&play), (at, first.clone()), "it may take its time");
    silent(&mut play, 200);
    assert_ne!(opened(&play).1, first);
    assert_eq!(play.mode(), Mode::Leased);
}

#[test]
fn a_new_leader_and_one_that_only_says_no_need_no_relay() {
    // A new leader: the followers say so, and it takes a moment to reach it.
    let mut play = member(AVAILABLE);
    play.lose(0);
    play.pass(1_000);
    play.hear(1, follows("sky-3:9991"));
    play.hear(2, serving(Serving::Quorum));
    play.hear(2, welcome(M, 1, share(2, &[0]), AVAILABLE));
    play.answer_heartbeats(2);
    play.pass(1_900);
    assert_eq!(relay(&play), None);
    // A server that refuses this client is reached.
    let mut play = Play::new(2);
    play.event(
        1,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
    play.hear(1, follows(LEADER));
    play.event(
        0,
        Event::Closed(End::Refused(refusal(Code::FORBIDDEN, None))),
    );
    play.pass(5_000);
    assert_eq!(relay(&play), None);
    // So is one that does not know yet that it leads.
    let mut play = Play::new(2);
    play.open(0, Serving::None);
    play.event(
        1,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
    play.hear(1, follows(LEADER));
    play.pass(5_000);
    assert_eq!(relay(&play), None);
}

#[test]
fn a_client_that_never_reached_the_leader_joins_through_a_follower() {
    let mut play = Play::new(2);
    play.event(
        1,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
    play.hear(1, follows("sky-9:9991"));
    play.pass(1_600);
    let (at, through) = opened(&play);
    assert_eq!(through, "sky-2:9991");
    play.open(at, Serving::Quorum);
    assert_eq!(play.take().last(), Some(&(at, attach(None, 0))));
}

#[test]
fn a_relay_to_a_server_that_leads_no_more_is_given_up() {
    let mut play = member(AVAILABLE);
    let (at, _) = cut_off(&mut play);
    served(&mut play, at, AVAILABLE);
    play.hear(at, follows("sky-2:9991"));
    assert!(play.ended.contains(&(at, "reset")));
    assert_eq!(play.core.state(&play.permit).servers.len(), 3);
}
