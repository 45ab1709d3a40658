//! The configuration file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use skyschedule_common::ids::GroupName;
use toml::{Table, Value};

use super::User;
use super::keys::KEYS;
use super::load::REDACTED;
use super::sources::{self, Given, Origin};

/// What the file says.
#[derive(Default)]
pub(super) struct Content {
    /// Settings by name, each as text.
    pub(super) values: BTreeMap<String, String>,
    /// The entries of `[[users]]`.
    pub(super) users: Vec<FileUser>,
}

/// A user as the file has it.
pub(super) struct FileUser {
    path: PathBuf,
    at: usize,
    name: Option<String>,
    password: Option<String>,
    password_file: Option<String>,
    groups: Option<Vec<GroupName>>,
}

/// Reads the file. Each problem is one text; what is right is kept, so that all are found at once.
pub(super) fn parse(path: &Path, problems: &mut Vec<String>) -> Content {
    let shown = path.display();
    let mut content = Content::default();
    let table = sources::read(path)
        .map_err(|error| format!("{shown}: cannot be read: {error}"))
        .and_then(|text| {
            text.parse::<Table>().map_err(|error| {
                // Its own text quotes the line, which may hold a secret.
                let before = error.span().and_then(|span| text.get(..span.start));
                let line = before.map_or(1, |before| before.matches('\n').count() + 1);
                format!("{shown}: line {line}: is no TOML: {}", error.message())
            })
        });
    let table = match table {
        Ok(table) => table,
        Err(problem) => {
            problems.push(problem);
            return content;
        }
    };
    for (name, value) in table {
        if name == "users" {
            content.users = users(path, value, problems);
        } else if let Some(key) = KEYS.iter().find(|key| key.name == name) {
            match scalar(value) {
                Some(text) => {
                    content.values.insert(key.name.into(), text);
                }
                None => problems.push(format!("{shown}: {name}: expected a text or a number")),
            }
        } else {
            problems.push(unknown(path, &name, KEYS.iter().map(|key| key.name)));
        }
    }
    content
}

fn users(path: &Path, value: Value, problems: &mut Vec<String>) -> Vec<FileUser> {
    let Value::Array(entries) = value else {
        problems.push(format!(
            "{}: users: expected entries such as [[users]] name = \"moon\" password_file = \"…\"",
            path.display()
        ));
        return Vec::new();
    };
    let mut users = Vec::new();
    for (at, entry) in entries.into_iter().enumerate() {
        let mut user = FileUser {
            path: path.to_owned(),
            at,
            name: None,
            password: None,
            password_file: None,
            groups: None,
        };
        let Value::Table(table) = entry else {
            problems.push(format!("{}: expected name and password_file", user.place()));
            continue;
        };
        for (name, value) in table {
            if let Err(problem) = user.set(&name, value) {
                problems.push(problem);
            }
        }
        users.push(user);
    }
    users
}

impl FileUser {
    fn set(&mut self, name: &str, value: Value) -> Result<(), String> {
        let place = self.place();
        let text = |value| match value {
            Value::String(text) => Ok(Some(text)),
            _ => Err(format!("{place}.{name}: expected a text")),
        };
        match name {
            "name" => self.name = text(value)?,
            "password" => self.password = text(value)?,
            "password_file" => self.password_file = text(value)?,
            "groups" => self.groups = Some(groups(&place, value)?),
            _ => {
                let known = ["name", "password", "password_file", "groups"];
                return Err(unknown(
                    &self.path,
                    &format!("users.{name}"),
                    known.into_iter(),
                ));
            }
        }
        Ok(())
    }

    /// The user that a server lets in.
    pub(super) fn to_user(&self) -> Result<User, String> {
        let place = self.place();
        let name = self
            .name
            .as_deref()
            .ok_or_else(|| format!("{place}: has no name"))?;
        let password = match (&self.password, &self.password_file) {
            (Some(password), None) => {
                sources::not_blank(password.clone(), &format_args!("{place}.password"))
            }
            (None, Some(file)) => sources::read_secret(&Given {
                text: file.clone(),
                origin: Origin::File("users.password_file", self.path.clone()),
            }),
            (None, None) => Err(format!(
                "{place}: {name:?} has no password; set password_file"
            )),
            (Some(_), Some(_)) => Err(format!(
                "{place}: password and password_file exclude each other: give one of them"
            )),
        }?;
        let user = User::new(name, password).map_err(|error| format!("{place}: {error}"))?;
        Ok(User {
            groups: self.groups.clone(),
            ..user
        })
    }

    fn place(&self) -> String {
        format!("{}: users[{}]", self.path.display(), self.at)
    }
}

impl fmt::Display for FileUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "[[users]]")?;
        let password = self.password.as_deref().map(|_| REDACTED);
        let texts = [
            ("name", self.name.as_deref()),
            ("password", password),
            ("password_file", self.password_file.as_deref()),
        ];
        for (key, text) in texts {
            if let Some(text) = text {
                writeln!(f, "{key} = {}", quoted(text))?;
            }
        }
        if let Some(groups) = &self.groups {
            let groups: Vec<_> = groups.iter().map(|group| quoted(group.as_str())).collect();
            writeln!(f, "groups = [{}]", groups.join(", "))?;
        }
        Ok(())
    }
}

fn groups(place: &str, value: Value) -> Result<Vec<GroupName>, String> {
    let Value::Array(groups) = value else {
        return Err(format!("{place}.groups: expected a list of group names"));
    };
    groups
        .into_iter()
        .map(|group| {
            let text = scalar(group).unwrap_or_default();
            GroupName::new(text).map_err(|error| format!("{place}.groups: {error}"))
        })
        .collect()
}

fn scalar(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text),
        Value::Integer(number) => Some(number.to_string()),
        Value::Boolean(truth) => Some(truth.to_string()),
        _ => None,
    }
}

fn unknown<'a>(path: &Path, name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<_> = known.collect();
    let meant = name.replace('-', "_");
    let hint = if known.contains(&meant.as_str()) {
        format!("write {meant}")
    } else {
        format!("known are {}", known.join(", "))
    };
    format!("{}: unknown key {name:?}; {hint}", path.display())
}

/// `text` as a TOML string.
pub(super) fn quoted(text: &str) -> String {
    Value::String(text.into()).to_string()
}
