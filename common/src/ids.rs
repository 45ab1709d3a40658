//! Names and identities. Each is checked where it enters, so that everything inside can rely on it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A name that does not follow the rules of its kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no {kind}: expected {rule}")]
pub struct InvalidName {
    kind: &'static str,
    rule: &'static str,
    text: String,
}

/// What a URL's path takes for a folder, however it is escaped.
fn is_dots(text: &str) -> bool {
    matches!(text, "." | "..")
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $rule:literal, $valid:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks the text and makes it a name.
            ///
            /// # Errors
            /// When the text breaks the rule that the type documents.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidName> {
                let text = text.into();
                let valid: fn(&str) -> bool = $valid;
                if valid(&text) {
                    Ok(Self(text.into()))
                } else {
                    // A hostile name must not fill a log line.
                    let text = text.chars().take(80).collect();
                    Err(InvalidName { kind: $kind, rule: $rule, text })
                }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidName;
            fn try_from(text: String) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0.as_ref().to_owned()
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", self.0)
            }
        }
    };
}

name!(
    /// A group: the clients that share one task table. 1 to 64 of `A-Z a-z 0-9 . _ -`, but neither `.` nor `..`.
    GroupName,
    "group name",
    "1 to 64 characters of A-Z a-z 0-9 . _ -, neither . nor ..",
    |text| (1..=64).contains(&text.len()) && !is_dots(text) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
);

name!(
    /// A client's name within its group, unique among those that live. 1 to 128 visible ASCII characters, but neither `.`
    /// nor `..`.
    ClientId,
    "client id",
    "1 to 128 visible ASCII characters, no spaces, neither . nor ..",
    |text| (1..=128).contains(&text.len()) && !is_dots(text) && text.bytes().all(|b| b.is_ascii_graphic())
);

name!(
    /// The name under which executors register code for jobs. 1 to 128 visible ASCII characters.
    HandlerName,
    "handler name",
    "1 to 128 visible ASCII characters, no spaces",
    |text| (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
);

/// One membership's random identity: a process that was dropped comes back as another incarnation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u128);

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A membership of a group: a number that is never used again.
///
/// `replica` is 0 for those that a committed `Join` gave, else the degraded replica that minted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Membership {
    /// Counts the memberships of the group.
    pub number: u64,
    /// 0, or the replica that minted the number in degraded service.
    pub replica: u16,
}

impl Membership {
    /// The membership that a committed `Join` gave.
    pub const fn quorum(number: u64) -> Self {
        Self { number, replica: 0 }
    }
}

impl fmt::Display for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number)?;
        if self.replica != 0 {
            write!(f, "@{}", self.replica)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_names_follow_the_rule() {
        for good in ["1000", "orders", "a.b_c-D", "...", &"x".repeat(64)] {
            assert!(GroupName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "ä", "a/b", ".", "..", &"x".repeat(65)] {
            assert!(GroupName::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_client_id_can_stand_in_the_path_of_a_url() {
        assert!(ClientId::new("a/../b").is_ok(), "it is escaped there");
        for bad in [".", "..", "", "a b", "ä"] {
            assert!(ClientId::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_refused_name_is_quoted_in_short() {
        let error = ClientId::new("é".repeat(10_000)).unwrap_err();
        assert!(error.to_string().len() < 300);
    }
}
