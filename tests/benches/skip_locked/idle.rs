//! What a consumer asks the database while nothing of its own is due.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use skyschedule_client::sql::{self, Task};
use skyschedule_common::env;
use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber, span};

use super::Result;
use super::members::{Servers, slots};
use super::place::{BY_SLOT, Place};
use super::report::{Measured, Report, Row};

/// For how long polls are watched.
const WATCHED: Duration = Duration::from_secs(5);

/// The driver tells how long each statement took, by way of `tracing`.
struct Stopwatch;

static RUNS: AtomicBool = AtomicBool::new(false);
static TIMES: Mutex<Vec<f64>> = Mutex::new(Vec::new());

impl Subscriber for Stopwatch {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        RUNS.load(Ordering::Relaxed) && metadata.target() == "sqlx::query"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut statement = Statement::default();
        event.record(&mut statement);
        if statement.selects
            && let Ok(mut times) = TIMES.lock()
        {
            times.push(statement.seconds * 1_000.0);
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Statement {
    selects: bool,
    seconds: f64,
}

impl Visit for Statement {
    fn record_f64(&mut self, field: &Field, value: f64) {
        if field.name() == "elapsed_secs" {
            self.seconds = value;
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.selects |= field.name() == "summary" && value.starts_with("SELECT");
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// A member with a sixteenth of the slots, all of whose rows are done. The other one only holds its share.
pub(crate) async fn poll(place: &Place, servers: &Servers, report: &mut Report) -> Result<()> {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    INSTALLED.get_or_init(|| tracing::subscriber::set_global_default(Stopwatch).is_ok());
    let clients = servers.join(&[1, 15], slots()).await?;
    let status = clients[0].shares().borrow().clone();
    let share = status.rows.single().ok_or("the client has no share")?;
    let own: Vec<String> = share
        .numbers()
        .iter()
        .map(|slot| slot.to_string())
        .collect();
    place.empty(&own.join(", ")).await?;
    let consumer = sql::consumer(&clients[0], place.table(BY_SLOT))
        .longest_idle(Duration::from_millis(20))
        .on_any(place.pool().await?)
        .await?;
    let stopper = consumer.stopper();
    let running = env::spawn(consumer.run(|_: Task<(i64, String)>| async { Ok::<_, String>(()) }));
    env::sleep(Duration::from_secs(1)).await;
    RUNS.store(true, Ordering::Relaxed);
    env::sleep(WATCHED).await;
    RUNS.store(false, Ordering::Relaxed);
    stopper.stop();
    let counted = running.await?;
    if counted.started > 0 {
        return Err("the empty share had rows".into());
    }
    let times = std::mem::take(&mut *TIMES.lock().map_err(|_| "a lock is broken")?);
    for client in &clients {
        client.close().await?;
    }
    report.add(Row {
        database: place.kind.name(),
        what: format!("idle poll, {} empty slots", own.len()),
        note: format!("{} polls", times.len()),
        measured: Measured::Millis(times),
        bar: Some(1.0),
    });
    place.put_back(BY_SLOT).await
}
