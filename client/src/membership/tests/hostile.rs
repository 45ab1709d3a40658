//! Whatever servers say, in whatever order.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

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
                Input::Ready(server) => play.event(server, Event::Ready { ends: None, features: 0 }),
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
