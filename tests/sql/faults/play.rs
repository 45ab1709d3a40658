//! The faults: each replica and each consumer meets some of its own, at times that its dice say.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};
use skyschedule_common::env::{self, Instant};
use skyschedule_tests::mesh::{Doors, Network, SERVERS};
use skyschedule_tests::proxy::{Direction, Flow};
use skyschedule_tests::server::{PASSWORD, Server, USER};
use tokio::process::Child;

use crate::common::consumers::command;
use crate::common::crew::PATIENCE;
use crate::common::place::Place;
use crate::dice::Dice;
use crate::story::{Kind, Story};
use crate::{BATCH, GROUP, Logs};

/// How long each task of a consumer takes, in milliseconds.
const WORK_MS: [u64; 8] = [5, 10, 15, 20, 25, 30, 40, 50];

/// What all consumers of a run have in common.
pub(crate) struct Cast<'a> {
    pub(crate) place: &'a Place,
    pub(crate) flags: &'a [&'a str],
    pub(crate) servers: Vec<SocketAddr>,
    pub(crate) logs: Logs,
    pub(crate) story: Story,
}

/// A consumer: a process, and after its death another one of the same id.
pub(crate) struct Consumer<'a> {
    cast: &'a Cast<'a>,
    pub(crate) id: String,
    work_ms: u64,
    doors: Option<Doors>,
    child: Child,
    lives: u32,
    dice: Dice,
}

impl<'a> Consumer<'a> {
    /// Starts one. With doors it reaches the servers through them only.
    pub(crate) fn start(cast: &'a Cast<'a>, at: usize, doors: Option<Doors>, dice: Dice) -> Self {
        let id = format!("consumer-{at}");
        let work_ms = WORK_MS[at % WORK_MS.len()];
        let child = start(cast, &id, work_ms, doors.as_ref(), 0);
        Self {
            cast,
            id,
            work_ms,
            doors,
            child,
            lives: 1,
            dice,
        }
    }

    /// Meets faults until then, and lives afterwards.
    pub(crate) async fn play(&mut self, until: Instant) {
        loop {
            env::sleep(self.dice.millis(4_000..14_000)).await;
            if env::now() >= until {
                return;
            }
            self.look_after();
            match self.dice.below(10) {
                0..4 => self.is_killed().await,
                4 => self.is_restarted().await,
                5..8 if self.doors.is_some() => self.is_cut_off().await,
                _ => self.is_paused().await,
            }
        }
    }

    /// Starts a process again that did not become a member in time, as whoever deploys it would: as long as there is
    /// no lasting leader, its predecessor's lease does not end. One that ends for another reason is a fault of its own.
    pub(crate) fn look_after(&mut self) {
        if let Some(ended) = self.child.try_wait().unwrap() {
            let log = self.log();
            assert!(
                log.contains("the client cannot connect"),
                "{} ended: {ended:?}: {log}",
                self.id
            );
            self.begin_anew();
        }
    }

    /// Asks it to end, and waits until it has.
    pub(crate) async fn stop(&mut self) {
        self.look_after();
        self.signal(Signal::TERM);
        let ended = env::timeout(PATIENCE, self.child.wait()).await;
        let status = ended
            .unwrap_or_else(|_| panic!("it does not end: {}", self.log()))
            .unwrap();
        // One that is no member yet has nothing to finish.
        let unconnected = status.signal() == Some(Signal::TERM.as_raw());
        assert!(status.success() || unconnected, "{status}: {}", self.log());
    }

    async fn is_killed(&mut self) {
        let from = env::unix_micros();
        self.signal(Signal::KILL);
        self.child.wait().await.unwrap();
        self.cast.story.note(&self.id, Kind::Killed, from);
        env::sleep(self.dice.millis(200..2_000)).await;
        self.begin_anew();
    }

    async fn is_restarted(&mut self) {
        let from = env::unix_micros();
        self.signal(Signal::TERM);
        let ended = env::timeout(PATIENCE, self.child.wait()).await;
        ended
            .unwrap_or_else(|_| panic!("it does not end: {}", self.log()))
            .unwrap();
        self.cast.story.note(&self.id, Kind::Restarted, from);
        self.begin_anew();
    }

    async fn is_paused(&mut self) {
        let from = env::unix_micros();
        self.signal(Signal::STOP);
        env::sleep(self.dice.millis(300..6_000)).await;
        self.signal(Signal::CONT);
        self.cast.story.note(&self.id, Kind::Paused, from);
    }

