//! Any table: whatever its keys, its names and its times are, each row is executed by one member, and not before it
//! is due.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test may fail like the test itself"
)]

use std::time::Duration;

use crate::common::crew::{Crew, NoColumns, PATIENCE, settled};
use crate::common::place::Place;
use skyschedule_client::sql::{self, Database, Error, Table, Task, UnixTime};
use skyschedule_client::{Dialect, RowKey};
use skyschedule_common::env;

/// Three members settle, then the rows appear: each is executed once, by one of them, and all work.
async fn each_is_executed_once(place: &Place, table: Table, into: &str, values: Vec<String>) {
    crew_executes_each_once(Crew::new().await, place, table, into, values).await;
}

async fn crew_executes_each_once(
    crew: Crew,
    place: &Place,
    table: Table,
    into: &str,
    values: Vec<String>,
) {
    let a = crew.join("a", &place.database, table.clone()).await;
    let b = crew.join("b", &place.database, table.clone()).await;
    let c = crew.join("c", &place.database, table).await;
    settled(&[&a, &b, &c]).await;
    place.insert(into, &values).await;
    crew.seen.reach(values.len()).await;
    let mut done = 0;
    for member in [a, b, c] {
        let metrics = member.close().await;
        assert!(metrics.done > 0, "a member was idle: {metrics:?}");
        assert_eq!(metrics.lost_marks, 0, "{metrics:?}");
        done += metrics.done;
    }
    assert_eq!(done, u64::try_from(values.len()).unwrap());
    let twice: Vec<_> = crew
        .seen
        .by_key()
        .into_iter()
        .filter(|(_, executions)| executions.len() > 1)
        .collect();
    assert!(twice.is_empty(), "executed twice: {twice:?}");
}

