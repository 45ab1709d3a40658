//! A group and its members, who really work on the rows that they were told until they release them.

use std::collections::{BTreeMap, BTreeSet};

use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName, Incarnation};
use skyschedule_common::protocol::codec;
use skyschedule_common::protocol::messages::{Consistency, Numbering};
use skyschedule_common::share::{Numbers, Share};
use skyschedule_server::state::{
    Change, Command, Effect, Event, Group, Joining, Member, Settings, State, Update,
};

/// Rows that stand for all: both signs, zero, the ends.
const ROWS: std::ops::Range<i64> = -40..41;
const FAR_ROWS: [i64; 6] = [
    i64::MIN,
    i64::MIN + 7,
    -1_000_003,
    999_983,
    i64::MAX - 5,
    i64::MAX,
];

fn rows() -> impl Iterator<Item = i64> {
    ROWS.chain(FAR_ROWS)
}

fn rows_of(share: &Share) -> BTreeSet<i64> {
    rows().filter(|&row| share.contains(row.into())).collect()
}

/// A member's own process.
#[derive(Debug, Default)]
struct Process {
    epoch: Epoch,
    share: Share,
    /// Rows of earlier shares on which work goes on.
    busy: BTreeSet<i64>,
    /// Rows for which the group did not wait, and what it was told last at that time.
    overtaken: BTreeSet<i64>,
    overtaken_at: Epoch,
    /// What it was told last, whether it has heard of it or not.
    told: Option<Share>,
    /// What is under way to it, in any order.
    inbox: Vec<(Epoch, Share)>,
}

impl Process {
    fn holds(&self) -> BTreeSet<i64> {
        &rows_of(&self.share) | &self.busy
    }

    /// Takes what is newer than what it has: rule C3.
    fn take(&mut self, (epoch, share): (Epoch, Share)) {
        if epoch > self.epoch {
            let before = self.holds();
            let granted = rows_of(&share);
            self.busy = &before - &granted;
            if epoch > self.overtaken_at {
                self.overtaken = &self.overtaken - &granted;
            }
            (self.epoch, self.share) = (epoch, share);
        }
    }
}

pub(crate) struct World {
    pub(crate) state: State,
    log: Vec<Command>,
    processes: BTreeMap<u64, Process>,
    /// Every release that was ever said: the network may repeat any of them.
    releases: Vec<(u64, Epoch, Share)>,
    /// Every epoch that was ever told, and to whom.
    epochs: BTreeMap<Epoch, u64>,
    incarnations: u128,
    pub(crate) handovers: u32,
}

fn name() -> GroupName {
    GroupName::new("orders").unwrap()
}

pub(crate) fn client(at: u8) -> ClientId {
    ClientId::new(format!("client-{at}")).unwrap()
}

impl World {
    pub(crate) fn new(settings: Option<Settings>) -> Self {
        let mut world = Self {
            state: State::default(),
            log: Vec::new(),
            processes: BTreeMap::new(),
            releases: Vec::new(),
            epochs: BTreeMap::new(),
            incarnations: 0,
            handovers: 0,
        };
        if let Some(settings) = settings {
            world.apply(Change::Configure {
                settings,
                start: true,
            });
        }
        world
    }

    pub(crate) fn group(&self) -> &Group {
        static EMPTY: std::sync::LazyLock<Group> = std::sync::LazyLock::new(Group::default);
        self.state.group(&name()).unwrap_or(&EMPTY)
    }

    /// The number of the member that `pick` chooses.
    pub(crate) fn member(&self, pick: u8) -> Option<u64> {
        let members = self.group().members();
        let at = usize::from(pick).checked_rem(members.len())?;
        members.keys().nth(at).copied()
    }

    pub(crate) fn vacant(&self, pick: u8) -> Option<ClientId> {
        let vacancies = self.group().vacancies();
        let at = usize::from(pick).checked_rem(vacancies.len())?;
        vacancies.keys().nth(at).cloned()
    }

    /// Decides, and checks all that must hold after every decision.
    pub(crate) fn apply(&mut self, change: Change) -> Vec<Event> {
        let before = self.group().epoch();
        let repeats = matches!(change, Change::Reissue(_));
        let command = Command::Group {
            group: name(),
            change,
        };
        let effects = self.state.apply(&command);
        self.log.push(command);
        let events: Vec<Event> = effects
            .into_iter()
            .map(|effect| match effect {
                Effect::Group { group, event } if group == name() => event,
                other => panic!("an effect elsewhere: {other:?}"),
            })
            .collect();
        for event in &events {
            self.see(event, before, repeats);
        }
        assert!(self.group().epoch() >= before, "also where it is deleted");
        if let Err(violation) = self.state.check() {
            panic!("{violation}");
        }
        self.check_processes();
        events
    }

