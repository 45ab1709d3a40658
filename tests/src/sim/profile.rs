//! What a simulation is like: the group's settings, how many clients, which trouble how often.

use skyschedule_common::protocol::messages::{Consistency, Millis, Numbering};
use skyschedule_server::state::Settings;
use std::time::Duration;

use super::dice::Dice;

/// Something that goes wrong, or just happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// A client's process starts.
    Start,
    /// A client leaves in good order.
    Close,
    /// A client's process is killed: its kernel ends the connections.
    Kill,
    /// A client's machine loses power: nobody hears of it.
    PowerLoss,
    /// A client is killed and comes back at once, as another incarnation of the same id.
    Restart,
    /// A client's connections break.
    Reset,
    /// A client's process is stopped (SIGSTOP), and continued later.
    Pause,
    /// A client's machine is suspended, with its timers, and continued later.
    Suspend,
    /// A client is stopped until about the instant at which the server gives it up.
    NearLapse,
    /// The network between a client and the server keeps what is sent, one way or both, for a while.
    Stall,
    /// The network loses what is sent, one way or both, for a while.
    Cut,
    /// Answers to a client are late, and then its own words.
    LateAnswers,
    /// The end of a client's connection arrives when its next incarnation works.
    LateFin,
    /// What a leader tells a client arrives after what the next leader tells it.
    LateTold,
    /// A client's weight changes.
    Weight,
    /// A client's share moves away, or back.
    Drain,
    /// The server is killed and started again.
    ServerKill,
    /// The server's machine loses power: its disk forgets some of what was not synced.
    ServerPowerLoss,
    /// The server is stopped in good order and started again.
    ServerRestart,
    /// The server's process is stopped, and continued later.
    ServerPause,
    /// A client starts, and the server is away for long soon after.
    JoinThenAway,
    /// A client starts or dies, and the server loses its power within a few milliseconds.
    CrashAtCommit,
    /// Two clients start within milliseconds.
    TwoStarts,
    /// The servers' disks are copied.
    Backup,
    /// The servers come back with older copies of their disks, all from the same moment.
    Restore,
    /// The servers' disks are copied, and soon afterwards a majority of them are restored from the copies.
    RestoreByTheBook,
    /// The servers come back with empty disks.
    DiskLoss,
    /// One of several servers comes back with an empty disk.
    OneDiskLost,
    /// All servers lose power within a few milliseconds.
    Blackout,
    /// The network between two servers loses what is sent, one way or both, for a while.
    PeerCut,
    /// The network between two servers keeps what is sent, one way or both, for a while.
    PeerStall,
    /// A server is cut off from the others, but not from its clients, for a while.
    Isolate,
    /// All servers but one are killed, and are away for long.
    MajorityAway,
    /// A client starts, and all servers are killed as soon as it is a member, and started again at once.
    WelcomeThenKill,
    /// A client starts, and all servers are killed soon after it is a member, and are away for long.
    WelcomeThenAway,
    /// The leader and some of its clients are cut off from the other servers and clients, until after the end of leases that it
    /// gave; another client may start meanwhile.
    LeaderApart,
    /// The server that is left numbers by itself, and is restarted before the others are back.
    LastOneRestarts,
    /// The server that is left numbers by itself, and goes before all have heard of its last numbering.
    LastOneDies,
    /// The server that is left numbers by itself, and a client loses its power, which tells nobody.
    LastOneIsNotTold,
    /// The server that is left numbers by itself, and then follows another one, which its clients do not reach.
    LastOneFollows,
    /// A server is cut off from its clients, but not from the others, for a while.
    ClientsCut,
    /// The operator changes the group's settings.
    Configure,
    /// The operator has another server lead.
    Transfer,
    /// The operator adds a server, with an empty disk.
    AddServer,
    /// The operator removes a server, for good.
    RemoveServer,
    /// A server loses its disk; the operator removes it, and adds it anew.
    ReplaceServer,
}

