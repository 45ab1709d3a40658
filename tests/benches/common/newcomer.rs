//! A member by hand, so that the clock can start with the login's proof.

use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};
use skyschedule_common::epoch::Epoch;
use skyschedule_common::ids::Membership;
use skyschedule_common::protocol::messages::{ClientMessage, ServerMessage};
use skyschedule_common::share::Share;
use skyschedule_tests::peer::{Peer, exchange, hello, login};
use skyschedule_tests::server::{PASSWORD, USER};

use super::Result;
use super::server::rest;

/// Often enough for the shortest lease.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// A member that owns rows.
pub(crate) struct Newcomer {
    peer: Peer,
    membership: Membership,
    seq: u64,
    /// When the proof of its login was sent; the server has it a moment later.
    pub(crate) began: Instant,
    /// When it had its share.
    pub(crate) served: Instant,
    /// What it owns.
    pub(crate) share: Share,
}

impl Newcomer {
    /// Joins, and waits until it has `numbers` numbers of `total`.
    pub(crate) async fn join(
        server: SocketAddr,
        group: &str,
        name: &str,
        total: u32,
        numbers: u64,
    ) -> Result<Self> {
        let mut peer = Peer::connect(server).await;
        peer.send(ClientMessage::Hello(hello())).await;
        peer.receive().await.ok_or("no hello")?;
        let exchange = exchange(USER, PASSWORD);
        let (user, nonce) = (exchange.user().clone(), exchange.nonce().clone());
        peer.send(ClientMessage::AuthFirst { user, nonce }).await;
        let (proof, check) = exchange.respond(&peer.challenge().await)?;
        let began = env::now();
        peer.send(ClientMessage::AuthProof { proof }).await;
        match peer.receive().await {
            Some(ServerMessage::AuthDone { signature }) => check.verify(&signature)?,
            other => return Err(format!("{other:?} in answer to a proof").into()),
        }
        peer.send(ClientMessage::Login(Box::new(login(group, name))))
            .await;
        let welcomed = peer.attach().await;
        let membership = welcomed.membership;
        let heartbeat = |seq, epoch| ClientMessage::Heartbeat {
            membership,
            seq,
            epoch,
            load: None,
        };
        peer.send(heartbeat(1, welcomed.epoch)).await;
        let is_enough = |share: &Share| share.total() == total && share.numbers().len() >= numbers;
        let (mut epoch, mut share) = (welcomed.epoch, welcomed.share);
        while !is_enough(&share) {
            (epoch, share) = peer
                .until(|message| match message {
                    ServerMessage::Told { epoch, share, .. } => Some((epoch, share)),
                    _ => None,
                })
                .await;
        }
        let served = env::now();
        peer.send(heartbeat(2, epoch)).await;
        Ok(Self {
            peer,
            membership,
            seq: 2,
            began,
            served,
            share,
        })
    }

    /// Says goodbye; when it began to, and the connection, which ends when it is dropped.
    pub(crate) async fn leave(mut self) -> (Instant, Peer) {
        let membership = self.membership;
        let began = env::now();
        self.peer.send(ClientMessage::Goodbye { membership }).await;
        (began, self.peer)
    }

    /// Rests as all do after a renumbering that took so long, and keeps its lease meanwhile.
    pub(crate) async fn rest(&mut self, took: Duration) {
        let mut resting = pin!(rest(took));
        while env::timeout(HEARTBEAT, resting.as_mut()).await.is_err() {
            self.seq += 1;
            let (membership, seq) = (self.membership, self.seq);
            self.peer.heartbeat(membership, seq, Epoch::ZERO).await;
        }
    }
}
