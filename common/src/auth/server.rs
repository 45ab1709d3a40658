//! The server's side.

use secrecy::SecretString;
use subtle::{Choice, ConstantTimeEq as _};

use super::scram::{Key, Keys, auth_message};
use super::{
    AuthError, Challenge, JointNonce, Nonce, Salt, Signature, check_iterations, check_nonce,
    check_password,
};

/// Bytes of the salts made here.
const SALT: usize = 16;

/// What the server keeps of a user: enough to check a login, not enough to log in.
#[derive(Debug, Clone)]
pub struct StoredUser {
    salt: Salt,
    iterations: u32,
    stored_key: Key,
    server_key: Key,
}

impl StoredUser {
    /// Derives the keys: `iterations` rounds of PBKDF2, tens of milliseconds, so not on an I/O thread.
    pub fn derive(password: &SecretString, salt: Salt, iterations: u32) -> Result<Self, AuthError> {
        check_password(password)?;
        check_iterations(iterations)?;
        let keys = Keys::derive(password, &salt, iterations);
        Ok(Self {
            salt,
            iterations,
            stored_key: keys.client.hash(),
            server_key: keys.server,
        })
    }
}

/// Makes users that do not exist look like users that do.
///
/// A name always gets the same salt. Real users should get theirs from [`Decoys::salt`] too, with the same
/// number of iterations: then nothing tells them apart, and all replicas that share the secret ask a client
/// for the same key, which it derives once. The secret must survive restarts.
#[derive(Debug, Clone)]
pub struct Decoys {
    secret: Key,
    iterations: u32,
}

impl Decoys {
    /// From a random secret, and the iterations that real users have.
    pub fn new(secret: [u8; 32], iterations: u32) -> Self {
        Self {
            secret: Key::new(secret),
            iterations,
        }
    }

    /// The salt of this name.
    pub fn salt(&self, user: &str) -> Salt {
        let mut salt = Salt::new();
        for byte in self.key("salt", user).bytes().iter().take(SALT) {
            // Never full: a salt may be longer.
            let _ = salt.try_push(*byte);
        }
        salt
    }

    fn user(&self, user: &str) -> StoredUser {
        StoredUser {
            salt: self.salt(user),
            iterations: self.iterations,
            stored_key: self.key("stored", user),
            server_key: self.key("server", user),
        }
    }

    fn key(&self, purpose: &str, user: &str) -> Key {
        self.secret.derive(format!("{purpose},{user}").as_bytes())
    }
}

/// A login in progress: the challenge is out, the proof is awaited.
#[derive(Debug)]
pub struct ServerExchange {
    known: Choice,
    user: StoredUser,
    auth_message: String,
}

impl ServerExchange {
    /// Answers a client's first message. `stored` is `None` for an unknown user, who gets a challenge like
    /// any other and fails at the proof. `server_nonce` must be new for each login.
    pub fn challenge(
        stored: Option<&StoredUser>,
        decoys: &Decoys,
        user: &str,
        client_nonce: &Nonce,
        server_nonce: &Nonce,
    ) -> Result<(Challenge, Self), AuthError> {
        check_nonce(client_nonce)?;
        check_nonce(server_nonce)?;
        let nonce = JointNonce::try_from(format!("{client_nonce}{server_nonce}"))
            .map_err(|_| AuthError::Nonce)?;
        // Made for known users too, so that both take the same time.
        let decoy = decoys.user(user);
        let known = Choice::from(u8::from(stored.is_some()));
        let stored = stored.unwrap_or(&decoy).clone();
        let challenge = Challenge {
            nonce,
            salt: stored.salt.clone(),
            iterations: stored.iterations,
        };
        let auth_message = auth_message(
            user,
            client_nonce,
            &challenge.nonce,
            &challenge.salt,
            challenge.iterations,
        );
        Ok((
            challenge,
            Self {
                known,
                user: stored,
                auth_message,
            },
        ))
    }

    /// Checks the client's proof, in constant time, and answers with the server's own.
    /// [`AuthError::Refused`] does not say what was wrong; slow the peer down before it is told.
    pub fn verify(self, proof: &Signature) -> Result<Signature, AuthError> {
        let message = self.auth_message.as_bytes();
        let client_key = Key::new(*proof).xor(&self.user.stored_key.sign(message));
        let right = Key::new(client_key)
            .hash()
            .bytes()
            .ct_eq(self.user.stored_key.bytes());
        let signature = self.user.server_key.sign(message);
        if bool::from(right & self.known) {
            Ok(signature)
        } else {
            Err(AuthError::Refused)
        }
    }
}
