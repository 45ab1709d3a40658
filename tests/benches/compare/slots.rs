//! A newcomer's first row: three replicas of SkySchedule beside a rebalance through three etcd members.

use std::path::Path;
use std::time::Duration;

use skyschedule_common::env::{self, Instant};

use crate::Options;
use crate::common::Result;
use crate::common::process::Worker;
use crate::common::report::{Report, Row, Samples};
use crate::common::server::rest;
use crate::rows::Rows;
use crate::run::PROMISE_BAR;
use crate::servers::{Number, PATIENCE, Servers, System};
use crate::slot_crew::{Settled, Who};
use crate::stage::{PROCESSES, Stage};

/// Measures SkySchedule before and after the others.
pub(crate) async fn all(options: &Options, report: &mut Report) -> Result<()> {
    let (size, joins) = (options.slot_members, options.joins);
    let folder = tempfile::tempdir()?;
    let table = &folder.path().join("tasks.db");
    Rows::create(table, options.slots).await?;
    let mut ours = skyschedule(options, joins.div_ceil(2), table).await?;
    let affected = etcd(options, Who::Affected, table).await?;
    let everyone = etcd(options, Who::All, table).await?;
    ours.extend(skyschedule(options, joins / 2, table).await?);
    for (name, theirs, bar) in [
        ("3 etcd, the affected acknowledge", affected, None),
        ("3 etcd, all acknowledge", everyone, Some(PROMISE_BAR)),
    ] {
        for (which, part) in [("p50", 0.5), ("p99", 0.99)] {
            report.add(Row::beside(
                format!(
                    "{} slots, {size} members: first row, {which}",
                    options.slots
                ),
                "ms",
                ours.at(part),
                (name, theirs.at(part)),
                bar,
            ));
        }
    }
    Ok(())
}

/// From the proof of a login until the newcomer has read a row of a slot of its own.
async fn skyschedule(options: &Options, joins: usize, table: &Path) -> Result<Samples> {
    let (size, slots) = (options.slot_members, options.slots);
    let mut stage = Stage::set(System::SkySchedule, Number::Three, size, slots).await?;
    let rows = Rows::open(table).await?;
    stage.gather().await?;
    let mut times = Samples::NONE;
    for round in 0..joins {
        let name = format!("newcomer{round}");
        let mut newcomer = stage.newcomer(&name, slots, 1).await?;
        let began = newcomer.began;
        rows.first_of(&newcomer.share).await?;
        let first = env::now();
        times.push(first.saturating_duration_since(began));
        let end = stage.numbered(size + 1).await?.max(first);
        newcomer.rest(end.saturating_duration_since(began)).await;
        let (began, peer) = newcomer.leave().await;
        let end = stage.numbered(size).await?;
        drop(peer);
        rest(end.saturating_duration_since(began)).await;
    }
    Ok(times)
}

/// From the newcomer's key until it has read a row of a slot of its own.
async fn etcd(options: &Options, who: Who, table: &Path) -> Result<Samples> {
    let (size, slots) = (options.slot_members, options.slots);
    let folder = tempfile::tempdir()?;
    let system = System::Etcd { acknowledged: true };
    let servers = Servers::start(system, Number::Three, slots, folder.path()).await?;
    let start = || {
        Worker::start(
            "slots",
            &[&servers.addresses(), &table.display().to_string()],
        )
    };
    let mut members = (0..PROCESSES)
        .map(|_| start())
        .collect::<Result<Vec<_>>>()?;
    let entering = members
        .iter_mut()
        .enumerate()
        .map(|(at, worker)| async move {
            let count = (size + at) / PROCESSES;
            worker.ask::<()>(&format!("connect m{at} {count}")).await?;
            worker.ask::<u64>("join").await?;
            worker.ask::<()>(&format!("follow {who}")).await
        });
    futures_util::future::try_join_all(entering).await?;
    let mut planner = start()?;
    planner.ask::<()>(&format!("plan {slots} {who}")).await?;
    let mut newcomer = start()?;
    newcomer.ask::<()>("connect newcomer 1").await?;
    newcomer.ask::<()>(&format!("follow {who}")).await?;
    let mut times = Samples::NONE;
    for _ in 0..options.joins {
        let began = Instant::from_nanos(newcomer.ask("join").await?);
        let first = until(&mut newcomer, "first", |first: &Option<u64>| {
            first.is_some()
        });
        let first = Instant::from_nanos(first.await?.unwrap_or(0));
        times.push(first.saturating_duration_since(began));
        settled(&mut planner, size + 1).await?;
        newcomer.ask::<()>("leave").await?;
        settled(&mut planner, size).await?;
    }
    Ok(times)
}

/// Waits until so many members have all slots, and what follows from that is over.
async fn settled(planner: &mut Worker, members: usize) -> Result<()> {
    let right = Settled { members, moving: 0 };
    until(planner, "settled", |settled: &Settled| *settled == right).await?;
    env::sleep(Duration::from_millis(200)).await;
    Ok(())
}

async fn until<T: serde::de::DeserializeOwned>(
    worker: &mut Worker,
    what: &str,
    is_right: impl Fn(&T) -> bool,
) -> Result<T> {
    let deadline = env::now() + PATIENCE;
    while env::now() < deadline {
        let answer = worker.ask(what).await?;
        if is_right(&answer) {
            return Ok(answer);
        }
        env::sleep(Duration::from_millis(3)).await;
    }
    Err(format!("not {what} within {PATIENCE:?}").into())
}