on_each_database! {
    async fn negative_zero_positive_and_extreme_ids_are_executed(place: &Place) {
        place.create_tasks().await;
        let ids = (-10_000..=10_000).chain([i64::MIN, i64::MIN + 1, i64::MAX - 1, i64::MAX]);
        let values = ids.map(|id| format!("({id})")).collect();
        each_is_executed_once(place, Table::new("task_info"), "task_info (id)", values).await;
        assert_eq!(place.with_status(1).await, 20_005);
    }

    async fn text_keys_are_executed_whatever_they_are_made_of(place: &Place) {
        // In MariaDB neither case nor trailing blanks make a difference unless the collation says so, and the
        // character set of the column must not change the hash.
        place.execute(place.pick(
            "CREATE TABLE task_info (id TEXT PRIMARY KEY, task_time TIMESTAMPTZ NOT NULL DEFAULT now(), \
             status SMALLINT NOT NULL DEFAULT 0)",
            "CREATE TABLE task_info (id VARCHAR(100) CHARACTER SET utf16 COLLATE utf16_nopad_bin PRIMARY KEY, \
             task_time DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), status TINYINT NOT NULL DEFAULT 0)",
            "CREATE TABLE task_info (id TEXT PRIMARY KEY, task_time TEXT NOT NULL DEFAULT (datetime('now')), \
             status INTEGER NOT NULL DEFAULT 0)",
        )).await;
        let kinds = ["order", "Order", "ORDER ", "order  ", "订单", "🚀é", "O''Brien", " "];
        let values: Vec<String> = (0..50)
            .flat_map(|n| kinds.map(|kind| format!("('{n}{kind}')")))
            .chain(["('')".to_owned()])
            .collect();
        each_is_executed_once(place, Table::new("task_info"), "task_info (id)", values).await;
        assert_eq!(place.with_status(0).await, 0);
    }

    async fn uuids_are_executed(place: &Place) {
        place.execute(place.pick(
            "CREATE TABLE task_info (id UUID PRIMARY KEY, task_time TIMESTAMPTZ NOT NULL DEFAULT now(), \
             status SMALLINT NOT NULL DEFAULT 0)",
            "CREATE TABLE task_info (id UUID PRIMARY KEY, \
             task_time DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), status TINYINT NOT NULL DEFAULT 0)",
            "CREATE TABLE task_info (id UUID PRIMARY KEY, task_time TEXT NOT NULL DEFAULT (datetime('now')), \
             status INTEGER NOT NULL DEFAULT 0)",
        )).await;
        let uuid = |n: u64| {
            let n = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            format!("('{:08X}-{:04x}-4{:03x}-8{:03x}-{:012x}')", n >> 32, n & 0xffff, n & 0xfff, n >> 52, n >> 16)
        };
        let values = (1..=500).map(uuid).collect();
        each_is_executed_once(place, Table::new("task_info"), "task_info (id)", values).await;
        assert_eq!(place.with_status(0).await, 0);
    }

    async fn slots_are_worked_through_by_their_column(place: &Place) {
        place.create_tasks().await;
        place.execute(place.pick(
            "ALTER TABLE task_info ADD COLUMN slot SMALLINT GENERATED ALWAYS AS (id & 1023) STORED; \
             CREATE INDEX slots ON task_info (slot, task_time, id) WHERE status = 0",
            "ALTER TABLE task_info ADD COLUMN slot SMALLINT UNSIGNED AS (id & 1023) VIRTUAL, \
             ADD INDEX slots (slot, status, task_time, id)",
            "ALTER TABLE task_info ADD COLUMN slot INTEGER AS (id & 1023) VIRTUAL; \
             CREATE INDEX slots ON task_info (slot, task_time, id) WHERE status = 0",
        )).await;
        let crew = Crew::new().await;
        crew.slots(1_024).await;
        let table = Table::new("task_info").slot_column("slot", 1_024);
        let ids = (-3_000..=3_000).chain([i64::MIN, i64::MAX]);
        let values = ids.map(|id| format!("({id})")).collect();
        crew_executes_each_once(crew, place, table, "task_info (id)", values).await;
    }

    async fn no_slot_starves_while_others_are_flooded(place: &Place) {
        const FLOOD: i64 = 8_000;
        place.create_tasks().await;
        place.execute(place.pick(
            "ALTER TABLE task_info ADD COLUMN slot SMALLINT GENERATED ALWAYS AS (id & 15) STORED; \
             CREATE INDEX slots ON task_info (slot, task_time, id) WHERE status = 0",
            "ALTER TABLE task_info ADD COLUMN slot SMALLINT UNSIGNED AS (id & 15) VIRTUAL, \
             ADD INDEX slots (slot, status, task_time, id)",
            "ALTER TABLE task_info ADD COLUMN slot INTEGER AS (id & 15) VIRTUAL; \
             CREATE INDEX slots ON task_info (slot, task_time, id) WHERE status = 0",
        )).await;
        // Two slots have thousands of old tasks, each of the others one that is younger than all of them.
        place.add_tasks((0..FLOOD).map(|n| n / 2 * 16 + n % 2)).await;
        place.execute(place.pick(
            "UPDATE task_info SET task_time = now() - interval '1 hour'",
            "UPDATE task_info SET task_time = NOW(6) - INTERVAL 1 HOUR",
            "UPDATE task_info SET task_time = datetime('now', '-1 hour')",
        )).await;
        place.add_tasks(2..16).await;
        let crew = Crew::new().await;
        crew.slots(16).await;
        let table = Table::new("task_info").slot_column("slot", 16);
        let member = crew.join("a", &place.database, table).await;
        let all = usize::try_from(FLOOD).unwrap() + 14;
        crew.seen.reach(all).await;
        let metrics = member.close().await;
        assert_eq!((metrics.done, metrics.lost_marks), (u64::try_from(all).unwrap(), 0));
        let executed = crew.seen.all();
        let is_lone = |key: &str| key.parse::<i64>().is_ok_and(|id| (2..16).contains(&id));
        let last = executed.iter().rposition(|one| is_lone(&one.key)).unwrap();
        assert!(last < all / 2, "a slot waited for {last} tasks of others");
    }

    async fn slots_of_text_keys_are_those_of_the_documentation(place: &Place) {
        place.execute(place.pick(
            "CREATE TABLE task_info (id TEXT PRIMARY KEY, task_time TIMESTAMPTZ NOT NULL DEFAULT now(), \
             status SMALLINT NOT NULL DEFAULT 0, slot INT GENERATED ALWAYS AS \
             (('x' || substr(md5(id), 1, 8))::bit(32)::bigint % 64) STORED)",
            "CREATE TABLE task_info (id VARCHAR(100) CHARACTER SET latin1 COLLATE latin1_bin PRIMARY KEY, \
             task_time DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), status TINYINT NOT NULL DEFAULT 0, \
             slot SMALLINT UNSIGNED AS (CAST(CONV(SUBSTR(MD5(CONVERT(id USING utf8mb4)), 1, 8), 16, 10) AS UNSIGNED) % 64) VIRTUAL)",
            // Without such a function: whoever adds a task computes its slot.
            "CREATE TABLE task_info (id TEXT PRIMARY KEY, slot INTEGER, task_time TEXT NOT NULL DEFAULT (datetime('now')), \
             status INTEGER NOT NULL DEFAULT 0)",
        )).await;
        let crew = Crew::new().await;
        crew.slots(64).await;
        let table = Table::new("task_info").slot_column("slot", 64);
        // So many that each slot is read in several steps.
        let ids = (0..3_000).map(|n| format!("Größe {n}"));
        let (into, values) = if place.dialect == Dialect::Sqlite {
            let slot = |id: &str| RowKey::from(id).modulo(64);
            ("task_info (id, slot)", ids.map(|id| format!("('{id}', {})", slot(&id))).collect())
        } else {
            ("task_info (id)", ids.map(|id| format!("('{id}')")).collect())
        };
        crew_executes_each_once(crew, place, table, into, values).await;
    }

    async fn a_group_of_slots_needs_no_index_for_them(place: &Place) {
        place.create_tasks().await;
        let crew = Crew::new().await;
        crew.slots(64).await;
        let values = (0..1_000).map(|id| format!("({id})")).collect();
        crew_executes_each_once(crew, place, Table::new("task_info"), "task_info (id)", values).await;
    }

    async fn hostile_and_reserved_names_are_names(place: &Place) {
        // A name that closes the quotes of its database, and one that is a keyword.
        let wicked = place.pick("x\" --; 'y", "x` --; 'y", "x\" --; 'y");
        let quote = |name: &str| match place.dialect {
            Dialect::MySql => format!("`{}`", name.replace('`', "``")),
            Dialect::Postgres | Dialect::Sqlite => format!("\"{}\"", name.replace('"', "\"\"")),
        };
        let (table, id, status) = (quote("SELECT"), quote(wicked), quote("Zustand ß"));
        let (due, attempts, next) = (quote("order"), quote("☃"), quote("Next?"));
        let (time, now) = (
            place.pick("TIMESTAMPTZ", "DATETIME(6)", "TEXT"),
            place.pick("now()", "CURRENT_TIMESTAMP(6)", "(datetime('now'))"),
        );
        place.execute(&format!(
            "CREATE TABLE {table} ({id} BIGINT PRIMARY KEY, {status} VARCHAR(20) NOT NULL DEFAULT 'it''s new', \
             {due} {time} NOT NULL DEFAULT {now}, {attempts} INT, {next} {time} NULL)"
        )).await;
        let described = Table::new("SELECT")
            .schema(place.schema())
            .id(wicked)
            .status("Zustand ß")
            .status_values("it's new", "done?", "failed")
            .due("order")
            .columns([wicked])
            .retries("☃", sql::Retry::default())
            .next_attempt("Next?");
        let values = (0..300).map(|n| format!("({n})")).collect();
        each_is_executed_once(place, described, &format!("{table} ({id})"), values).await;
        let done = format!("SELECT COUNT(*) FROM {table} WHERE {status} = 'done?'");
        assert_eq!(place.number(&done).await, 300);
    }

    async fn columns_and_tables_that_do_not_exist_are_named_at_the_start(place: &Place) {
        place.create_tasks().await;
        let client = Crew::new().await.client("a").await;
        for table in [
            Table::new("no_such_table"),
            Table::new("task_info").id("no_such_column"),
            Table::new("task_info").due("no_such_column"),
            Table::new("task_info").columns(["no_such_column"]),
        ] {
            let error = sql::consumer(&client, table).on_any(place.database.clone()).await.unwrap_err();
            assert!(error.to_string().contains("no_such_"), "{error}");
        }
    }

    async fn a_task_runs_when_it_is_due_and_not_before(place: &Place) {
        // Each kind of column: its type, a time some seconds from now written without the library, and how the
        // column is described: its zone, its unit.
        const SECONDS: Option<UnixTime> = Some(UnixTime::Seconds);
        const MILLIS: Option<UnixTime> = Some(UnixTime::Millis);
        let kinds: Vec<(&str, &str, Option<&str>, Option<UnixTime>)> = match place.dialect {
            Dialect::Postgres => vec![
                ("TIMESTAMPTZ", "now() + INTERVAL '{} seconds'", None, None),
                ("TIMESTAMP", "(now() AT TIME ZONE 'Asia/Shanghai') + INTERVAL '{} seconds'", Some("Asia/Shanghai"), None),
                ("TIMESTAMP", "(now() AT TIME ZONE 'UTC') + INTERVAL '8 hours {} seconds'", Some("+08:00"), None),
                ("TIMESTAMP", "(now() AT TIME ZONE 'UTC') - INTERVAL '3 hours 30 minutes' + INTERVAL '{} seconds'",
                    Some("-03:30"), None),
                ("BIGINT", "EXTRACT(EPOCH FROM now()) + {}", None, SECONDS),
                ("BIGINT", "(EXTRACT(EPOCH FROM now()) + {}) * 1000", None, MILLIS),
            ],
            Dialect::MySql => vec![
                // The server's zone is +08:00, and so is that of sessions that did not change it.
                ("TIMESTAMP(6)", "NOW(6) + INTERVAL {} SECOND", None, None),
                ("DATETIME(6)", "NOW(6) + INTERVAL {} SECOND", None, None),
                ("DATETIME", "NOW() + INTERVAL {} SECOND", Some("+08:00"), None),
                ("DATETIME(3)", "UTC_TIMESTAMP(3) - INTERVAL 210 MINUTE + INTERVAL {} SECOND", Some("-03:30"), None),
                ("BIGINT", "UNIX_TIMESTAMP() + {}", None, SECONDS),
                ("BIGINT UNSIGNED", "(UNIX_TIMESTAMP() + {}) * 1000", None, MILLIS),
            ],
            Dialect::Sqlite => vec![
                ("TEXT", "strftime('%Y-%m-%d %H:%M:%f', 'now', '{} seconds')", None, None),
                ("DATETIME", "strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '{} seconds')", None, None),
                ("TEXT", "datetime('now', '8 hours', '{} seconds')", Some("+08:00"), None),
                ("INTEGER", "unixepoch('now') + {}", None, SECONDS),
                ("INTEGER", "(unixepoch('now') + {}) * 1000", None, MILLIS),
            ],
        };
        let crew = Crew::new().await;
        let a = crew.client("a").await;
        let mut running = Vec::new();
        for (number, (kind, now, zone, unit)) in kinds.into_iter().enumerate() {
            let name = format!("tasks_{number}");
            place.execute(&format!(
                "CREATE TABLE {name} (id INTEGER PRIMARY KEY, task_time {kind} NOT NULL, status INTEGER NOT NULL DEFAULT 0)"
            )).await;
            let mut described = Table::new(&name);
            if let Some(zone) = zone {
                described = described.time_zone(zone);
            }
            if let Some(unit) = unit {
                described = described.unix_time(unit);
            }
            let consumer = sql::consumer(&a, described)
                .longest_idle(Duration::from_millis(100))
                .on_any(place.database.clone())
                .await
                .unwrap();
            let due = |seconds: i32| now.replace("{}", &seconds.to_string());
            let start = env::now();
            place.execute(&format!(
                "INSERT INTO {name} (id, task_time) VALUES (1, {}), (2, {}), (3, {}), (4, {})",
                due(-3_600), due(3), due(3_600), due(9 * 3_600)
            )).await;
            let (seen, label) = (crew.seen.clone(), format!("{kind} {now}"));
            let stopper = consumer.stopper();
            let run = env::spawn(consumer.run(move |task: Task<NoColumns>| {
                seen.note(&label, &task);
                async { Ok::<_, String>(()) }
            }));
            running.push((name, format!("{kind} {now}"), start, stopper, run));
        }
        crew.seen.reach(2 * running.len()).await;
        env::sleep(Duration::from_millis(500)).await;
        for (name, label, start, stopper, run) in running {
            stopper.stop();
            run.await.unwrap();
            let executed = crew.seen.all();
            let at = |key: &str| executed.iter().find(|one| one.client == label && one.key == key);
            assert!(at("1").is_some(), "the past is due: {name} {label}");
            let after = at("2").unwrap_or_else(|| panic!("not executed: {name} {label}")).at;
            let after = after.saturating_duration_since(start);
            // Columns of whole seconds cut or round the time when they take it.
            assert!(after >= Duration::from_millis(1_900), "{after:?} is too early: {name} {label}");
            assert!(after <= PATIENCE, "{after:?} is too late: {name} {label}");
            assert!(at("3").is_none() && at("4").is_none(), "not due yet: {name} {label}");
        }
    }
}

