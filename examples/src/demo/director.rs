//! The one loop of the demo: hears what happens, shows it, and does what the script says.

use std::path::PathBuf;
use std::time::Duration;

use indicatif::HumanCount;
use skyschedule_common::env::{self, Instant};
use skyschedule_server::view::ServerEvent;
use tokio::sync::mpsc;

use super::client::{Client, State};
use super::crew::Process;
use super::folder::Folder;
use super::happening::Happening;
use super::options::{Options, Pace, WorkerOptions};
use super::replicas::{self, Replicas};
use super::report::Report;
use super::screen::{Mark, Screen};
use super::script::{Act, Script};
use super::signals::Signals;
use super::summary::{Cause, Kill, LeaderKill, Renumbering, Story, millis};
use super::table::Table;

/// How often the bars move.
const TICK: Duration = Duration::from_millis(100);

/// Every so many ticks the table is asked how far it is.
const TICKS_A_LOOK: u32 = 3;

/// How long consumers may take to end in good order.
const CLOSING: Duration = Duration::from_secs(15);

pub(super) struct Director {
    pub(super) options: Options,
    pub(super) pace: Pace,
    pub(super) program: PathBuf,
    pub(super) folder: Folder,
    pub(super) table: Table,
    pub(super) replicas: Replicas,
    pub(super) screen: Screen,
    pub(super) tell: mpsc::Sender<Happening>,
    pub(super) inbox: mpsc::Receiver<Happening>,
    pub(super) began: Instant,
}

/// What is left when the demo is over.
pub(super) struct Ended {
    pub(super) folder: Folder,
    pub(super) table: Table,
    pub(super) story: Story,
}

/// The running demo.
struct Play {
    d: Director,
    clients: Vec<Client>,
    script: Script,
    story: Story,
    /// Whether all the first consumers have had rows.
    opened: bool,
    /// Why the next renumbering comes, and since when.
    cause: (Cause, Instant),
    killed_at: Option<Instant>,
    /// Before this the next act would come too soon to tell them apart.
    next_act: Instant,
    /// The replica that leads, as far as is known.
    leader: Option<u16>,
    /// Since when there is none by our hand, and how many tasks were done by then.
    leaderless: Option<(Instant, u64)>,
    /// The group's newest epoch.
    epoch: String,
    done: u64,
    closing: Option<Instant>,
}

impl Director {
    /// Plays the whole demo.
    pub(super) async fn play(self, signals: &mut Signals) -> Ended {
        let now = env::now();
        let mut play = Play {
            clients: Vec::new(),
            script: Script::default(),
            story: Story::default(),
            opened: false,
            cause: (Cause::Start, now),
            killed_at: None,
            next_act: now,
            leader: None,
            leaderless: None,
            epoch: String::new(),
            done: 0,
            closing: None,
            d: self,
        };
        play.run(signals).await;
        play.end().await
    }
}

impl Play {
    async fn run(&mut self, signals: &mut Signals) {
        let (mut tick, mut ticks) = (env::now() + TICK, 0_u32);
        while !self.is_over() {
            tokio::select! {
                biased;
                () = signals.next() => self.interrupt(),
                () = env::sleep_until(tick) => {
                    tick = env::now() + TICK;
                    ticks = ticks.wrapping_add(1);
                    if ticks.is_multiple_of(TICKS_A_LOOK) {
                        self.look().await;
                    }
                    self.act();
                    self.show();
                }
                happening = self.d.inbox.recv() => {
                    if let Some(happening) = happening {
                        self.hear(happening);
                    }
                }
            }
        }
    }

    async fn end(mut self) -> Ended {
        self.look().await;
        self.show();
        self.d.screen.freeze();
        self.story.took = self.d.began.elapsed();
        self.end_replicas().await;
        Ended {
            folder: self.d.folder,
            table: self.d.table,
            story: self.story,
        }
    }

    fn is_over(&self) -> bool {
        let running = self.clients.iter().any(|client| client.process.is_some());
        self.closing.is_some() && !running
    }

    // What happens

    fn hear(&mut self, happening: Happening) {
        match happening {
            Happening::Told { name, report } => self.told(&name, report),
            Happening::Ended {
                name,
                in_order,
                how,
            } => self.ended(&name, in_order, &how),
        }
    }