    async fn is_cut_off(&mut self) {
        let doors = self.doors.as_ref().expect("it has doors");
        let from = env::unix_micros();
        let directions: &[Direction] = match self.dice.below(3) {
            0 => &[Direction::ToServer],
            1 => &[Direction::ToClient],
            _ => &[Direction::ToServer, Direction::ToClient],
        };
        let servers = match self.dice.below(4) {
            3 => 0..SERVERS,
            server => {
                let server = usize::try_from(server).unwrap();
                server..server + 1
            }
        };
        let set = |flow| {
            for server in servers.clone() {
                for direction in directions {
                    doors.set(server, *direction, flow);
                }
            }
        };
        set(Flow::Stall);
        env::sleep(self.dice.millis(300..6_000)).await;
        // Sometimes what is on its way still arrives.
        if self.dice.below(2) == 0 {
            servers.clone().for_each(|server| doors.reset(server));
        }
        set(Flow::Pass);
        self.cast.story.note(&self.id, Kind::CutOff, from);
    }

    fn begin_anew(&mut self) {
        self.child = start(
            self.cast,
            &self.id,
            self.work_ms,
            self.doors.as_ref(),
            self.lives,
        );
        self.lives += 1;
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().expect("it has not ended").cast_signed();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// Where its processes wrote their logs.
    pub(crate) fn logs(&self) -> impl Iterator<Item = PathBuf> + '_ {
        (0..self.lives).map(|life| log(self.cast, &self.id, life))
    }

    fn log(&self) -> String {
        let path = log(self.cast, &self.id, self.lives - 1);
        let text = std::fs::read_to_string(path).unwrap();
        let told = text.lines().filter(|line| !line.contains("TRACE"));
        told.collect::<Vec<_>>().join("\n")
    }
}

fn log(cast: &Cast<'_>, id: &str, life: u32) -> PathBuf {
    cast.logs.path().join(format!("{id}.{life}"))
}

fn start(cast: &Cast<'_>, id: &str, work_ms: u64, doors: Option<&Doors>, life: u32) -> Child {
    let servers = doors.map_or_else(|| cast.servers.clone(), Doors::addresses);
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    command(cast.place)
        .args(["--servers", &servers.join(",")])
        .args([
            "--group",
            GROUP,
            "--client-id",
            id,
            "--user",
            USER,
            "--ledger",
        ])
        .args(["--batch", &BATCH.to_string(), "--concurrency", "8"])
        .args(["--work-ms", &work_ms.to_string()])
        .args(cast.flags)
        .env("SKY_PASSWORD", PASSWORD)
        .env("RUST_LOG", "info,held=trace")
        .stderr(File::create(log(cast, id, life)).unwrap())
        .spawn()
        .unwrap()
}

/// A replica meets faults until then, and lives afterwards.
pub(crate) async fn replica(
    server: &mut Server,
    at: usize,
    network: &Network,
    story: &Story,
    mut dice: Dice,
    until: Instant,
) {
    let name = format!("replica-{}", at + 1);
    loop {
        env::sleep(dice.millis(3_000..9_000)).await;
        if env::now() >= until {
            return;
        }
        let from = env::unix_micros();
        let kind = match dice.below(8) {
            0..3 => {
                server.signal(Signal::KILL);
                let ended = server.ended().await;
                assert_eq!(
                    ended.signal(),
                    Some(Signal::KILL.as_raw()),
                    "{}",
                    server.log()
                );
                env::sleep(dice.millis(100..3_000)).await;
                server.launch();
                Kind::Killed
            }
            3 => {
                let status = server.stop().await;
                assert_eq!(status.code(), Some(0), "{}", server.log());
                server.launch();
                Kind::Restarted
            }
            4..6 => {
                server.signal(Signal::STOP);
                env::sleep(dice.millis(300..4_000)).await;
                server.signal(Signal::CONT);
                Kind::Paused
            }
            _ => {
                is_cut_off(at, network, &mut dice).await;
                Kind::CutOff
            }
        };
        story.note(&name, kind, from);
    }
}

/// From one other replica, one way or both, or from all.
async fn is_cut_off(at: usize, network: &Network, dice: &mut Dice) {
    let other = (at + 1 + usize::try_from(dice.below(2)).unwrap()) % SERVERS;
    let how = dice.below(4);
    let set = |carries| match how {
        0 => network.carries(at, other, carries),
        1 => network.carries(other, at, carries),
        2 => network.connects(at, other, carries),
        _ => network.reaches(at, carries),
    };
    set(false);
    env::sleep(dice.millis(300..4_000)).await;
    if dice.below(2) == 0 {
        network.reset(at, other);
    }
    set(true);
}
