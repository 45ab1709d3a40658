//! Turns: ours and theirs, one after the other, on equal tables.

use std::time::Duration;

use skyschedule_common::env;
use skyschedule_common::protocol::messages::Numbering;

use super::locked::{Way, Workers};
use super::members::{Members, Servers, slots};
use super::place::{BY_SLOT, BY_TIME, Kind, Place};
use super::report::{Measured, Report, Row, median, say};
use super::{Options, Part, Result};

/// Rows of a mark on both sides, and of a transaction's query.
pub(crate) const BATCH: usize = 100;

/// Rows that a consumer has in work at most, as a worker with two transactions has.
pub(crate) const IN_WORK: usize = BATCH * 2;

/// Before a window.
const WARM_UP: Duration = Duration::from_secs(1);

/// Consumers of a drain.
const DRAINERS: usize = 16;

/// So many times as long as ours may their drain take before it is broken off.
const PATIENCE: u32 = 5;

/// Those who work through a table.
pub(crate) trait Crew {
    /// Rows that they have marked.
    fn marked(&self) -> u64;
    /// Ends them in good order.
    async fn stop(self) -> Result<()>;
}

/// Rows marked in a window, per second.
#[allow(clippy::cast_precision_loss, reason = "far from 2^52")]
async fn rate(crew: &impl Crew, window: Duration, rows: u64) -> Result<f64> {
    env::sleep(WARM_UP).await;
    let (before, start) = (crew.marked(), env::now());
    loop {
        env::sleep(Duration::from_millis(50)).await;
        let (marked, took) = (crew.marked(), start.elapsed());
        // Not until the table is empty: both are measured at full work.
        if took >= window || marked > rows / 10 * 8 {
            return Ok((marked - before) as f64 / took.as_secs_f64());
        }
    }
}

/// Ends a turn: the table says the same as those who worked, and is as before.
async fn end(place: &Place, crew: impl Crew, table: &str, count: u64) -> Result<()> {
    crew.stop().await?;
    let marked = place.marked(table).await?;
    if marked < i64::try_from(count)? {
        return Err(format!("{count} rows were counted, and {marked} marked").into());
    }
    place.put_back(table).await
}

async fn their_rate(place: &Place, count: usize, way: Way, window: Duration) -> Result<f64> {
    let workers = Workers::start(place, count, way).await?;
    let rate = rate(&workers, window, place.rows).await?;
    let count = workers.marked();
    end(place, workers, BY_TIME, count).await?;
    Ok(rate)
}

/// The better way for so many workers, as found in short windows.
async fn better_way(place: &Place, count: usize) -> Result<Way> {
    let mut sums = [0.0; 2];
    for _ in 0..2 {
        for (sum, way) in sums.iter_mut().zip([Way::One, Way::All]) {
            let workers = Workers::start(place, count, way).await?;
            *sum += rate(&workers, Duration::from_secs(1), place.rows / 4).await?;
            workers.stop().await?;
        }
    }
    place.put_back(BY_TIME).await?;
    Ok(if sums[0] >= sums[1] {
        Way::One
    } else {
        Way::All
    })
}

pub(crate) async fn throughput(
    options: &Options,
    place: &Place,
    servers: &Servers,
    part: Part,
    count: usize,
    report: &mut Report,
) -> Result<()> {
    let (name, numbering, table) = match part {
        Part::Slots => ("slots", slots(), BY_SLOT),
        _ => ("modulo", Numbering::Modulo, BY_TIME),
    };
    let way = better_way(place, count).await?;
    let mut turns = Vec::new();
    for round in 0..options.rounds {
        let members = Members::start(place, servers, numbering, count, table).await?;
        let ours = rate(&members, options.window(), place.rows).await?;
        let marked = members.marked();
        end(place, members, table, marked).await?;
        let theirs = their_rate(place, count, way, options.window()).await?;
        say(&format!(
            "{name} {count} round {}: {ours:.0} beside {theirs:.0} rows/s",
            round + 1
        ));
        turns.push((ours, theirs));
    }
    report.add(Row {
        database: place.kind.name(),
        what: format!("{name}, {count} consumers"),
        measured: Measured::Rates(turns),
        bar: match (place.kind, part, count) {
            (Kind::Postgres, Part::Modulo, 1) => Some(1.0),
            (Kind::Postgres, Part::Modulo, 4) => Some(1.2),
            (Kind::Postgres, Part::Modulo, 16) => Some(2.5),
            (Kind::Postgres, Part::Slots, 16) => Some(3.0),
            (Kind::Postgres, Part::Slots, 64) => Some(5.0),
            (Kind::Mariadb, Part::Slots, 16) => Some(3.5),
            _ => None,
        },
        note: way.name().to_owned(),
    });
    Ok(())
}

