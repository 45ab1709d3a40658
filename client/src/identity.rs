//! What a client is called when nobody named it.

use skyschedule_common::env::rng;
use skyschedule_common::ids::{ClientId, InvalidName};

/// `host-pid-random`: readable for people, and never that of another process.
pub(crate) fn default_client_id() -> Result<ClientId, InvalidName> {
    let random = rng::u64() & 0xffff_ffff;
    ClientId::new(format!("{}-{}-{random:08x}", host(), process()))
}

#[cfg(all(unix, not(sim)))]
fn host() -> String {
    let name = rustix::system::uname();
    let name: String = name
        .nodename()
        .to_string_lossy()
        .chars()
        .filter(char::is_ascii_graphic)
        .take(64)
        .collect();
    if name.is_empty() {
        "host".to_owned()
    } else {
        name
    }
}

#[cfg(any(not(unix), sim))]
fn host() -> String {
    "host".to_owned()
}

#[cfg(not(sim))]
fn process() -> u32 {
    std::process::id()
}

#[cfg(sim)]
fn process() -> u32 {
    0
}