/// How long rows are worked on.
#[derive(Debug, Clone, Copy)]
pub struct Handlers {
    /// Of a hundred rows, so many take up to twice the longest drain.
    pub slow_percent: u64,
    /// Of a hundred rows, so many ignore that they are revoked.
    pub stubborn_percent: u64,
    /// What the others take at most, in milliseconds.
    pub usual_ms: u64,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Profile {
    /// For people.
    pub name: &'static str,
    /// How many servers.
    pub servers: usize,
    /// Machines on which the operator may start further servers.
    pub spares: usize,
    /// At most one server is in trouble at a time, and no client is: then no share may move but by what clients do.
    pub one_at_a_time: bool,
    /// Of the group.
    pub settings: Settings,
    /// Clients' machines.
    pub clients: (u64, u64),
    /// Some machines run processes with the client id of another.
    pub twins_percent: u64,
    /// Which trouble, how often in proportion.
    pub events: Vec<(Event, u32)>,
    /// Mean time between two of them in milliseconds; one is drawn for each seed.
    pub every_ms: Vec<u64>,
    /// How long there is trouble, in milliseconds.
    pub trouble_ms: (u64, u64),
    /// Longest delay of the network in milliseconds; one is drawn for each seed.
    pub network_ms: Vec<u64>,
    /// Delay of a commit in milliseconds; one is drawn for each seed.
    pub disk_ms: Vec<u64>,
    /// How long rows are worked on.
    pub handlers: Handlers,
    /// After how long without a quorum servers number clients without one, and clients turn to such.
    pub degraded_after: Duration,
}

/// Lease of all groups here, but of those whose settings were lost.
pub const LEASE: Duration = Duration::from_secs(2);

/// Another one, for a while, where the operator changes settings.
pub const LONGER_LEASE: Duration = Duration::from_secs(3);

const AVAILABLE_DRAIN: Millis = Millis(1_000);
const EXCLUSIVE_DRAIN: Millis = Millis(1_500);

fn settings(numbering: Numbering, consistency: Consistency) -> Settings {
    Settings {
        numbering,
        consistency,
        drain_timeout: AVAILABLE_DRAIN,
        max_drain: EXCLUSIVE_DRAIN,
        reset_grace: Millis(500),
        lease: Some(Millis::from_duration(LEASE)),
        ..Settings::default()
    }
}

impl Profile {
    /// The profile of a seed of the general mix.
    pub fn of_seed(seed: u64) -> Self {
        let mut dice = Dice::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut profile = match seed % 8 {
            0 => Self::available("available", Numbering::Modulo),
            1 => Self::available("available slots", Numbering::Slots(16)),
            2 => Self::exclusive("exclusive", Numbering::Modulo, false),
            3 => Self::exclusive("exclusive trusting FIN", Numbering::Modulo, true),
            4 => Self::exclusive("exclusive slots", Numbering::Slots(16), false),
            5 => Self::exclusive("exclusive slots trusting FIN", Numbering::Slots(16), true),
            6 => Self::orderly(if seed % 16 == 6 {
                Numbering::Modulo
            } else {
                Numbering::Slots(16)
            }),
            _ => {
                let numbering = if seed % 16 == 7 {
                    Numbering::Modulo
                } else {
                    Numbering::Slots(16)
                };
                if seed % 32 < 16 {
                    Self::lost_disks(numbering)
                } else {
                    Self::restored("restored", numbering)
                }
            }
        };
        if dice.percent(30) {
            profile.settings.rejoin_grace = Millis(dice.pick(&[300, 1_000, 2_000]));
        }
        if dice.percent(30) {
            profile.settings.settle = Millis(dice.pick(&[1, 200]));
        }
        profile
    }

    /// Whether the group promises that no row is ever held twice.
    pub fn is_exclusive(&self) -> bool {
        self.settings.consistency == Consistency::Exclusive
    }

    /// Whether what the server knew may be lost: then its epochs begin again.
    pub fn loses_disks(&self) -> bool {
        self.events
            .iter()
            .any(|(event, weight)| matches!(event, Event::Restore | Event::DiskLoss) && *weight > 0)
    }

    /// Whether most servers are away for long.
    pub fn goes_without_quorum(&self) -> bool {
        self.events
            .iter()
            .any(|(event, weight)| leaves_one(*event) && *weight > 0)
    }

    /// Whether the operator changes settings.
    pub fn changes_settings(&self) -> bool {
        self.events
            .iter()
            .any(|(event, weight)| *event == Event::Configure && *weight > 0)
    }

    /// The longest lease that a client may have.
    pub fn longest_lease(&self) -> Duration {
        if self.loses_disks() {
            // Until the operator has configured the group anew.
            Settings::default().base_lease().duration()
        } else if self.changes_settings() {
            LONGER_LEASE
        } else {
            LEASE
        }
    }

