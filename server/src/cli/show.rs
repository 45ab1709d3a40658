//! Answers of the admin interface as tables.

use comfy_table::{Table, presets};
use serde_json::Value;

/// What must be put right in each group where something must.
pub(super) fn problems(groups: &Value) -> Vec<String> {
    list(&groups["groups"]).iter().filter_map(problem).collect()
}

fn problem(group: &Value) -> Option<String> {
    let problem = &group["problem"];
    let line = || format!("group {}: {}", text(&group["name"]), text(problem));
    problem.is_string().then(line)
}

/// Each on a line of its own.
fn lines(problems: &[String]) -> String {
    problems.iter().map(|line| format!("{line}\n")).collect()
}

/// The replicas, whether the one that was asked serves, and what must be put right.
pub(super) fn status(cluster: &Value, not_ready: Option<&str>, problems: &[String]) -> String {
    let table = replicas(cluster);
    let ready = match not_ready {
        Some(reason) => format!("not ready: {reason}"),
        None if cluster["degraded"] == true => {
            "ready, without a quorum: it numbers by itself who turns to it".to_owned()
        }
        None => "ready".to_owned(),
    };
    format!(
        "replica {}, {}: {ready}\n{table}\n{}{}",
        text(&cluster["replica_id"]),
        term(cluster),
        unknown_lag(cluster),
        lines(problems),
    )
}

/// The replicas.
pub(super) fn cluster(cluster: &Value) -> String {
    let table = replicas(cluster);
    format!(
        "as replica {} sees them, {}\n{table}\n{}",
        text(&cluster["replica_id"]),
        term(cluster),
        unknown_lag(cluster),
    )
}

/// Why no lag is shown, where none is: only the leader knows it.
fn unknown_lag(cluster: &Value) -> String {
    let replicas = list(&cluster["replicas"]);
    let is_known = replicas.iter().any(|replica| !replica["lag"].is_null());
    if is_known || replicas.len() < 2 || !is_formed(cluster) {
        return String::new();
    }
    let leader = &cluster["leader"];
    match replicas.iter().find(|replica| replica["id"] == *leader) {
        Some(replica) => format!(
            "LAG is known to the leader only, replica {} ({}), which gave no answer: ask there (--admin)\n",
            text(leader),
            text(&replica["address"]),
        ),
        None => {
            "LAG is known to the leader only, and there is none that this replica follows\n".into()
        }
    }
}

fn is_formed(cluster: &Value) -> bool {
    cluster["formed"] != false
}

fn term(cluster: &Value) -> String {
    match is_formed(cluster) {
        true => format!("term {}", text(&cluster["term"])),
        false => "in no cluster yet".into(),
    }
}

fn replicas(cluster: &Value) -> Table {
    let mut table = table(&["REPLICA", "ADDRESS", "ROLE", "REACHABLE", "LAG"]);
    for replica in list(&cluster["replicas"]) {
        let leads = !cluster["leader"].is_null() && replica["id"] == cluster["leader"];
        table.add_row([
            text(&replica["id"]),
            text(&replica["address"]),
            match (leads, replica["voter"] == true) {
                _ if !is_formed(cluster) => "-",
                (true, _) => "leader",
                (false, true) => "voter",
                (false, false) => "learner",
            }
            .into(),
            yes(replica["reachable"] == true),
            text(&replica["lag"]),
        ]);
    }
    table
}

/// The groups.
pub(super) fn groups(answer: &Value) -> String {
    let mut table = table(&[
        "GROUP",
        "NUMBERING",
        "TOTAL",
        "EPOCH",
        "CONSISTENCY",
        "MEMBERS",
    ]);
    for group in list(&answer["groups"]) {
        table.add_row([
            text(&group["name"]),
            text(&group["numbering"]),
            text(&group["total"]),
            text(&group["epoch"]),
            text(&group["consistency"]),
            list(&group["members"]).len().to_string(),
        ]);
    }
    format!("{table}\n{}", lines(&problems(answer)))
}

