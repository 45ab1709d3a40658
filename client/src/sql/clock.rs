//! The database's clock, in the terms of a column.

use std::time::Duration;

use super::table::UnixTime;

/// How a column tells a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Clock {
    /// PostgreSQL `timestamptz`.
    PostgresZoned,
    /// PostgreSQL `timestamp` (or `date`, `type_name`) in a zone, which is an SQL expression.
    PostgresLocal {
        zone: String,
        type_name: &'static str,
    },
    /// MariaDB and MySQL `TIMESTAMP`: read and compared in the session's zone, whatever it is.
    MySqlZoned,
    /// MariaDB and MySQL `DATETIME` or `DATE` in a zone, which is an SQL expression.
    MySqlLocal { zone: String },
    /// SQLite text, so many minutes east of UTC.
    SqliteText { minutes: i32 },
    /// A number since 1970.
    PostgresUnix(UnixTime),
    /// The same.
    MySqlUnix(UnixTime),
    /// The same.
    SqliteUnix(UnixTime),
}

/// Microseconds since 1970 in MariaDB and MySQL, whatever the session's zone.
const MYSQL_MICROS: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

impl Clock {
    /// Now, as a value of the column. The database takes it for a constant, so that an index can serve.
    pub(super) fn now(&self) -> String {
        match self {
            Self::PostgresZoned => "now()".to_owned(),
            Self::PostgresLocal { zone, .. } => format!("(now() AT TIME ZONE {zone})"),
            Self::MySqlZoned => "NOW(6)".to_owned(),
            // Not NOW(): drivers set the session's zone to UTC.
            Self::MySqlLocal { zone } => format!("CONVERT_TZ(UTC_TIMESTAMP(6), '+00:00', {zone})"),
            Self::SqliteText { .. } => self.sqlite_text(' ', Duration::ZERO),
            Self::PostgresUnix(UnixTime::Seconds) => {
                "CAST(floor(EXTRACT(EPOCH FROM now())) AS bigint)".to_owned()
            }
            Self::PostgresUnix(UnixTime::Millis) => {
                "CAST(floor(EXTRACT(EPOCH FROM now()) * 1000) AS bigint)".to_owned()
            }
            Self::MySqlUnix(UnixTime::Seconds) => format!("({MYSQL_MICROS} DIV 1000000)"),
            Self::MySqlUnix(UnixTime::Millis) => format!("({MYSQL_MICROS} DIV 1000)"),
            Self::SqliteUnix(UnixTime::Seconds) => "unixepoch('now')".to_owned(),
            Self::SqliteUnix(UnixTime::Millis) => {
                "CAST(unixepoch('now', 'subsec') * 1000 AS INTEGER)".to_owned()
            }
        }
    }

    /// The condition that the time in `column` has come.
    pub(super) fn reached(&self, column: &str) -> String {
        match self {
            // Both ways of writing a time. They order differently only within a day, and T after blank.
            Self::SqliteText { .. } => {
                let (blank, letter) = (
                    self.sqlite_text(' ', Duration::ZERO),
                    self.sqlite_text('T', Duration::ZERO),
                );
                format!(
                    "{column} <= {letter} AND ({column} <= {blank} OR substr({column}, 11, 1) = 'T')"
                )
            }
            _ => format!("{column} <= {}", self.now()),
        }
    }

    /// The time after `wait`, as a value of the column.
    pub(super) fn after(&self, wait: Duration) -> String {
        let (now, millis) = (self.now(), wait.as_millis());
        match self {
            Self::PostgresZoned => format!("now() + INTERVAL '{millis} milliseconds'"),
            Self::PostgresLocal { type_name, .. } => {
                format!("CAST({now} + INTERVAL '{millis} milliseconds' AS {type_name})")
            }
            Self::MySqlZoned | Self::MySqlLocal { .. } => {
                format!("{now} + INTERVAL {} MICROSECOND", millis * 1_000)
            }
            Self::SqliteText { .. } => self.sqlite_text(' ', wait),
            Self::PostgresUnix(unit) | Self::MySqlUnix(unit) | Self::SqliteUnix(unit) => {
                let units = match unit {
                    UnixTime::Seconds => millis.div_ceil(1_000),
                    UnixTime::Millis => millis,
                };
                format!("{now} + {units}")
            }
        }
    }

