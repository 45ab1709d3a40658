//! Results, as a table for the README or as JSON.

use serde_json::{Value, json};

use super::place::{CONNECTIONS, Order, Place, SLOTS};
use super::rounds::{BATCH, IN_WORK};
use super::{Options, Result};

/// What was measured.
pub(crate) enum Measured {
    /// Rows a second of ours and of theirs, in each round.
    Rates(Vec<(f64, f64)>),
    /// A ratio by itself.
    Ratio(f64),
    /// Times, of which the median counts: the bar is the longest.
    Millis(Vec<f64>),
}

pub(crate) struct Row {
    pub(crate) database: &'static str,
    pub(crate) what: String,
    pub(crate) measured: Measured,
    pub(crate) bar: Option<f64>,
    pub(crate) note: String,
}

impl Row {
    /// Rates of ours and theirs, if there are any, and what the bar is for.
    fn figures(&self) -> (Option<(f64, f64)>, f64) {
        match &self.measured {
            Measured::Rates(turns) => {
                let ours = median(turns.iter().map(|(ours, _)| *ours));
                let theirs = median(turns.iter().map(|(_, theirs)| *theirs));
                let ratio = median(turns.iter().map(|(ours, theirs)| ours / theirs));
                (Some((ours, theirs)), ratio)
            }
            Measured::Ratio(ratio) => (None, *ratio),
            Measured::Millis(times) => (None, median(times.iter().copied())),
        }
    }

    fn is_met(&self) -> Option<bool> {
        let (bar, (_, figure)) = (self.bar?, self.figures());
        Some(match self.measured {
            Measured::Millis(_) => figure <= bar,
            Measured::Rates(_) | Measured::Ratio(_) => figure >= bar,
        })
    }

    fn line(&self) -> String {
        let (rates, figure) = self.figures();
        let (ours, theirs) = rates.map_or((String::new(), String::new()), |(ours, theirs)| {
            (format!("{ours:.0}"), format!("{theirs:.0}"))
        });
        let (figure, bound) = match self.measured {
            Measured::Millis(_) => (format!("{figure:.2} ms"), "at most"),
            Measured::Rates(_) | Measured::Ratio(_) => (format!("{figure:.2}"), "at least"),
        };
        let bar = self.bar.map_or(String::new(), |bar| {
            let missed = if self.is_met() == Some(false) {
                ", missed"
            } else {
                ""
            };
            format!("{bound} {bar:.1}{missed}")
        });
        format!(
            "| {} | {} | {ours} | {theirs} | {figure} | {bar} | {} |",
            self.database, self.what, self.note
        )
    }

    fn json(&self) -> Value {
        let (rates, figure) = self.figures();
        let turns = match &self.measured {
            Measured::Rates(turns) => json!(turns),
            _ => Value::Null,
        };
        json!({
            "database": self.database,
            "what": self.what,
            "ours": rates.map(|(ours, _)| ours),
            "skip_locked": rates.map(|(_, theirs)| theirs),
            "figure": figure,
            "bar": self.bar,
            "met": self.is_met(),
            "turns": turns,
            "note": self.note,
        })
    }
}

/// All results of a run, in order.
pub(crate) struct Report {
    json: bool,
    conditions: Vec<String>,
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(options: &Options) -> Self {
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let mut conditions = vec![format!(
            "{rows} due, {rows} done, {rows} future rows, due in {} order; {BATCH} rows a mark and a transaction, {IN_WORK} in work at most; \
             handler that does nothing; \
             {SLOTS} slots; {CONNECTIONS} connections a consumer or worker; windows of {} s, median of {} rounds in turn, \
             drains: {}; {cores} cores for the database and both sides' tasks",
            match options.order {
                Order::Mixed => "another than the ids'",
                Order::Added => "the ids'",
            },
            options.seconds,
            options.rounds,
            options.drains,
            rows = options.rows,
        )];
        conditions.push(format!("load average at the start: {}", load()));
        Self {
            json: options.json,
            conditions,
            rows: Vec::new(),
        }
    }

    pub(crate) async fn describe(&mut self, place: &Place) -> Result<()> {
        self.conditions.push(place.settings().await?);
        Ok(())
    }

    /// One more result; it is shown at once.
    pub(crate) fn add(&mut self, row: Row) {
        say(&format!("{} (load {})", row.line(), load()));
        self.rows.push(row);
    }

    #[allow(clippy::print_stdout, reason = "a benchmark prints its result")]
    pub(crate) fn print(mut self) {
        self.conditions
            .push(format!("load average at the end: {}", load()));
        if self.json {
            let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
            println!(
                "{}",
                json!({"skip_locked": rows, "conditions": self.conditions})
            );
            return;
        }
        println!(
            "\n| database | what | rows/s | SKIP LOCKED, rows/s | ratio | bar | SKIP LOCKED workers had |\n\
             |---|---|---|---|---|---|---|"
        );
        for row in &self.rows {
            println!("{}", row.line());
        }
        println!();
        for condition in &self.conditions {
            println!("- {condition}");
        }
    }
}

/// The middle one; 0 of none.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace()
        .take(3)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Progress.
#[allow(clippy::print_stderr, reason = "a benchmark shows how far it is")]
pub(crate) fn say(line: &str) {
    eprintln!("{line}");
}
