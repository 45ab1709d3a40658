//! Simulations with several servers.

use skyschedule_common::protocol::messages::{Millis, Numbering};

use super::dice::Dice;
use super::profile::{Event, LEASE, Profile};

/// Trouble of several servers, beside that of one.
const TROUBLE: [(Event, u32); 13] = [
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
    (Event::Transfer, 2),
];

/// What the operator does to the servers.
const CHANGES: [(Event, u32); 4] = [
    (Event::AddServer, 8),
    (Event::RemoveServer, 6),
    (Event::ReplaceServer, 4),
    (Event::Transfer, 6),
];

/// How many kinds of worlds there are in the general mix.
const KINDS: u64 = 10;

impl Profile {
    /// The profile of a seed of the general mix with several servers.
    pub fn of_replicas(seed: u64) -> Self {
        Self::of_replicas_like(seed % KINDS, seed)
    }

    /// Of the kinds in the general mix, always this one.
    pub fn of_replicas_like(kind: u64, seed: u64) -> Self {
        let mut dice = Dice::new(seed.wrapping_mul(0xd6e8_feb8_6659_fd93));
        let numbering = dice.pick(&[Numbering::Modulo, Numbering::Slots(16)]);
        let trust_fin = dice.percent(50);
        let exclusive = |name| Self::exclusive(name, numbering, trust_fin);
        let mut profile = match kind {
            0 | 1 => Self::available("replicas, available", numbering).with_replicas(),
            2 | 3 => exclusive("replicas, exclusive").with_replicas(),
            4 => Self::few_left(numbering),
            5 => Self::one_at_a_time(Self::available("replicas, one at a time", numbering)),
            6 => Self::one_at_a_time(exclusive("replicas, one at a time, exclusive")),
            7 if dice.percent(50) => Self::available("replicas, changing", numbering).changing(),
            7 => exclusive("replicas, changing, exclusive").changing(),
            8 if dice.percent(50) => Self::changing_one_at_a_time(Self::available(
                "replicas, changing one at a time",
                numbering,
            )),
            8 => Self::changing_one_at_a_time(exclusive(
                "replicas, changing one at a time, exclusive",
            )),
            _ if dice.percent(50) => Self::all_disks_lost(numbering),
            _ => Self::restored("replicas, restored", numbering).with_replicas(),
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
            (Event::Transfer, 3),
        ];
        let mut profile = profile.with_events(&events);
        profile.servers = 3;
        profile.one_at_a_time = true;
        profile.twins_percent = 0;
        profile.handlers.slow_percent = 0;
        profile
    }

    /// Three servers and their trouble, while the operator adds some, removes some, and has others lead.
    #[must_use]
    pub fn changing(self) -> Self {
        let mut profile = self.with_replicas();
        profile.events.extend(CHANGES);
        profile.spares = 2;
        profile.trouble_ms = (8_000, 14_000);
        profile
    }

    /// The same with one server in trouble at a time.
    pub fn changing_one_at_a_time(profile: Self) -> Self {
        let mut profile = Self::one_at_a_time(profile);
        profile.events.extend(CHANGES);
        profile.spares = 2;
        profile.trouble_ms = (8_000, 14_000);
        profile
    }

    /// Three servers, of which most are away for long, again and again: those that are left go on without a quorum.
    pub fn few_left(numbering: Numbering) -> Self {
        let mut profile = Self::available("replicas, few left", numbering).with_replicas();
        profile.events.push((Event::MajorityAway, 12));
        profile.degraded_after = LEASE;
        profile
    }

    /// Three servers that lose all their disks, or come back with older copies of all.
    pub fn all_disks_lost(numbering: Numbering) -> Self {
        let mut profile = Self::lost_disks(numbering).with_replicas();
        profile.name = "replicas, lost disks";
        profile
    }
}
