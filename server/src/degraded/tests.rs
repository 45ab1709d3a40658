//! What a replica without a quorum gives out.

use std::time::Duration;

use skyschedule_common::env;
use skyschedule_common::ids::{ClientId, Incarnation};
use skyschedule_common::protocol::bounded::BoundedVec;
use skyschedule_common::protocol::messages::Consistency;
use skyschedule_common::share::Numbers;

use super::*;
use crate::state::Settings;

struct Play {
    degraded: Degraded,
    now: Instant,
}

fn login(client: &str, incarnation: u128) -> Login {
    Login {
        group: group(),
        client: client.parse::<ClientId>().unwrap(),
        incarnation: Incarnation(incarnation),
        membership: None,
        epoch: Epoch::ZERO,
        consistency: None,
        weight: 1,
        ends: None,
        ring_key: None,
        handlers: BoundedVec::default(),
    }
}

fn group() -> GroupName {
    "g".parse().unwrap()
}

fn known(member: Option<Share>) -> Known {
    Known {
        settings: Settings::default(),
        lease: Millis(6_000),
        epoch: Epoch::quorum(20),
        member: member.map(|share| (share, false)),
        owner: None,
    }
}

fn share(total: u32, number: u32) -> Share {
    Share::new(total, Numbers::range(number, number)).unwrap()
}

impl Play {
    fn new(memory: Memory) -> Self {
        let now = env::now();
        Self {
            degraded: Degraded::new(2, memory, now),
            now,
        }
    }

    fn attach(&mut self, at: u64, membership: Option<u64>, epoch: Epoch) -> Attached {
        let login = login(&format!("c{at}"), u128::from(at) + 1);
        let attaching = Attaching {
            login: &login,
            connection: ConnectionId(at),
            address: String::new(),
            membership: membership.map(Membership::quorum),
            epoch,
        };
        let held = membership.map(|number| share(3, u32::try_from(number - 1).unwrap()));
        self.degraded.attach(&attaching, known(held), self.now)
    }

    /// Lets time pass until nothing is due any more; what was told.
    fn pass(&mut self, millis: u64) -> Vec<Notice> {
        self.now += Duration::from_millis(millis);
        match self.degraded.renumber(self.now) {
            Step::Nothing => Vec::new(),
            Step::Publish | Step::Write(_) => self.degraded.written().0,
        }
    }

    fn beat(&mut self, at: u64, told: &Notice) -> Answer {
        let connection = ConnectionId(at);
        let answer =
            self.degraded
                .heartbeat(&group(), connection, told.membership, told.epoch, self.now);
        answer.unwrap()
    }
}

#[test]
fn those_that_attach_are_numbered_together_and_keep_what_they_can() {
    let mut play = Play::new(Memory::default());
    // The leader gave three members their numbers; the second one is gone.
    assert_eq!(play.attach(1, Some(1), Epoch::quorum(21)), Attached::Taken);
    assert_eq!(play.pass(100), []);
    assert_eq!(play.attach(3, Some(3), Epoch::quorum(23)), Attached::Taken);
    assert_eq!(play.pass(100), [], "more may come");
    let told = play.pass(50);
    assert_eq!(told.len(), 2);
    assert_eq!(told[0].membership, Membership::quorum(1));
    assert_eq!(
        (&told[0].share, &told[1].share),
        (&share(2, 0), &share(2, 1))
    );
    for notice in &told {
        assert!(notice.epoch > Epoch::quorum(23) && notice.epoch < Epoch::quorum(24));
        let (terms, lease) = notice.welcome.unwrap();
        assert_eq!(
            (terms.consistency, lease),
            (Consistency::Available, Millis(6_000))
        );
    }
    assert_ne!(told[0].epoch, told[1].epoch);

    // D3: settled once both have taken the numbering.
    assert_eq!(play.beat(1, &told[0]).settled, None);
    assert_eq!(play.beat(3, &told[1]).settled, Some(told[1].epoch));
    assert_eq!(play.beat(1, &told[0]).settled, Some(told[0].epoch));
}

#[test]
fn a_join_and_a_death_are_numbered() {
    let mut play = Play::new(Memory::default());
    play.attach(1, Some(1), Epoch::quorum(21));
    let first = play.pass(150);
    play.attach(2, None, Epoch::ZERO);
    let told = play.pass(150);
    assert_eq!(told.len(), 2);
    let minted = told.iter().find(|notice| notice.membership.replica == 2);
    assert_eq!(minted.unwrap().membership.number, 1);
    let old = told.iter().find(|notice| notice.membership.replica == 0);
    assert!(old.unwrap().epoch > first[0].epoch && old.unwrap().welcome.is_none());

    play.degraded
        .ended(&group(), ConnectionId(2), true, play.now);
    let told = play.pass(150);
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].share, share(1, 0));

    // The last one falls silent for a lease.
    assert_eq!(play.pass(6_100), []);
    assert_eq!(play.pass(150), []);
    assert!(play.degraded.view(&group(), play.now).is_none());
}

