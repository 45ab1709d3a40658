//! The name of everything that is counted.

/// Connections that are open.
pub const CONNECTIONS: &str = "skyschedule_connections";
/// Connections that were turned away before a login, by `reason`.
pub const CONNECTIONS_REFUSED: &str = "skyschedule_connections_refused_total";
/// Clients that this server carries on to the one that leads, which they cannot reach themselves.
pub const RELAYS: &str = "skyschedule_relays";
/// How many it has ever carried.
pub const RELAYED: &str = "skyschedule_relayed_total";
/// Logins, by `result`.
pub const LOGINS: &str = "skyschedule_logins_total";
/// Connections closed because of bytes that are no message, or a message out of turn.
pub const PROTOCOL_ERRORS: &str = "skyschedule_protocol_errors_total";
/// Connections closed because the peer did not read what it was sent.
pub const SLOW_READERS: &str = "skyschedule_slow_readers_total";
/// Heartbeats that were read.
pub const HEARTBEATS: &str = "skyschedule_heartbeats_total";
/// Members, by `group`; 0 on a replica that does not lead.
pub const MEMBERS: &str = "skyschedule_members";
/// Groups; 0 on a replica that does not lead.
pub const GROUPS: &str = "skyschedule_groups";
/// The part of a group's rows that no member is to have although it has members, from 0 to 1, by `group`.
pub const UNOWNED: &str = "skyschedule_unowned_ratio";
/// Handovers that are over, by `group`.
pub const HANDOVERS: &str = "skyschedule_handovers_total";
/// How long handovers took, in seconds.
pub const HANDOVER_SECONDS: &str = "skyschedule_handover_seconds";
/// Shares that members were told.
pub const TOLD: &str = "skyschedule_told_total";
/// Members that died, by `group` and `why`.
pub const EXPIRED: &str = "skyschedule_expired_total";
/// Members that did not release in time, so that others went on, by `group`.
pub const OVERTAKEN: &str = "skyschedule_overtaken_total";
/// Members whose lease is no longer renewed since they do not release, by `group`.
pub const FENCED: &str = "skyschedule_fenced_total";
/// Joins put off because the client died too often, by `group`.
pub const DELAYED_JOINS: &str = "skyschedule_delayed_joins_total";
/// Commands that were made durable.
pub const COMMITS: &str = "skyschedule_commits_total";
/// How long a batch of commands took to become durable, in seconds.
pub const COMMIT_SECONDS: &str = "skyschedule_commit_seconds";
/// 1 while this replica numbers by itself, since it has no quorum, else 0.
pub const DEGRADED: &str = "skyschedule_degraded";
/// Seconds for which this replica has seen no quorum; 0 while it sees one.
pub const WITHOUT_QUORUM: &str = "skyschedule_without_quorum_seconds";
/// Entries of the log that another replica lacks, by `replica`; none on a replica that does not lead.
pub const REPLICA_LAG: &str = "skyschedule_replica_lag_entries";
/// Counts leaderships, as far as this replica knows; 0 on one that is alone.
pub const TERM: &str = "skyschedule_term";
/// 1 on the leader, else 0.
pub const LEADER: &str = "skyschedule_leader";

/// All of them.
pub const ALL: [&str; 25] = [
    CONNECTIONS,
    CONNECTIONS_REFUSED,
    RELAYS,
    RELAYED,
    LOGINS,
    PROTOCOL_ERRORS,
    SLOW_READERS,
    HEARTBEATS,
    MEMBERS,
    GROUPS,
    UNOWNED,
    HANDOVERS,
    HANDOVER_SECONDS,
    TOLD,
    EXPIRED,
    OVERTAKEN,
    FENCED,
    DELAYED_JOINS,
    COMMITS,
    COMMIT_SECONDS,
    LEADER,
    DEGRADED,
    WITHOUT_QUORUM,
    REPLICA_LAG,
    TERM,
];
