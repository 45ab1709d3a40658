//! The SQL condition of a share.

use std::fmt::Write as _;

use super::{Numbers, Share};

/// The databases whose SQL a share can write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// PostgreSQL.
    Postgres,
    /// MariaDB and MySQL.
    MySql,
    /// SQLite.
    Sqlite,
}

/// What kind of key the id column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyKind {
    /// Any integer type, signed or unsigned.
    Integer,
    /// Text or UUID: hashed.
    Text,
}

/// Totals that are a power of two from here on are masked instead of divided: the expression of the
/// index that the documentation recommends for slots, and non-negative for every id.
const MIN_MASK: u32 = 16;

impl Dialect {
    /// The SQL expression for the number, below `total`, of the row whose key is in `column`; `None` where the database cannot
    /// hash text (SQLite). It is the expression that an index on slots is made of.
    pub fn remainder(self, column: &str, kind: KeyKind, total: u32) -> Option<String> {
        Some(match (kind, self) {
            // Integer arithmetic is the same in the three databases.
            (KeyKind::Integer, _) if total >= MIN_MASK && total.is_power_of_two() => {
                format!("({column} & {})", total - 1)
            }
            (KeyKind::Integer, _) => format!("(({column} % {total}) + {total}) % {total}"),
            (KeyKind::Text, Self::Postgres) => format!(
                "(('x' || substr(md5(CAST({column} AS text)), 1, 8))::bit(32)::bigint % {total})"
            ),
            (KeyKind::Text, Self::MySql) => format!(
                "(CAST(CONV(SUBSTR(MD5(CONVERT({column} USING utf8mb4)), 1, 8), 16, 10) AS UNSIGNED) % {total})"
            ),
            (KeyKind::Text, Self::Sqlite) => return None,
        })
    }
}

impl Share {
    /// The condition on the integer column or expression `column` that holds for exactly the rows of
    /// this share. Quote `column` yourself where its name needs it.
    pub fn predicate(&self, dialect: Dialect, column: &str) -> String {
        // Every database divides integers.
        self.predicate_for(dialect, column, KeyKind::Integer)
            .unwrap_or_default()
    }

    /// The condition for a key of this kind; `None` where the database cannot hash text (SQLite):
    /// there, filter by [`Share::contains`] in the process, or keep a slot column.
    pub fn predicate_for(&self, dialect: Dialect, column: &str, kind: KeyKind) -> Option<String> {
        let remainder = dialect.remainder(column, kind, self.total().max(1))?;
        Some(self.condition(&remainder))
    }

    fn condition(&self, remainder: &str) -> String {
        if self.is_empty() {
            return "1 = 0".to_owned();
        }
        if self.numbers() == &Numbers::below(self.total()) {
            return "1 = 1".to_owned();
        }
        membership(remainder, self.numbers())
    }
}

/// `expression ∈ numbers`: long ranges by BETWEEN, the rest by one IN or =.
fn membership(expression: &str, numbers: &Numbers) -> String {
    let (long, short): (Vec<_>, Vec<_>) = numbers
        .ranges()
        .iter()
        .partition(|(first, last)| last - first >= 2);
    let mut terms: Vec<String> = long
        .iter()
        .map(|(first, last)| format!("{expression} BETWEEN {first} AND {last}"))
        .collect();
    let mut list = String::new();
    let mut count = 0;
    for number in short.iter().flat_map(|&(first, last)| first..=last) {
        let comma = if count > 0 { ", " } else { "" };
        // Writing to a String cannot fail.
        let _ = write!(list, "{comma}{number}");
        count += 1;
    }
    match count {
        0 => {}
        1 => terms.push(format!("{expression} = {list}")),
        _ => terms.push(format!("{expression} IN ({list})")),
    }
    if terms.len() == 1 {
        terms.remove(0)
    } else {
        format!("({})", terms.join(" OR "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(total: u32, numbers: &[u32]) -> Share {
        Share::new(total, numbers.iter().copied().collect()).unwrap()
    }

    #[test]
    fn conditions_are_short_and_never_divide_by_zero() {
        let sql = |share: Share| share.predicate(Dialect::Sqlite, "id");
        assert_eq!(sql(share(5, &[2])), "((id % 5) + 5) % 5 = 2");
        assert_eq!(sql(share(5, &[0, 2])), "((id % 5) + 5) % 5 IN (0, 2)");
        assert_eq!(
            sql(share(1024, &[0, 1, 2, 9])),
            "((id & 1023) BETWEEN 0 AND 2 OR (id & 1023) = 9)"
        );
        assert_eq!(sql(share(3, &[0, 1, 2])), "1 = 1");
        assert_eq!(sql(Share::NONE), "1 = 0");
        assert_eq!(sql(Share::none_of(7)), "1 = 0");
    }

    #[test]
    fn text_keys_need_a_database_that_hashes() {
        let share = share(3, &[1]);
        assert!(
            share
                .predicate_for(Dialect::Postgres, "id", KeyKind::Text)
                .unwrap()
                .ends_with("% 3) = 1")
        );
        assert!(
            share
                .predicate_for(Dialect::Sqlite, "id", KeyKind::Text)
                .is_none()
        );
    }
}