#[test]
fn nothing_is_given_out_again_after_a_restart_or_below_what_clients_know() {
    let mut play = Play::new(Memory::default());
    play.attach(1, None, Epoch::ZERO);
    play.now += Duration::from_millis(150);
    let Step::Write(memory) = play.degraded.renumber(play.now) else {
        panic!("it is noted first");
    };
    assert_eq!(
        play.degraded.renumber(play.now),
        Step::Nothing,
        "one at a time"
    );
    let (first, _) = play.degraded.written();
    let memory = Memory::decode(&memory.encode().unwrap()).unwrap();

    let mut play = Play::new(memory);
    play.attach(1, None, Epoch::ZERO);
    let again = play.pass(150);
    assert!(again[0].epoch > first[0].epoch);
    assert!(again[0].membership.number > first[0].membership.number);

    // Another replica without a quorum has told this one more.
    let elsewhere = Epoch {
        quorum: 20,
        degraded: 90,
        replica: 3,
    };
    play.attach(2, None, elsewhere);
    assert!(play.pass(150).iter().all(|notice| notice.epoch > elsewhere));
}

#[test]
fn a_client_id_is_served_once() {
    let mut play = Play::new(Memory::default());
    play.attach(1, None, Epoch::ZERO);
    play.pass(150);
    let mut other = login("c1", 77);
    let now = play.now;
    let mut attach = |login: &Login, connection| {
        let attaching = Attaching {
            login,
            connection: ConnectionId(connection),
            address: String::new(),
            membership: None,
            epoch: Epoch::ZERO,
        };
        play.degraded.attach(&attaching, known(None), now)
    };
    assert!(matches!(attach(&other, 9), Attached::IdInUse(_)));
    // The same incarnation comes on another connection, and keeps its membership.
    other.incarnation = Incarnation(2);
    assert_eq!(attach(&other, 9), Attached::Taken);
    let told = play.pass(150);
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].connection, ConnectionId(9));
    assert_eq!(told[0].membership.number, 1);
}

/// Of two processes with one client id, the one that the leader had made a member is that for a replica without a
/// quorum, too, whichever comes first.
#[test]
fn the_id_of_a_member_is_kept_for_it_for_one_lease() {
    let mut play = Play::new(Memory::default());
    let attach = |play: &mut Play, incarnation, membership| {
        let login = login("c1", incarnation);
        let attaching = Attaching {
            login: &login,
            connection: ConnectionId(u64::try_from(incarnation).unwrap()),
            address: String::new(),
            membership,
            epoch: Epoch::quorum(20),
        };
        let known = Known {
            owner: Some((3, Incarnation(2))),
            ..known(None)
        };
        play.degraded.attach(&attaching, known, play.now)
    };
    let ls = Duration::from_secs(6)..Duration::from_millis(6_100);
    let Attached::IdInUse(left) = attach(&mut play, 77, None) else {
        panic!("it is not the member");
    };
    assert!(ls.contains(&left), "{left:?}");
    // An earlier membership, or one that another replica minted, is none of the quorum's either.
    let minted = Membership {
        number: 9,
        replica: 3,
    };
    for other in [minted, Membership::quorum(2)] {
        let refused = attach(&mut play, 77, Some(other));
        assert!(matches!(refused, Attached::IdInUse(_)), "{other}");
    }
    let member = Some(Membership::quorum(3));
    assert_eq!(attach(&mut play, 2, member), Attached::Taken);

    // A later membership shows that this replica's state is behind.
    let mut play = Play::new(Memory::default());
    let later = Some(Membership::quorum(4));
    assert_eq!(attach(&mut play, 77, later), Attached::Taken);

    // The member does not come.
    let mut play = Play::new(Memory::default());
    play.now += Duration::from_secs(6);
    assert!(matches!(attach(&mut play, 77, None), Attached::IdInUse(_)));
    play.now += Duration::from_millis(100);
    assert_eq!(attach(&mut play, 77, None), Attached::Taken);
}

/// Whoever looked again at once, and found that it has to wait, would look for ever.
#[test]
fn nothing_is_due_while_a_numbering_is_being_written() {
    let mut play = Play::new(Memory::default());
    play.attach(1, None, Epoch::ZERO);
    play.now += Duration::from_millis(150);
    assert!(matches!(play.degraded.renumber(play.now), Step::Write(_)));
    play.attach(2, None, Epoch::ZERO);
    play.now += Duration::from_secs(10);
    assert_eq!(play.degraded.next(), None);
    play.degraded.written();
    assert!(play.degraded.next().is_some_and(|next| next < play.now));
}
