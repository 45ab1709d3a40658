//! Members come, change and go.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{ClientId, Incarnation};
use skyschedule_common::protocol::messages::{Consistency, Millis, Numbering};
use skyschedule_common::share::{MAX_TOTAL, Share};

use super::command::{Change, Joining, Update};
use super::effect::{Event, JoinRefusal, Parting};
use super::moving::Moving;
use super::settings::{Settings, SettingsError};

/// What clients claim to know is believed up to this number: above it, counting on could overflow.
pub(super) const MAX_CLAIM: u64 = 1 << 62;

/// A client that knows a later epoch than this state shows that decisions were lost. Others, who have not come back yet,
/// may know later ones still: numbering goes on so far above.
pub(super) const LOST_EPOCHS: u64 = 1 << 20;

/// The clients that share one task table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub(super) settings: Settings,
    standing: Standing,
    /// Length of leases in force.
    lease: Millis,
    /// Raised by every change of what any member is told.
    pub(super) counter: u64,
    /// Number of the next membership.
    next: u64,
    pub(super) members: BTreeMap<u64, Member>,
    clients: BTreeMap<ClientId, u64>,
    pub(super) vacancies: BTreeMap<ClientId, Vacancy>,
    pub(super) handover: Option<Handover>,
    /// The targets are not those that the members ask for: a handover must follow.
    pub(super) outdated: bool,
    /// Numbering under which the targets were made.
    pub(super) planned: Numbering,
    #[serde(skip)]
    pub(super) moving: Moving,
}

/// Whether there is such a group. In snapshots of earlier builds this is a truth value, of the same bytes as the first two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Standing {
    /// Nobody has decided yet what it promises.
    Unfounded,
    /// An operator, or the first member, has.
    Founded,
    /// It was deleted. Its counters and its promise stay, in case that a group of this name is made again.
    Deleted,
}

/// One membership.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub client: ClientId,
    /// Its identity.
    pub incarnation: Incarnation,
    /// Its part of the whole.
    pub weight: u32,
    /// Whether its share moves away while it stays.
    pub draining: bool,
    /// Its lease is not renewed any more.
    pub fenced: bool,
    /// Epoch of what it was told last.
    pub epoch: Epoch,
    /// All that it may hold.
    pub told: Share,
    /// What it may still be working on.
    pub held: Share,
    /// Its share when the running handover is over.
    pub target: Share,
}

/// A share that is kept for a client that left or died.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Vacancy {
    /// Number of the membership that ended.
    pub member: u64,
    /// Its part of the whole.
    pub weight: u32,
    /// Its share.
    pub target: Share,
}

/// Rows are moving.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Handover {
    /// Something was granted: the targets cannot be made anew any more.
    pub(super) granted: bool,
}

impl Default for Group {
    fn default() -> Self {
        let settings = Settings::default();
        Self {
            lease: settings.base_lease(),
            planned: settings.numbering,
            settings,
            standing: Standing::Unfounded,
            counter: 0,
            next: 1,
            members: BTreeMap::new(),
            clients: BTreeMap::new(),
            vacancies: BTreeMap::new(),
            handover: None,
            outdated: false,
            moving: Moving::default(),
        }
    }
}

impl Member {
    /// Its weight in plans: nothing while it drains or is fenced.
    pub(super) fn effective_weight(&self) -> u32 {
        if self.draining || self.fenced {
            0
        } else {
            self.weight
        }
    }

    /// Whether nothing beyond what it was told may still be worked on.
    pub fn has_released(&self) -> bool {
        self.told == self.held
    }

    /// Whether it has what it should have.
    pub fn is_settled(&self) -> bool {
        self.told == self.held && self.held == self.target
    }
}

impl Group {
    /// Whether an operator or a member has made it, and nobody has deleted it since.
    pub fn exists(&self) -> bool {
        self.standing == Standing::Founded
    }

    /// What clients must agree to, since others have relied on it: some may still, where no server reaches them.
    pub fn promise(&self) -> Option<Consistency> {
        let is = self.settings.consistency;
        let had_members = self.next > 1;
        match self.standing {
            Standing::Unfounded => None,
            Standing::Founded => had_members.then_some(is),
            // All of an exclusive group's clients know that they are no members any more, or have no lease.
            Standing::Deleted => (had_members && is == Consistency::Available).then_some(is),
        }
    }

