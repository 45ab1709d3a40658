//! What the state machine shows of itself.

use skyschedule_common::protocol::messages::Code;

use super::server::{Phase, Server};
use super::{Core, End, Farewell};
use crate::error::ConnectError;
use crate::observe::{ConnectionState, Link, ServerState};
use crate::permit::Permit;

/// Refusals that time heals even where the server names no time.
const HEALING: [Code; 6] = [
    Code::DEADLINE,
    Code::TOO_MANY,
    Code::ID_IN_USE,
    Code::BACK_OFF,
    Code::STOPPING,
    Code::TOO_SLOW,
];

impl End {
    /// Whether only a person can put it right.
    pub(super) fn is_final(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                refusal.retry_after.is_none() && !HEALING.contains(&refusal.code)
            }
            Self::Unfit(_) => true,
            Self::Failed(_) => false,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Refused(refusal) => format!("refused ({}): {}", refusal.code, refusal.text),
            Self::Unfit(text) | Self::Failed(text) => text.clone(),
        }
    }

    fn error(&self, server: &Server) -> Option<ConnectError> {
        let address = &server.address;
        match self {
            Self::Refused(refusal) => Some(ConnectError::refused(address, refusal)),
            Self::Unfit(reason) => Some(ConnectError::Login {
                server: address.clone(),
                reason: reason.clone(),
            }),
            Self::Failed(_) => None,
        }
    }
}

impl Core {
    /// Whether the client has been a member.
    pub(crate) fn joined_once(&self) -> bool {
        self.joined_once
    }

    /// How it ended, once it has.
    pub(crate) fn farewell(&self) -> Option<Farewell> {
        self.farewell
    }

    /// Why no amount of waiting makes this client a member: what its group promises, on which all servers agree; or another
    /// final refusal, and no other server to go to.
    pub(crate) fn hopeless(&self) -> Option<ConnectError> {
        let tried = |server: &Server| {
            let is_idle = !matches!(server.phase, Phase::Dialing { .. } | Phase::Open(_));
            server.is_forgotten() || (is_idle && server.attempt > 0)
        };
        if self.joined_once {
            return None;
        }
        if let Some((server, refusal)) = &self.refusal
            && refusal.code == Code::CONSISTENCY
        {
            let server = self.servers.get(*server)?;
            return Some(ConnectError::refused(&server.address, refusal));
        }
        if !self.servers.iter().all(tried) {
            return None;
        }
        self.servers.iter().find_map(|server| {
            server
                .trouble
                .as_ref()
                .filter(|end| end.is_final())
                .and_then(|end| end.error(server))
        })
    }

    /// Why a client that was a member can never be one again, and ends.
    pub(crate) fn expelled(&self) -> Option<&ConnectError> {
        self.expelled.as_ref()
    }

    /// Why the client is no member yet.
    pub(crate) fn obstacle(&self) -> ConnectError {
        if let Some((server, refusal)) = &self.refusal
            && let Some(server) = self.servers.get(*server)
        {
            return ConnectError::refused(&server.address, refusal);
        }
        let trouble = |server: &Server| match (&server.trouble, server.session()) {
            (Some(end), _) => format!("{}: {}", server.address, end.text()),
            (None, Some(session)) if session.accepted => {
                format!("{}: connected, but serves nobody", server.address)
            }
            _ => format!("{}: no answer", server.address),
        };
        let listed = self
            .servers
            .iter()
            .filter(|server| !matches!(server.phase, Phase::Double { .. } | Phase::Forgotten));
        ConnectError::Unavailable {
            servers: listed.map(trouble).collect(),
        }
    }

    /// How the connections stand.
    pub(crate) fn state(&self, permit: &Permit) -> ConnectionState {
        let attached = self
            .attachment
            .as_ref()
            .filter(|attachment| attachment.welcomed);
        let attached = attached.map(|attachment| attachment.server);
        let serving = attached.and_then(|at| self.servers.get(at));
        let through = serving.and_then(|server| server.through.as_ref());
        let servers = self
            .servers
            .iter()
            .enumerate()
            .filter_map(|(index, server)| {
                let link = match &server.phase {
                    Phase::Double { .. } | Phase::Forgotten => return None,
                    _ if server.is_relay() => return None,
                    _ if through.is_some_and(|it| it.address == server.address) => Link::Relaying,
                    Phase::Down { .. } => Link::Down,
                    Phase::Dialing { .. } => Link::Connecting,
                    Phase::Open(_) if attached == Some(index) => Link::Attached,
                    Phase::Open(session) if session.accepted => Link::Standby,
                    Phase::Open(_) => Link::Connected,
                };
                let trouble = server.trouble.as_ref().map(End::text);
                Some(ServerState {
                    address: server.address.clone(),
                    link,
                    trouble,
                })
            });
        ConnectionState {
            servers: servers.collect(),
            membership: permit.holding().map(|holding| holding.membership),
            refusal: self
                .refusal
                .as_ref()
                .map(|(_, refusal)| refusal.text.to_string()),
            closed: self.farewell.is_some(),
        }
    }
}
