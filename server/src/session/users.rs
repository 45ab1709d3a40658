//! Who may log in, and to which groups.

use std::collections::BTreeMap;

use secrecy::SecretString;
use skyschedule_common::auth::{AuthError, DEFAULT_ITERATIONS, Decoys, StoredUser};
use skyschedule_common::env;
use skyschedule_common::ids::GroupName;

/// The users of a server; none at all means that nobody is asked who they are.
#[derive(Debug)]
pub(crate) struct Users {
    users: BTreeMap<String, User>,
    decoys: Decoys,
}

#[derive(Debug)]
struct User {
    stored: StoredUser,
    /// `None`: all groups.
    groups: Option<Vec<GroupName>>,
}

impl Users {
    /// Derives what is kept of the passwords; takes tens of milliseconds a user.
    pub(crate) fn derive<'a>(
        users: impl Iterator<Item = (&'a str, &'a SecretString, Option<&'a [GroupName]>)>,
    ) -> Result<Self, AuthError> {
        let mut secret = [0; 32];
        env::rng::fill(&mut secret);
        let decoys = Decoys::new(secret, DEFAULT_ITERATIONS);
        let users = users
            .map(|(name, password, groups)| {
                let stored = StoredUser::derive(password, decoys.salt(name), DEFAULT_ITERATIONS)?;
                Ok((
                    name.to_owned(),
                    User {
                        stored,
                        groups: groups.map(<[GroupName]>::to_vec),
                    },
                ))
            })
            .collect::<Result<_, AuthError>>()?;
        Ok(Self { users, decoys })
    }

    /// Whether clients must authenticate.
    pub(super) fn are_required(&self) -> bool {
        !self.users.is_empty()
    }

    pub(super) fn stored(&self, user: &str) -> Option<&StoredUser> {
        self.users.get(user).map(|user| &user.stored)
    }

    pub(super) fn decoys(&self) -> &Decoys {
        &self.decoys
    }

    /// Whether the user may use the group.
    pub(super) fn may_use(&self, user: Option<&str>, group: &GroupName) -> bool {
        match user.and_then(|user| self.users.get(user)) {
            Some(user) => user
                .groups
                .as_ref()
                .is_none_or(|groups| groups.contains(group)),
            None => !self.are_required(),
        }
    }
}