/// An index on the expression, where the database has such indexes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_are_worked_through_by_an_index_on_their_expression() {
    for place in [Place::postgres().await, Place::sqlite().await] {
        place.create_tasks().await;
        place
            .execute(
                "CREATE INDEX slots ON task_info ((id & 1023), task_time, id) WHERE status = 0",
            )
            .await;
        let crew = Crew::new().await;
        crew.slots(1_024).await;
        let table = Table::new("task_info").slot_index(1_024);
        let values = (-2_000..=2_000).map(|id| format!("({id})")).collect();
        crew_executes_each_once(crew, &place, table, "task_info (id)", values).await;
        place.remove().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsigned_ids_above_the_signed_ones_are_executed() {
    let place = Place::mariadb().await;
    place
        .execute(
            "CREATE TABLE task_info (id BIGINT UNSIGNED PRIMARY KEY, \
             task_time DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), status TINYINT NOT NULL DEFAULT 0)",
        )
        .await;
    let ids = (0..500).chain((u64::MAX - 500)..=u64::MAX);
    let ids = ids.chain([i64::MAX.unsigned_abs(), i64::MAX.unsigned_abs() + 1]);
    let values = ids.map(|id| format!("({id})")).collect();
    each_is_executed_once(&place, Table::new("task_info"), "task_info (id)", values).await;
    assert_eq!(place.with_status(1).await, 1_003);
    place.remove().await;
}

#[tokio::test]
async fn a_postgres_time_without_zone_needs_the_zone_named() {
    let place = Place::postgres().await;
    place
        .execute("CREATE TABLE task_info (id BIGINT PRIMARY KEY, task_time TIMESTAMP, status INT)")
        .await;
    let client = Crew::new().await.client("a").await;
    let set_up = |table| sql::consumer(&client, table).on_any(place.database.clone());
    let error = set_up(Table::new("task_info")).await.unwrap_err();
    assert!(matches!(error, Error::NoTimeZone { .. }), "{error}");
    let unknown = Table::new("task_info").time_zone("Asia/Atlantis");
    let error = set_up(unknown).await.unwrap_err();
    assert!(error.to_string().contains("Asia/Atlantis"), "{error}");
    set_up(Table::new("task_info").time_zone("Asia/Shanghai"))
        .await
        .unwrap();
    place.remove().await;
}

#[tokio::test]
async fn a_zone_that_mariadb_cannot_convert_is_refused() {
    let place = Place::mariadb().await;
    place.create_tasks().await;
    let client = Crew::new().await.client("a").await;
    let unknown = Table::new("task_info").time_zone("Asia/Atlantis");
    let error = sql::consumer(&client, unknown)
        .on_any(place.database.clone())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::TimeZone { .. }), "{error}");
    place.remove().await;
}

