//! The order of things: who is started, what is measured, what it is compared with.

use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use tempfile::TempDir;

use crate::Options;
use crate::common::Result;
use crate::common::members::{Tally, look};
use crate::common::newcomer::Newcomer;
use crate::common::process::{Worker, memory, processor_time};
use crate::common::report::{Bar, Report, Row, Samples, Yardstick};
use crate::common::server::rest;

/// Processes that the members of a group are spread over.
const PROCESSES: usize = 2;

/// Times that all log in at once.
const STORMS: usize = 3;

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(120);

/// Joins and leaves at most twice the bare exchange.
const EXCHANGE_BAR: Bar = Bar::AtMost(2.0);
/// Logins at most three times the bare ones.
const LOGIN_BAR: Bar = Bar::AtMost(3.0);
/// Memory at most that of `Framed`.
const MEMORY_BAR: Bar = Bar::AtMost(1.0);

/// How the rows of a group are numbered.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Modulo,
    Slots(u32),
}

impl Kind {
    /// Those that were asked for; with as many slots as suit so many members.
    fn wanted(options: &Options, members: usize) -> Vec<Self> {
        let slots = if members > 1_000 { 65_536 } else { 1_024 };
        let kinds = [Self::Modulo, Self::Slots(slots)].into_iter();
        let is_wanted = |kind: &Self| options.numberings.iter().any(|name| name == kind.name());
        kinds.filter(is_wanted).collect()
    }

    fn name(self) -> &'static str {
        match self {
            Self::Modulo => "modulo",
            Self::Slots(_) => "slots",
        }
    }

    /// The total of so many members.
    fn total(self, members: usize) -> Result<u32> {
        match self {
            Self::Modulo => Ok(u32::try_from(members)?),
            Self::Slots(slots) => Ok(slots),
        }
    }

    /// Numbers that a newcomer gets at least, and members that get news beside it.
    fn moved(self, members: usize) -> Result<(u64, usize)> {
        match self {
            Self::Modulo => Ok((1, members)),
            Self::Slots(slots) => {
                let numbers = usize::try_from(slots)? / (members + 1);
                Ok((numbers as u64, numbers.min(members)))
            }
        }
    }
}

/// Measures everything.
pub(crate) async fn all(options: &Options, report: &mut Report) -> Result<()> {
    for &members in &options.members {
        for kind in Kind::wanted(options, members) {
            let mut stage = Stage::set(options).await?;
            stage.gather(kind, members).await?;
            stage.joins_and_leaves(kind, options.rounds, report).await?;
        }
    }
    if options.storm > 0 {
        for kind in Kind::wanted(options, options.storm) {
            let mut storms = Storms::default();
            for _ in 1..STORMS {
                Stage::set(options)
                    .await?
                    .storm(kind, options, &mut storms)
                    .await?;
            }
            let mut stage = Stage::set(options).await?;
            let used = stage.storm(kind, options, &mut storms).await?;
            storms.report(kind, options.storm, report);
            if matches!(kind, Kind::Modulo) {
                stage.costs(used, options, report).await?;
            }
            // After a renumbering of modulo all rest for as long as it takes 25 times.
            let rounds = match kind {
                Kind::Modulo => options.rounds.div_ceil(3),
                Kind::Slots(_) => options.rounds,
            };
            stage.joins_and_leaves(kind, rounds, report).await?;
            stage.all_drop(kind, report).await?;
        }
    }
    Ok(())
}

/// What several storms of logins showed.
#[derive(Default)]
struct Storms {
    joined: Samples,
    numbered: Samples,
    bare: Samples,
    work: Samples,
    bare_work: Samples,
    renumberings: Vec<u64>,
}

impl Storms {
    fn report(self, kind: Kind, size: usize, report: &mut Report) {
        let what = |what: &str| format!("{}, {size} log in at once: {what}", kind.name());
        let bare = |samples: Samples, bar| {
            Some(Yardstick {
                name: "bare connections, 4 frames each",
                samples,
                bar,
            })
        };
        for (name, ours, yardstick) in [
            (
                "all are members",
                self.joined,
                bare(self.bare.clone(), Some(LOGIN_BAR)),
            ),
            ("all are numbered", self.numbered, bare(self.bare, None)),
            ("processors' time", self.work, bare(self.bare_work, None)),
        ] {
            report.add(Row {
                what: what(name),
                unit: "ms",
                ours,
                yardstick,
            });
        }
        report.add(Row {
            what: what("renumberings"),
            unit: "",
            ours: Samples::counts(&self.renumberings),
            yardstick: None,
        });
    }
}