    fn see(&mut self, event: &Event, before: Epoch, repeats: bool) {
        match event {
            Event::Joined { member, .. } => {
                let process = Process::default();
                assert!(self.processes.insert(*member, process).is_none());
                // What its Welcome says is decided when the command is applied, not while.
            }
            Event::Told {
                member,
                epoch,
                share,
            } => {
                self.note(*member, *epoch, before);
                let process = self.processes.get_mut(member).unwrap();
                let told = process.told.replace(share.clone());
                assert!(
                    repeats || told.as_ref() != Some(share),
                    "{member} is told {share:?} again"
                );
                process.inbox.push((*epoch, share.clone()));
            }
            Event::Parted { member, .. } => {
                // Whoever ends it ends the process first.
                assert!(!self.processes.contains_key(member));
            }
            Event::Overtaken { member, held } => {
                let process = self.processes.get_mut(member).unwrap();
                // Also what was granted it and is still under way.
                process.overtaken.extend(rows_of(held));
                process.overtaken_at = before;
            }
            Event::HandoverStarted => self.handovers += 1,
            _ => {}
        }
    }

    /// Epochs grow, and each names one share.
    fn note(&mut self, member: u64, epoch: Epoch, before: Epoch) {
        assert!(epoch > before, "{epoch} was told after {before}");
        let other = self.epochs.insert(epoch, member);
        assert_eq!(other, None, "{epoch} names two shares");
    }

    fn check_processes(&mut self) {
        let members = self.state.group(&name()).map(Group::members);
        let members = members.cloned().unwrap_or_default();
        assert!(members.keys().eq(self.processes.keys()));
        let mut holders: BTreeMap<i64, u64> = BTreeMap::new();
        for (number, process) in &mut self.processes {
            let member = &members[number];
            if process.epoch == Epoch::ZERO && process.inbox.is_empty() {
                // Its Welcome.
                process.inbox.push((member.epoch, member.told.clone()));
            }
            let holds = process.holds();
            if process.epoch >= process.overtaken_at {
                process.overtaken = &process.overtaken & &holds;
            }
            let known = rows_of(&member.held);
            for row in &holds - &process.overtaken {
                assert!(
                    known.contains(&row),
                    "member {number} works on row {row}, and the group thinks it holds {:?}",
                    member.held
                );
                let other = holders.insert(row, *number);
                assert_eq!(other, None, "{number} and another work on row {row}");
            }
        }
    }

    pub(crate) fn join(&mut self, clients: &[u8], weight: u32, start: bool) -> Vec<Event> {
        let members = clients.iter().map(|&at| {
            self.incarnations += 1;
            Joining {
                client: client(at),
                incarnation: Incarnation(self.incarnations),
                weight,
                consistency: None,
            }
        });
        let members = members.collect();
        self.apply(Change::Join { members, start })
    }

    /// The processes die, or end in good order; what they worked on has ended.
    pub(crate) fn end(&mut self, members: Vec<u64>, died: bool, start: bool) -> Vec<Event> {
        for member in &members {
            self.processes.remove(member);
        }
        self.apply(if died {
            Change::Dead { members, start }
        } else {
            Change::Leave { members, start }
        })
    }

    /// Something that is under way arrives, whichever.
    pub(crate) fn deliver(&mut self, member: u64, pick: u8) {
        let process = self.processes.get_mut(&member).unwrap();
        if let Some(at) = usize::from(pick).checked_rem(process.inbox.len()) {
            let told = process.inbox.remove(at);
            process.take(told);
        }
    }

    pub(crate) fn deliver_all(&mut self) {
        for process in self.processes.values_mut() {
            while let Some(told) = process.inbox.pop() {
                process.take(told);
            }
        }
    }

    /// The member ends its work outside of its share, except for numbers of what it held that `keep` selects, and says so.
    pub(crate) fn say_release(&mut self, number: u64, keep: u64) -> (u64, Epoch, Share) {
        let process = self.processes.get_mut(&number).unwrap();
        let member = self.state.group(&name()).unwrap().members()[&number].clone();
        let kept = |&n: &u32| keep >> (n % 64) & 1 == 1;
        let keeping: Numbers = member.held.numbers().iter().filter(kept).collect();
        let keeping = if member.epoch == process.epoch {
            Share::new(member.held.total(), keeping).unwrap()
        } else {
            // It answers something older: what that was, the group knows no more.
            Share::NONE
        };
        process.busy = &process.busy & &rows_of(&keeping);
        let release = (number, process.epoch, keeping);
        self.releases.push(release.clone());
        release
    }

    /// A release that was said before, once more.
    pub(crate) fn repeat_release(&mut self, pick: u8) {
        if let Some(at) = usize::from(pick).checked_rem(self.releases.len()) {
            let release = self.releases[at].clone();
            self.apply(Change::Release(vec![release]));
        }
    }

    pub(crate) fn release_all(&mut self) -> Vec<Event> {
        let numbers: Vec<u64> = self.processes.keys().copied().collect();
        let said = numbers
            .into_iter()
            .map(|number| self.say_release(number, 0));
        let releases = said.collect();
        self.apply(Change::Release(releases))
    }

