//! Where settings come from: flag, environment, file, default, the first of which wins.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use secrecy::SecretString;

use super::keys::{Key, flag, variable};

/// Longest file of a setting; a device or a log given by mistake must not fill the memory.
const MAX_FILE: u64 = 1 << 20;

/// Where a value can be given, the first of which wins.
#[derive(Debug, Clone, Copy)]
enum Layer {
    Flag,
    Variable,
    File,
}

const LAYERS: [Layer; 3] = [Layer::Flag, Layer::Variable, Layer::File];

/// Values by the names of their settings, each as text.
#[derive(Default)]
pub struct Sources {
    pub(super) flags: BTreeMap<&'static str, String>,
    pub(super) environment: BTreeMap<String, OsString>,
    pub(super) file: BTreeMap<String, String>,
    pub(super) path: Option<PathBuf>,
}

/// A value as it was given.
#[derive(Clone)]
pub(super) struct Given {
    pub(super) text: String,
    pub(super) origin: Origin,
}

/// Who gave a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    Flag(&'static str),
    Variable(&'static str),
    File(&'static str, PathBuf),
    Default(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(name) => write!(f, "--{}", flag(name)),
            Self::Variable(name) => f.write_str(&variable(name)),
            Self::File(name, path) => write!(f, "{}: {name}", path.display()),
            Self::Default(name) => write!(f, "default of {name}"),
        }
    }
}

impl Sources {
    /// From the flags that were given, by the names of their settings, and the variables of the
    /// environment. Variables that are none of ours are ignored: orchestrators add some.
    pub fn new(
        flags: BTreeMap<&'static str, String>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Self {
        let environment = environment
            .into_iter()
            .filter_map(|(name, value)| {
                let name = name.into_string().ok()?;
                name.starts_with("SKY_").then_some((name, value))
            })
            .collect();
        Self {
            flags,
            environment,
            ..Self::default()
        }
    }

    /// The value that wins. Problems are texts that name the origin.
    pub(super) fn get(&self, key: &Key) -> Result<Option<Given>, String> {
        for layer in LAYERS {
            if let Some(given) = self.at(layer, key)? {
                return Ok(Some(given));
            }
        }
        Ok(default(key))
    }

    /// The secret of a setting that can also be given as a file: the layer that has either wins, and
    /// one that has both is refused, as is a blank secret.
    ///
    /// # Errors
    /// A text that says what is wrong.
    pub fn secret(&self, direct: &Key, file: &Key) -> Result<Option<SecretString>, String> {
        for layer in LAYERS {
            return match (self.at(layer, direct)?, self.at(layer, file)?) {
                (None, None) => continue,
                (Some(given), None) => not_blank(given.text, &given.origin).map(Some),
                (None, Some(given)) => read_secret(&given).map(Some),
                (Some(direct), Some(file)) => Err(format!(
                    "{} and {} exclude each other: give one of them",
                    direct.origin, file.origin
                )),
            };
        }
        Ok(None)
    }

    /// The text of a setting, wherever it comes from.
    ///
    /// # Errors
    /// A text that says what is wrong.
    pub fn text(&self, key: &Key) -> Result<Option<String>, String> {
        Ok(self.get(key)?.map(|given| given.text))
    }

    fn at(&self, layer: Layer, key: &Key) -> Result<Option<Given>, String> {
        match layer {
            Layer::Flag => Ok(self.flag(key)),
            Layer::Variable => self.variable(key),
            Layer::File => Ok(self.in_file(key)),
        }
    }

    fn flag(&self, key: &Key) -> Option<Given> {
        let text = self.flags.get(key.name)?.clone();
        let origin = Origin::Flag(key.name);
        Some(Given { text, origin })
    }

    fn variable(&self, key: &Key) -> Result<Option<Given>, String> {
        let Some(value) = self.environment.get(&key.variable()) else {
            return Ok(None);
        };
        let origin = Origin::Variable(key.name);
        match value.clone().into_string() {
            Ok(text) => Ok(Some(Given { text, origin })),
            Err(_) => Err(format!("{origin}: is not UTF-8 text")),
        }
    }

    fn in_file(&self, key: &Key) -> Option<Given> {
        let text = self.file.get(key.name)?.clone();
        let origin = Origin::File(key.name, self.path.clone().unwrap_or_default());
        Some(Given { text, origin })
    }
}

fn default(key: &Key) -> Option<Given> {
    let text = key.default?.to_owned();
    let origin = Origin::Default(key.name);
    Some(Given { text, origin })
}

/// A secret that is one.
pub(super) fn not_blank(text: String, origin: &dyn fmt::Display) -> Result<SecretString, String> {
    if text.trim().is_empty() {
        return Err(format!("{origin}: is blank; set a secret, or leave it out"));
    }
    Ok(text.into())
}

/// The secret in the file that `given` names, without the line end that editors add.
pub(super) fn read_secret(given: &Given) -> Result<SecretString, String> {
    let Given { text: path, origin } = given;
    let content = read(Path::new(path))
        .map_err(|error| format!("{origin}: cannot read {path:?}: {error}"))?;
    let content = content.strip_suffix('\n').unwrap_or(&content);
    let content = content.strip_suffix('\r').unwrap_or(content);
    not_blank(
        content.to_owned(),
        &format_args!("{origin}: the file {path:?}"),
    )
}

/// A file of bounded length.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut content = String::new();
    let read = File::open(path)?
        .take(MAX_FILE + 1)
        .read_to_string(&mut content)?;
    if u64::try_from(read).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(io::Error::other("the file is longer than 1 MiB"));
    }
    Ok(content)
}