/// Sessions whose clock is an hour ahead of this process's: what is due within the hour runs, what is due later does
/// not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_application_clock_decides_nothing() {
    use sqlx::Executor as _;
    let mariadb = Place::mariadb().await;
    mariadb.create_tasks().await;
    let ahead = sqlx::mysql::MySqlPoolOptions::new().after_connect(|connection, _| {
        Box::pin(async move {
            let query = "SET timestamp = UNIX_TIMESTAMP() + 3600";
            connection.execute(query).await.map(|_| ())
        })
    });
    let ahead = Database::MySql(ahead.connect(&mariadb.url).await.unwrap());
    runs_an_hour_ahead(&mariadb, &ahead, "NOW(6) + INTERVAL {} MINUTE").await;
    mariadb.remove().await;

    let postgres = Place::postgres().await;
    postgres.create_tasks().await;
    postgres
        .execute(
            "CREATE FUNCTION now() RETURNS timestamptz STABLE LANGUAGE sql \
             AS 'SELECT pg_catalog.now() + INTERVAL ''1 hour'''",
        )
        .await;
    let path = format!("SET search_path = {}, pg_catalog", postgres.schema());
    let ahead = sqlx::postgres::PgPoolOptions::new().after_connect(move |connection, _| {
        let path = path.clone();
        Box::pin(async move {
            let query = sqlx::AssertSqlSafe(path);
            connection.execute(query).await.map(|_| ())
        })
    });
    let ahead = Database::Postgres(ahead.connect(&postgres.url).await.unwrap());
    let later = "pg_catalog.now() + INTERVAL '{} minutes'";
    runs_an_hour_ahead(&postgres, &ahead, later).await;
    postgres.remove().await;
}

async fn runs_an_hour_ahead(place: &Place, ahead: &Database, later: &str) {
    let due = |minutes: i32| later.replace("{}", &minutes.to_string());
    let tasks =
        [(1, due(-5)), (2, due(55)), (3, due(65))].map(|(id, due)| format!("({id}, {due})"));
    place.insert("task_info (id, task_time)", &tasks).await;
    let crew = Crew::new().await;
    let member = crew.join("a", ahead, Table::new("task_info")).await;
    crew.seen.reach(2).await;
    env::sleep(Duration::from_millis(300)).await;
    member.close().await;
    let keys: Vec<String> = crew.seen.by_key().into_keys().collect();
    assert_eq!(keys, ["1", "2"]);
}
