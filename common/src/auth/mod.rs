//! The login: SCRAM-SHA-256 (RFC 5802, RFC 7677), carried in our own messages.
//!
//! No password crosses the wire, the server keeps only keys derived from it, a recorded login is useless
//! later, and the server proves itself too.
//!
//! | step | client | server |
//! |---|---|---|
//! | 1 | [`ClientExchange::new`]: user and a nonce | |
//! | 2 | | [`ServerExchange::challenge`]: the nonce continued, salt, iterations |
//! | 3 | [`ClientExchange::respond`]: the proof | |
//! | 4 | | [`ServerExchange::verify`]: checks it, answers with the server's signature |
//! | 5 | [`ServerCheck::verify`]: checks that | |
//!
//! What is signed is the text of the RFC's messages, so that its test vectors hold. Nothing here draws
//! randomness: nonces and secrets come from the caller. Names and passwords are taken as they are (UTF-8,
//! without SASLprep), as both ends are ours.
//!
//! ```
//! use skyschedule_common::auth::{
//!     nonce, ClientExchange, Credentials, Decoys, ServerExchange, StoredUser, MIN_ITERATIONS,
//! };
//!
//! // Server, once: a user and its keys.
//! let decoys = Decoys::new([7; 32], MIN_ITERATIONS);
//! let stored = StoredUser::derive(&"walker".into(), decoys.salt("moon"), MIN_ITERATIONS)?;
//!
//! let client = ClientExchange::new(&Credentials::new("moon", "walker")?, nonce([1; 18]))?;
//! let (challenge, server) =
//!     ServerExchange::challenge(Some(&stored), &decoys, client.user(), client.nonce(), &nonce([2; 18]))?;
//! let (proof, check) = client.respond(&challenge)?;
//! let signature = server.verify(&proof)?;
//! check.verify(&signature)?;
//! # Ok::<(), skyschedule_common::auth::AuthError>(())
//! ```

mod client;
mod cluster;
mod key_cache;
mod scram;
mod server;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use secrecy::{ExposeSecret as _, SecretString};

use crate::protocol::bounded::{BoundedString, BoundedVec};

pub use client::{ClientExchange, ServerCheck};
pub use cluster::{ClusterKey, Introduction, Role};
pub use server::{Decoys, ServerExchange, StoredUser};

/// Rounds of PBKDF2 for a new user: some ten milliseconds of one core, once a process, and the price of
/// each guess for a thief of the stored keys. Simulations, which start servers by the thousand, take the fewest.
pub const DEFAULT_ITERATIONS: u32 = if cfg!(sim) { MIN_ITERATIONS } else { 100_000 };

/// Fewest rounds: RFC 7677 asks for this many.
pub const MIN_ITERATIONS: u32 = 4_096;

/// Most rounds: a hostile server must not burn its clients' processors.
pub const MAX_ITERATIONS: u32 = 1_000_000;

/// Fewest characters of one side's nonce.
pub const MIN_NONCE: usize = 16;

/// Name of a user, at most 128 bytes.
pub type UserName = BoundedString<128>;

/// One side's nonce: 16 to 64 printable ASCII characters, no comma.
pub type Nonce = BoundedString<64>;

/// The client's nonce followed by the server's.
pub type JointNonce = BoundedString<128>;

/// Salt of the key derivation.
pub type Salt = BoundedVec<u8, 64>;

/// A client's proof, or a server's signature.
pub type Signature = [u8; 32];

/// A nonce made of 144 random bits.
pub fn nonce(random: [u8; 18]) -> Nonce {
    Nonce::truncated(&BASE64.encode(random))
}

/// The server's answer to a client's first message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// The client's nonce, continued by the server.
    pub nonce: JointNonce,
    /// Salt of the key derivation.
    pub salt: Salt,
    /// Rounds of the key derivation.
    pub iterations: u32,
}

/// Who logs in, and with which password. Printing it hides the password.
#[derive(Debug, Clone)]
pub struct Credentials {
    user: UserName,
    password: SecretString,
}

impl Credentials {
    /// Checks that neither part is empty and that the name is short enough and printable.
    pub fn new(user: &str, password: impl Into<SecretString>) -> Result<Self, AuthError> {
        let password = password.into();
        let user = UserName::try_from(user).map_err(|_| AuthError::UserName)?;
        if user.is_empty() || user.chars().any(char::is_control) {
            return Err(AuthError::UserName);
        }
        check_password(&password)?;
        Ok(Self { user, password })
    }

    /// Name of the user.
    pub fn user(&self) -> &UserName {
        &self.user
    }
}

/// Why a login did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// A name that cannot be one.
    #[error("a user name has 1 to 128 bytes and no control characters: choose another one")]
    UserName,
    /// An empty password, which is never taken to mean "none needed".
    #[error(
        "the password is empty: set one (an empty password file or variable is the usual cause)"
    )]
    EmptyPassword,
    /// A nonce of the wrong length or with characters that it may not have.
    #[error("a nonce of the login is malformed: the peer does not follow SCRAM-SHA-256; update it")]
    Nonce,
    /// The challenge does not continue this client's nonce.
    #[error(
        "the server's challenge answers another login: something between client and server mixes or replays messages"
    )]
    NonceMismatch,
    /// Rounds of key derivation out of bounds.
    #[error(
        "{asked} iterations of the key derivation, where {MIN_ITERATIONS} to {MAX_ITERATIONS} are accepted: \
         correct the server's setting, or do not trust this server"
    )]
    Iterations {
        /// Rounds asked for.
        asked: u32,
    },
    /// Unknown user or wrong password; which of them is not said.
    #[error("login refused: check user name and password")]
    Refused,
    /// The server does not have this user's key.
    #[error(
        "the server could not prove that it knows this user: do not trust it; check its address and what is between"
    )]
    ServerNotProven,
}

fn check_password(password: &SecretString) -> Result<(), AuthError> {
    if password.expose_secret().is_empty() {
        return Err(AuthError::EmptyPassword);
    }
    Ok(())
}

fn check_iterations(asked: u32) -> Result<(), AuthError> {
    if !(MIN_ITERATIONS..=MAX_ITERATIONS).contains(&asked) {
        return Err(AuthError::Iterations { asked });
    }
    Ok(())
}

fn check_nonce(nonce: &str) -> Result<(), AuthError> {
    let printable = nonce
        .bytes()
        .all(|byte| byte.is_ascii_graphic() && byte != b',');
    if nonce.len() < MIN_NONCE || !printable {
        return Err(AuthError::Nonce);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
