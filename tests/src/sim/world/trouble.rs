//! What happens: drawn by the profile's weights, where it can happen.

use skyschedule_server::consensus::MemoryDisk;
use std::time::Duration;

use super::{Later, Machine, World};
use crate::sim::network::{Kept, Link, Way};
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
        let clear = self.machines_that(|machine| machine.is_up && machine.link == Link::Clear);
        let from = match event {
            Event::Start | Event::JoinThenAway | Event::TwoStarts => down.clone(),
            Event::Close
            | Event::Reset
            | Event::Pause
            | Event::Suspend
            | Event::NearLapse
            | Event::Weight
            | Event::Drain => runs,
            Event::Stall | Event::Cut | Event::LateAnswers | Event::LateFin => clear,
            Event::Kill | Event::PowerLoss | Event::Restart => up,
            _ => Vec::new(),
        };
        let server_runs = self.sky.up_since.is_some() && !self.sky.host.is_stopped();
        if from.is_empty() && !is_of_server(event) || is_of_server(event) && !server_runs {
            return false;
        }
        let at = if from.is_empty() {
            0
        } else {
            self.dice.pick(&from)
        };
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
                let (way, kept) = (self.way(), self.kept(at));
                let spell = self.spell();
                self.link(at, Link::Stalled(way, kept), spell);
            }
            Event::Cut => {
                let (way, spell) = (self.way(), self.spell());
                self.link(at, Link::Cut(way), spell);
            }
            Event::LateAnswers => {
                let answers = self.dice.millis(300, 1_900);
                self.link(at, Link::Stalled(Way::ToClient, Kept::All), answers);
                let links = self.machines[at].links;
                let words = Link::Stalled(Way::ToServer, Kept::All);
                let spell = self.dice.millis(1_000, 4_000);
                self.schedule(answers, Later::Link(at, links, words, spell));
            }
            Event::LateFin => {
                let spell = self.dice.millis(100, 5_500);
                self.link(at, Link::Stalled(Way::Both, Kept::Ends), spell);
                self.note(&format!("host {at}: killed, and started again"));
                self.kill(at);
                let after = self.dice.millis(0, 300);
                self.schedule(after, Later::Start(at));
            }
            Event::Weight => self.set_weight(at),
            Event::Drain => {
                let machine = &mut self.machines[at];
                machine.is_draining = !machine.is_draining;
                let away = machine.is_draining;
                self.note(&format!("host {at}: drains: {away}"));
                self.tell_wishes(at);
            }
            Event::ServerKill => {
                let away = self.outage();
                self.kill_server(away);
            }
            Event::ServerPowerLoss => {
                let away = self.outage();
                self.server_loses_power(away);
            }
            Event::ServerRestart => self.stop_server(),
            Event::ServerPause => {
                let spell = self.spell();
                self.note(&format!("server: stopped for {spell:?}"));
                if self.dice.percent(30) {
                    self.sky.host.suspend();
                } else {
                    self.sky.host.pause();
                }
                self.schedule(spell, Later::ResumeServer);
            }
            Event::JoinThenAway => {
                if !server_runs {
                    return false;
                }
                self.start(at);
                let away = self.dice.millis(3_500, 6_500);
                let soon = self.dice.millis(1, 500);
                self.schedule(soon, Later::KillServer(away));
                self.quiet_until = self.now() + soon + away;
            }
            Event::CrashAtCommit => {
                if let Some(at) = down.first().copied().filter(|_| self.dice.percent(70)) {
                    self.start(at);
                } else if let Some(at) = self.machines.iter().position(|machine| machine.is_up) {
                    self.note(&format!("host {at}: killed"));
                    self.kill(at);
                }
                let soon = self.dice.millis(1, 60);
                self.schedule(soon, Later::LosePower);
            }
            Event::TwoStarts => {
                for at in down.into_iter().take(2) {
                    let soon = self.dice.millis(0, 20);
                    self.schedule(soon, Later::Start(at));
                }
            }
            Event::Backup => {
                self.note("server: a backup is made");
                self.sky.backup = Some(self.sky.disk.copy());
            }
            Event::Restore => {
                let Some(backup) = &self.sky.backup else {
                    return false;
                };
                let disk = backup.copy();
                self.replace_disk(disk, "an older copy");
            }
            Event::DiskLoss => {
                let disk = MemoryDisk::new().with_latency(Duration::from_millis(3));
                self.replace_disk(disk, "nothing");
            }
        }
        true
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
        if self.profile.name == "orderly" {
            return self.dice.millis(1, 200);
        }
        match self.dice.below(4) {
            0 | 1 => self.dice.millis(1, 300),
            2 => self.dice.millis(300, 2_500),
            _ => self.dice.millis(2_500, 6_000),
        }
    }

    pub(super) fn way(&mut self) -> Way {
        self.dice.pick(&[Way::ToServer, Way::ToClient, Way::Both])
    }

    pub(super) fn kept(&mut self, at: usize) -> Kept {
        match self.dice.below(4) {
            0 => Kept::Ends,
            1 => Kept::Old(self.machines[at].port),
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
            | Event::CrashAtCommit
            | Event::Backup
            | Event::Restore
            | Event::DiskLoss
    )
}
