//! Gathers what is to be decided next. Whatever arrives while a commit is under way is one batch, so
//! that its cost does not grow with the number of events.

use std::collections::BTreeMap;

use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::{ClientId, GroupName};
use skyschedule_common::protocol::messages::Millis;
use skyschedule_common::share::Share;

use crate::state::{Change, Command, Joining, Settings, Update};

/// The next commands of all groups.
#[derive(Debug, Default)]
pub(super) struct Batch {
    groups: BTreeMap<GroupName, GroupBatch>,
}

/// The next commands of one group.
#[derive(Debug, Default)]
pub(super) struct GroupBatch {
    pub(super) lease: Option<Millis>,
    pub(super) recover: Option<(u64, Epoch)>,
    pub(super) configure: Vec<Settings>,
    pub(super) dead: Vec<u64>,
    pub(super) leave: Vec<u64>,
    pub(super) vacate: Vec<ClientId>,
    pub(super) release: Vec<(u64, Epoch, Share)>,
    pub(super) overtake: Vec<(u64, Epoch)>,
    pub(super) fence: Vec<u64>,
    pub(super) update: Vec<Update>,
    pub(super) join: Vec<Joining>,
    pub(super) reissue: Vec<(u64, Epoch)>,
    pub(super) start: bool,
    pub(super) delete: bool,
}

impl Batch {
    pub(super) fn group(&mut self, name: &GroupName) -> &mut GroupBatch {
        if !self.groups.contains_key(name) {
            self.groups.insert(name.clone(), GroupBatch::default());
        }
        self.groups.entry(name.clone()).or_default()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The commands, in an order in which each finds what it needs: who is gone makes room for who
    /// comes. `may_start` says of each group whether pacing allows a handover now.
    pub(super) fn take(
        &mut self,
        may_start: impl Fn(&GroupName, &GroupBatch) -> bool,
    ) -> Vec<Command> {
        let mut commands = Vec::new();
        for (group, batch) in std::mem::take(&mut self.groups) {
            let start = may_start(&group, &batch);
            let changes = batch.into_changes(start);
            commands.extend(changes.into_iter().map(|change| Command::Group {
                group: group.clone(),
                change,
            }));
        }
        commands
    }
}

impl GroupBatch {
    /// Whether rows lose their owner.
    pub(super) fn frees_rows(&self) -> bool {
        !(self.dead.is_empty() && self.leave.is_empty() && self.vacate.is_empty())
    }

    fn into_changes(self, start: bool) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::new();
        changes.extend(
            self.recover
                .map(|(number, epoch)| Change::Recover { number, epoch }),
        );
        changes.extend(self.lease.map(Change::LeaseLength));
        changes.extend(
            self.configure
                .into_iter()
                .map(|settings| Change::Configure { settings, start }),
        );
        let mut some = |is_some: bool, change: Change| {
            if is_some {
                changes.push(change);
            }
        };
        some(
            !self.dead.is_empty(),
            Change::Dead {
                members: self.dead,
                start,
            },
        );
        some(
            !self.leave.is_empty(),
            Change::Leave {
                members: self.leave,
                start,
            },
        );
        some(
            !self.vacate.is_empty(),
            Change::Vacate {
                clients: self.vacate,
                start,
            },
        );
        some(!self.release.is_empty(), Change::Release(self.release));
        some(!self.overtake.is_empty(), Change::Overtake(self.overtake));
        some(!self.fence.is_empty(), Change::Fence(self.fence));
        some(
            !self.update.is_empty(),
            Change::Update {
                members: self.update,
                start,
            },
        );
        some(
            !self.join.is_empty(),
            Change::Join {
                members: self.join,
                start,
            },
        );
        some(!self.reissue.is_empty(), Change::Reissue(self.reissue));
        some(self.start, Change::Start);
        some(self.delete, Change::Delete);
        changes
    }
}
