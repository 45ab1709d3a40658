//! Simulations with several servers.

use skyschedule_common::protocol::messages::{Millis, Numbering};

use super::dice::Dice;
use super::profile::{Event, Profile};

/// Trouble of several servers, beside that of one.
const TROUBLE: [(Event, u32); 12] = [
    (Event::ServerKill, 6),
    (Event::ServerPowerLoss, 4),
    (Event::ServerRestart, 4),
    (Event::ServerPause, 6),
    (Event::CrashAtCommit, 4),
    (Event::OneDiskLost, 2),
    (Event::Blackout, 1),
    (Event::PeerCut, 4),
    (Event::PeerStall, 4),
    (Event::Isolate, 4),
    (Event::ClientsCut, 3),
    (Event::Configure, 3),
];

impl Profile {
    /// The profile of a seed of the general mix with several servers.
    pub fn of_replicas(seed: u64) -> Self {
        let mut dice = Dice::new(seed.wrapping_mul(0xd6e8_feb8_6659_fd93));
        let numbering = dice.pick(&[Numbering::Modulo, Numbering::Slots(16)]);
        let mut profile = match seed % 8 {
            0 | 1 => Self::available("replicas, available", numbering).with_replicas(),
            2 | 3 => Self::exclusive("replicas, exclusive", numbering, false).with_replicas(),
            4 => {
                Self::exclusive("replicas, exclusive trusting FIN", numbering, true).with_replicas()
            }
            5 => Self::one_at_a_time(Self::available("replicas, one at a time", numbering)),
            6 => Self::one_at_a_time(Self::exclusive(
                "replicas, one at a time, exclusive",
                numbering,
                dice.percent(50),
            )),
            _ => Self::all_disks_lost(numbering),
        };
        if dice.percent(15) {
            profile.servers = 5;
        }
        if dice.percent(30) {
            profile.settings.rejoin_grace = Millis(dice.pick(&[300, 1_000, 2_000]));
        }
        if dice.percent(30) {
            profile.settings.settle = Millis(dice.pick(&[1, 200]));
        }
        profile
    }

    /// The same with three servers, and their trouble.
    #[must_use]
    pub fn with_replicas(mut self) -> Self {
        self.servers = 3;
        let several = |event| TROUBLE.iter().any(|(other, _)| *other == event);
        self.events.retain(|(event, _)| !several(*event));
        self.events.extend(TROUBLE);
        self
    }

    /// Three servers, of which one at a time is in trouble, while clients come and go: that moves no share, and delays
    /// nothing for long.
    pub fn one_at_a_time(profile: Self) -> Self {
        let events = [
            (Event::Start, 12),
            (Event::Close, 6),
            (Event::Kill, 3),
            (Event::PowerLoss, 3),
            (Event::Restart, 2),
            (Event::Weight, 4),
            (Event::Drain, 3),
            (Event::TwoStarts, 4),
            (Event::ServerKill, 6),
            (Event::ServerPowerLoss, 4),
            (Event::ServerRestart, 4),
            (Event::ServerPause, 6),
            (Event::CrashAtCommit, 4),
            (Event::OneDiskLost, 2),
            (Event::PeerCut, 4),
            (Event::PeerStall, 2),
            (Event::Isolate, 6),
        ];
        let mut profile = profile.with_events(&events);
        profile.servers = 3;
        profile.one_at_a_time = true;
        profile.twins_percent = 0;
        profile.handlers.slow_percent = 0;
        profile
    }

    /// Three servers, of which most are away for long, again and again: those that are left go on without a quorum.
    pub fn few_left(numbering: Numbering) -> Self {
        let mut profile = Self::available("replicas, few left", numbering).with_replicas();
        profile.events.push((Event::MajorityAway, 12));
        profile
    }

    /// Three servers that lose all their disks, or come back with older copies of all.
    pub fn all_disks_lost(numbering: Numbering) -> Self {
        let mut profile = Self::lost_disks(numbering).with_replicas();
        profile.name = "replicas, lost disks";
        profile
    }
}