    fn told(&mut self, name: &str, report: Report) {
        let mut clients = self.clients.iter_mut();
        let client = clients.find(|client| client.name == name);
        match (report, client) {
            (Report::Executed { count }, Some(client)) => client.executed = count,
            (Report::Rows { rows }, Some(client)) => {
                if rows.is_some() && client.state == State::Starting {
                    client.state = State::Working;
                }
                client.rows = rows;
                self.open();
            }
            (Report::Server { event }, _) => self.server_told(event),
            (Report::Reunited { epoch }, _) => self.reunited(epoch),
            (Report::Ready, _) => self.replica_is_ready(name),
            (Report::Executed { .. } | Report::Rows { .. }, None) => {}
        }
    }

    /// Tells once that all the first consumers have their rows.
    fn open(&mut self) {
        let ready = |client: &Client| client.state == State::Working && client.rows.is_some();
        let all = !self.clients.is_empty() && self.clients.iter().all(ready);
        if self.opened || self.closing.is_some() || !all {
            return;
        }
        self.opened = true;
        let count = self.clients.len();
        let text = match count {
            1 => "1 consumer joined, and has all rows".to_owned(),
            _ => format!("{count} consumers joined, and each has its own rows"),
        };
        self.event(Mark::Good, &text, "");
    }

    fn ended(&mut self, name: &str, in_order: bool, how: &str) {
        match self.d.replicas.ended(name) {
            Some(true) => return,
            Some(false) => return self.trouble(format!("{name} ended unexpectedly: {how}")),
            None => {}
        }
        let Some(client) = self.clients.iter_mut().find(|client| client.name == name) else {
            return;
        };
        client.process = None;
        client.rows = None;
        match client.state {
            State::Killed => {}
            _ if in_order => client.state = State::Left,
            _ => {
                client.state = State::Failed;
                self.trouble(format!("{name} ended unexpectedly: {how}"));
            }
        }
    }

    fn server_told(&mut self, event: ServerEvent) {
        if self.closing.is_some() {
            return;
        }
        let now = env::now();
        match event {
            ServerEvent::Joined { .. } if !self.opened => self.cause = (Cause::Start, now),
            ServerEvent::Joined { client_id, .. } => {
                self.cause = (Cause::Joined, now);
                self.event(Mark::Good, &format!("{client_id} joined"), "");
            }
            ServerEvent::Expired { client_id, .. } => self.expired(&client_id, now),
            ServerEvent::Left { client_id, .. } => {
                self.cause = (Cause::Other, now);
                self.event(Mark::Plain, &format!("{client_id} left"), "");
            }
            ServerEvent::Renumbered { total, epoch, .. } => {
                self.epoch.clone_from(&epoch);
                self.renumbered(total, epoch, now);
            }
            ServerEvent::Leader { replica_id } => self.leader = Some(replica_id),
            ServerEvent::Overtaken { client_id, .. } => {
                let text = format!("{client_id} was too slow to hand over; the others went on");
                self.event(Mark::Bad, &text, "");
            }
            ServerEvent::Delayed { client_id, .. } => {
                self.event(
                    Mark::Bad,
                    &format!("{client_id} must wait before it joins"),
                    "",
                );
            }
            _ => {}
        }
    }

    fn expired(&mut self, name: &str, now: Instant) {
        let kill = self.story.kill.as_mut();
        match (kill, self.killed_at) {
            (Some(kill), Some(at)) if kill.consumer == name => {
                let noticed = millis(now.saturating_duration_since(at));
                kill.noticed_ms = Some(noticed);
                self.cause = (Cause::Killed, at);
                self.event(
                    Mark::Plain,
                    &format!("the servers noticed within {}", shown(noticed)),
                    "A connection that the system ends proves that its process is dead.",
                );
            }
            _ => {
                self.cause = (Cause::Other, now);
                self.event(Mark::Bad, &format!("the servers lost {name}"), "");
            }
        }
    }

    fn renumbered(&mut self, total: u32, epoch: String, now: Instant) {
        let alive = self.alive();
        if total == 0 || alive == 0 {
            // A group without members, when it is made or after a kill: nobody was numbered.
            return;
        }
        let (cause, since) = self.cause;
        let took_ms = millis(now.saturating_duration_since(since));
        self.story.renumberings.push(Renumbering {
            cause,
            took_ms,
            total,
            epoch,
        });
        let took = shown(took_ms);
        match cause {
            Cause::Start => return,
            Cause::Killed => {
                if let Some(kill) = &mut self.story.kill {
                    kill.renumbered_ms = Some(took_ms);
                }
                let owners = match alive {
                    1 => "the other one has all rows".to_owned(),
                    _ => format!("the other {alive} share all rows"),
                };
                self.event(
                    Mark::Plain,
                    &format!("{took} after the kill, {owners}"),
                    "Nothing is lost: a task that it had not marked as done is still due.",
                );
            }
            Cause::Joined if alive == 1 => {
                self.event(Mark::Plain, &format!("{took} later, it has all rows"), "");
            }
            Cause::Joined => self.event(
                Mark::Plain,
                &format!("{took} later, all {alive} share the rows anew"),
                "Each finished the tasks that it ran before it gave rows away.",
            ),
            Cause::Other => self.event(Mark::Plain, &format!("renumbered within {took}"), ""),
        }
        // One that comes without another change of members says so.
        self.cause = (Cause::Other, now);
    }

