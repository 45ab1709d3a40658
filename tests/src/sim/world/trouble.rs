//! What happens: drawn by the profile's weights, where it can happen.

use std::time::Duration;

use super::{Later, Machine, World};
use crate::sim::network::{Between, Kept, Link, Place, Way};
use crate::sim::profile::Event;

impl World {
    pub(super) fn something_happens(&mut self) {
        let weights: Vec<u32> = self
            .profile
            .events
            .iter()
            .map(|(_, weight)| *weight)
            .collect();
        for _ in 0..10 {
            let Some(drawn) = self.dice.weighted(&weights) else {
                return;
            };
            if self.happens(self.profile.events[drawn].0) {
                return;
            }
        }
    }

    /// False: it cannot happen now.
    pub(super) fn happens(&mut self, event: Event) -> bool {
        let up: Vec<usize> = self.machines_that(|machine| machine.is_up);
        let down = self.machines_that(|machine| !machine.is_up);
        let runs = self.machines_that(|machine| machine.is_up && !machine.host.is_stopped());
        let clear: Vec<usize> = up
            .iter()
            .copied()
            .filter(|at| self.network.is_clear(Place::Client(*at)))
            .collect();
        let from = match event {
            Event::Start | Event::TwoStarts => down.clone(),
            Event::JoinThenAway | Event::WelcomeThenKill | Event::WelcomeThenAway
                if down.is_empty() =>
            {
                return false;
            }
            Event::Close
            | Event::Reset
            | Event::Pause
            | Event::Suspend
            | Event::NearLapse
            | Event::Weight
            | Event::Drain => runs,
            Event::Stall | Event::Cut | Event::LateAnswers | Event::LateFin | Event::LateTold => {
                clear
            }
            Event::Kill | Event::PowerLoss | Event::Restart => up,
            _ => Vec::new(),
        };
        if from.is_empty() && !is_of_server(event) {
            return false;
        }
        let at = if from.is_empty() {
            0
        } else {
            self.dice.pick(&from)
        };
        if is_of_server(event) {
            return self.happens_to_server(event, &down);
        }
        self.last_event = self.now();
        match event {
            Event::Start => self.start(at),
            Event::Close => self.close(at),
            Event::Kill => {
                self.note(&format!("host {at}: killed"));
                self.kill(at);
            }
            Event::PowerLoss => self.lose_power(at),
            Event::Restart => {
                self.note(&format!("host {at}: killed, and started again"));
                self.kill(at);
                let after = self.dice.millis(0, 300);
                self.schedule(after, Later::Start(at));
            }
            Event::Reset => {
                self.note(&format!("host {at}: its connections break"));
                self.machines[at].host.reset_connections();
            }
            Event::Pause | Event::Suspend => {
                let spell = self.spell();
                self.pause(at, spell, event == Event::Suspend);
            }
            Event::NearLapse => return self.near_lapse(at),
            Event::Stall => {
                let links = self.some_links(at);
                let (way, kept) = (self.way(), self.kept(links[0]));
                let spell = self.spell();
                self.link(&links, Link::Stalled(way, kept), spell);
            }
            Event::Cut => {
                let links = self.some_links(at);
                let (way, spell) = (self.way(), self.spell());
                self.link(&links, Link::Cut(way), spell);
            }
            Event::LateAnswers => {
                let links = self.some_links(at);
                let answers = self.dice.millis(300, 1_900);
                self.link(&links, Link::Stalled(Way::Back, Kept::All), answers);
                let words = Link::Stalled(Way::ToServer, Kept::All);
                let spell = self.dice.millis(1_000, 4_000);
                for between in links {
                    let changes = self.network.changes(between);
                    self.schedule(answers, Later::Link(between, changes, words, spell));
                }
            }
            Event::LateFin => {
                let links = self.some_links(at);
                let spell = self.dice.millis(100, 5_500);
                self.link(&links, Link::Stalled(Way::Both, Kept::Ends), spell);
                self.note(&format!("host {at}: killed, and started again"));
                self.kill(at);
                let after = self.dice.millis(0, 300);
                self.schedule(after, Later::Start(at));
            }
            Event::LateTold => {
                let Some(leader) = self.leader() else {
                    return false;
                };
                // Shorter than the client waits for an answer.
                let spell = self.dice.millis(600, 950);
                let late = Link::Stalled(Way::Back, Kept::All);
                self.link(&[Between::client(at, leader)], late, spell);
                let others = self.machines_that(|machine| machine.is_up);
                let other = self.dice.pick(&others);
                self.set_weight(other);
                let (soon, away) = (self.dice.millis(20, 120), self.outage());
                let next = if self.are_several() && self.dice.percent(70) {
                    Later::Transfer
                } else {
                    Later::KillServer(leader, away)
                };
                self.schedule(soon, next);
            }
            Event::Weight => self.set_weight(at),
            Event::Drain => {
                let machine = &mut self.machines[at];
                machine.is_draining = !machine.is_draining;
                let away = machine.is_draining;
                self.note(&format!("host {at}: drains: {away}"));
                self.tell_wishes(at);
            }
            Event::TwoStarts => {
                for at in down.into_iter().take(2) {
                    let soon = self.dice.millis(0, 20);
                    self.schedule(soon, Later::Start(at));
                }
            }
            _ => return false,
        }
        true
    }

