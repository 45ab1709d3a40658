//! A system's servers with members, to whom things happen.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use skyschedule_common::env::{self, Instant};
use tempfile::TempDir;

use crate::common::Result;
use crate::common::members::look;
use crate::common::newcomer::Newcomer;
use crate::common::process::Worker;
use crate::common::server::rest;
use crate::servers::{GROUP, Number, PATIENCE, Servers, System};

/// Processes that the members are spread over.
pub(crate) const PROCESSES: usize = 2;

/// A member that will leave in good order.
pub(crate) enum Victim {
    ByHand(Newcomer),
    Process(Worker),
}

/// Servers with their members.
pub(crate) struct Stage {
    system: System,
    pub(crate) servers: Servers,
    members: Vec<Worker>,
    size: usize,
    /// Of SkySchedule's group; 0: it is numbered modulo the members.
    slots: u32,
    _folder: TempDir,
}

impl Stage {
    /// Starts the servers, with slots or, for 0 of them, modulo.
    pub(crate) async fn set(
        system: System,
        number: Number,
        size: usize,
        slots: u32,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let servers = Servers::start(system, number, slots, folder.path()).await?;
        let addresses = servers.addresses();
        let start = |_| Worker::start(system.role(), &[&addresses]);
        let mut members = (0..PROCESSES).map(start).collect::<Result<Vec<_>>>()?;
        if system != System::SkySchedule {
            members[0].ask::<()>("found").await?;
        }
        Ok(Self {
            system,
            servers,
            members,
            size,
            slots,
            _folder: folder,
        })
    }

    /// Lets all members in.
    pub(crate) async fn enter(&mut self) -> Result<()> {
        let Self { system, size, .. } = *self;
        let ask = self.members.iter_mut().enumerate();
        let ask = ask.map(|(at, worker)| async move {
            let count = (size + at) / PROCESSES;
            enter(system, worker, &format!("m{at}"), count).await
        });
        futures_util::future::try_join_all(ask).await?;
        Ok(())
    }

    /// Lets all members in, and waits until they have all rows.
    pub(crate) async fn gather(&mut self) -> Result<()> {
        self.enter().await?;
        self.numbered(self.size).await?;
        if self.system.is_acknowledged() {
            for worker in &mut self.members {
                worker.ask::<()>("acknowledge").await?;
            }
        }
        Ok(())
    }

    /// What so many have together divided evenly among them: the total, and the least that the last of them gets.
    fn share_of_last(&self, present: usize) -> Result<(u32, u64)> {
        Ok(match u32::try_from(present)? {
            present if self.slots == 0 => (present, 1),
            present => (self.slots, u64::from(self.slots / present)),
        })
    }

    /// Waits until the members have what is theirs when so many are there, one more than themselves at most;
    /// since when they do.
    pub(crate) async fn numbered(&mut self, present: usize) -> Result<Instant> {
        let (total, least) = self.share_of_last(present)?;
        let all = u64::from(total);
        // What does not divide evenly may have gone to the newcomer.
        let numbers = match (present > self.size, self.slots) {
            (false, _) => all..=all,
            (true, 0) => all - 1..=all - 1,
            (true, _) => all - least - 1..=all - least,
        };
        let deadline = env::now() + PATIENCE;
        loop {
            let tally = look(&mut self.members).await?;
            let all_have = tally.shares.len() == 1
                && tally
                    .shares
                    .get(&total)
                    .is_some_and(|(members, sum)| *members == self.size && numbers.contains(sum));
            if all_have {
                return Ok(Instant::from_nanos(tally.last));
            }
            if env::now() > deadline {
                return Err(format!(
                    "{:?}: not {numbers:?} of {total} within {PATIENCE:?}: {tally:?}",
                    self.system
                )
                .into());
            }
            env::sleep(Duration::from_millis(3)).await;
        }
    }

