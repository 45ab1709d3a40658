//! Why there was no answer: what was tried, for how long, and what to check.

use std::io::ErrorKind;
use std::net::ToSocketAddrs as _;
use std::time::Duration;

use ureq::{Error, Timeout};

/// What was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    /// `host:port`, as the operator wrote it.
    pub(super) place: &'a str,
    /// How long a connection may take to be made.
    pub(super) connect: Duration,
    /// How long all may take.
    pub(super) patience: Duration,
    /// Whether it was to change something.
    pub(super) changes: bool,
}

/// The reason for operators: what a library says of it helps nobody.
pub(super) fn why(asked: Asked<'_>, error: &Error) -> String {
    let Asked { place, .. } = asked;
    let kind = match error {
        Error::Io(error) => Some(error.kind()),
        _ => None,
    };
    match (error, kind) {
        (Error::Timeout(Timeout::Resolve | Timeout::Connect), _) => format!(
            "cannot connect to {place} within {} s: check the address (--admin), that the host is up, and that no firewall is \
             between",
            asked.connect.as_secs_f32()
        ),
        (Error::Timeout(_), _) => unsure(
            asked,
            format!(
                "{place} accepts the connection, but gives no answer within {} s: the server stands still or has too much to do, or \
                 something else listens there. Check its log and its processor, and the address (--admin)",
                asked.patience.as_secs_f32()
            ),
        ),
        (_, Some(ErrorKind::ConnectionRefused)) => format!(
            "nothing listens at {place}: is the server running, and is this its admin address (--admin)?"
        ),
        (Error::HostNotFound, _) => unknown_name(place),
        (_, Some(kind)) if is_end(kind) => unsure(
            asked,
            format!(
                "{place} ended the connection and gave no answer: the server stops, or has too many callers, or this is not its admin \
                 address but that of its clients (--admin)"
            ),
        ),
        (Error::Protocol(_) | Error::Http(_) | Error::LargeResponseHeader(..), _) => format!(
            "what listens at {place} is no admin interface of SkySchedule, since it does not answer in HTTP: is this the address of \
             its clients? The admin address (--admin) has another port"
        ),
        (Error::BodyExceedsLimit(limit), _) => format!(
            "the answer of {place} has more than {limit} bytes: is this the admin address of SkySchedule (--admin)?"
        ),
        _ if !is_known(place) => unknown_name(place),
        _ => format!(
            "cannot talk to {place} ({error}): check the address (--admin) and the network to it"
        ),
    }
}

/// Whether the host of `host:port` has an address.
fn is_known(place: &str) -> bool {
    let place = place.split('/').next().unwrap_or_default();
    let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (host, 0).to_socket_addrs().is_ok()
}

fn unknown_name(place: &str) -> String {
    format!(
        "the name in {place} cannot be resolved: check the address (--admin) and the name service of this host"
    )
}

/// The connection was there, and is no more.
fn is_end(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        kind,
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
    )
}

/// The question may have arrived.
fn unsure(asked: Asked<'_>, text: String) -> String {
    match asked.changes {
        true => format!("{text}. The change may be done or not: ask again"),
        false => text,
    }
}