/// The members of a group.
pub(super) fn members(group: &Value) -> String {
    let mut table = table(&[
        "CLIENT",
        "STATE",
        "NUMBERS",
        "TARGET",
        "WEIGHT",
        "ADDRESS",
        "HEARTBEAT",
        "PENDING",
    ]);
    for member in list(&group["members"]) {
        table.add_row([
            text(&member["client_id"]),
            text(&member["state"]),
            ranges(&member["numbers"]),
            ranges(&member["target"]),
            text(&member["weight"]),
            text(&member["address"]),
            seconds(&member["heartbeat_age_ms"]).map_or("-".into(), |age| age + " ago"),
            seconds(&member["pending_since_ms"]).unwrap_or("-".into()),
        ]);
    }
    format!(
        "group {}: total {}, epoch {}, {}, {}\n{table}\n{}",
        text(&group["name"]),
        text(&group["total"]),
        text(&group["epoch"]),
        text(&group["numbering"]),
        text(&group["consistency"]),
        lines(problem(group).as_slice()),
    )
}

/// A member whose drain has begun.
pub(super) fn drained(group: &str, member: &Value) -> String {
    let client = text(&member["client_id"]);
    match ranges(&member["numbers"]).as_str() {
        "-" => format!("{client} drains and holds nothing\n"),
        numbers => format!(
            "{client} drains and holds {numbers} until these are released: skyschedule members {group}\n"
        ),
    }
}

/// A member that does not drain any more.
pub(super) fn undrained(group: &str, member: &Value) -> String {
    format!(
        "{} drains no more, and gets its part of the rows: skyschedule members {group}\n",
        text(&member["client_id"])
    )
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        // What the server says must not steer the terminal.
        Value::String(text) => text.chars().filter(|c| !c.is_control()).collect(),
        other => other.to_string(),
    }
}

fn yes(truth: bool) -> String {
    if truth { "yes" } else { "no" }.into()
}

fn seconds(milliseconds: &Value) -> Option<String> {
    let ms = milliseconds.as_u64()?;
    Some(format!("{}.{} s", ms / 1_000, ms % 1_000 / 100))
}

/// Inclusive ranges as `0,4-7`.
fn ranges(value: &Value) -> String {
    let ranges: Vec<_> = list(value)
        .iter()
        .map(|range| match (&range[0], &range[1]) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        })
        .collect();
    match ranges.is_empty() {
        true => "-".into(),
        false => ranges.join(","),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_is_said_why_no_lag_is_shown() {
        let seen = |leader: Value, lag: Value| {
            cluster(&json!({
                "replica_id": 1, "leader": leader, "term": 3, "formed": true, "replicas": [
                    { "id": 1, "address": "sky-1:9991", "voter": true, "reachable": true, "lag": lag },
                    { "id": 2, "address": "sky-2:9991", "voter": true, "reachable": true, "lag": null },
                ],
            }))
        };
        let asked = seen(json!(2), Value::Null);
        assert!(
            asked.contains("leader only, replica 2 (sky-2:9991)"),
            "{asked}"
        );
        let nobody = seen(Value::Null, Value::Null);
        assert!(nobody.contains("there is none"), "{nobody}");
        let known = seen(json!(2), json!(0));
        assert!(!known.contains("leader only"), "{known}");
    }

    #[test]
    fn members_are_shown_with_their_numbers() {
        let shown = members(&json!({
            "name": "orders", "numbering": "modulo", "total": 8, "epoch": "17", "consistency": "available",
            "members": [{
                "client_id": "a\u{1b}[2J", "numbers": [[0, 0], [4, 7]], "weight": 1, "state": "away",
                "address": null, "heartbeat_age_ms": 1_250, "target": [], "pending_since_ms": 61_070,
            }],
        }));
        let lines: Vec<_> = shown.lines().map(str::trim_end).collect();
        assert_eq!(
            lines[0],
            "group orders: total 8, epoch 17, modulo, available"
        );
        let cells: Vec<_> = lines[2].split_whitespace().collect();
        assert_eq!(
            cells,
            [
                "a[2J", "away", "0,4-7", "-", "1", "-", "1.2", "s", "ago", "61.0", "s"
            ]
        );
    }
}