/// A server with its members, and beside it the bare loop with its own.
struct Stage {
    server: Worker,
    bare: Worker,
    address: String,
    members: Vec<Worker>,
    bare_members: Vec<Worker>,
    group: String,
    size: usize,
    _folders: [TempDir; 2],
}

impl Stage {
    async fn set(options: &Options) -> Result<Self> {
        let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
        let path = |folder: &TempDir| folder.path().display().to_string();
        let mut server = Worker::start_under(&options.server_by, "server", &[&path(&folders[0])])?;
        let mut bare = Worker::start("bare-server", &[&path(&folders[1])])?;
        let address: String = server.ask("address").await?;
        let bare_address: String = bare.ask("address").await?;
        let start = |role: &str, address: &str| -> Result<Vec<Worker>> {
            (0..PROCESSES)
                .map(|_| Worker::start(role, &[address]))
                .collect()
        };
        Ok(Self {
            members: start("members", &address)?,
            bare_members: start("bare-members", &bare_address)?,
            server,
            bare,
            address,
            group: String::new(),
            size: 0,
            _folders: folders,
        })
    }

    /// Makes the group, and lets the members in.
    async fn gather(&mut self, kind: Kind, size: usize) -> Result<()> {
        self.found(kind).await?;
        self.connect("m", size).await?;
        self.size = size;
        connect_bare(&mut self.bare_members, size).await?;
        self.bare.ask::<u64>(&format!("wait {size}")).await?;
        self.numbered(kind).await?;
        Ok(())
    }

    async fn found(&mut self, kind: Kind) -> Result<()> {
        self.group = kind.name().to_owned();
        let slots = match kind {
            Kind::Modulo => 0,
            Kind::Slots(slots) => slots,
        };
        let command = format!("found {} {slots} 0", self.group);
        self.server.ask::<()>(&command).await
    }

    /// Lets `count` clients in at once; when the last of them was a member.
    async fn connect(&mut self, name: &str, count: usize) -> Result<Instant> {
        let group = &self.group;
        let ask = self.members.iter_mut().zip(parts(count)).enumerate();
        let ask = ask.map(|(process, (worker, part))| async move {
            let command = format!("connect {group} {name}{process} {part}");
            worker.ask::<u64>(&command).await
        });
        let ends = futures_util::future::try_join_all(ask).await?;
        Ok(Instant::from_nanos(ends.into_iter().max().unwrap_or(0)))
    }

    /// Waits until the members share all rows among them; when that was so.
    async fn numbered(&mut self, kind: Kind) -> Result<Instant> {
        let total = kind.total(self.size)?;
        let numbers = u64::from(total);
        let members = self.size.min(usize::try_from(total)?);
        self.until(|tally| tally.shares == [(total, (members, numbers))].into())
            .await
    }

    /// Waits until what the members have together is as it should be; when the last share came.
    async fn until(&mut self, is_right: impl Fn(&Tally) -> bool) -> Result<Instant> {
        let deadline = env::now() + PATIENCE;
        loop {
            let tally = look(&mut self.members).await?;
            if is_right(&tally) {
                return Ok(Instant::from_nanos(tally.last));
            }
            if env::now() > deadline {
                return Err(format!("not numbered within {PATIENCE:?}: {tally:?}").into());
            }
            env::sleep(Duration::from_millis(3)).await;
        }
    }