    /// False: it cannot happen now.
    fn happens_to_server(&mut self, event: Event, down: &[usize]) -> bool {
        let several = self.are_several();
        let needs_several = matches!(
            event,
            Event::OneDiskLost
                | Event::PeerCut
                | Event::PeerStall
                | Event::Isolate
                | Event::MajorityAway
                | Event::LeaderApart
                | Event::LastOneRestarts
                | Event::LastOneDies
                | Event::LastOneIsNotTold
                | Event::LastOneFollows
                | Event::Transfer
        );
        if needs_several && !several || self.profile.one_at_a_time && !self.servers_are_well() {
            return false;
        }
        let running: Vec<usize> = (0..self.servers.len())
            .filter(|at| self.servers[*at].runs())
            .collect();
        let Some(at) = self.some_server(&running) else {
            return false;
        };
        self.last_event = self.now();
        match event {
            Event::ServerKill => {
                let away = self.outage();
                self.kill_server(at, away);
            }
            Event::ServerPowerLoss => {
                let away = self.outage();
                self.server_loses_power(at, away);
            }
            Event::ServerRestart => self.stop_server(at),
            Event::ServerPause => {
                let spell = self.spell();
                let suspend = self.dice.percent(30);
                self.pause_server(at, spell, suspend);
            }
            Event::JoinThenAway => {
                let client = self.dice.pick(down);
                self.start(client);
                let away = self.dice.millis(3_500, 6_500);
                let soon = self.dice.millis(1, 500);
                for at in running {
                    self.schedule(soon, Later::KillServer(at, away));
                }
                self.quiet_until = self.now() + soon + away;
            }
            Event::WelcomeThenKill | Event::WelcomeThenAway => {
                let client = self.dice.pick(down);
                self.start(client);
                self.ambush = Some((client, event));
            }
            Event::LeaderApart => return self.leader_apart(down),
            Event::LastOneRestarts => self.last_one_restarts(at, &running),
            Event::LastOneDies => self.last_one_dies(at, &running),
            Event::LastOneIsNotTold => return self.last_one_is_not_told(at, &running),
            Event::LastOneFollows => self.last_one_follows(at, &running),
            Event::CrashAtCommit => {
                if let Some(at) = down.first().copied().filter(|_| self.dice.percent(70)) {
                    self.start(at);
                } else if let Some(at) = self.machines.iter().position(|machine| machine.is_up) {
                    self.note(&format!("host {at}: killed"));
                    self.kill(at);
                }
                let soon = self.dice.millis(1, 60);
                self.schedule(soon, Later::LosePower(at));
            }
            Event::Blackout => {
                for at in running {
                    let soon = self.dice.millis(0, 20);
                    self.schedule(soon, Later::LosePower(at));
                }
            }
            Event::MajorityAway => {
                let away = self.dice.millis(2_500, 8_000);
                for other in running.into_iter().filter(|other| *other != at) {
                    self.kill_server(other, away);
                }
            }
            Event::Backup => self.back_up(),
            Event::RestoreByTheBook => return self.restore_by_the_book(&running, down),
            Event::Restore => return self.replace_disks(true),
            Event::DiskLoss => {
                self.replace_disks(false);
            }
            Event::OneDiskLost => {
                // With two of them lost nobody knows what was decided.
                if self.someone_is_new(at) {
                    return false;
                }
                self.lose_disk(at);
            }
            Event::PeerCut | Event::PeerStall => {
                let others = self.present_servers();
                let others: Vec<usize> = others.into_iter().filter(|it| *it != at).collect();
                if others.is_empty() {
                    return false;
                }
                let between = Between::servers(at, self.dice.pick(&others));
                let (way, spell) = (self.way(), self.spell());
                let link = if event == Event::PeerCut {
                    Link::Cut(way)
                } else {
                    Link::Stalled(way, self.kept(between))
                };
                self.link(&[between], link, spell);
            }
            Event::Isolate | Event::ClientsCut => {
                let of_clients = event == Event::ClientsCut;
                let mut links = self.network.of(Place::Server(at));
                links.retain(|between| matches!(between.from, Place::Client(_)) == of_clients);
                let way = self
                    .dice
                    .pick(&[Way::ToServer, Way::Back, Way::Both, Way::Both]);
                let spell = self.spell();
                for between in links {
                    // As seen from this server: it does not hear, or is not heard.
                    let cut = Link::Cut(if between.server == at {
                        way
                    } else {
                        way.reversed()
                    });
                    self.link(&[between], cut, spell);
                }
            }
            Event::Configure => self.configure(),
            Event::Transfer => {
                let members = self.members();
                let to = self.dice.pick(&members);
                self.transfer(Some(to));
            }
            Event::AddServer => return self.add_server(),
            Event::RemoveServer => return self.remove_server(at),
            Event::ReplaceServer => return self.replace_server(at),
            _ => return false,
        }
        true
    }

