//! What this replica saw of a client that another one serves: the leader is told, and what it was told is kept
//! for a lease, for whoever leads next (rule F1).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use skyschedule_common::env::net::Ending;
use skyschedule_common::env::{self, Instant};
use skyschedule_common::fault::{Rule, broken};
use skyschedule_common::ids::{GroupName, Incarnation, Membership};
use skyschedule_common::protocol::codec;

use super::Coordinator;
use super::connections::Connection;
use super::handle::Handle;
use super::leases::End;
use super::track::server_lease;
use crate::peers::{Answering, Peers, Service};
use crate::session::ConnectionId;

/// Reports that are kept; the oldest make room.
const MOST: usize = 10_000;
/// Reports that are sent at once.
const AT_ONCE: usize = 1_000;
/// How long the leader may take to answer.
const LIMIT: Duration = Duration::from_millis(500);
/// Pause before reports are sent again that were not taken.
const RETRY: Duration = Duration::from_millis(100);
/// Largest message, in bytes.
const MAX_MESSAGE: usize = 1 << 20;

/// A membership is over, as one of its connections shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    group: GroupName,
    member: u64,
    /// A connection that only claims a membership proves nothing.
    incarnation: Incarnation,
    how: How,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum How {
    /// A direct connection ended with a FIN.
    Fin,
    /// The client said goodbye.
    Goodbye,
}

/// Reports on their way.
#[derive(Default)]
pub(super) struct Reports {
    kept: VecDeque<Kept>,
    next: u64,
    leader: Option<u16>,
    /// The leader has all before this.
    told: u64,
    sending: Option<Sending>,
    not_before: Option<Instant>,
}

struct Kept {
    number: u64,
    report: Report,
    until: Instant,
}

type Sending = Pin<Box<dyn Future<Output = Sent> + Send>>;

/// What became of reports that were sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    leader: u16,
    /// All before this were sent.
    before: u64,
    taken: bool,
}

impl Reports {
    fn keep(&mut self, report: Report, lease: Duration) {
        if self.kept.len() >= MOST {
            self.kept.pop_front();
        }
        self.kept.push_back(Kept {
            number: self.next,
            report,
            until: env::now() + lease,
        });
        self.next += 1;
    }

    /// All that a new leader must know.
    pub(super) fn kept(&mut self) -> Vec<Report> {
        self.forget();
        self.kept.iter().map(|kept| kept.report.clone()).collect()
    }

    /// Whether one of them shows that this membership is over.
    pub(super) fn end(&self, group: &GroupName, member: u64, incarnation: Incarnation) -> bool {
        self.kept.iter().any(|kept| {
            let report = &kept.report;
            (&report.group, report.member, report.incarnation) == (group, member, incarnation)
        })
    }

    fn forget(&mut self) {
        let now = env::now();
        self.kept.retain(|kept| kept.until > now);
    }

    /// A new leader is told all that is kept.
    pub(super) fn leader_is(&mut self, leader: Option<u16>) {
        if leader != self.leader {
            self.leader = leader;
            self.told = 0;
            self.sending = None;
            self.not_before = None;
        }
    }

    fn send(&mut self, peers: &Peers, me: u16) {
        let waits = self.not_before.is_some_and(|at| at > env::now());
        let Some(leader) = self.leader.filter(|leader| *leader != me && !waits) else {
            return;
        };
        if self.sending.is_some() || self.kept.is_empty() {
            return;
        }
        self.forget();
        let unsent = self.kept.iter().filter(|kept| kept.number >= self.told);
        let unsent: Vec<&Kept> = unsent.take(AT_ONCE).collect();
        let Some(last) = unsent.last() else { return };
        let before = last.number + 1;
        let reports: Vec<&Report> = unsent.iter().map(|kept| &kept.report).collect();
        let Ok(body) = codec::encode(&reports, MAX_MESSAGE) else {
            return;
        };
        let peers = peers.clone();
        self.sending = Some(Box::pin(async move {
            let answer = peers.ask(leader, Service::Reports, body, LIMIT).await;
            Sent {
                leader,
                before,
                taken: answer.is_ok(),
            }
        }));
    }

    /// Resolves when what is being sent was taken or not; never, when nothing is.
    pub(super) async fn sent(&mut self) -> Sent {
        match &mut self.sending {
            Some(sending) => sending.await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn note(&mut self, sent: Sent) {
        self.sending = None;
        if self.leader != Some(sent.leader) {
            return;
        }
        if sent.taken {
            self.told = sent.before;
        } else {
            self.not_before = Some(env::now() + RETRY);
        }
    }
}

/// Takes the reports of other replicas.
pub(super) fn serve(peers: &Peers, handle: &Handle) {
    let handle = handle.clone();
    peers.serve(
        Service::Reports,
        Arc::new(move |_, body| -> Answering {
            let handle = handle.clone();
            Box::pin(async move {
                let reports: Vec<Report> =
                    codec::decode(&body, MAX_MESSAGE).map_err(|error| error.to_string())?;
                let taken = handle.report(reports).await;
                if taken.map_err(|error| error.to_string())? {
                    Ok(Bytes::new())
                } else {
                    Err("it does not lead".to_owned())
                }
            })
        }),
    );
}

impl Coordinator {
    /// A connection ended. A leader keeps it, too: it may lose its leadership before that is decided.
    pub(super) fn report_end(&mut self, connection: &Connection, ending: Ending) {
        if ending == Ending::Fin && connection.direct {
            self.report(connection.membership, connection, How::Fin);
        }
    }

    /// A client says goodbye.
    pub(super) fn report_goodbye(&mut self, id: ConnectionId, membership: Membership) {
        if let Some(connection) = self.connections.remove(&id) {
            if connection.membership == Some(membership) {
                self.report(Some(membership), &connection, How::Goodbye);
            }
            self.connections.insert(id, connection);
        }
    }

    fn report(&mut self, carried: Option<Membership>, connection: &Connection, how: How) {
        if self.consensus.peers().is_none() {
            return;
        }
        let login = &connection.login;
        let Some(membership) = carried.filter(|membership| membership.replica == 0) else {
            return;
        };
        let report = Report {
            group: login.group.clone(),
            member: membership.number,
            incarnation: login.incarnation,
            how,
        };
        let lease = server_lease(self.lease_of(&login.group));
        self.reports.keep(report, lease);
    }

    pub(super) fn send_reports(&mut self) {
        if let Some(peers) = self.consensus.peers().filter(|_| self.ready.is_none()) {
            self.reports.send(peers, self.consensus.id());
        }
    }

    /// Acts on what a replica saw, if this one leads.
    pub(super) fn take_reports(&mut self, reports: &[Report]) -> bool {
        if self.ready.is_none() {
            return false;
        }
        for report in reports {
            self.act_on(report);
        }
        true
    }

    pub(super) fn act_on(&mut self, report: &Report) {
        let Report {
            group,
            member,
            incarnation,
            how,
        } = report;
        let is_its_own = self.consensus.read(|state| {
            let group = state.group(group);
            let member = group.and_then(|group| group.members().get(member));
            member.is_some_and(|member| member.incarnation == *incarnation)
        });
        if !is_its_own && !broken(Rule::F1) {
            return;
        }
        match how {
            How::Goodbye => self.leave(group, *member),
            How::Fin => self.connection_ended(
                group,
                *member,
                End {
                    ending: Ending::Fin,
                    direct: true,
                    attached: false,
                },
            ),
        }
    }
}
