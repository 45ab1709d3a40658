//! A deserializer around bincode's that takes no length on trust.
//!
//! bincode allocates a text as long as its prefix says, and serde's own collections reserve up to 1 MiB on
//! the announced number of elements, both before a byte of content is seen. Here text and bytes are borrowed
//! from the input first, which fails where they are not all there; collections are told no number of
//! elements, so that they grow as elements arrive; and more elements than bytes are refused at once (every
//! element on the wire has at least one byte). It holds for every type, bounded or not.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};

/// Reads a `T` with caution.
pub(super) struct Seed<T> {
    bytes: usize,
    value: PhantomData<T>,
}

impl<T> Seed<T> {
    /// For an input of `bytes` bytes.
    pub(super) const fn new(bytes: usize) -> Self {
        Self {
            bytes,
            value: PhantomData,
        }
    }
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Seed<T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        T::deserialize(Cautious {
            inner: deserializer,
            bytes: self.bytes,
        })
    }
}

/// What serde hands around (deserializer, visitor, seed, access), and how long the whole input is.
struct Cautious<I> {
    inner: I,
    bytes: usize,
}

impl<I> Cautious<I> {
    fn wrap<J>(&self, inner: J) -> Cautious<J> {
        Cautious {
            inner,
            bytes: self.bytes,
        }
    }

    fn check<E: Error>(&self, announced: Option<usize>) -> Result<(), E> {
        match announced {
            Some(elements) if elements > self.bytes => Err(E::custom(
                "more elements are announced than bytes are there",
            )),
            _ => Ok(()),
        }
    }
}

/// Scalars hold no length: the visitor goes through as it is.
macro_rules! scalars {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method(visitor)
        }
    )*};
}

/// What may hold a length further in: the visitor is wrapped.
macro_rules! containers {
    ($($method:ident($($argument:ident: $type:ty),*))*) => {$(
        fn $method<V: Visitor<'de>>(self, $($argument: $type,)* visitor: V) -> Result<V::Value, D::Error> {
            let visitor = self.wrap(visitor);
            self.inner.$method($($argument,)* visitor)
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Cautious<D> {
    type Error = D::Error;

    scalars! {
        deserialize_bool deserialize_char deserialize_unit deserialize_identifier
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64 deserialize_str deserialize_bytes
    }

    containers! {
        deserialize_any() deserialize_ignored_any() deserialize_option() deserialize_seq() deserialize_map()
        deserialize_unit_struct(name: &'static str)
        deserialize_newtype_struct(name: &'static str)
        deserialize_tuple(len: usize)
        deserialize_tuple_struct(name: &'static str, len: usize)
        deserialize_struct(name: &'static str, fields: &'static [&'static str])
        deserialize_enum(name: &'static str, variants: &'static [&'static str])
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_str(visitor)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_bytes(visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// Only what bincode calls on the visitor of a container.
impl<'de, V: Visitor<'de>> Visitor<'de> for Cautious<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.visit_some(deserializer)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<V::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.visit_newtype_struct(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.check(access.size_hint())?;
        let access = self.wrap(access);
        self.inner.visit_seq(access)
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.check(access.size_hint())?;
        let access = self.wrap(access);
        self.inner.visit_map(access)
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = self.wrap(access);
        self.inner.visit_enum(access)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Cautious<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.deserialize(deserializer)
    }
}

/// `size_hint` is left at serde's default, "unknown".
impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Cautious<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        let seed = self.wrap(seed);
        self.inner.next_element_seed(seed)
    }
}

/// `size_hint` is left at serde's default, "unknown".
impl<'de, A: MapAccess<'de>> MapAccess<'de> for Cautious<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        let seed = self.wrap(seed);
        self.inner.next_key_seed(seed)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        let seed = self.wrap(seed);
        self.inner.next_value_seed(seed)
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for Cautious<A> {
    type Error = A::Error;
    type Variant = Cautious<A::Variant>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self::Variant), A::Error> {
        let Self { inner, bytes } = self;
        let (value, variant) = inner.variant_seed(seed)?;
        Ok((
            value,
            Cautious {
                inner: variant,
                bytes,
            },
        ))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Cautious<A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.wrap(seed);
        self.inner.newtype_variant_seed(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        let visitor = self.wrap(visitor);
        self.inner.tuple_variant(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = self.wrap(visitor);
        self.inner.struct_variant(fields, visitor)
    }
}
