//! What came of it: for people and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use console::style;
use indicatif::HumanCount;
use serde::Serialize;

use super::audit::Audit;

/// Why rows were renumbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Cause {
    /// The first consumers joined.
    Start,
    /// A consumer was killed.
    Killed,
    /// A consumer joined.
    Joined,
    /// Anything else.
    Other,
}

/// One renumbering.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Renumbering {
    pub(super) cause: Cause,
    /// From the change to the moment at which every row has its new owner; owners finish first what they run.
    pub(super) took_ms: f64,
    pub(super) total: u32,
    pub(super) epoch: String,
}

/// The kill.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Kill {
    pub(super) consumer: String,
    /// From the signal to the server's notice.
    pub(super) noticed_ms: Option<f64>,
    /// From the signal to the moment at which every row has an owner that lives.
    pub(super) renumbered_ms: Option<f64>,
}

/// The kill of the leader.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct LeaderKill {
    pub(super) replica: u16,
    /// Which one leads afterwards.
    pub(super) next: Option<u16>,
    /// From the signal to the moment at which the next one served all consumers.
    pub(super) without_ms: Option<f64>,
    pub(super) executed_meanwhile: u64,
    /// Whether any consumer got other rows by it.
    pub(super) rows_moved: bool,
    /// Whether it came back.
    pub(super) back: bool,
}

/// What happened, as the demo saw it.
#[derive(Debug, Default)]
pub(super) struct Story {
    pub(super) renumberings: Vec<Renumbering>,
    pub(super) kill: Option<Kill>,
    pub(super) leader_kill: Option<LeaderKill>,
    pub(super) trouble: Vec<String>,
    pub(super) interrupted: bool,
    /// Whether every task was done when it ended.
    pub(super) complete: bool,
    pub(super) took: Duration,
}

/// All that is told at the end.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    /// Whether every task was executed, and none twice but for the kill.
    pub(super) ok: bool,
    pub(super) interrupted: bool,
    pub(super) tasks: u64,
    pub(super) executed: u64,
    pub(super) lost: u64,
    pub(super) left: u64,
    pub(super) failed: u64,
    pub(super) executed_twice: u64,
    pub(super) executed_twice_allowed: u64,
    pub(super) batch: u16,
    pub(super) numbering: &'static str,
    pub(super) seconds: f64,
    pub(super) tasks_per_second: f64,
    pub(super) executed_by: BTreeMap<String, u64>,
    pub(super) killed: Option<Kill>,
    pub(super) renumberings: Vec<Renumbering>,
    pub(super) leader_killed: Option<LeaderKill>,
    pub(super) trouble: Vec<String>,
}

impl Summary {
    pub(super) fn new(
        tasks: u32,
        batch: u16,
        numbering: &'static str,
        audit: Audit,
        story: Story,
    ) -> Self {
        let seconds = story.took.as_secs_f64();
        let executed = f64::from(u32::try_from(audit.executed).unwrap_or(u32::MAX));
        Self {
            ok: audit.is_good() && story.complete && story.trouble.is_empty(),
            interrupted: story.interrupted,
            tasks: tasks.into(),
            executed: audit.executed,
            lost: audit.lost,
            left: audit.left,
            failed: audit.failed,
            executed_twice: audit.twice,
            executed_twice_allowed: audit.twice_allowed,
            batch,
            numbering,
            seconds: rounded(seconds),
            tasks_per_second: if seconds > 0.0 {
                rounded(executed / seconds)
            } else {
                0.0
            },
            executed_by: audit.by_client,
            killed: story.kill,
            renumberings: story.renumberings,
            leader_killed: story.leader_kill,
            trouble: story.trouble,
        }
    }

    /// As a person reads it, at most 80 columns wide.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "\n\n  {}\n\n",
            style("Checked against the table, and a ledger of every execution:").bold()
        );
        let mut row = |what: &str, value: String, why: &str| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "    {what:<16}{value:>8}   {}", style(why).dim());
        };
        let count = |number| HumanCount(number).to_string();
        let ids = if self.tasks > 1 {
            "half of them with negative ids"
        } else {
            ""
        };
        row("tasks", count(self.tasks), ids);
        row("executed", count(self.executed), "");
        if self.left > 0 {
            row(
                "not yet",
                count(self.left),
                "still due: whoever comes next executes them",
            );
        }
        if self.failed > 0 {
            row("failed", count(self.failed), "");
        }
        row("lost", count(self.lost), "");
        row(
            "executed twice",
            count(self.executed_twice),
            &self.why_twice(),
        );
        row(
            "renumberings",
            count(u64::try_from(self.renumberings.len()).unwrap_or(u64::MAX)),
            &self.times(),
        );
        if let Some((kill, without)) = self
            .leader_killed
            .as_ref()
            .and_then(|kill| Some((kill, kill.without_ms?)))
        {
            let moved = if kill.rows_moved {
                "rows moved"
            } else {
                "no row moved"
            };
            let meanwhile = count(kill.executed_meanwhile);
            let why = format!("{meanwhile} tasks executed meanwhile, {moved}");
            row("without leader", format!("{:.1} s", without / 1e3), &why);
        }
        let speed = format!("{:.0} tasks a second", self.tasks_per_second);
        row("time", format!("{:.1} s", self.seconds), &speed);
        for trouble in &self.trouble {
            let _ = writeln!(text, "\n  {} {trouble}", style("!").red().bold());
        }
        let verdict = self.verdict();
        let verdict = if self.ok {
            style(format!("✓ {verdict}")).green().bold()
        } else if self.interrupted && self.trouble.is_empty() && self.lost == 0 {
            style(verdict).yellow().bold()
        } else {
            style(format!("✗ {verdict}")).red().bold()
        };
        let _ = writeln!(text, "\n  {verdict}");
        text
    }

    fn verdict(&self) -> String {
        let unexplained = self.executed_twice - self.executed_twice_allowed;
        if self.lost > 0 {
            format!(
                "{} tasks were lost. Please report this.",
                HumanCount(self.lost)
            )
        } else if !self.trouble.is_empty() || self.failed > 0 {
            "The demo failed; no task was lost.".to_owned()
        } else if unexplained > 0 {
            format!(
                "{} tasks were executed twice, and no kill explains it. Please report this.",
                HumanCount(unexplained)
            )
        } else if self.interrupted {
            "Stopped early; no task was lost.".to_owned()
        } else {
            "Every task was executed; none was lost.".to_owned()
        }
    }

    fn why_twice(&self) -> String {
        let Some(Kill { consumer, .. }) = &self.killed else {
            return String::new();
        };
        match self.executed_twice_allowed {
            0 if self.executed_twice > 0 => String::new(),
            0 => format!("{consumer} had marked all that it ran"),
            allowed => format!("{allowed} allowed: {consumer} died before marking them"),
        }
    }

    fn times(&self) -> String {
        let names = [
            (Cause::Start, "start"),
            (Cause::Killed, "kill"),
            (Cause::Joined, "join"),
            (Cause::Other, "other"),
        ];
        let of = |(cause, name)| {
            let took: Vec<String> = self
                .renumberings
                .iter()
                .filter(|renumbering| renumbering.cause == cause)
                .map(|renumbering| format!("{:.0}", renumbering.took_ms))
                .collect();
            (!took.is_empty()).then(|| format!("{name} {} ms", took.join("+")))
        };
        names
            .into_iter()
            .filter_map(of)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

/// Milliseconds and the like, for people.
pub(super) fn rounded(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

pub(super) fn millis(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e3)
}
