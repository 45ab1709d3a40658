//! The client's side.

use std::sync::Arc;

use subtle::ConstantTimeEq as _;

use super::key_cache::KEYS;
use super::scram::{Keys, auth_message};
use super::{
    AuthError, Challenge, Credentials, Nonce, Signature, UserName, check_iterations, check_nonce,
};

/// A login in progress: the first message can be sent, the challenge is awaited.
#[derive(Debug)]
pub struct ClientExchange {
    credentials: Credentials,
    nonce: Nonce,
}

impl ClientExchange {
    /// Begins a login; `nonce` must be new for each.
    pub fn new(credentials: &Credentials, nonce: Nonce) -> Result<Self, AuthError> {
        check_nonce(&nonce)?;
        Ok(Self {
            credentials: credentials.clone(),
            nonce,
        })
    }

    /// The user, for the first message.
    pub fn user(&self) -> &UserName {
        &self.credentials.user
    }

    /// The client's nonce, for the first message.
    pub fn nonce(&self) -> &Nonce {
        &self.nonce
    }

    /// Whether the key for this challenge is derived already, so that the answer takes microseconds.
    pub fn knows_key(&self, challenge: &Challenge) -> bool {
        let Challenge {
            salt, iterations, ..
        } = challenge;
        KEYS.knows(&self.credentials.password, salt, *iterations)
    }

    /// Answers the challenge with the proof, and gives what checks the server's answer to that.
    ///
    /// The first time in a process this derives the key, for tens of milliseconds (up to a second where the
    /// server asks for [`super::MAX_ITERATIONS`]): not on a thread that must answer others, unless
    /// [`knows_key`](Self::knows_key).
    pub fn respond(self, challenge: &Challenge) -> Result<(Signature, ServerCheck), AuthError> {
        let Challenge {
            nonce,
            salt,
            iterations,
        } = challenge;
        let server_nonce = nonce
            .strip_prefix(self.nonce.as_str())
            .ok_or(AuthError::NonceMismatch)?;
        check_nonce(server_nonce)?;
        check_iterations(*iterations)?;
        let keys = KEYS.get(&self.credentials.password, salt, *iterations);
        let auth_message = auth_message(self.user(), &self.nonce, nonce, salt, *iterations);
        let proof = keys
            .client
            .xor(&keys.client.hash().sign(auth_message.as_bytes()));
        Ok((proof, ServerCheck { keys, auth_message }))
    }
}

/// A login in progress: the proof is out, the server's signature is awaited.
#[derive(Debug)]
pub struct ServerCheck {
    keys: Arc<Keys>,
    auth_message: String,
}

impl ServerCheck {
    /// Whether the server knows this user's key. A client that skips this talks to anyone.
    pub fn verify(self, signature: &Signature) -> Result<(), AuthError> {
        let expected = self.keys.server.sign(self.auth_message.as_bytes());
        if bool::from(expected.ct_eq(signature)) {
            Ok(())
        } else {
            Err(AuthError::ServerNotProven)
        }
    }
}
