//! What happened in a simulation, in order: to be read by people, and to be compared between runs.

use std::time::Duration;

/// Lines kept for the report of a failure.
const KEPT: usize = 400;

/// See the module.
#[derive(Debug)]
pub struct Trace {
    now: Duration,
    lines: std::collections::VecDeque<String>,
    hash: u64,
    count: u64,
    prints: bool,
}

impl Trace {
    /// An empty trace; with `prints` each line is printed at once.
    pub fn new(prints: bool) -> Self {
        Self {
            now: Duration::ZERO,
            lines: std::collections::VecDeque::new(),
            hash: 0xcbf2_9ce4_8422_2325,
            count: 0,
            prints,
        }
    }

    /// Time goes on.
    pub fn at(&mut self, now: Duration) {
        self.now = now;
    }

    /// Something happened.
    #[expect(clippy::print_stderr, reason = "asked for by who reads it")]
    pub fn note(&mut self, what: &str) {
        let line = format!("{:>9.3} {what}", self.now.as_secs_f64());
        for byte in line.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.count += 1;
        if self.prints {
            eprintln!("{line}");
        }
        if self.lines.len() == KEPT {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// The last lines.
    pub fn tail(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }

    /// Number of lines, and a hash of all of them.
    pub fn fingerprint(&self) -> (u64, u64) {
        (self.count, self.hash)
    }
}