    /// One joins and leaves again, several times; each time followed by the bare exchange.
    async fn joins_and_leaves(
        &mut self,
        kind: Kind,
        rounds: usize,
        report: &mut Report,
    ) -> Result<()> {
        let (size, group) = (self.size, self.group.clone());
        let server = self.address.parse()?;
        let total = kind.total(size + 1)?;
        let (numbers, concerned) = kind.moved(size)?;
        let [mut joins, mut leaves, mut bare] = [const { Samples::NONE }; 3];
        let [mut work, mut bare_work] = [const { Samples::NONE }; 2];
        for round in 0..rounds {
            let name = format!("newcomer-{round}");
            let started = env::now();
            let before = worked(&self.server, &self.members)?;
            let mut newcomer = Newcomer::join(server, &group, &name, total, numbers).await?;
            let left = u64::from(total) - newcomer.share.numbers().len();
            let last = self
                .until(|tally| {
                    let numbers = tally.shares.get(&total).map(|(_, numbers)| *numbers);
                    tally.shares.len() == 1 && numbers == Some(left)
                })
                .await?;
            let took = last
                .max(newcomer.served)
                .saturating_duration_since(newcomer.began);
            joins.push(took);
            let joining = self.work_since(before, took).await?;
            // Heartbeats go on meanwhile, and are not a part of it.
            let resting = env::now();
            let before = worked(&self.server, &self.members)?;
            newcomer.rest(took).await;
            let heartbeats = worked(&self.server, &self.members)?.saturating_sub(before);
            let joined = resting.saturating_duration_since(started);
            let part = joined.div_duration_f64(resting.elapsed());
            work.push(joining.saturating_sub(heartbeats.mul_f64(part)));

            let (began, peer) = newcomer.leave().await;
            let took = self.numbered(kind).await?.saturating_duration_since(began);
            leaves.push(took);
            drop(peer);
            rest(took).await;

            let worked_bare = worked(&self.bare, &self.bare_members)?;
            let began: u64 = self.bare.ask(&format!("exchange {concerned}")).await?;
            let last = look(&mut self.bare_members).await?.last;
            bare.push(Duration::from_nanos(last.saturating_sub(began)));
            let now = worked(&self.bare, &self.bare_members)?;
            bare_work.push(now.saturating_sub(worked_bare));
        }
        let bar = (size >= 100).then_some(EXCHANGE_BAR);
        for (what, ours, samples, bar) in [
            ("one joins", joins, bare.clone(), bar),
            ("one leaves", leaves, bare, bar),
            ("processors' time, one joins", work, bare_work, None),
        ] {
            report.add(Row {
                what: format!("{}, {size} members: {what}", kind.name()),
                unit: "ms",
                ours,
                yardstick: Some(Yardstick {
                    name: "bare exchange",
                    samples,
                    bar,
                }),
            });
        }
        Ok(())
    }

    /// What server and clients worked for a renumbering, with what follows when it is over: heartbeats.
    async fn work_since(&self, worked_before: Duration, took: Duration) -> Result<Duration> {
        env::sleep((took / 2).min(Duration::from_millis(500)) + Duration::from_millis(5)).await;
        Ok(worked(&self.server, &self.members)?.saturating_sub(worked_before))
    }

    /// All log in at once. Answers the memory that the server had before.
    async fn storm(&mut self, kind: Kind, options: &Options, storms: &mut Storms) -> Result<u64> {
        let size = options.storm;
        let worked_before = worked(&self.bare, &self.bare_members)?;
        let began = env::now();
        let connected = connect_bare(&mut self.bare_members, size).await?;
        storms.bare.push(connected.saturating_duration_since(began));
        self.bare.ask::<u64>(&format!("wait {size}")).await?;
        let work = worked(&self.bare, &self.bare_members)?.saturating_sub(worked_before);
        storms.bare_work.push(work);

        self.found(kind).await?;
        // One a process comes before: it derives the key of the password.
        self.connect("first", PROCESSES).await?;
        // And one that will be left when all others are gone.
        let mut survivor = Worker::start("members", &[&self.address])?;
        let command = format!("connect {} survivor 1", self.group);
        survivor.ask::<u64>(&command).await?;
        self.members.push(survivor);
        env::sleep(Duration::from_millis(500)).await;
        let count = format!("handovers {}", self.group);
        let before: u64 = self.server.ask(&count).await?;
        let used = memory(self.server.pid()?)?;
        let worked_before = worked(&self.server, &self.members)?;
        let began = env::now();
        let joined = self.connect("m", size - PROCESSES - 1).await?;
        self.size = size;
        let numbered = self.numbered(kind).await?;
        storms.joined.push(joined.saturating_duration_since(began));
        storms
            .numbered
            .push(numbered.saturating_duration_since(began));
        let work = worked(&self.server, &self.members)?.saturating_sub(worked_before);
        storms.work.push(work);
        let handovers: u64 = self.server.ask(&count).await?;
        storms.renumberings.push(handovers - before);
        // The last heartbeats that follow.
        env::sleep(Duration::from_secs(3)).await;
        Ok(used)
    }

