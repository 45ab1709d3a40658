//! A client derives its key once a process, however many servers it logs in to and however often.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};

use super::scram::Keys;

/// Derived keys kept: a process has few users, and its servers share their salts.
const CAPACITY: usize = 16;

/// The keys of this process.
pub(super) static KEYS: KeyCache = KeyCache::new();

/// A digest of password, salt and iterations: all that a key depends on.
type Id = [u8; 32];

/// Filled outside the cache's lock; those who want the same key wait for one derivation.
type Slot = Arc<OnceLock<Arc<Keys>>>;

/// The newest few derived keys.
pub(super) struct KeyCache {
    slots: Mutex<VecDeque<(Id, Slot)>>,
}

impl KeyCache {
    const fn new() -> Self {
        Self {
            slots: Mutex::new(VecDeque::new()),
        }
    }

    /// The keys of this password, derived now if they are not known.
    pub(super) fn get(&self, password: &SecretString, salt: &[u8], iterations: u32) -> Arc<Keys> {
        let slot = self.slot(id(password, salt, iterations));
        Arc::clone(slot.get_or_init(|| Arc::new(Keys::derive(password, salt, iterations))))
    }

    /// Whether [`get`](Self::get) has nothing to derive.
    pub(super) fn knows(&self, password: &SecretString, salt: &[u8], iterations: u32) -> bool {
        let id = id(password, salt, iterations);
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.iter().find(|(known, _)| *known == id);
        slot.is_some_and(|(_, slot)| slot.get().is_some())
    }

    fn slot(&self, id: Id) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, slot)) = slots.iter().find(|(known, _)| *known == id) {
            return Arc::clone(slot);
        }
        if slots.len() == CAPACITY {
            slots.pop_front();
        }
        let slot = Slot::default();
        slots.push_back((id, Arc::clone(&slot)));
        slot
    }
}

fn id(password: &SecretString, salt: &[u8], iterations: u32) -> Id {
    let salt_and_iterations = Sha256::new_with_prefix(salt)
        .chain_update(iterations.to_be_bytes())
        .finalize();
    Sha256::new_with_prefix(salt_and_iterations)
        .chain_update(password.expose_secret())
        .finalize()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEW: u32 = 2;

    fn password(text: &str) -> SecretString {
        text.into()
    }

    #[test]
    fn the_same_login_derives_once_and_another_derives_anew() {
        let cache = KeyCache::new();
        assert!(!cache.knows(&password("walker"), b"salt", FEW));
        let first = cache.get(&password("walker"), b"salt", FEW);
        assert!(cache.knows(&password("walker"), b"salt", FEW));
        assert!(!cache.knows(&password("walker"), b"salt", FEW + 1));
        assert!(Arc::ptr_eq(
            &first,
            &cache.get(&password("walker"), b"salt", FEW)
        ));
        for (text, salt, iterations) in [
            ("walkex", "salt", FEW),
            ("walker", "salx", FEW),
            ("walker", "salt", FEW + 1),
        ] {
            let other = cache.get(&password(text), salt.as_bytes(), iterations);
            assert_ne!(first.client.bytes(), other.client.bytes());
        }
    }

    #[test]
    fn concurrent_logins_share_one_derivation() {
        let cache = KeyCache::new();
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| cache.get(&password("walker"), b"salt", 5_000)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(all.iter().all(|keys| Arc::ptr_eq(keys, &all[0])));
    }

    #[test]
    fn a_server_that_changes_its_salt_for_ever_fills_no_memory() {
        let cache = KeyCache::new();
        for salt in 0..100_u32 {
            cache.get(&password("walker"), &salt.to_be_bytes(), FEW);
        }
        assert_eq!(cache.slots.lock().unwrap().len(), CAPACITY);
    }
}
