use skyschedule_common::share::{Numbers, Share};

use super::*;
use crate::sql::clock::Clock;
use crate::sql::table::Retry;

fn statements(dialect: Dialect, table: Table) -> Statements {
    let clock = match dialect {
        Dialect::Postgres => Clock::PostgresZoned,
        Dialect::MySql => Clock::MySqlLocal {
            zone: "@@global.time_zone".to_owned(),
        },
        Dialect::Sqlite => Clock::SqliteText { minutes: 0 },
    };
    let schema = Schema {
        key: KeyType::Integer,
        key_cast: None,
        clock,
    };
    Statements::new(dialect, table, schema)
}

fn share(total: u32, last: u32) -> ShareUnion {
    Share::new(total, Numbers::range(0, last)).unwrap().into()
}

fn cursor() -> Cursor {
    Cursor {
        due: Due::Text("2026-11-30 12:00:00".to_owned()),
        key: Key::Integer(7),
    }
}

/// The part that decides how the table is read.
fn condition(statement: &Statement) -> &str {
    statement.text.split_once(" WHERE ").unwrap().1
}

#[test]
fn a_page_has_literals_for_what_an_index_is_made_of_and_binds_the_rest() {
    let table = || Table::new("task_info");
    let page = |dialect| statements(dialect, table()).page(&share(3, 0), Some(&cursor()), 100);
    assert_eq!(
        condition(&page(Dialect::Postgres)),
        "t.\"status\" = 0 AND t.\"task_time\" <= now() \
         AND (t.\"task_time\", t.\"id\") > ($1, $2) \
         AND CASE WHEN ((t.\"id\" % 3) + 3) % 3 = 0 THEN TRUE ELSE FALSE END \
         ORDER BY t.\"task_time\", t.\"id\" LIMIT $3"
    );
    let mysql = page(Dialect::MySql);
    assert_eq!(
        condition(&mysql),
        "t.`status` = 0 AND t.`task_time` <= CONVERT_TZ(UTC_TIMESTAMP(6), '+00:00', @@global.time_zone) \
         AND t.`task_time` >= ? AND (t.`task_time` > ? OR t.`id` > ?) \
         AND ((t.`id` % 3) + 3) % 3 = 0 ORDER BY t.`task_time`, t.`id` LIMIT ?"
    );
    assert_eq!(mysql.binds.len(), 4);
    assert_eq!(page(Dialect::Sqlite).binds.len(), 3);
}

#[test]
fn slots_are_asked_for_one_by_one_each_with_its_own_limit() {
    let ask = |dialect, slots: &[u32]| {
        statements(dialect, Table::new("task_info").slot_index(1_024)).slots(slots, 50)
    };
    let statements = |dialect| statements(dialect, Table::new("task_info").slot_index(1_024));
    let one = statements(Dialect::Postgres).slot(9, None, 50);
    assert!(
        one.text.contains(
            "(t.\"id\" & 1023) = $1 AND t.\"status\" = 0 AND t.\"task_time\" <= now() \
             ORDER BY t.\"task_time\", t.\"id\" LIMIT $2"
        ),
        "{}",
        one.text
    );
    let next = statements(Dialect::Postgres).slot(9, Some(&cursor()), 50);
    assert!(
        next.text
            .contains("(t.\"task_time\", t.\"id\") > ($2, $3) ORDER BY")
    );
    let many = ask(Dialect::Postgres, &[9, 10, 11]);
    assert!(
        many.text
            .contains("unnest($1) AS s(slot) CROSS JOIN LATERAL")
    );
    assert_eq!(many.binds.len(), 2);
    let further = statements(Dialect::Postgres).slots_behind(
        &[9, 10, 11],
        &[cursor(), cursor(), cursor()],
        50,
    );
    assert!(
        further.text.contains("(VALUES ($1, $2, $3), ($4, $5, $6), ($7, $8, $9), ($10, $11, $12)) AS s(slot, due, id)")
            && further.text.contains("(u.\"task_time\", u.\"id\") > (s.due, s.id) ORDER BY u.\"task_time\", u.\"id\" LIMIT $13")
            && further.text.ends_with("ORDER BY t.\"task_time\", t.\"id\""),
        "{}",
        further.text
    );
    let list = ask(Dialect::MySql, &[9, 10, 11]);
    assert!(
        list.text.contains("(t.`id` & 1023) IN (?, ?, ?, ?)")
            && list
                .text
                .ends_with("ORDER BY (t.`id` & 1023), t.`task_time`, t.`id` LIMIT ?"),
        "{}",
        list.text
    );
    let union = ask(Dialect::Sqlite, &[9, 10, 11]);
    assert_eq!(union.text.matches("UNION ALL").count(), 2);
    assert_eq!(union.binds.len(), 6);
}

#[test]
fn slots_serve_only_a_group_that_has_as_many() {
    let with = statements(Dialect::Postgres, Table::new("t").slot_index(1_024));
    assert!(with.slots_of(&share(1_024, 99)).is_some());
    assert!(with.slots_of(&share(512, 99)).is_none() && with.slots_of(&share(3, 0)).is_none());
    let without = statements(Dialect::Postgres, Table::new("t"));
    assert!(without.slots_of(&share(1_024, 99)).is_none());
}

#[test]
fn marks_are_conditional() {
    let table = Table::new("t").retries("attempts", Retry::default());
    let keys = [Key::Integer(5), Key::Integer(6), Key::Integer(7)];
    let mark = |dialect, mark| statements(dialect, table.clone()).mark(mark, &keys);
    let done = mark(Dialect::Postgres, Mark::Done);
    assert_eq!(
        done.text,
        "UPDATE \"t\" SET \"status\" = 1 WHERE \"id\" = ANY($1) \
         AND CASE WHEN \"status\" = 0 THEN TRUE ELSE FALSE END"
    );
    let done = mark(Dialect::MySql, Mark::Done);
    assert_eq!(
        done.text,
        "UPDATE `t` SET `status` = 1 WHERE `id` IN (?, ?, ?, ?) AND `status` = 0"
    );
    assert_eq!(done.binds[2], done.binds[3], "filled up with the last key");
    let again = Mark::Again {
        attempts: 1,
        wait: Duration::from_secs(20),
    };
    let again = mark(Dialect::Postgres, again);
    assert!(
        again
            .text
            .ends_with("FALSE END AND COALESCE(\"attempts\", 0) = 1")
    );
    assert!(!again.lasting);
}