    /// Memory and processor time of the server while its clients send heartbeats.
    async fn costs(&mut self, used: u64, options: &Options, report: &mut Report) -> Result<()> {
        let size = self.size;
        let pid = self.server.pid()?;
        let bytes = memory(pid)?.saturating_sub(used) as f64 / size as f64;
        let busy = busy(pid, options.seconds).await?;
        let mut echoes = Vec::new();
        for role in ["echo-frames", "echo-bytes"] {
            echoes.push(Echo::measure(role, size, options.seconds).await?);
        }
        for (echo, name, bar) in [
            (
                &echoes[0],
                "Framed, default buffers, a queue",
                Some(MEMORY_BAR),
            ),
            (&echoes[1], "raw loop", None),
        ] {
            report.add(Row {
                what: format!("memory a client, {size} clients"),
                unit: "bytes",
                ours: Samples::one(bytes),
                yardstick: Some(Yardstick {
                    name,
                    samples: Samples::one(echo.bytes),
                    bar,
                }),
            });
            report.add(Row {
                what: "processor, 1,000 clients' heartbeats, each 2 s".to_owned(),
                unit: "ms/s",
                ours: Samples::one(busy / size as f64 * 1e6),
                yardstick: Some(Yardstick {
                    name,
                    samples: Samples::one(echo.busy / size as f64 * 1e6),
                    bar: None,
                }),
            });
        }
        Ok(())
    }

    /// All are killed but one, which then owns everything.
    async fn all_drop(mut self, kind: Kind, report: &mut Report) -> Result<()> {
        let size = self.size - 1;
        let rest = self.members.split_off(PROCESSES);
        let began = env::now();
        kill(std::mem::replace(&mut self.members, rest)).await?;
        self.size = 1;
        let ours = self.numbered(kind).await?.saturating_duration_since(began);

        let began = env::now();
        kill(self.bare_members).await?;
        let end: u64 = self.bare.ask("ends").await?;
        let bare = Instant::from_nanos(end).saturating_duration_since(began);
        report.add(Row {
            what: format!(
                "{}, all {} drop at once, until one owns all",
                kind.name(),
                size
            ),
            unit: "ms",
            ours: Samples::time(ours),
            yardstick: Some(Yardstick {
                name: "bare loop sees all ends",
                samples: Samples::time(bare),
                bar: None,
            }),
        });
        self.server.end().await?;
        Ok(())
    }
}

/// What a server that only echoes costs.
struct Echo {
    /// Memory a client.
    bytes: f64,
    /// Part of one processor.
    busy: f64,
}

impl Echo {
    async fn measure(role: &str, size: usize, seconds: u64) -> Result<Self> {
        let mut server = Worker::start(role, &[])?;
        let address: String = server.ask("address").await?;
        let mut members = (0..PROCESSES)
            .map(|_| Worker::start("bare-members", &[&address]))
            .collect::<Result<Vec<_>>>()?;
        connect_bare(&mut members, PROCESSES).await?;
        let pid = server.pid()?;
        let used = memory(pid)?;
        connect_bare(&mut members, size).await?;
        let bytes = memory(pid)?.saturating_sub(used) as f64 / size as f64;
        for worker in &mut members {
            worker.ask::<()>("beat 2000").await?;
        }
        env::sleep(Duration::from_secs(3)).await;
        let busy = busy(pid, seconds).await?;
        kill(members).await?;
        Ok(Self { bytes, busy })
    }
}

/// The part of one processor that a process uses.
async fn busy(pid: u32, seconds: u64) -> Result<f64> {
    let worked = processor_time(pid)?;
    let began = env::now();
    env::sleep(Duration::from_secs(seconds)).await;
    let worked = processor_time(pid)?.saturating_sub(worked);
    Ok(worked.as_secs_f64() / began.elapsed().as_secs_f64())
}

/// When the last of `count` bare connections had exchanged its frames.
async fn connect_bare(members: &mut [Worker], count: usize) -> Result<Instant> {
    let ask = members.iter_mut().zip(parts(count));
    let ask = ask
        .map(|(worker, part)| async move { worker.ask::<u64>(&format!("connect {part}")).await });
    let ends = futures_util::future::try_join_all(ask).await?;
    Ok(Instant::from_nanos(ends.into_iter().max().unwrap_or(0)))
}

/// What the processors did for a server and its members.
fn worked(server: &Worker, members: &[Worker]) -> Result<Duration> {
    let processes = std::iter::once(server).chain(members);
    processes
        .map(|process| processor_time(process.pid()?))
        .sum::<Result<Duration>>()
}

async fn kill(members: Vec<Worker>) -> Result<()> {
    futures_util::future::try_join_all(members.into_iter().map(Worker::kill)).await?;
    Ok(())
}

/// `count` in as many equal parts as there are processes.
fn parts(count: usize) -> impl Iterator<Item = usize> {
    (0..PROCESSES).map(move |part| (count + part) / PROCESSES)
}
