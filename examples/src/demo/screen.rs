//! What a person sees while the demo runs: a line for each event, and below them a bar for each consumer.

use std::time::Duration;

use console::style;
use indicatif::{HumanCount, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use skyschedule_server::stderr::Lines;

use super::client::{Client, State};

/// What kind of event a line tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Plain,
    Good,
    Bad,
    Server,
}

/// Where it is shown.
pub(super) enum Screen {
    /// Bars and coloured lines.
    Terminal(Box<Bars>),
    /// Lines on stderr: stdout belongs to the JSON.
    Lines(Lines),
}

pub(super) struct Bars {
    all: MultiProgress,
    /// Keeps the lines apart from the bars.
    space: ProgressBar,
    clients: Vec<ProgressBar>,
    total: ProgressBar,
    tasks: u64,
    /// Tasks that fill a consumer's bar.
    full: u64,
}

impl Screen {
    pub(super) fn bars(tasks: u64, clients: u64) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        let space = all.add(ProgressBar::new(1));
        space.set_style(style_of(" "));
        let total = all.add(ProgressBar::new(tasks));
        total.set_style(bar_style("cyan"));
        Self::Terminal(Box::new(Bars {
            all,
            space,
            clients: Vec::new(),
            total,
            tasks,
            // Those who live longest do more than their part.
            full: (tasks * 5 / 4 / clients).max(1),
        }))
    }

    /// What there is to see, at the beginning.
    pub(super) fn title(&self, title: &str, lines: &[&str]) {
        if let Self::Terminal(bars) = self {
            bars.say(&format!("\n  {}\n", style(title).bold()));
            for line in lines {
                bars.say(&format!("  {line}"));
            }
            bars.say("");
        }
    }

    /// One event, and what it means.
    pub(super) fn event(&self, at: Duration, mark: Mark, text: &str, why: &str) {
        let time = format!("{:>6.1} s", at.as_secs_f64());
        match self {
            Self::Terminal(bars) => {
                let (sign, text) = match mark {
                    Mark::Plain => (style("·").dim(), style(text)),
                    Mark::Good => (style("+").green().bold(), style(text)),
                    Mark::Bad => (style("✗").red().bold(), style(text).bold()),
                    Mark::Server => (style("↻").yellow().bold(), style(text).bold()),
                };
                bars.say(&format!("{}  {sign} {text}", style(time).dim()));
                if !why.is_empty() {
                    bars.say(&format!("            {}", style(why).dim()));
                }
            }
            Self::Lines(lines) => lines.say(&format!("{time}  {text}")),
        }
    }

    /// How each consumer stands, and the whole.
    pub(super) fn show(&mut self, clients: &[Client], speeds: &[f64], done: u64) {
        if let Self::Terminal(bars) = self {
            bars.show(clients, speeds, done);
        }
    }

    /// No change any more: the bars stay as they are.
    pub(super) fn freeze(&self) {
        if let Self::Terminal(bars) = self {
            for bar in bars.clients.iter().chain([&bars.space, &bars.total]) {
                bar.abandon();
            }
        }
    }
}

impl Bars {
    fn say(&self, line: &str) {
        // A terminal that is gone ends the demo by its signal.
        let _ = self.all.println(line);
    }

    fn show(&mut self, clients: &[Client], speeds: &[f64], done: u64) {
        self.space.tick();
        while self.clients.len() < clients.len() {
            let bar = self
                .all
                .insert_before(&self.total, ProgressBar::new(self.full));
            self.clients.push(bar);
        }
        for ((bar, client), speed) in self.clients.iter().zip(clients).zip(speeds) {
            let (colour, rows) = match client.state {
                State::Starting => ("yellow", "starts"),
                State::Working => ("green", client.rows.as_deref().unwrap_or("hands over")),
                State::Killed => ("red", "killed"),
                State::Left => ("green", "said goodbye"),
                State::Failed => ("red", "failed"),
            };
            bar.set_style(bar_style(colour));
            let rows = match client.state {
                State::Killed | State::Failed => style(format!("{rows:<18}")).red(),
                _ => style(format!("{rows:<18}")),
            };
            bar.set_prefix(format!("{:<12} {rows}", client.name));
            bar.set_position(client.executed.min(self.full));
            bar.set_message(numbers(
                &HumanCount(client.executed).to_string(),
                *speed,
                client.is_alive(),
            ));
        }
        let progress = format!("{} of {}", HumanCount(done), HumanCount(self.tasks));
        self.total
            .set_prefix(format!("{:<12} {progress:<18}", style("all tasks").bold()));
        self.total.set_position(done);
        let percent = format!("{} %", done * 100 / self.tasks.max(1));
        let alive = clients.iter().any(Client::is_alive);
        self.total
            .set_message(numbers(&percent, speeds.iter().sum(), alive));
    }
}

fn numbers(what: &str, speed: f64, runs: bool) -> String {
    if runs {
        format!("{what:>7}  {speed:>6.0}/s")
    } else {
        format!("{what:>7}")
    }
}

fn bar_style(colour: &str) -> ProgressStyle {
    style_of(&format!("  {{prefix}} {{bar:24.{colour}/238}} {{msg}}")).progress_chars("━━─")
}

fn style_of(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