    /// What operators set.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Length of leases in force.
    pub fn lease(&self) -> Millis {
        self.lease
    }

    /// The newest epoch that any member was told.
    pub fn epoch(&self) -> Epoch {
        Epoch::quorum(self.counter)
    }

    /// Number of the next membership: all below it were given.
    pub fn next_membership(&self) -> u64 {
        self.next
    }

    /// The members by number: the oldest first.
    pub fn members(&self) -> &BTreeMap<u64, Member> {
        &self.members
    }

    /// The member of this client id.
    pub fn member_of(&self, client: &ClientId) -> Option<(u64, &Member)> {
        let number = *self.clients.get(client)?;
        Some((number, self.members.get(&number)?))
    }

    /// Shares that are kept for clients that left or died.
    pub fn vacancies(&self) -> &BTreeMap<ClientId, Vacancy> {
        &self.vacancies
    }

    /// Whether rows are moving.
    pub fn in_handover(&self) -> bool {
        self.handover.is_some()
    }

    /// Whether the targets are not those that the members ask for.
    pub fn is_outdated(&self) -> bool {
        self.outdated
    }

    /// Whether `Start` has something to do: now in a slot group, after the handover in a modulo group.
    pub fn wants_handover(&self) -> bool {
        self.outdated && (self.handover.is_none() || self.settings.numbering != Numbering::Modulo)
    }

    pub(super) fn apply(&mut self, change: &Change) -> Vec<Event> {
        let mut events = Vec::new();
        match change {
            Change::Configure { settings, start } => self.configure(settings, *start, &mut events),
            Change::LeaseLength(lease) => {
                self.lease = *lease;
                events.push(Event::LeaseLength(*lease));
            }
            Change::Recover { number, epoch } => {
                if (*number).max(epoch.quorum) > MAX_CLAIM {
                    return events;
                }
                self.next = self.next.max(number + 1);
                self.counter = self.counter.max(epoch.quorum + LOST_EPOCHS);
                events.push(Event::Recovered);
            }
            Change::Join { members, start } => {
                // Only totals of modulo are sums of weights.
                let modulo = self.settings.numbering == Numbering::Modulo;
                let mut sum = modulo.then(|| self.weight_sum());
                for joining in members {
                    self.join(joining, &mut sum, &mut events);
                }
                self.replan(*start, &mut events);
            }
            Change::Dead { members, start } => {
                self.part(members, Parting::Dead, *start, &mut events);
            }
            Change::Leave { members, start } => {
                self.part(members, Parting::Left, *start, &mut events);
            }
            Change::Release(releases) => {
                for (member, epoch, keeping) in releases {
                    self.release(*member, *epoch, keeping);
                }
                self.progress(&mut events);
            }
            Change::Overtake(members) => {
                for &(member, epoch) in members {
                    self.overtake(member, epoch, &mut events);
                }
                self.progress(&mut events);
            }
            Change::Fence(members) => {
                for number in members {
                    if let Some(member) =
                        self.members.get_mut(number).filter(|member| !member.fenced)
                    {
                        member.fenced = true;
                        self.outdated = true;
                        events.push(Event::Fenced { member: *number });
                    }
                }
            }
            Change::Update { members, start } => self.update(members, *start, &mut events),
            Change::Vacate { clients, start } => {
                let mut freed = Vec::new();
                for client in clients {
                    if let Some(vacancy) = self.vacancies.remove(client) {
                        events.push(Event::Vacated {
                            client: client.clone(),
                        });
                        freed.push(vacancy.target);
                    }
                }
                self.free(&freed, *start);
                self.replan(*start, &mut events);
            }
            Change::Start => {
                if self.wants_handover() {
                    self.replan(true, &mut events);
                }
            }
            Change::Reissue(members) => {
                for &(member, epoch) in members {
                    self.reissue(member, epoch, &mut events);
                }
            }
            Change::Delete => events.push(self.delete()),
        }
        events
    }