/// How a drain went.
struct Drain {
    /// Until all was marked, or it was broken off.
    took: Duration,
    marked: u64,
    /// Rows a second in each tenth.
    tenths: Vec<f64>,
}

impl Drain {
    #[allow(clippy::cast_precision_loss, reason = "far from 2^52")]
    async fn of(crew: &impl Crew, rows: u64, limit: Duration) -> Self {
        let start = env::now();
        let (mut tenths, mut since, mut before) = (Vec::new(), Duration::ZERO, 0);
        loop {
            env::sleep(Duration::from_millis(10)).await;
            let (marked, took) = (crew.marked(), start.elapsed());
            if marked - before >= rows / 10 {
                let step = (took - since).as_secs_f64();
                tenths.push((marked - before) as f64 / step);
                (since, before) = (took, marked);
            }
            if marked >= rows || took >= limit {
                if marked > before {
                    tenths.push((marked - before) as f64 / (took - since).as_secs_f64());
                }
                return Self {
                    took,
                    marked,
                    tenths,
                };
            }
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "far from 2^52")]
    fn rate(&self) -> f64 {
        self.marked as f64 / self.took.as_secs_f64()
    }

    fn shown(&self) -> String {
        let tenths: Vec<String> = self
            .tenths
            .iter()
            .map(|rate| format!("{:.1}", rate / 1_000.0))
            .collect();
        tenths.join(" ")
    }
}

pub(crate) async fn drain(
    options: &Options,
    place: &Place,
    servers: &Servers,
    snapshot: bool,
    report: &mut Report,
) -> Result<()> {
    let way = better_way(place, DRAINERS).await?;
    let (mut turns, mut flat, mut note) = (Vec::new(), Vec::new(), String::new());
    let longest = Duration::from_secs(1_200);
    for _ in 0..options.drains {
        let held = if snapshot {
            Some(place.snapshot().await?)
        } else {
            None
        };
        let members = Members::start(place, servers, slots(), DRAINERS, BY_SLOT).await?;
        let ours = Drain::of(&members, place.rows, longest).await;
        members.stop().await?;
        let workers = Workers::start(place, DRAINERS, way).await?;
        let theirs = Drain::of(&workers, place.rows, ours.took * PATIENCE).await;
        workers.stop().await?;
        drop(held);
        for (table, drain) in [(BY_SLOT, &ours), (BY_TIME, &theirs)] {
            if place.marked(table).await? < i64::try_from(drain.marked)? {
                return Err(format!("{table} has fewer marked rows than were counted").into());
            }
            place.put_back(table).await?;
        }
        turns.push((ours.rate(), theirs.rate()));
        if let (Some(first), Some(last)) = (ours.tenths.first(), ours.tenths.last()) {
            flat.push((*last, *first));
        }
        let broken_off = if theirs.marked < place.rows {
            format!(", broken off after {:.0} s", theirs.took.as_secs_f64())
        } else {
            String::new()
        };
        note = format!(
            "{}; 1000 rows/s by tenths: {} beside {}{broken_off}",
            way.name(),
            ours.shown(),
            theirs.shown()
        );
        say(&note);
    }
    let what = if snapshot {
        "drain under an old snapshot"
    } else {
        "drain"
    };
    report.add(Row {
        database: place.kind.name(),
        what: format!("slots, {what}, {DRAINERS} consumers"),
        measured: Measured::Rates(turns),
        bar: (place.kind == Kind::Postgres).then_some(3.0),
        note,
    });
    let ratio = median(flat.iter().map(|(last, first)| last / first));
    report.add(Row {
        database: place.kind.name(),
        what: format!("slots, {what}: last tenth to first"),
        measured: Measured::Ratio(ratio),
        bar: (place.kind == Kind::Postgres).then_some(0.7),
        note: String::new(),
    });
    Ok(())
}
