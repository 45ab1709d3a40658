//! The order of things: each system has the same members and the same events.

use std::time::Duration;

use rustix::process::Signal;
use skyschedule_common::env;

use crate::common::Result;
use crate::common::report::{Bar, Report, Row, Samples};
use crate::servers::{Number, System};
use crate::stage::Stage;
use crate::{Options, Part, commits, slots};

/// At most so many times the plain watch, which promises less.
const WATCH_BAR: Bar = Bar::AtMost(1.5);
/// At least five times faster than the same promise.
pub(crate) const PROMISE_BAR: Bar = Bar::AtMost(0.2);
/// At most a fifth of the memory.
const MEMORY_BAR: Bar = Bar::AtMost(0.2);

/// Signals of one kind that are measured at most.
const SIGNALS: usize = 3;

/// What happens, in the order of an outcome's times.
const EVENTS: [&str; 4] = [
    "one joins",
    "one leaves",
    "SIGKILL of one",
    "SIGSTOP of one",
];

const ETCD: System = System::Etcd {
    acknowledged: false,
};
const ETCD_ACKNOWLEDGED: System = System::Etcd { acknowledged: true };
const ZOOKEEPER: System = System::ZooKeeper {
    acknowledged: false,
};
const ZOOKEEPER_ACKNOWLEDGED: System = System::ZooKeeper { acknowledged: true };

/// What one server is compared with.
const ONE: [(System, &str); 4] = [
    (ETCD, "etcd, watch"),
    (ETCD_ACKNOWLEDGED, "etcd, acknowledged"),
    (ZOOKEEPER, "ZooKeeper, watch"),
    (ZOOKEEPER_ACKNOWLEDGED, "ZooKeeper, acknowledged"),
];

/// What three replicas are compared with.
const THREE: [(System, &str); 2] = [
    (ETCD, "3 etcd, watch"),
    (ETCD_ACKNOWLEDGED, "3 etcd, acknowledged"),
];

/// What one system showed with one number of members.
struct Outcome {
    /// By event.
    times: [Samples; EVENTS.len()],
    /// Memory a member, in bytes: of the leader, and of all followers together.
    memory: [Samples; 2],
}

/// Measures everything that is asked for.
pub(crate) async fn all(options: &Options, report: &mut Report) -> Result<()> {
    for part in &options.parts {
        match part {
            Part::One => events(options, Number::One, &ONE, report).await?,
            Part::Cluster => events(options, Number::Three, &THREE, report).await?,
            Part::Commits => commits::all(options, report).await?,
            Part::Slots => slots::all(options, report).await?,
        }
    }
    Ok(())
}

async fn events(
    options: &Options,
    number: Number,
    others: &[(System, &'static str)],
    report: &mut Report,
) -> Result<()> {
    let servers = match number {
        Number::One => "1 server",
        Number::Three => "3 servers",
    };
    for &size in &options.members {
        for &(system, name) in others {
            // Next to each of the others, since a shared machine is not always the same.
            let ours =
                async |slots| measure(System::SkySchedule, number, size, slots, options).await;
            let modulo = ours(0).await?;
            let theirs = measure(system, number, size, 0, options).await?;
            let slots = ours(options.slots).await?;
            let bar = if system.is_acknowledged() {
                PROMISE_BAR
            } else {
                WATCH_BAR
            };
            for (numbering, ours) in [("modulo", &modulo), ("slots", &slots)] {
                for ((event, ours), theirs) in
                    EVENTS.into_iter().zip(&ours.times).zip(&theirs.times)
                {
                    let what = format!("{servers}, {size} members, {numbering}: {event}");
                    let (ours, theirs) = (ours.clone(), theirs.clone());
                    report.add(Row::beside(what, "ms", ours, (name, theirs), bar));
                }
            }
            if system.is_acknowledged() {
                continue;
            }
            for ((who, ours), theirs) in ["the leader", "both followers"]
                .into_iter()
                .zip(modulo.memory)
                .zip(theirs.memory)
                .take(if number == Number::One { 1 } else { 2 })
            {
                let what = format!("{servers}, {size} members: memory a member, {who}");
                report.add(Row::beside(what, "bytes", ours, (name, theirs), MEMORY_BAR));
            }
        }
    }
    Ok(())
}

/// `slots` are those of SkySchedule's group, 0 for modulo.
async fn measure(
    system: System,
    number: Number,
    size: usize,
    slots: u32,
    options: &Options,
) -> Result<Outcome> {
    let rounds = options.rounds;
    let mut stage = Stage::set(system, number, size, slots).await?;
    let before = stage.servers.memory().await?;
    stage.gather().await?;
    env::sleep(Duration::from_secs(1)).await;
    let after = stage.servers.memory().await?;
    let each = |after: u64, before| Samples::one(after.saturating_sub(before) as f64 / size as f64);
    let memory = [each(after.0, before.0), each(after.1, before.1)];
    let [mut joins, mut leaves, mut kills, mut stops] = [const { Samples::NONE }; 4];
    for round in 0..rounds {
        let (victim, took) = stage.join(&format!("leaves{round}")).await?;
        joins.push(took);
        leaves.push(stage.leave(victim).await?);
    }
    for (signal, times) in [(Signal::KILL, &mut kills), (Signal::STOP, &mut stops)] {
        for round in 0..rounds.min(SIGNALS) {
            let name = format!("{signal:?}{round}").replace(['(', ')'], "");
            times.push(stage.lose(&name, signal).await?);
        }
    }
    Ok(Outcome {
        times: [joins, leaves, kills, stops],
        memory,
    })
}
