//! Without a quorum for long: clients of available groups are numbered here, if they turn to this replica.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{GroupName, Membership};
use skyschedule_common::protocol::messages::{
    ClientMessage, Code, Consistency, Login, Refusal, ServerMessage,
};

use super::Coordinator;
use super::connections::{IDLE_LEASES, LONGEST_WAIT, SHORTEST_WAIT};
use crate::degraded::{Attached, Attaching, Degraded, Known, Memory, Notice, Step};
use crate::session::ConnectionId;
use crate::state::Settings;
use crate::view::ServerEvent;

/// A client for which there is no room asks again after so long.
const FULL_WAIT: Duration = Duration::from_secs(5);

pub(super) type Writing = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

/// Resolves when what is being written is on the disk; never, when nothing is.
pub(super) async fn written(writing: &mut Option<Writing>) -> io::Result<()> {
    match writing {
        Some(writing) => writing.await,
        None => std::future::pending().await,
    }
}

impl Coordinator {
    /// What this replica gave out without a quorum, before it was restarted.
    pub(super) fn memory_on_disk(consensus: &crate::consensus::Consensus) -> Memory {
        let note = consensus.note().filter(|_| !broken(Rule::D2));
        note.map_or_else(Memory::default, |note| {
            Memory::decode(note).unwrap_or_else(|error| {
                tracing::error!(%error, "what this replica numbered without a quorum cannot be read");
                Memory::default()
            })
        })
    }

    pub(super) fn begin_degraded(&mut self, without: Duration) {
        tracing::warn!(
            replica = self.identity.replica_id,
            without_ms = without.as_millis(),
            "there has been no quorum for too long: this replica numbers by itself the clients of available groups that \
             turn to it, until there is one again. Rows may run twice meanwhile, and exclusive groups wait"
        );
        let memory = std::mem::take(&mut self.memory);
        self.degraded = Some(Degraded::new(self.identity.replica_id, memory, env::now()));
        self.hint = None;
        self.metrics.degraded(true);
        self.handle.publish(ServerEvent::Degraded {
            replica_id: self.identity.replica_id,
            degraded: true,
        });
        self.announce();
    }

    /// Rule D1: it stops as soon as it follows or leads.
    pub(super) fn end_degraded(&mut self) {
        if !self.forget_degraded() {
            return;
        }
        self.hint = self.leader_address();
        self.announce();
    }

    /// Nothing of the degraded service is acted on any more. Whether there was one.
    pub(super) fn forget_degraded(&mut self) -> bool {
        let Some(degraded) = self.degraded.take() else {
            return false;
        };
        tracing::warn!(
            replica = self.identity.replica_id,
            "there is a quorum again: this replica numbers nobody by itself any more"
        );
        self.memory = degraded.into_memory();
        self.writing = None;
        self.metrics.degraded(false);
        self.handle.publish(ServerEvent::Degraded {
            replica_id: self.identity.replica_id,
            degraded: false,
        });
        true
    }

    /// Takes what a client says to a replica without a quorum; false: it is answered as by any that does not lead.
    pub(super) fn degraded_message(
        &mut self,
        id: ConnectionId,
        read_at: Instant,
        message: &ClientMessage,
    ) -> bool {
        let Some(degraded) = &mut self.degraded else {
            return false;
        };
        let Some(connection) = self.connections.get(&id) else {
            return true;
        };
        let group = connection.login.group.clone();
        match *message {
            ClientMessage::Attach { membership, epoch } => {
                return self.degraded_attach(id, &group, membership, epoch);
            }
            ClientMessage::Heartbeat {
                membership,
                seq,
                epoch,
                ..
            } => {
                let Some(answer) = degraded.heartbeat(&group, id, membership, epoch, read_at)
                else {
                    return false;
                };
                if let Some((epoch, share)) = answer.tell {
                    let told = ServerMessage::Told {
                        membership,
                        epoch,
                        share,
                    };
                    self.send(id, told);
                }
                let alive = ServerMessage::Alive {
                    membership,
                    seq,
                    lease: answer.lease,
                    settled: answer.settled,
                };
                self.send(id, alive);
            }
            ClientMessage::Pull { membership } => {
                let Some((epoch, share)) = degraded.told(&group, id, membership) else {
                    return false;
                };
                let told = ServerMessage::Told {
                    membership,
                    epoch,
                    share,
                };
                self.send(id, told);
            }
            ClientMessage::Update {
                membership,
                weight,
                drain,
                ..
            } if connection.membership == Some(membership) => {
                degraded.update(&group, membership, (weight, drain), read_at);
            }
            ClientMessage::Detach { .. } => degraded.ended(&group, id, false, read_at),
            ClientMessage::Goodbye { membership } if connection.membership == Some(membership) => {
                degraded.leave(&group, membership, read_at);
                // The next leader must know, too.
                self.report_goodbye(id, membership);
            }
            _ => return false,
        }
        true
    }

