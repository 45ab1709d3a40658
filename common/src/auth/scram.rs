//! The functions of RFC 5802, section 3, with SHA-256.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit as _, Mac as _};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::Signature;

/// Block size of SHA-256 in bytes.
const BLOCK: usize = 64;

/// A secret key: wiped when dropped, never printed.
#[derive(Clone)]
pub(super) struct Key(Zeroizing<[u8; 32]>);

impl Key {
    pub(super) fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// `HMAC(key, message)`.
    pub(super) fn sign(&self, message: &[u8]) -> Signature {
        // HMAC fills a short key up with zeros itself; a full block cannot have a wrong length.
        let mut block = Zeroizing::new([0; BLOCK]);
        block[..self.0.len()].copy_from_slice(self.bytes());
        let mut mac = Hmac::<Sha256>::new((&*block).into());
        mac.update(message);
        mac.finalize().into_bytes().into()
    }

    /// `HMAC(key, label)`, a key of its own.
    pub(super) fn derive(&self, label: &[u8]) -> Self {
        Self::new(self.sign(label))
    }

    /// `H(key)`.
    pub(super) fn hash(&self) -> Self {
        Self::new(Sha256::digest(self.bytes()).into())
    }

    /// `key XOR signature`.
    pub(super) fn xor(&self, signature: &Signature) -> [u8; 32] {
        let mut bytes = *self.0;
        for (byte, other) in bytes.iter_mut().zip(signature) {
            *byte ^= other;
        }
        bytes
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[REDACTED]")
    }
}

/// The two keys that follow from a password.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    pub(super) client: Key,
    pub(super) server: Key,
}

impl Keys {
    /// `Hi(password, salt, iterations)`, the costly step, and what follows from it.
    pub(super) fn derive(password: &SecretString, salt: &[u8], iterations: u32) -> Self {
        let password = password.expose_secret().as_bytes();
        let salted = Key::new(pbkdf2::pbkdf2_hmac_array::<Sha256, 32>(
            password, salt, iterations,
        ));
        Self {
            client: salted.derive(b"Client Key"),
            server: salted.derive(b"Server Key"),
        }
    }
}

/// `AuthMessage`: all that both sides said, as the text that the RFC would have put on the wire.
pub(super) fn auth_message(
    user: &str,
    client_nonce: &str,
    nonce: &str,
    salt: &[u8],
    iterations: u32,
) -> String {
    let user = user.replace('=', "=3D").replace(',', "=2C");
    let salt = BASE64.encode(salt);
    // `biws` is the header "n,,": no channel binding.
    format!("n={user},r={client_nonce},r={nonce},s={salt},i={iterations},c=biws,r={nonce}")
}