    /// All members have come to the leader.
    fn reunited(&mut self, epoch: String) {
        if self.clients.is_empty() && self.closing.is_none() {
            // The group is set up.
            for _ in 0..self.d.options.clients {
                self.start_consumer();
            }
            return;
        }
        let rows_moved = epoch != self.epoch;
        self.epoch = epoch;
        let Some((since, before)) = self.leaderless.take() else {
            return;
        };
        let executed_meanwhile = self.executed().saturating_sub(before);
        let without = millis(since.elapsed());
        if let Some(kill) = &mut self.story.leader_kill {
            kill.next = self.leader;
            kill.without_ms = Some(without);
            kill.executed_meanwhile = executed_meanwhile;
            kill.rows_moved = rows_moved;
        }
        let (leader, tasks) = (
            self.leader.map_or_else(String::new, replicas::name),
            HumanCount(executed_meanwhile),
        );
        let text = format!(
            "{} later {leader} leads; {tasks} tasks were executed meanwhile",
            shown(without)
        );
        let why = if rows_moved {
            "Rows changed their owners."
        } else {
            "It knows who has which rows: no row changed its owner."
        };
        self.event(Mark::Server, &text, why);
    }

    fn replica_is_ready(&mut self, name: &str) {
        let killed = self.story.leader_kill.as_mut();
        if let Some(kill) = killed.filter(|kill| replicas::name(kill.replica) == name && !kill.back)
        {
            kill.back = true;
            self.event(Mark::Server, &format!("{name} is back, and follows"), "");
            self.pause();
        }
    }

    // What is done

    fn act(&mut self) {
        let now = env::now();
        if let Some(deadline) = self.closing {
            if now > deadline {
                self.kill_all();
            }
            return;
        }
        if self.d.began.elapsed() > self.d.options.limit() {
            return self.trouble(format!(
                "Not all tasks were done within {} s: is the machine very busy?",
                self.d.options.limit().as_secs()
            ));
        }
        self.revive(now);
        let settled = |client: &Client| !client.is_alive() || client.rows.is_some();
        let calm = self.opened
            && self.leaderless.is_none()
            && self.leader.is_some()
            && self.story.leader_kill.as_ref().is_none_or(|kill| kill.back)
            && now > self.next_act
            && self.clients.iter().all(settled);
        if !calm {
            return;
        }
        let all = u64::from(self.d.options.tasks);
        let alive = self.alive();
        match self.script.due(self.done, all, alive) {
            Some(Act::Kill) => self.kill_one(),
            Some(Act::Join) => self.start_consumer(),
            Some(Act::KillLeader) => self.kill_leader(),
            None if self.script.is_over() && self.done >= all => {
                self.story.complete = true;
                self.event(
                    Mark::Good,
                    "all tasks are done; the consumers say goodbye",
                    "",
                );
                self.close();
            }
            None => {}
        }
        self.pause();
    }

    fn pause(&mut self) {
        self.next_act = env::now() + self.d.options.pause();
    }

    fn start_consumer(&mut self) {
        let name = format!("consumer-{}", self.clients.len() + 1);
        let options = WorkerOptions {
            name: name.clone(),
            servers: self.d.replicas.addresses(),
            folder: self.d.folder.path().to_owned(),
            batch: self.d.pace.batch.into(),
            concurrency: self.d.pace.concurrency.into(),
            slots: self.d.options.numbering.slots(),
            work_us: self.d.pace.work_us,
        };
        let (program, arguments) = (&self.d.program, options.arguments());
        match Process::start(program, &name, arguments, self.d.tell.clone()) {
            Ok(process) => self.clients.push(Client::new(name, process)),
            Err(error) => self.trouble(format!("{name} cannot be started: {error}")),
        }
    }