    fn degraded_attach(
        &mut self,
        id: ConnectionId,
        group: &GroupName,
        membership: Option<Membership>,
        epoch: skyschedule_common::epoch::Epoch,
    ) -> bool {
        let (Some(connection), Some(degraded)) = (self.connections.get(&id), &mut self.degraded)
        else {
            return false;
        };
        let login = &connection.login;
        let reports = &self.reports;
        let known = self.consensus.read(|state| {
            let name = group;
            let group = state.group(group);
            // One that never had a member may be an exclusive one by now.
            let group = group.filter(|group| group.next_membership() > 1);
            let member = membership
                .filter(|membership| membership.replica == 0)
                .and_then(|membership| group?.members().get(&membership.number));
            group.map(|group| Known {
                settings: group.settings().clone(),
                lease: group.lease(),
                epoch: group.epoch(),
                member: member.map(|member| (member.told.clone(), member.draining)),
                owner: group
                    .member_of(&login.client)
                    .map(|(number, member)| (number, member.incarnation))
                    .filter(|(number, incarnation)| !reports.end(name, *number, *incarnation)),
            })
        });
        let known = known.or_else(|| {
            let settings = Settings::default();
            let relies_on = login.consistency == Some(Consistency::Available);
            relies_on.then(|| Known {
                lease: settings.base_lease(),
                settings,
                epoch: skyschedule_common::epoch::Epoch::ZERO,
                member: None,
                owner: None,
            })
        });
        let available = |known: &Known| {
            known.settings.consistency == Consistency::Available
                && login.consistency != Some(Consistency::Exclusive)
        };
        let Some(known) = known.filter(available) else {
            return false;
        };
        let attaching = Attaching {
            login,
            connection: id,
            address: connection.peer.to_string(),
            membership,
            epoch,
        };
        let refusal = match degraded.attach(&attaching, known, env::now()) {
            Attached::Taken => return true,
            Attached::IdInUse(left) => {
                self.wait_for_id(id, left.clamp(SHORTEST_WAIT, LONGEST_WAIT));
                return true;
            }
            Attached::Full => Refusal::new(
                Code::LIMIT,
                "the weights of this group add up to too much, or there are too many groups",
                Some(FULL_WAIT),
            ),
        };
        self.send(id, ServerMessage::Wait(refusal));
        true
    }

    /// A connection ended that a replica without a quorum may have served.
    pub(super) fn degraded_ended(&mut self, id: ConnectionId, login: &Login, proven: bool) {
        if let Some(degraded) = &mut self.degraded {
            degraded.ended(&login.group, id, proven, env::now());
        }
    }

    /// Numbers anew what is due. Rule D2: what is given out is on the disk before it is told.
    pub(super) fn number_degraded(&mut self) {
        let Some(degraded) = &mut self.degraded else {
            return;
        };
        match degraded.renumber(env::now()) {
            Step::Nothing => {}
            Step::Publish => self.publish_degraded(),
            Step::Write(_) if broken(Rule::D2) => self.publish_degraded(),
            Step::Write(memory) => {
                let consensus = self.consensus.clone();
                self.writing = Some(Box::pin(async move {
                    let note = memory.encode().map_err(io::Error::other)?;
                    consensus.keep_note(note).await
                }));
            }
        }
    }

    pub(super) fn note_written(&mut self, written: io::Result<()>) {
        self.writing = None;
        match written {
            Ok(()) => self.publish_degraded(),
            // The store has failed, which ends this server.
            Err(error) => tracing::error!(%error, "cannot note what is numbered without a quorum"),
        }
    }

    fn publish_degraded(&mut self) {
        let Some(degraded) = &mut self.degraded else {
            return;
        };
        let (notices, numbered) = degraded.written();
        self.metrics.told(notices.len() as u64);
        for notice in notices {
            self.tell_degraded(notice);
        }
        for group in numbered {
            tracing::warn!(group = %group.group, members = group.members, total = group.total, epoch = %group.epoch, "renumbered without a quorum");
            self.handle.publish(ServerEvent::Renumbered {
                group: group.group.to_string(),
                total: group.total,
                epoch: group.epoch.to_string(),
                took_ms: 0,
            });
        }
    }

    fn tell_degraded(&mut self, notice: Notice) {
        let Notice {
            connection: id,
            membership,
            epoch,
            share,
            welcome,
        } = notice;
        let message = match welcome {
            None => ServerMessage::Told {
                membership,
                epoch,
                share,
            },
            Some((terms, lease)) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.membership = Some(membership);
                    // A full queue is noticed by the message that follows.
                    let _ = connection.outbox.idle_limit(lease.duration() * IDLE_LEASES);
                }
                ServerMessage::Welcome {
                    membership,
                    epoch,
                    share,
                    terms,
                    lease,
                }
            }
        };
        self.send(id, message);
    }
}
