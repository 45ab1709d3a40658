//! What the servers know: the same, in the same order, and never less than anybody was told.

use skyschedule_server::state::Group;
use std::time::Duration;

use super::{Oracle, Violation};
use crate::sim::trace::Trace;
use crate::sim::worker::server_name;

/// What one server has applied.
#[derive(Debug)]
pub struct Applied {
    /// Which.
    pub server: usize,
    /// Tells its processes apart.
    pub life: u64,
    /// How much of the log; `None`: there is but one server, and this is the newest.
    pub index: Option<u64>,
    /// The group then.
    pub group: Option<Group>,
    /// What the core says of its own invariants.
    pub checked: Result<(), String>,
}

impl Oracle {
    /// Promise 7: what one server has applied, all apply, in the same place of the log; so that whoever leads later
    /// has it, too.
    pub(super) fn observe_applied(
        &mut self,
        applied: Vec<Applied>,
        now: Duration,
        trace: &mut Trace,
    ) -> Result<(), Violation> {
        for one in applied {
            let is_news = self.note_applied(&one)?;
            if is_news {
                self.observe_state(one.group, trace)?;
                self.note_recalls(now);
            }
            one.checked.map_err(|what| Violation::new("state", what))?;
        }
        Ok(())
    }

    /// Whether it is more than was known before.
    fn note_applied(&mut self, one: &Applied) -> Result<bool, Violation> {
        let Some(index) = one.index else {
            return Ok(true);
        };
        let name = server_name(one.server);
        let place = (one.server, one.life);
        if let Some(before) = self.applied.insert(place, index).filter(|was| *was > index) {
            return Err(Violation::new(
                "forgotten",
                format!("{name} had applied {before} entries, and now {index}"),
            ));
        }
        let known = self.log.entry(index).or_insert_with(|| one.group.clone());
        if *known != one.group {
            return Err(Violation::new(
                "servers differ",
                format!(
                    "after {index} entries the group of {name} is {:?}, and was elsewhere {known:?}",
                    one.group
                ),
            ));
        }
        let is_news = self.newest.is_none_or(|newest| index > newest);
        if is_news {
            self.newest = Some(index);
        }
        Ok(is_news)
    }
}
