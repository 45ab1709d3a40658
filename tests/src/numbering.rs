//! Whether members divide the rows among themselves.

use std::time::Duration;

use skyschedule_common::env;
use skyschedule_common::share::{Numbers, Share};

use crate::member::{Event, Member, PATIENCE, Rows};

/// Whether the shares have one total, are disjoint and cover every row.
pub fn is_whole(shares: &[Share]) -> bool {
    let Some(total) = shares.first().map(Share::total) else {
        return false;
    };
    let mut seen = Numbers::EMPTY;
    for share in shares {
        if share.total() != total || share.numbers().meets(&seen) {
            return false;
        }
        seen = seen.union(share.numbers());
    }
    seen == Numbers::below(total)
}

/// What a member keeps while only servers come and go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its epoch, as text.
    pub epoch: Option<String>,
    /// Each share: the total, and inclusive ranges of numbers.
    pub shares: Vec<(u32, Vec<(u32, u32)>)>,
    /// Its membership, as text.
    pub membership: Option<String>,
}

/// What these members have at present.
pub fn kept(members: &[Member]) -> Vec<Kept> {
    let of = |member: &Member| {
        let rows = member.rows();
        Kept {
            epoch: rows.epoch,
            shares: rows.shares,
            membership: member.membership(),
        }
    };
    members.iter().map(of).collect()
}

/// All of them, for those who ask for some.
pub fn all(members: &[Member]) -> Vec<&Member> {
    members.iter().collect()
}

/// A numbering that all members have taken.
#[derive(Debug, Clone)]
pub struct Numbering {
    /// The rows of each member, in the order in which they were asked.
    pub rows: Vec<Rows>,
    /// When the last of them had taken its share under a lease.
    pub at: u64,
}

impl Numbering {
    /// How long after `start` it was complete.
    pub fn after(&self, start: u64) -> Duration {
        Duration::from_nanos(self.at.saturating_sub(start))
    }
}

/// Waits until these members, and no others, own every row, each under a lease.
///
/// Just after a member was lost another one may have its rows beside its own, under the old total.
pub async fn covered(members: &[&Member]) -> Numbering {
    until(members, |_| true).await
}

/// Waits until these members own every row, each one number of as many as there are members.
pub async fn numbered(members: &[&Member]) -> Numbering {
    until(members, |rows| has_one_of(members.len(), rows)).await
}

/// As [`numbered`], and until each of them knows that all have taken the numbering: with its next heartbeat.
pub async fn settled(members: &[&Member]) -> Numbering {
    until(members, |rows| {
        has_one_of(members.len(), rows) && rows.settled
    })
    .await
}

fn has_one_of(total: usize, rows: &Rows) -> bool {
    rows.node
        .is_some_and(|node| usize::try_from(node.0) == Ok(total))
}

async fn until(members: &[&Member], ready: impl Fn(&Rows) -> bool) -> Numbering {
    let deadline = env::now() + PATIENCE;
    loop {
        let rows: Vec<Rows> = members.iter().map(|member| member.rows()).collect();
        let shares: Option<Vec<Share>> = rows
            .iter()
            .map(|rows| rows.share().filter(|_| rows.is_leased() && ready(rows)))
            .collect();
        if shares.is_some_and(|shares| is_whole(&shares)) {
            let at = members
                .iter()
                .zip(&rows)
                .map(|(member, rows)| since(member, rows))
                .max();
            return Numbering {
                rows,
                at: at.expect("there is a member"),
            };
        }
        if env::now() > deadline {
            let all: Vec<String> = members.iter().map(ToString::to_string).collect();
            panic!("no numbering within {PATIENCE:?}:\n{}", all.join("\n"));
        }
        env::sleep(Duration::from_millis(2)).await;
    }
}

/// When the member first showed the rows that it shows now, under a lease.
fn since(member: &Member, now: &Rows) -> u64 {
    let same =
        |rows: &Rows| rows.epoch == now.epoch && rows.shares == now.shares && rows.is_leased();
    let first = member.events().into_iter().find_map(|event| match event {
        Event::Share(rows) if same(&rows) => Some(rows.at),
        _ => None,
    });
    first.unwrap_or(now.at)
}