    fn configure(&mut self, settings: &Settings, start: bool, events: &mut Vec<Event>) {
        let becomes_exclusive = settings.consistency == Consistency::Exclusive
            && self.promise() == Some(Consistency::Available);
        if becomes_exclusive {
            events.push(Event::ConfigureRefused(SettingsError::BecomesExclusive));
            return;
        }
        if let Err(error) = settings.validate() {
            events.push(Event::ConfigureRefused(error));
            return;
        }
        let modulo = settings.numbering == Numbering::Modulo;
        if modulo && self.weight_sum() > u64::from(MAX_TOTAL) {
            events.push(Event::ConfigureRefused(SettingsError::TotalTooLarge));
            return;
        }
        let renumbers = (settings.numbering, settings.max_slots)
            != (self.settings.numbering, self.settings.max_slots);
        self.standing = Standing::Founded;
        self.settings = settings.clone();
        if self.next == 1 {
            // Nobody was told a longer one.
            self.lease = settings.base_lease();
        }
        events.push(Event::Configured(settings.clone()));
        if renumbers {
            self.outdated = true;
            self.replan(start, events);
        }
    }

    fn delete(&mut self) -> Event {
        if !self.members.is_empty() {
            return Event::DeleteRefused {
                members: self.members.len(),
            };
        }
        if self.exists() {
            // Neither epochs nor numbers of memberships begin again (promise 4), and an available group does not become
            // exclusive in this way either (rule L18).
            let mut left = Self {
                counter: self.counter,
                next: self.next,
                ..Self::default()
            };
            if left != Self::default() {
                left.standing = Standing::Deleted;
                left.settings.consistency = self.settings.consistency;
            }
            *self = left;
        }
        Event::Deleted
    }

    /// `sum` is that of all weights, where it matters.
    fn join(&mut self, joining: &Joining, sum: &mut Option<u64>, events: &mut Vec<Event>) {
        let vacancy = self.vacancies.get(&joining.client);
        let kept = vacancy.map_or(0, |vacancy| u64::from(vacancy.weight));
        let new_sum = sum.map(|sum| sum - kept + u64::from(joining.weight));
        if let Some(why) = self.refuses(joining, new_sum) {
            let (client, incarnation) = (joining.client.clone(), joining.incarnation);
            events.push(Event::JoinRefused {
                client,
                incarnation,
                why,
            });
            return;
        }
        if !self.exists() {
            self.standing = Standing::Founded;
            self.settings.consistency = joining.consistency.unwrap_or_default();
        }
        *sum = new_sum;
        let number = self.next;
        self.next += 1;
        self.counter += 1;
        let total = self
            .members
            .values()
            .next()
            .map_or(0, |member| member.target.total());
        let vacancy = self.vacancies.remove(&joining.client);
        self.outdated |= vacancy
            .as_ref()
            .is_none_or(|vacancy| vacancy.weight != joining.weight);
        let member = Member {
            client: joining.client.clone(),
            incarnation: joining.incarnation,
            weight: joining.weight,
            draining: false,
            fenced: false,
            epoch: Epoch::quorum(self.counter),
            told: Share::none_of(total),
            held: Share::none_of(total),
            target: vacancy.map_or_else(|| Share::none_of(total), |vacancy| vacancy.target),
        };
        self.clients.insert(member.client.clone(), number);
        self.members.insert(number, member);
        self.moving.add(number);
        let (client, incarnation) = (joining.client.clone(), joining.incarnation);
        events.push(Event::Joined {
            member: number,
            client,
            incarnation,
        });
    }

    fn refuses(&self, joining: &Joining, sum: Option<u64>) -> Option<JoinRefusal> {
        if self.clients.contains_key(&joining.client) && !broken(Rule::L7) {
            return Some(JoinRefusal::IdInUse);
        }
        let decided = self.exists().then_some(self.settings.consistency);
        match (joining.consistency, decided.or(self.promise())) {
            (Some(wanted), Some(is)) if wanted != is => {
                return Some(JoinRefusal::Consistency { is, wanted });
            }
            _ => {}
        }
        let too_large = sum.is_some_and(|sum| sum > u64::from(MAX_TOTAL));
        too_large.then_some(JoinRefusal::TotalTooLarge)
    }

    fn weight_sum(&self) -> u64 {
        let members = self.members.values().map(|member| u64::from(member.weight));
        let vacancies = self
            .vacancies
            .values()
            .map(|vacancy| u64::from(vacancy.weight));
        members.chain(vacancies).sum()
    }

