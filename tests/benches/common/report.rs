//! Results: what was measured, its yardstick from the same run, and the bar for the ratio of the two.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::Result;

/// Measurements of one thing, in one unit.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// None yet.
    pub(crate) const NONE: Self = Self(Vec::new());

    /// A single time.
    pub(crate) fn time(took: Duration) -> Self {
        Self::one(took.as_secs_f64() * 1_000.0)
    }

    /// One more time, kept in milliseconds.
    pub(crate) fn push(&mut self, took: Duration) {
        self.0.push(took.as_secs_f64() * 1_000.0);
    }

    /// Figures that are counts.
    #[allow(clippy::cast_precision_loss, reason = "counts are small")]
    pub(crate) fn counts(counts: &[u64]) -> Self {
        Self(counts.iter().map(|count| *count as f64).collect())
    }

    /// A single figure.
    pub(crate) fn one(value: f64) -> Self {
        Self(vec![value])
    }

    /// The value below which this part of them lies; 0 of none.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss
        )]
        let at = (sorted.len().saturating_sub(1) as f64 * part).round() as usize;
        sorted.get(at).copied().unwrap_or(0.0)
    }

    /// That quantile alone.
    pub(crate) fn at(&self, part: f64) -> Self {
        Self::one(self.quantile(part))
    }

    /// These, and others.
    pub(crate) fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

/// A yardstick: what it is, and what it measured.
#[derive(Debug, Clone)]
pub(crate) struct Yardstick {
    pub(crate) name: &'static str,
    pub(crate) samples: Samples,
    /// The ratio that is to be kept, if one was set.
    pub(crate) bar: Option<Bar>,
}

/// What the ratio of a measurement to its yardstick has to be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bar {
    AtMost(f64),
    AtLeast(f64),
}

impl Bar {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtMost(bar) => ratio <= bar,
            Self::AtLeast(bar) => ratio >= bar,
        }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(bar) => write!(f, "<={bar:.1}"),
            Self::AtLeast(bar) => write!(f, ">={bar:.1}"),
        }
    }
}

/// One line of the table.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: Samples,
    pub(crate) yardstick: Option<Yardstick>,
}

impl Row {
    /// A measurement beside a yardstick with a bar.
    pub(crate) fn beside(
        what: String,
        unit: &'static str,
        ours: Samples,
        (name, samples): (&'static str, Samples),
        bar: impl Into<Option<Bar>>,
    ) -> Self {
        let bar = bar.into();
        Self {
            what,
            unit,
            ours,
            yardstick: Some(Yardstick { name, samples, bar }),
        }
    }

    fn ratio(&self) -> Option<f64> {
        let yardstick = self.yardstick.as_ref()?.samples.median();
        (yardstick > 0.0).then(|| self.ours.median() / yardstick)
    }

    fn is_met(&self) -> Option<bool> {
        Some(self.yardstick.as_ref()?.bar?.is_met(self.ratio()?))
    }
}

/// All results of a run, in order, each with the load of the machine when it was there.
#[derive(Debug, Default)]
pub(crate) struct Report(Vec<(Row, String)>);

impl Report {
    /// One more result; it is shown at once.
    pub(crate) fn add(&mut self, row: Row) {
        let load = load();
        if self.0.is_empty() {
            say(&format!(
                "{:<58}{:>11}{:>11} {:<6}{:>11}  {:<34}{:>6}{:>7}  {:<8}load",
                "what", "median", "p90", "unit", "yardstick", "which", "ratio", "bar", ""
            ));
        }
        let show = |value: Option<f64>, digits: usize| {
            value.map_or_else(String::new, |value| format!("{value:.digits$}"))
        };
        let yardstick = row.yardstick.as_ref();
        let met = match row.is_met() {
            Some(true) => "met",
            Some(false) => "NOT MET",
            None => "",
        };
        say(&format!(
            "{:<58}{:>11.2}{:>11.2} {:<6}{:>11}  {:<34}{:>6}{:>7}  {met:<8}{load}",
            row.what,
            row.ours.median(),
            row.ours.quantile(0.9),
            row.unit,
            show(yardstick.map(|yardstick| yardstick.samples.median()), 2),
            yardstick.map_or("", |yardstick| yardstick.name),
            show(row.ratio(), 2),
            yardstick
                .and_then(|yardstick| yardstick.bar)
                .map_or_else(String::new, |bar| bar.to_string()),
        ));
        self.0.push((row, load));
    }

    /// Writes all results as one JSON object.
    pub(crate) fn write_json(&self, name: &str, path: &Path) -> Result<()> {
        let rows: Vec<_> = self
            .0
            .iter()
            .map(|(row, load)| {
                let yardstick = row.yardstick.as_ref();
                serde_json::json!({
                    "what": row.what,
                    "unit": row.unit,
                    "median": row.ours.median(),
                    "p90": row.ours.quantile(0.9),
                    "p99": row.ours.quantile(0.99),
                    "max": row.ours.quantile(1.0),
                    "rounds": row.ours.0.len(),
                    "yardstick": yardstick.map(|yardstick| yardstick.name),
                    "yardstick_median": yardstick.map(|yardstick| yardstick.samples.median()),
                    "ratio": row.ratio(),
                    "bar": yardstick.and_then(|yardstick| Some(yardstick.bar?.to_string())),
                    "met": row.is_met(),
                    "load": load.parse::<f64>().ok(),
                })
            })
            .collect();
        Ok(std::fs::write(
            path,
            format!("{}\n", serde_json::json!({ name: rows })),
        )?)
    }
}

/// The load average of the last minute; empty where the system does not tell.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

#[allow(clippy::print_stdout, reason = "a benchmark prints its result")]
pub(crate) fn say(line: &str) {
    println!("{line}");
}
