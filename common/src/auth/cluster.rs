//! What replicas prove to each other: that both know the cluster's secret.
//!
//! Each side answers the other's fresh nonce with an HMAC over all that both said, and over its own role:
//! nothing recorded is of use later, and nothing can be sent back to where it came from. It does not
//! protect what follows: where the network between replicas is not trusted, TLS does.

use secrecy::{ExposeSecret as _, SecretString};
use subtle::ConstantTimeEq as _;

use super::Signature;
use super::scram::Key;

/// Makes guessing a secret from a recorded exchange as costly as guessing a password.
const ROUNDS: u32 = super::DEFAULT_ITERATIONS;
const SALT: &[u8] = b"skyschedule cluster secret";

/// Which end of a connection speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It opened the connection.
    Dialer,
    /// It accepted the connection.
    Acceptor,
}

/// All that both ends of a connection between replicas said before they prove themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Introduction {
    /// The replica that opened the connection.
    pub from: u16,
    /// The replica that it wants to reach.
    pub to: u16,
    /// Drawn anew by the dialer.
    pub dialer_nonce: [u8; 32],
    /// Drawn anew by the acceptor.
    pub acceptor_nonce: [u8; 32],
}

/// The key of a cluster.
#[derive(Debug, Clone)]
pub struct ClusterKey(Key);

impl ClusterKey {
    /// From the secret that all replicas share. Takes tens of milliseconds.
    pub fn derive(secret: &SecretString) -> Self {
        let secret = secret.expose_secret().as_bytes();
        Self(Key::new(pbkdf2::pbkdf2_hmac_array::<sha2::Sha256, 32>(
            secret, SALT, ROUNDS,
        )))
    }

    /// The key of a cluster without a secret, on the loopback interface only: it proves nothing.
    pub fn open() -> Self {
        Self(Key::new([0; 32]))
    }

    /// The proof of one end.
    pub fn prove(&self, role: Role, introduction: &Introduction) -> Signature {
        let mut message = Vec::with_capacity(80);
        message.extend_from_slice(match role {
            Role::Dialer => b"dialer",
            Role::Acceptor => b"accept",
        });
        message.extend_from_slice(&introduction.from.to_be_bytes());
        message.extend_from_slice(&introduction.to.to_be_bytes());
        message.extend_from_slice(&introduction.dialer_nonce);
        message.extend_from_slice(&introduction.acceptor_nonce);
        self.0.sign(&message)
    }

    /// Whether this is the proof of that end, in constant time.
    pub fn verify(&self, role: Role, introduction: &Introduction, proof: &Signature) -> bool {
        self.prove(role, introduction).ct_eq(proof).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction() -> Introduction {
        Introduction {
            from: 1,
            to: 2,
            dialer_nonce: [3; 32],
            acceptor_nonce: [4; 32],
        }
    }

    #[test]
    fn only_the_same_secret_role_and_words_verify() {
        let key = ClusterKey::derive(&"0123456789abcdef".into());
        let other = ClusterKey::derive(&"0123456789abcdeF".into());
        let said = introduction();
        let proof = key.prove(Role::Dialer, &said);
        assert!(key.verify(Role::Dialer, &said, &proof));
        assert!(!other.verify(Role::Dialer, &said, &proof));
        assert!(!ClusterKey::open().verify(Role::Dialer, &said, &proof));
        assert!(
            !key.verify(Role::Acceptor, &said, &proof),
            "sent back to where it came from"
        );
        let changes: [fn(&mut Introduction); 4] = [
            |said| said.from = 3,
            |said| said.to = 3,
            |said| said.dialer_nonce[0] ^= 1,
            |said| said.acceptor_nonce[31] ^= 1,
        ];
        for change in changes {
            let mut replayed = introduction();
            change(&mut replayed);
            assert!(!key.verify(Role::Dialer, &replayed, &proof));
        }
    }
}