    /// One joins; how long it took until all knew.
    pub(crate) async fn join(&mut self, name: &str) -> Result<(Victim, Duration)> {
        let present = self.size + 1;
        let (total, share) = self.share_of_last(present)?;
        let (mut victim, began, served) = match self.system {
            System::SkySchedule => {
                let newcomer = self.newcomer(name, total, share).await?;
                let (began, served) = (newcomer.began, newcomer.served);
                (Victim::ByHand(newcomer), began, served)
            }
            _ => {
                let (mut worker, began) = self.start(name).await?;
                let served = loop {
                    let tally = look(std::slice::from_mut(&mut worker)).await?;
                    if tally.shares.contains_key(&total) {
                        break Instant::from_nanos(tally.last);
                    }
                    env::sleep(Duration::from_millis(3)).await;
                };
                (Victim::Process(worker), began, served)
            }
        };
        let last = self.numbered(present).await?.max(served);
        let took = last.saturating_duration_since(began);
        match &mut victim {
            Victim::ByHand(newcomer) => newcomer.rest(took).await,
            Victim::Process(_) => self.rest(took).await,
        }
        Ok((victim, took))
    }

    /// A member by hand, once it has so many numbers of this total.
    pub(crate) async fn newcomer(&self, name: &str, total: u32, numbers: u64) -> Result<Newcomer> {
        let joining = Newcomer::join(self.servers.leader().await?, GROUP, name, total, numbers);
        env::timeout(PATIENCE, joining).await?
    }

    /// A member in a process of its own; when it joined.
    async fn start(&mut self, name: &str) -> Result<(Worker, Instant)> {
        let mut worker = Worker::start(self.system.role(), &[&self.servers.addresses()])?;
        if self.system.is_acknowledged() {
            worker.ask::<()>("acknowledge").await?;
        }
        let began = enter(self.system, &mut worker, name, 1).await?;
        Ok((worker, began))
    }

    /// Waits until the next change is a change of its own. A signal's time is mostly that of a lease; what
    /// counts here is that of the renumbering.
    async fn rest(&self, took: Duration) {
        match self.system {
            System::SkySchedule => rest(took.min(Duration::from_millis(250))).await,
            _ => env::sleep(Duration::from_millis(200)).await,
        }
    }

    pub(crate) async fn leave(&mut self, victim: Victim) -> Result<Duration> {
        let (began, took) = match victim {
            Victim::ByHand(newcomer) => {
                let (began, peer) = newcomer.leave().await;
                let end = self.numbered(self.size).await?;
                drop(peer);
                (began, end)
            }
            Victim::Process(mut worker) => {
                let began = Instant::from_nanos(worker.ask("leave").await?);
                let end = self.numbered(self.size).await?;
                worker.end().await?;
                (began, end)
            }
        };
        let took = took.saturating_duration_since(began);
        self.rest(took).await;
        Ok(took)
    }

    /// One joins, and gets a signal.
    pub(crate) async fn lose(&mut self, name: &str, signal: Signal) -> Result<Duration> {
        let (worker, joined) = self.start(name).await?;
        let end = self.numbered(self.size + 1).await?;
        self.rest(end.saturating_duration_since(joined)).await;
        let pid = Pid::from_raw(i32::try_from(worker.pid()?)?).ok_or("a process without an id")?;
        let began = env::now();
        kill_process(pid, signal)?;
        let took = self
            .numbered(self.size)
            .await?
            .saturating_duration_since(began);
        worker.kill().await?;
        self.rest(took).await;
        Ok(took)
    }
}

/// Lets members of a process in; when they joined.
async fn enter(system: System, worker: &mut Worker, name: &str, count: usize) -> Result<Instant> {
    if system == System::SkySchedule {
        let command = format!("connect {GROUP} {name} {count}");
        return Ok(Instant::from_nanos(worker.ask(&command).await?));
    }
    worker.ask::<()>(&format!("connect {name} {count}")).await?;
    Ok(Instant::from_nanos(worker.ask("join").await?))
}