    /// A replica without a quorum has told it the same share under an epoch of its own.
    pub(crate) fn reissue(&mut self, number: u64, degraded: u32) {
        let process = self.processes.get_mut(&number).unwrap();
        let epoch = Epoch {
            quorum: process
                .epoch
                .quorum
                .max(self.state.group(&name()).unwrap().epoch().quorum),
            degraded: process.epoch.degraded.max(degraded),
            replica: 3,
        };
        process.epoch = epoch;
        self.apply(Change::Reissue(vec![(number, epoch)]));
        let told = self.group().members()[&number].epoch;
        assert!(told > epoch, "{told} is not above {epoch}");
    }

    pub(crate) fn configure(&mut self, settings: Settings, start: bool) {
        self.apply(Change::Configure { settings, start });
    }

    pub(crate) fn update(
        &mut self,
        member: u64,
        weight: Option<u32>,
        drain: Option<bool>,
        start: bool,
    ) {
        let update = Update {
            member,
            weight,
            drain,
        };
        self.apply(Change::Update {
            members: vec![update],
            start,
        });
    }

    /// The state goes on from its own bytes, and the whole log gives it once more.
    pub(crate) fn restore(&mut self) {
        let mut replayed = State::default();
        for command in &self.log {
            replayed.apply(command);
        }
        assert!(replayed == self.state, "the same log gave another state");
        let bytes = codec::encode(&self.state, 1 << 20).unwrap();
        self.state = codec::decode(&bytes, 1 << 20).unwrap();
        assert!(replayed == self.state, "the bytes gave another state");
    }

    /// Everybody answers, whatever is due begins, fenced members' leases end: until nothing is to be done.
    pub(crate) fn quiet(&mut self) {
        let fenced = |(&number, member): (&u64, &Member)| member.fenced.then_some(number);
        let fenced = self.group().members().iter().filter_map(fenced).collect();
        self.end(fenced, true, false);
        for _ in 0..20 {
            self.deliver_all();
            let answers = self.release_all();
            let started = if self.group().wants_handover() {
                self.apply(Change::Start)
            } else {
                Vec::new()
            };
            if answers.is_empty() && started.is_empty() && !self.group().in_handover() {
                return self.check_quiet();
            }
        }
        panic!("it never becomes quiet: {:?}", self.group());
    }

    /// Nothing moves: the shares of the members are disjoint and, with what is kept for others, cover every
    /// row; each is as large as its weight says.
    fn check_quiet(&self) {
        let group = self.group();
        let settings = group.settings();
        for (number, process) in &self.processes {
            let member = &group.members()[number];
            assert!(member.is_settled());
            assert_eq!(
                (member.epoch, &member.told),
                (process.epoch, &process.share)
            );
        }
        let members = group.members().values().map(|member| {
            let weight = if member.draining { 0 } else { member.weight };
            (weight, &member.told)
        });
        let vacancies = group.vacancies().values();
        let vacancies = vacancies.map(|vacancy| (vacancy.weight, &vacancy.target));
        let places: Vec<(u32, &Share)> = members.chain(vacancies).collect();
        let weights: u32 = places.iter().map(|(weight, _)| weight).sum();
        for row in rows() {
            let holders = self.processes.values().filter(|p| p.holds().contains(&row));
            assert!(holders.count() <= 1, "row {row} has several owners");
            let owners = places
                .iter()
                .filter(|(_, share)| share.contains(row.into()));
            let owners = owners.count();
            assert!(owners <= 1, "row {row} has {owners} owners");
            assert!(
                owners == 1 || weights == 0 || settings.max_slots.is_some(),
                "row {row} has no owner"
            );
        }
        for (weight, share) in places {
            let numbers = share.numbers().len() as f64;
            let fair = match settings.numbering {
                Numbering::Modulo => f64::from(weight),
                Numbering::Slots(slots) => {
                    f64::from(slots) * f64::from(weight) / f64::from(weights.max(1))
                }
            };
            match settings.max_slots {
                // As much as without a cap, and then no more than it.
                Some(cap) => {
                    let (cap, least) = (f64::from(cap), fair.min(f64::from(cap)) - 1.0);
                    assert!(
                        numbers <= cap && numbers > least,
                        "{numbers} of {fair}, cap {cap}"
                    );
                    assert!(numbers < fair + 1.0, "{numbers} where {fair} are fair");
                }
                None => assert!(
                    (numbers - fair).abs() < 1.0,
                    "{numbers} where {fair} are fair"
                ),
            }
            assert!(weight > 0 || numbers == 0.0);
        }
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.group().settings().consistency == Consistency::Exclusive
    }

    /// The share of each member, by number.
    pub(crate) fn shares(&self) -> BTreeMap<u64, Share> {
        let members = self.group().members().iter();
        members
            .map(|(&number, member)| (number, member.told.clone()))
            .collect()
    }
}
