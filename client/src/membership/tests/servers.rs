//! Which servers a client knows.

use super::*;

fn list(addresses: &[&str]) -> ServerMessage {
    let addresses: Vec<_> = addresses
        .iter()
        .map(|address| (*address).try_into().unwrap())
        .collect();
    ServerMessage::Servers {
        addresses: addresses.try_into().unwrap(),
    }
}

fn known(play: &Play) -> Vec<&str> {
    let servers = play.core.servers.iter();
    servers
        .filter(|server| !server.is_forgotten())
        .map(|server| server.address.as_str())
        .collect()
}

fn member() -> Play {
    Play::member(1, share(1, &[0]), AVAILABLE)
}

#[test]
fn the_list_of_the_serving_server_adds_servers_and_forgets_those_that_are_gone() {
    let mut play = member();
    play.hear(0, list(&["sky-2:9991", "sky-3:9991", "not an address"]));
    assert_eq!(known(&play), ["sky-1:9991", "sky-2:9991", "sky-3:9991"]);
    assert_eq!(play.dialed, [0, 1, 2]);
    play.open(1, Serving::None);
    // What the user named stays, and the place of a server that is gone is used again.
    play.hear(0, list(&["sky-3:9991", "sky-4:9991"]));
    assert_eq!(known(&play), ["sky-1:9991", "sky-4:9991", "sky-3:9991"]);
    assert_eq!(play.ended, [(1, "reset")]);
    assert_eq!(play.dialed, [0, 1, 2, 1]);
}

#[test]
fn only_the_serving_server_is_believed() {
    let mut play = Play::member(2, share(1, &[0]), AVAILABLE);
    play.open(1, Serving::None);
    play.hear(0, list(&["sky-1:9991", "sky-2:9991", "sky-3:9991"]));
    play.hear(1, list(&["sky-9:9991"]));
    play.hear(0, list(&[]));
    assert_eq!(known(&play), ["sky-1:9991", "sky-2:9991", "sky-3:9991"]);
}

#[test]
fn late_words_of_a_forgotten_server_are_not_those_of_its_successor() {
    let mut play = member();
    play.hear(0, list(&["sky-2:9991"]));
    let old = ConnectionId {
        server: 1,
        attempt: play.core.servers[1].attempt,
    };
    play.event(
        1,
        Event::Ready {
            ends: None,
            features: 0,
        },
    );
    play.hear(0, list(&["sky-3:9991"]));
    let end = Event::Closed(End::Failed("reset".to_owned()));
    play.core.event(old, end, &mut play.permit, at(play.now));
    assert!(matches!(play.core.servers[1].phase, Phase::Dialing { .. }));
    assert_eq!(play.core.servers[1].address, "sky-3:9991");
}

#[test]
fn lists_cannot_fill_the_memory() {
    let mut play = member();
    for round in 0..20 {
        let addresses: Vec<String> = (0..16).map(|n| format!("sky-{round}-{n}:1")).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        play.hear(0, list(&addresses));
        assert_eq!(known(&play).len(), 16);
    }
    assert!(play.core.servers.len() <= 16 + MAX_LEARNED);
}

#[test]
fn a_second_name_of_a_server_is_tried_again_when_its_connection_ends() {
    let mut play = Play::new(1);
    let ends = |port: u16| {
        let peer = ([10, 0, 0, 1], 9_991).into();
        Some((([10, 0, 0, 9], port).into(), peer))
    };
    play.event(
        0,
        Event::Ready {
            ends: ends(1),
            features: 0,
        },
    );
    play.hear(0, serving(Serving::Quorum));
    play.hear(0, welcome(M, 1, share(1, &[0]), AVAILABLE));
    play.hear(0, list(&["10.0.0.1:9991"]));
    play.event(
        1,
        Event::Ready {
            ends: ends(2),
            features: 0,
        },
    );
    assert!(matches!(
        play.core.servers[1].phase,
        Phase::Double { of: 0 }
    ));
    // The name may lead to another server from now on.
    play.lose(0);
    play.pass(100);
    assert_eq!(play.dialed, [0, 1, 0, 1]);
}

#[test]
fn what_a_member_asks_for_in_vain_changes_nothing() {
    let mut play = member();
    play.core.wish(
        Wishes {
            weight: Some(1_000),
            drain: None,
        },
        0,
    );
    play.tick();
    play.hear(0, ServerMessage::Wait(refusal(Code::LIMIT, Some(5_000))));
    assert!(play.core.attachment.as_ref().unwrap().welcomed);
    play.answer_heartbeats(0);
    play.take();
    play.pass(1_000);
    let again = play.take();
    let asks = |(_, message): &(usize, ClientMessage)| {
        matches!(
            message,
            ClientMessage::Update { .. } | ClientMessage::Attach { .. }
        )
    };
    assert!(!again.iter().any(asks), "{again:?}");
}

#[test]
fn a_server_that_is_away_is_told_of_once_and_only_if_that_lasts() {
    let told = |play: &Play| play.core.servers[0].outage.was_told();
    let mut play = member();
    play.lose(0);
    for _ in 0..2 {
        play.pass(1_000);
        play.lose(0);
    }
    assert!(!told(&play));
    play.pass(1_500);
    play.lose(0);
    assert!(told(&play));
    play.pass(2_500);
    play.open(0, Serving::Quorum);
    assert!(!told(&play), "and the next time it is told again");
}
