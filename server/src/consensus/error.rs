//! What can go wrong, and what to do about it.

use std::io;

use super::split::REMEDY;

/// The memory of this replica cannot be opened, or cannot be written any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsensusError {
    /// Another process has it.
    #[error(
        "another process uses the data folder {place}: stop it, or give this replica a folder of its own (--data-dir)"
    )]
    Locked {
        /// The data folder.
        place: String,
    },
    /// The folder or a file in it cannot be opened or made.
    #[error(
        "the data folder {place} cannot be used ({source}): check that it can be made and written by this user, and that the disk works"
    )]
    Inaccessible {
        /// The data folder.
        place: String,
        /// Why.
        source: io::Error,
    },
    /// It is something else.
    #[error(
        "{place} holds something else than a store of SkySchedule ({reason}): give this replica a folder of its own (--data-dir)"
    )]
    Foreign {
        /// The data folder.
        place: String,
        /// What was found.
        reason: String,
    },
    /// It was written by a later version.
    #[error(
        "the store in {place} has format {found}, and this version reads up to {known}: use a version of skyschedule that is at least as new as the one that wrote it"
    )]
    Newer {
        /// The data folder.
        place: String,
        /// Format found.
        found: u64,
        /// Newest format that this version reads.
        known: u64,
    },
    /// It was written by a version whose stores cannot be carried over.
    #[error(
        "the store in {place} has format {found}, of a version before the first release, which cannot be carried over: \
         move the folder away to begin with an empty one; clients that know of later decisions then make the server go on above them"
    )]
    Older {
        /// The data folder.
        place: String,
        /// Format found.
        found: u64,
    },
    /// It is another replica's.
    #[error(
        "the store in {place} is that of replica {found}, and this is replica {given}: correct --replica-id, or give this replica its own --data-dir"
    )]
    OtherReplica {
        /// The data folder.
        place: String,
        /// Whose it is.
        found: u64,
        /// Which replica this is.
        given: u64,
    },
    /// It is in a cluster, and the configuration says that it is alone.
    #[error(
        "the cluster in {place} has the replicas {stored}, and the configuration lists none: set --peers (and --replica-id), \
         or move the folder away to begin with an empty one"
    )]
    OtherPeers {
        /// The data folder.
        place: String,
        /// Replicas of the cluster.
        stored: String,
    },
    /// It is another cluster's.
    #[error(
        "the store in {place} is from another cluster than the one that the other replicas form: correct --peers, \
         or give this replica its own --data-dir, or an empty one, which the others then fill"
    )]
    OtherCluster {
        /// The data folder.
        place: String,
    },
    /// Another process is this replica.
    #[error(
        "another process runs as replica {replica} at {address}, where this cluster has replica {replica}: start this one with the \
         --replica-id and the --peers that are meant for it; or, if it takes the place of the other one, stop that one first"
    )]
    Twin {
        /// Which.
        replica: u16,
        /// Where the other one is.
        address: String,
    },
    /// The cluster goes on without it.
    #[error(
        "replica {replica} was removed from its cluster, and the store in {place} takes part in it no more: stop this replica for good, \
         or, to add it anew under this id or another, move the folder away for good, start it with an empty one, and call \
         `skyschedule cluster add {replica} HOST:PORT`"
    )]
    Removed {
        /// The data folder.
        place: String,
        /// Which.
        replica: u16,
    },
    /// Data folders of different moments run together.
    #[error(
        "this replica ({replica}) and replica {other} have decided different things ({why}): copies of data folders of different \
         moments ran together. Nothing in {place} was overwritten. {REMEDY}"
    )]
    Split {
        /// The data folder.
        place: String,
        /// This one.
        replica: u16,
        /// The one that differs.
        other: u16,
        /// How that shows.
        why: String,
    },
    /// It is not what was written.
    #[error(
        "the store in {place} is damaged ({reason}): move it away and start with an empty one, \
         which the other replicas fill. A server that has no others: restore the folder from a backup, or begin with an empty one, and \
         clients that know of later decisions make it go on above them"
    )]
    Damaged {
        /// The data folder.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// Writes that were durable are missing at its end.
    #[error(
        "the store in {place} ends with write {last}, and write {durable} was durable: it was damaged, or replaced by an older copy. \
         Restore the whole folder. Where there are other replicas, move it away instead: they fill an empty one. \
         Without others, delete its file {mark} to go on with what is there; \
         clients that know of later decisions then make the server go on above them"
    )]
    Shortened {
        /// The data folder.
        place: String,
        /// Last write found.
        last: u64,
        /// Last write that was durable.
        durable: u64,
        /// Name of the file that knows.
        mark: &'static str,
    },
    /// A write failed: nothing that it held was answered, and nothing more will be.
    #[error(
        "the store in {place} cannot be written ({reason}): make room on the disk or repair it, then start the server again; nothing that was answered is lost"
    )]
    Write {
        /// The data folder.
        place: String,
        /// Why.
        reason: String,
    },
    /// The program has a fault.
    #[error(
        "the task that keeps the store in {place} has failed ({reason}): start the server again and please report it; nothing that was answered is lost"
    )]
    Panicked {
        /// The data folder.
        place: String,
        /// What is known.
        reason: String,
    },
}

/// Commands cannot be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Too many wait to be written.
    #[error("too many decisions wait for the disk; try again in a moment")]
    Busy,
    /// One of them is too large.
    #[error("a decision of more than {limit} bytes cannot be kept; split it")]
    TooLarge {
        /// Bytes allowed in a batch.
        limit: usize,
    },
    /// This replica has stopped.
    #[error("this replica has stopped")]
    Stopped,
}

/// This replica cannot be sure that it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfirmError {
    /// It does not lead.
    #[error("this replica does not lead; turn to the leader")]
    NotLeader,
    /// Too few replicas confirmed it in time.
    #[error("too few replicas answer; it may lead or not")]
    NoQuorum,
}