    fn part(&mut self, members: &[u64], how: Parting, start: bool, events: &mut Vec<Event>) {
        let mut freed = Vec::new();
        for number in members {
            let Some(member) = self.members.remove(number) else {
                continue;
            };
            // A broken rule L7 lets two members share an id.
            if self.clients.get(&member.client) == Some(number) {
                self.clients.remove(&member.client);
            }
            let vacant =
                self.settings.rejoin_grace > Millis(0) && !member.fenced && !member.draining;
            if vacant {
                let vacancy = Vacancy {
                    member: *number,
                    weight: member.weight,
                    target: member.target,
                };
                self.vacancies.insert(member.client.clone(), vacancy);
            } else {
                self.outdated = true;
                freed.push(member.target);
            }
            events.push(Event::Parted {
                member: *number,
                client: member.client,
                how,
                vacant,
            });
        }
        self.free(&freed, start);
        self.replan(start, events);
    }

    fn update(&mut self, updates: &[Update], start: bool, events: &mut Vec<Event>) {
        let modulo = self.settings.numbering == Numbering::Modulo;
        let mut sum = modulo.then(|| self.weight_sum());
        for update in updates {
            let Some(member) = self.members.get_mut(&update.member) else {
                continue;
            };
            let before = (member.effective_weight(), member.weight, member.draining);
            if let Some(weight) = update.weight {
                let new_sum = sum.map(|sum| sum - u64::from(member.weight) + u64::from(weight));
                if new_sum.is_none_or(|sum| sum <= u64::from(MAX_TOTAL)) {
                    member.weight = weight;
                    sum = new_sum;
                } else {
                    events.push(Event::WeightRefused {
                        member: update.member,
                    });
                }
            }
            member.draining = update.drain.unwrap_or(member.draining);
            let after = (member.effective_weight(), member.weight, member.draining);
            self.outdated |= after.0 != before.0;
            if after != before {
                events.push(Event::Updated {
                    member: update.member,
                });
            }
        }
        self.replan(start, events);
    }

    /// Checks what must hold after every command; the text names the first violation.
    pub(super) fn check(&self) -> Result<(), String> {
        let members: Vec<(&u64, &Member)> = self.members.iter().collect();
        let mut targets: Vec<&Share> = members.iter().map(|(_, member)| &member.target).collect();
        targets.extend(self.vacancies.values().map(|vacancy| &vacancy.target));
        for (at, (number, member)) in members.iter().enumerate() {
            if !member.told.is_within(&member.held) {
                return Err(format!(
                    "member {number} is told {:?} and holds only {:?}",
                    member.told, member.held
                ));
            }
            if member.epoch > self.epoch() {
                return Err(format!(
                    "member {number} is told an epoch above the counter {}",
                    self.counter
                ));
            }
            for (other_number, other) in &members[at + 1..] {
                if member.held.meets(&other.held) {
                    return Err(format!(
                        "members {number} and {other_number} hold the same rows"
                    ));
                }
                if member.epoch == other.epoch {
                    return Err(format!(
                        "members {number} and {other_number} are told the same epoch"
                    ));
                }
            }
            if self.handover.is_none() && !member.fenced && !member.is_settled() {
                return Err(format!("member {number} waits and no handover runs"));
            }
        }
        if let Some(number) = self.forgotten() {
            return Err(format!("member {number} waits and is forgotten"));
        }
        let mut totals = targets.iter().filter(|target| !target.is_empty());
        let first = totals.next().map(|target| target.total());
        if totals.any(|target| Some(target.total()) != first) {
            return Err("targets have different totals".to_owned());
        }
        for (at, target) in targets.iter().enumerate() {
            if targets[at + 1..].iter().any(|other| target.meets(other)) {
                return Err("two targets have rows in common".to_owned());
            }
        }
        let weights: u64 = self.seats().iter().map(|seat| u64::from(seat.weight)).sum();
        if !self.outdated && weights > 0 && self.settings.max_slots.is_none() {
            let total = u64::from(targets.first().map_or(0, |target| target.total()));
            let covered: u64 = targets.iter().map(|target| target.numbers().len()).sum();
            if covered != total {
                return Err(format!("the targets cover {covered} of {total} numbers"));
            }
        }
        Ok(())
    }
}

/// Answers when the cluster can keep no further group.
pub(super) fn refuse_all(change: &Change) -> Vec<Event> {
    match change {
        Change::Join { members, .. } => members
            .iter()
            .map(|joining| Event::JoinRefused {
                client: joining.client.clone(),
                incarnation: joining.incarnation,
                why: JoinRefusal::TooManyGroups,
            })
            .collect(),
        Change::Configure { .. } => {
            vec![Event::ConfigureRefused(SettingsError::TooManyGroups)]
        }
        _ => Vec::new(),
    }
}