    /// One of those that run: often the leader.
    fn some_server(&mut self, running: &[usize]) -> Option<usize> {
        let leader = self.leader().filter(|at| running.contains(at));
        match (running, leader) {
            ([], _) => None,
            ([alone], _) => Some(*alone),
            (_, Some(leader)) if self.dice.percent(50) => Some(leader),
            _ => Some(self.dice.pick(running)),
        }
    }

    /// Links of a client: to all servers, to the leader, or to any one.
    fn some_links(&mut self, at: usize) -> Vec<Between> {
        let all = self.network.of(Place::Client(at));
        if all.len() == 1 {
            return all;
        }
        match (self.dice.below(3), self.leader()) {
            (0, _) => all,
            (1, Some(leader)) => vec![Between::client(at, leader)],
            _ => vec![self.dice.pick(&all)],
        }
    }

    pub(super) fn machines_that(&self, fit: impl Fn(&Machine) -> bool) -> Vec<usize> {
        let numbered = self.machines.iter().enumerate();
        numbered
            .filter(|(_, machine)| fit(machine))
            .map(|(at, _)| at)
            .collect()
    }

    /// How long something lasts: often close to a lease.
    pub(super) fn spell(&mut self) -> Duration {
        match self.dice.below(4) {
            0 => self.dice.millis(1, 200),
            1 => self.dice.millis(200, 1_500),
            2 => self.dice.millis(1_800, 2_300),
            _ => self.dice.millis(2_300, 5_500),
        }
    }

    pub(super) fn outage(&mut self) -> Duration {
        if self.profile.name == "orderly" && self.servers.len() == 1 {
            return self.dice.millis(1, 200);
        }
        match self.dice.below(4) {
            0 | 1 => self.dice.millis(1, 300),
            2 => self.dice.millis(300, 2_500),
            _ => self.dice.millis(2_500, 6_000),
        }
    }

    pub(super) fn way(&mut self) -> Way {
        self.dice.pick(&[Way::ToServer, Way::Back, Way::Both])
    }

    pub(super) fn kept(&mut self, between: Between) -> Kept {
        match self.dice.below(4) {
            0 => Kept::Ends,
            1 => Kept::Old(self.network.port(between)),
            _ => Kept::All,
        }
    }
}

fn is_of_server(event: Event) -> bool {
    matches!(
        event,
        Event::ServerKill
            | Event::ServerPowerLoss
            | Event::ServerRestart
            | Event::ServerPause
            | Event::JoinThenAway
            | Event::WelcomeThenKill
            | Event::WelcomeThenAway
            | Event::LeaderApart
            | Event::LastOneRestarts
            | Event::LastOneDies
            | Event::LastOneIsNotTold
            | Event::LastOneFollows
            | Event::CrashAtCommit
            | Event::Blackout
            | Event::Backup
            | Event::Restore
            | Event::RestoreByTheBook
            | Event::DiskLoss
            | Event::OneDiskLost
            | Event::PeerCut
            | Event::PeerStall
            | Event::Isolate
            | Event::MajorityAway
            | Event::ClientsCut
            | Event::Configure
            | Event::Transfer
            | Event::AddServer
            | Event::RemoveServer
            | Event::ReplaceServer
    )
}
