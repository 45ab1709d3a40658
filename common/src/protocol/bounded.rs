//! Text and lists that carry their limit in their type.
//!
//! A peer chooses every length that it writes. A field of one of these types refuses what is longer than
//! its limit while it is being read, and grows only as its content really arrives: a length prefix alone
//! allocates nothing.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

/// Something is longer than its field allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{length} {unit} where at most {limit} are allowed: shorten it")]
pub struct OverLimit {
    /// How much there is.
    pub length: usize,
    /// How much there may be.
    pub limit: usize,
    /// What is counted: `bytes` of text, `elements` of a list.
    pub unit: &'static str,
}

/// UTF-8 text of at most `N` bytes.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct BoundedString<const N: usize>(String);

impl<const N: usize> BoundedString<N> {
    /// The beginning of `text` that fits, cut between two characters; for texts that only inform.
    pub fn truncated(text: &str) -> Self {
        Self(text[..text.floor_char_boundary(N)].to_owned())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text, owned.
    pub fn into_inner(self) -> String {
        self.0
    }

    fn check(text: &str) -> Result<(), OverLimit> {
        within(text.len(), N, "bytes")
    }
}

impl<const N: usize> TryFrom<String> for BoundedString<N> {
    type Error = OverLimit;

    fn try_from(text: String) -> Result<Self, OverLimit> {
        Self::check(&text)?;
        Ok(Self(text))
    }
}

impl<const N: usize> TryFrom<&str> for BoundedString<N> {
    type Error = OverLimit;

    fn try_from(text: &str) -> Result<Self, OverLimit> {
        Self::check(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl<const N: usize> From<BoundedString<N>> for String {
    fn from(text: BoundedString<N>) -> Self {
        text.0
    }
}

impl<const N: usize> Deref for BoundedString<N> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<const N: usize> fmt::Display for BoundedString<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<const N: usize> fmt::Debug for BoundedString<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl<'de, const N: usize> Deserialize<'de> for BoundedString<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text<const N: usize>;

        impl<const N: usize> Visitor<'_> for Text<N> {
            type Value = BoundedString<N>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "text of at most {N} bytes")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
                BoundedString::try_from(text).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Text)
    }
}

/// A list of at most `N` elements.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct BoundedVec<T, const N: usize>(Vec<T>);

impl<T, const N: usize> BoundedVec<T, N> {
    /// An empty list.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Appends `element`; refused when `N` are there already.
    pub fn try_push(&mut self, element: T) -> Result<(), OverLimit> {
        within(self.0.len() + 1, N, "elements")?;
        self.0.push(element);
        Ok(())
    }

    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        &self.0
    }

    /// The elements, owned.
    pub fn into_inner(self) -> Vec<T> {
        self.0
    }
}

impl<T, const N: usize> Default for BoundedVec<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, const N: usize> TryFrom<Vec<T>> for BoundedVec<T, N> {
    type Error = OverLimit;

    fn try_from(elements: Vec<T>) -> Result<Self, OverLimit> {
        within(elements.len(), N, "elements")?;
        Ok(Self(elements))
    }
}

impl<T, const N: usize> From<BoundedVec<T, N>> for Vec<T> {
    fn from(list: BoundedVec<T, N>) -> Self {
        list.0
    }
}

impl<T, const N: usize> Deref for BoundedVec<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T, const N: usize> IntoIterator for BoundedVec<T, N> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a, T, const N: usize> IntoIterator for &'a BoundedVec<T, N> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<T: fmt::Debug, const N: usize> fmt::Debug for BoundedVec<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for BoundedVec<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const N: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for List<T, N> {
            type Value = BoundedVec<T, N>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {N} elements")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut list = BoundedVec::new();
                // The announced length is not used to reserve: it is the peer's word, not content.
                while let Some(element) = seq.next_element()? {
                    list.try_push(element).map_err(A::Error::custom)?;
                }
                Ok(list)
            }
        }

        deserializer.deserialize_seq(List(PhantomData))
    }
}

fn within(length: usize, limit: usize, unit: &'static str) -> Result<(), OverLimit> {
    if length > limit {
        return Err(OverLimit {
            length,
            limit,
            unit,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::codec;
    use super::*;

    #[test]
    fn text_longer_than_its_limit_is_refused_when_made_and_when_read() {
        assert!(BoundedString::<4>::try_from("four").is_ok());
        let refused = BoundedString::<4>::try_from("fiver").unwrap_err();
        assert_eq!((refused.length, refused.limit), (5, 4));

        let bytes = codec::encode(&"fiver", 100).unwrap();
        assert!(codec::decode::<BoundedString<5>>(&bytes, 100).is_ok());
        assert!(codec::decode::<BoundedString<4>>(&bytes, 100).is_err());
    }

    #[test]
    fn text_that_only_informs_is_cut_between_characters() {
        assert_eq!(BoundedString::<4>::truncated("aéé").as_str(), "aé");
        assert_eq!(BoundedString::<5>::truncated("aéé").as_str(), "aéé");
        assert_eq!(BoundedString::<9>::truncated("aéé").as_str(), "aéé");
    }

    #[test]
    fn a_list_longer_than_its_limit_is_refused_when_made_and_when_read() {
        let mut list = BoundedVec::<u8, 2>::new();
        assert!(list.try_push(1).is_ok());
        assert!(list.try_push(2).is_ok());
        assert!(list.try_push(3).is_err());
        assert_eq!(list.as_slice(), [1, 2]);
        assert!(BoundedVec::<u8, 2>::try_from(vec![1, 2, 3]).is_err());

        let bytes = codec::encode(&vec![1_u8, 2, 3], 100).unwrap();
        assert!(codec::decode::<BoundedVec<u8, 3>>(&bytes, 100).is_ok());
        assert!(codec::decode::<BoundedVec<u8, 2>>(&bytes, 100).is_err());
    }

    #[test]
    fn bounded_types_are_written_like_plain_ones() {
        let text = BoundedString::<9>::try_from("plain").unwrap();
        let list = BoundedVec::<u32, 9>::try_from(vec![1, 70_000]).unwrap();
        assert_eq!(
            codec::encode(&text, 100).unwrap(),
            codec::encode(&"plain", 100).unwrap()
        );
        assert_eq!(
            codec::encode(&list, 100).unwrap(),
            codec::encode(&vec![1_u32, 70_000], 100).unwrap()
        );
    }
}