    /// For how many seconds the time in `column` has passed.
    pub(super) fn lag(&self, column: &str) -> String {
        let now = self.now();
        match self {
            // Two parts, not one of the difference: there is no difference to infinity. EXTRACT counts in decimals, slowly.
            // The one of now once a query.
            Self::PostgresZoned | Self::PostgresLocal { .. } => {
                format!("(SELECT date_part('epoch', {now})) - date_part('epoch', {column})")
            }
            Self::MySqlZoned | Self::MySqlLocal { .. } => {
                format!("TIMESTAMPDIFF(MICROSECOND, {column}, {now}) / 1e6")
            }
            Self::SqliteText { minutes } => {
                format!("(julianday('now', '{minutes} minutes') - julianday({column})) * 86400.0")
            }
            Self::PostgresUnix(unit) => {
                format!(
                    "CAST({now} - {column} AS double precision) / {}",
                    per_second(*unit)
                )
            }
            Self::MySqlUnix(unit) => {
                format!(
                    "({now} - CAST({column} AS SIGNED)) / {}e0",
                    per_second(*unit)
                )
            }
            Self::SqliteUnix(unit) => format!("({now} - {column}) / {}.0", per_second(*unit)),
        }
    }

    /// The column, exact enough to go on from: PostgreSQL's as it is, others' as text.
    pub(super) fn to_go_on_from(&self, column: &str) -> String {
        match self {
            Self::PostgresZoned | Self::PostgresLocal { .. } | Self::PostgresUnix(_) => {
                column.to_owned()
            }
            Self::MySqlZoned | Self::MySqlLocal { .. } | Self::MySqlUnix(_) => {
                format!("CAST({column} AS CHAR)")
            }
            Self::SqliteText { .. } | Self::SqliteUnix(_) => format!("CAST({column} AS TEXT)"),
        }
    }

    /// That, bound as `placeholder`, as a value of the column.
    pub(super) fn time_of(&self, placeholder: &str) -> String {
        match self {
            Self::MySqlUnix(_) => format!("CAST({placeholder} AS SIGNED)"),
            Self::SqliteUnix(_) => format!("CAST({placeholder} AS INTEGER)"),
            Self::PostgresZoned
            | Self::PostgresLocal { .. }
            | Self::PostgresUnix(_)
            | Self::MySqlZoned
            | Self::MySqlLocal { .. }
            | Self::SqliteText { .. } => placeholder.to_owned(),
        }
    }

    fn sqlite_text(&self, separator: char, wait: Duration) -> String {
        let mut modifiers = String::new();
        if let Self::SqliteText { minutes } = self
            && *minutes != 0
        {
            modifiers = format!(", '{minutes} minutes'");
        }
        if !wait.is_zero() {
            modifiers.push_str(&format!(", '{:.3} seconds'", wait.as_secs_f64()));
        }
        format!("strftime('%Y-%m-%d{separator}%H:%M:%f', 'now'{modifiers})")
    }
}

fn per_second(unit: UnixTime) -> u32 {
    match unit {
        UnixTime::Seconds => 1,
        UnixTime::Millis => 1_000,
    }
}

/// Minutes east of UTC of a zone such as `+08:00`; `None` for names.
pub(super) fn offset_minutes(zone: &str) -> Option<i32> {
    if matches!(zone, "UTC" | "utc" | "Z") {
        return Some(0);
    }
    let (sign, rest) = match zone.strip_prefix('+') {
        Some(rest) => (1, rest),
        None => (-1, zone.strip_prefix('-')?),
    };
    let (hours, minutes) = rest.split_once(':')?;
    let two = |digits: &str, below: i32| {
        let number = digits.parse::<i32>().ok()?;
        (digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_digit()) && number < below)
            .then_some(number)
    };
    Some(sign * (two(hours, 15)? * 60 + two(minutes, 60)?))
}

/// Minutes east of UTC as `+08:00`.
pub(super) fn offset_text(minutes: i32) -> String {
    let sign = if minutes < 0 { '-' } else { '+' };
    let minutes = minutes.abs();
    format!("{sign}{:02}:{:02}", minutes / 60, minutes % 60)
}

/// Whether the text may be the name of a zone.
pub(super) fn is_zone_name(zone: &str) -> bool {
    (1..=64).contains(&zone.len())
        && zone
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_+-/".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read_and_written() {
        assert_eq!(offset_minutes("+08:00"), Some(480));
        assert_eq!(offset_minutes("-03:30"), Some(-210));
        assert_eq!(offset_minutes("UTC"), Some(0));
        for name in ["Asia/Shanghai", "+8", "+08:60", "+1é:00", "08:00", ""] {
            assert_eq!(offset_minutes(name), None, "{name}");
        }
        assert_eq!(offset_text(-210), "-03:30");
        assert!(is_zone_name("America/Argentina/La_Rioja") && !is_zone_name("x'y"));
    }

    #[test]
    fn sqlite_takes_both_ways_of_writing_a_time() {
        let clock = Clock::SqliteText { minutes: 480 };
        assert!(clock.reached("due").contains("'now', '480 minutes'"));
        assert!(
            clock
                .after(Duration::from_millis(1_500))
                .ends_with(", '1.500 seconds')")
        );
    }
}
