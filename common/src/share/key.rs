//! Keys of rows.

use md5::{Digest, Md5};

/// A row's key as the number that shares divide.
///
/// Integer keys are themselves. Text and UUID keys are hashed the same everywhere, in the databases
/// and outside: the first 32 bits of the MD5 of their UTF-8 text, big-endian (a UUID in its
/// lower-case form with hyphens).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey(i128);

impl RowKey {
    /// The non-negative remainder; `total` is not 0.
    pub fn modulo(self, total: u32) -> u32 {
        // The remainder is below `total`, a u32.
        u32::try_from(self.0.rem_euclid(i128::from(total))).unwrap_or(0)
    }
}

macro_rules! integer_keys {
    ($($type:ty)*) => {$(
        impl From<$type> for RowKey {
            fn from(id: $type) -> Self {
                Self(i128::from(id))
            }
        }
    )*};
}
integer_keys!(i16 i32 i64 u16 u32 u64);

impl From<&str> for RowKey {
    fn from(id: &str) -> Self {
        let digest: [u8; 16] = Md5::digest(id.as_bytes()).into();
        Self(i128::from(u32::from_be_bytes([
            digest[0], digest[1], digest[2], digest[3],
        ])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_keys_hash_as_the_databases_do() {
        // SELECT ('x' || substr(md5('42'), 1, 8))::bit(32)::bigint
        assert_eq!(RowKey::from("42").0, 0xa1d0_c6e8);
        assert_eq!(RowKey::from("").0, 0xd41d_8cd9);
    }
}
