//! What befell consumers that nobody did to them directly, as logs tell.

use crate::story::{Fault, Kind};

/// What a server logged about members that did not release in time. Times are those of the wall clock, from `begun` on.
pub(crate) fn overtaken(log: &str, begun: i64) -> Vec<Fault> {
    let lines = log.lines().filter(|line| line.contains("was overtaken"));
    let fault = |line: &str| {
        let at = wall_clock(line, begun)?;
        let client = line.split_once("client=")?.1.split(' ').next()?;
        Some(Fault {
            who: client.trim_matches('"').to_owned(),
            kind: Kind::Overtaken,
            from: at,
            to: at,
        })
    };
    lines
        .map(|line| fault(line).expect("a line with a time and a client"))
        .collect()
}

/// When a consumer worked without any server, as the lines of its process about its shares say.
pub(crate) fn alone(who: &str, log: &str, begun: i64) -> Vec<Fault> {
    let mut since = None;
    let mut faults = Vec::new();
    let fault = |from, to| Fault {
        who: who.to_owned(),
        kind: Kind::Alone,
        from,
        to,
    };
    for line in log
        .lines()
        .filter(|line| line.contains("sql_consumer: share "))
    {
        let Some(at) = wall_clock(line, begun) else {
            continue;
        };
        if line.ends_with("(no server answers)") {
            since.get_or_insert(at);
        } else if let Some(since) = since.take() {
            faults.push(fault(since, at));
        }
    }
    faults.extend(since.map(|since| fault(since, i64::MAX / 2)));
    faults
}

/// The time at the beginning of a log's line; less than a day after `begun`.
fn wall_clock(line: &str, begun: i64) -> Option<i64> {
    const DAY: i64 = 86_400_000_000;
    let (_, time) = line.split_once('T')?;
    let (time, _) = time.split_once('Z')?;
    let mut parts = time.split([':', '.']).map(|part| part.parse::<i64>().ok());
    let mut next = || parts.next().flatten();
    let seconds = next()? * 3_600 + next()? * 60 + next()?;
    let of_day = seconds * 1_000_000 + next()?;
    Some(begun + (of_day - begun).rem_euclid(DAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noon of the first day.
    const NOON: i64 = 43_200_000_000;

    #[test]
    fn who_worked_without_a_server_is_read_from_its_log() {
        let log = "\
            1970-01-01T12:00:01.000000Z  INFO skyschedule_examples::sql_consumer: share total=2 numbers=1 epoch=5\n\
            1970-01-01T12:00:02.000000Z  INFO skyschedule_examples::sql_consumer: share total=2 numbers=1 epoch=5 (no server answers)\n\
            1970-01-01T12:00:03.500000Z  INFO skyschedule_examples::sql_consumer: share total=2 numbers=1 epoch=5\n";
        let [fault] = alone("a", log, NOON).try_into().unwrap();
        assert_eq!((fault.from - NOON, fault.to - NOON), (2_000_000, 3_500_000));
    }

    #[test]
    fn who_was_overtaken_is_read_from_the_logs_of_servers_also_after_midnight() {
        let log = "1970-01-02T00:00:01.000000Z  WARN coordinator: a member did not release in time and was overtaken: look \
                   group=1000 client=\"a\" held={3}/7\n";
        let [fault] = overtaken(log, 2 * NOON - 1_000_000).try_into().unwrap();
        assert_eq!(
            (fault.who.as_str(), fault.from),
            ("a", 2 * NOON + 1_000_000)
        );
    }
}