    /// An available group, with everything but lost disks.
    pub fn available(name: &'static str, numbering: Numbering) -> Self {
        Self {
            name,
            servers: 1,
            spares: 0,
            one_at_a_time: false,
            settings: settings(numbering, Consistency::Available),
            clients: (3, 6),
            twins_percent: 15,
            events: vec![
                (Event::Start, 12),
                (Event::Close, 4),
                (Event::Kill, 4),
                (Event::PowerLoss, 3),
                (Event::Restart, 3),
                (Event::Reset, 5),
                (Event::Pause, 5),
                (Event::Suspend, 2),
                (Event::NearLapse, 2),
                (Event::Stall, 6),
                (Event::Cut, 4),
                (Event::LateAnswers, 2),
                (Event::LateFin, 1),
                (Event::Weight, 3),
                (Event::Drain, 2),
                (Event::ServerKill, 3),
                (Event::ServerPowerLoss, 2),
                (Event::ServerRestart, 2),
                (Event::ServerPause, 2),
                (Event::JoinThenAway, 1),
                (Event::CrashAtCommit, 2),
                (Event::TwoStarts, 3),
                (Event::Configure, 1),
            ],
            every_ms: vec![200, 500, 1_500, 4_000],
            trouble_ms: (5_000, 10_000),
            network_ms: vec![2, 10, 50],
            disk_ms: vec![0, 3, 30],
            handlers: Handlers {
                slow_percent: 3,
                stubborn_percent: 0,
                usual_ms: 200,
            },
            degraded_after: Duration::from_secs(5),
        }
    }

    /// An exclusive group, with everything but lost disks.
    pub fn exclusive(name: &'static str, numbering: Numbering, trust_fin: bool) -> Self {
        let mut profile = Self::available(name, numbering);
        profile.settings = settings(numbering, Consistency::Exclusive);
        profile.settings.trust_fin = trust_fin;
        profile.handlers.stubborn_percent = 10;
        profile
    }

    /// An available group in which nothing fails that allows rows to be held twice: members come and go,
    /// also by dying, and the server restarts quickly. (Not by a loss of its power: `turmoil` sends nothing again,
    /// so that a login which was under way then is stuck for two seconds.)
    pub fn orderly(numbering: Numbering) -> Self {
        let mut profile = Self::available("orderly", numbering);
        profile.twins_percent = 0;
        profile.events = vec![
            (Event::Start, 12),
            (Event::Close, 6),
            (Event::Kill, 3),
            (Event::PowerLoss, 3),
            (Event::Restart, 2),
            (Event::Weight, 4),
            (Event::Drain, 3),
            (Event::ServerKill, 3),
            (Event::ServerRestart, 2),
            (Event::TwoStarts, 4),
        ];
        profile.handlers.slow_percent = 0;
        profile
    }

    /// An available group whose server loses its disk, or comes back with an older copy.
    pub fn lost_disks(numbering: Numbering) -> Self {
        let mut profile = Self::available("lost disks", numbering);
        profile.events.extend([
            (Event::Backup, 12),
            (Event::Restore, 6),
            (Event::DiskLoss, 3),
        ]);
        profile
    }

    /// An exclusive group whose server loses its disk: what it gives out then, it gives out after all leases.
    pub fn lost_and_exclusive() -> Self {
        let mut profile = Self::exclusive("lost and exclusive", Numbering::Modulo, false);
        profile.events = vec![
            (Event::Start, 10),
            (Event::Kill, 2),
            (Event::DiskLoss, 3),
            (Event::ServerKill, 6),
            (Event::ServerRestart, 3),
        ];
        profile
    }

    /// An exclusive group whose servers are restored from a backup, by the book.
    pub fn restored(name: &'static str, numbering: Numbering) -> Self {
        let mut profile = Self::exclusive(name, numbering, false);
        profile.events = vec![
            (Event::Start, 12),
            (Event::Close, 3),
            (Event::Kill, 1),
            (Event::Restart, 2),
            (Event::Weight, 2),
            (Event::Stall, 2),
            (Event::Cut, 2),
            (Event::ServerKill, 1),
            (Event::RestoreByTheBook, 8),
        ];
        profile.clients = (4, 6);
        profile.every_ms = vec![500, 1_500];
        profile.trouble_ms = (6_000, 12_000);
        profile
    }

    /// The same with other trouble, drawn by these weights.
    #[must_use]
    pub fn with_events(mut self, events: &[(Event, u32)]) -> Self {
        self.events = events.to_vec();
        self
    }
}

/// Whether all servers but one are away then.
fn leaves_one(event: Event) -> bool {
    matches!(
        event,
        Event::MajorityAway
            | Event::LastOneRestarts
            | Event::LastOneDies
            | Event::LastOneIsNotTold
            | Event::LastOneFollows
    )
}