    /// One in the middle, so that the others must be numbered anew.
    fn kill_one(&mut self) {
        let victim = self.clients.len().min(2) - 1;
        let client = &mut self.clients[victim];
        let Some(process) = &client.process else {
            return;
        };
        process.kill();
        client.state = State::Killed;
        self.killed_at = Some(env::now());
        let name = client.name.clone();
        self.story.kill = Some(Kill {
            consumer: name.clone(),
            noticed_ms: None,
            renumbered_ms: None,
        });
        self.event(
            Mark::Bad,
            &format!("{name} is killed (SIGKILL) in the middle of its work"),
            "",
        );
    }

    fn kill_leader(&mut self) {
        let Some(replica) = self.leader.take() else {
            return;
        };
        let now = env::now();
        self.d.replicas.kill(replica, now);
        self.leaderless = Some((now, self.executed()));
        self.story.leader_kill = Some(LeaderKill {
            replica,
            next: None,
            without_ms: None,
            executed_meanwhile: 0,
            rows_moved: false,
            back: false,
        });
        self.event(
            Mark::Server,
            &format!(
                "{}, the leader, is killed (SIGKILL)",
                replicas::name(replica)
            ),
            "The consumers go on with their rows; their leases last for 6 s.",
        );
    }

    /// What was killed comes back after a while.
    fn revive(&mut self, now: Instant) {
        let away = self.d.options.server_away();
        let due = |(id, since): (u16, Instant)| (since + away <= now).then_some(id);
        let due: Vec<u16> = self.d.replicas.killed().filter_map(due).collect();
        for id in due {
            if let Err(error) = self.d.replicas.launch(id) {
                let name = replicas::name(id);
                self.trouble(format!("{name} cannot be started: {error}"));
            }
        }
    }

    /// Waits until none is left: nothing may write into the folder when it is removed.
    async fn end_replicas(&mut self) {
        let deadline = env::now() + CLOSING;
        self.d.replicas.kill_all(env::now());
        while self.d.replicas.any() {
            match env::timeout_at(deadline, self.d.inbox.recv()).await {
                Ok(Some(Happening::Ended { name, .. })) => {
                    self.d.replicas.ended(&name);
                }
                Ok(Some(Happening::Told { .. })) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    fn interrupt(&mut self) {
        self.story.interrupted = true;
        if self.closing.is_some() {
            return self.kill_all();
        }
        self.event(
            Mark::Plain,
            "stopping: the consumers finish what they run and say goodbye",
            "Once more, and they are killed.",
        );
        self.close();
    }

    fn trouble(&mut self, text: String) {
        self.event(Mark::Bad, text.lines().next().unwrap_or_default(), "");
        self.story.trouble.push(text);
        self.close();
    }

    fn close(&mut self) {
        if self.closing.is_none() {
            self.closing = Some(env::now() + CLOSING);
            for process in self
                .clients
                .iter()
                .filter_map(|client| client.process.as_ref())
            {
                process.stop();
            }
        }
    }

    fn kill_all(&mut self) {
        for client in &mut self.clients {
            if let Some(process) = &client.process
                && client.state != State::Killed
            {
                process.kill();
                client.state = State::Killed;
                let text = format!("{} was killed before it said goodbye", client.name);
                self.story.trouble.push(text);
            }
        }
    }

    // What is seen

    /// Asks the table how far it is.
    async fn look(&mut self) {
        let all = u64::from(self.d.options.tasks);
        match self.d.table.remaining().await {
            Ok(remaining) => self.done = all.saturating_sub(remaining),
            Err(error) if self.closing.is_none() => {
                self.trouble(format!("The table cannot be read: {error}"));
            }
            Err(_) => {}
        }
    }

    /// How many consumers there are that were not killed.
    fn alive(&self) -> usize {
        self.clients
            .iter()
            .filter(|client| client.is_alive())
            .count()
    }

    fn executed(&self) -> u64 {
        self.clients.iter().map(|client| client.executed).sum()
    }

    fn show(&mut self) {
        let now = env::now();
        let mut speeds = Vec::new();
        for client in &mut self.clients {
            let speed = client.speed.take(now, client.executed);
            speeds.push(if client.is_alive() { speed } else { 0.0 });
        }
        self.d.screen.show(&self.clients, &speeds, self.done);
    }

    fn event(&self, mark: Mark, text: &str, why: &str) {
        self.d.screen.event(self.d.began.elapsed(), mark, text, why);
    }
}

fn shown(millis: f64) -> String {
    if millis < 10.0 {
        format!("{millis:.1} ms")
    } else {
        format!("{millis:.0} ms")
    }
}
