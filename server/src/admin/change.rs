//! New settings of a group, from what a caller sends.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;
use skyschedule_common::protocol::messages::{Consistency, Millis, Numbering};

use crate::state::Settings;

/// Slots of a group, unless said.
const DEFAULT_SLOTS: u32 = 1_024;

/// The settings after the change that `body` asks for; what it does not name stays as it is.
///
/// # Errors
/// All that is wrong, in one text.
pub(super) fn change(present: &Settings, body: &[u8]) -> Result<Settings, String> {
    let Fields(body) = serde_json::from_slice(body)
        .map_err(|error| format!("the body is no JSON object: {error}"))?;
    let mut change = Change {
        settings: present.clone(),
        slots: None,
        slotted: matches!(present.numbering, Numbering::Slots(_)),
    };
    let mut seen = BTreeSet::new();
    let mut wrong: Vec<String> = body
        .iter()
        .filter_map(|(key, value)| {
            let set = match seen.insert(key) {
                true => change.set(key, value),
                false => Err("given twice".into()),
            };
            Some(format!("{key}: {}", set.err()?))
        })
        .collect();
    match change.numbering(present.numbering) {
        Ok(numbering) => change.settings.numbering = numbering,
        Err(problem) => wrong.push(problem.into()),
    }
    // What could not be read has its old value, which says nothing about the rest.
    wrong.extend(change.settings.problems().iter().map(ToString::to_string));
    if wrong.is_empty() {
        Ok(change.settings)
    } else {
        Err(wrong.join("; "))
    }
}

/// A JSON object as it was written: a map would keep one of two fields of the same name, and say nothing.
struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(body: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut object: M) -> Result<Fields, M::Error> {
                let mut fields = Vec::new();
                while let Some(field) = object.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        body.deserialize_map(Object)
    }
}

struct Change {
    settings: Settings,
    slots: Option<u32>,
    slotted: bool,
}

impl Change {
    fn set(&mut self, key: &str, value: &Value) -> Result<(), String> {
        let settings = &mut self.settings;
        match key {
            "numbering" => self.slotted = one_of(value, [("modulo", false), ("slots", true)])?,
            "slots" => self.slots = optional(value)?,
            "consistency" => {
                let known = [
                    ("available", Consistency::Available),
                    ("exclusive", Consistency::Exclusive),
                ];
                settings.consistency = one_of(value, known)?;
            }
            "trust_fin" => settings.trust_fin = one_of_bools(value)?,
            "drain_timeout_ms" => settings.drain_timeout = Millis(whole(value)?),
            "max_drain_ms" => settings.max_drain = Millis(whole(value)?),
            "settle_ms" => settings.settle = Millis(whole(value)?),
            "rejoin_grace_ms" => settings.rejoin_grace = Millis(whole(value)?),
            "reset_grace_ms" => settings.reset_grace = Millis(whole(value)?),
            "lease_ms" => settings.lease = optional(value)?.map(Millis),
            "max_slots" => settings.max_slots = optional(value)?,
            _ => return Err("unknown; see /api/v1/openapi.json".into()),
        }
        Ok(())
    }

    fn numbering(&self, present: Numbering) -> Result<Numbering, &'static str> {
        match (self.slotted, self.slots, present) {
            (false, None, _) => Ok(Numbering::Modulo),
            (false, Some(_), _) => Err("slots: needs the numbering slots"),
            (true, Some(slots), _) | (true, None, Numbering::Slots(slots)) => {
                Ok(Numbering::Slots(slots))
            }
            (true, None, Numbering::Modulo) => Ok(Numbering::Slots(DEFAULT_SLOTS)),
        }
    }
}

fn whole(value: &Value) -> Result<u32, String> {
    value
        .as_u64()
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| "expected a whole number from 0 to 4294967295".into())
}

fn optional(value: &Value) -> Result<Option<u32>, String> {
    match value {
        Value::Null => Ok(None),
        value => whole(value).map(Some),
    }
}

fn one_of_bools(value: &Value) -> Result<bool, String> {
    value
        .as_bool()
        .ok_or_else(|| "expected true or false".into())
}

fn one_of<T: Copy>(value: &Value, known: [(&str, T); 2]) -> Result<T, String> {
    known
        .iter()
        .find(|(name, _)| value.as_str() == Some(name))
        .map(|(_, meaning)| *meaning)
        .ok_or_else(|| format!("expected {} or {}", known[0].0, known[1].0))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn after(present: &Settings, body: &Value) -> Result<Settings, String> {
        change(present, body.to_string().as_bytes())
    }

    #[test]
    fn what_is_not_named_stays() {
        let present = Settings {
            consistency: Consistency::Exclusive,
            numbering: Numbering::Slots(64),
            lease: Some(Millis(8_000)),
            ..Settings::default()
        };
        let changed = after(&present, &json!({"settle_ms": 50})).unwrap();
        let expected = Settings {
            settle: Millis(50),
            ..present.clone()
        };
        assert_eq!(changed, expected);
        let changed = after(&present, &json!({"numbering": "modulo", "lease_ms": null})).unwrap();
        assert_eq!(
            (changed.numbering, changed.lease),
            (Numbering::Modulo, None)
        );
    }

    #[test]
    fn slots_follow_the_numbering() {
        let numbering = |body| after(&Settings::default(), &body).map(|s| s.numbering);
        assert_eq!(
            numbering(json!({"numbering": "slots"})),
            Ok(Numbering::Slots(1_024))
        );
        assert_eq!(
            numbering(json!({"numbering": "slots", "slots": 16})),
            Ok(Numbering::Slots(16))
        );
        assert_eq!(numbering(json!({"slots": null})), Ok(Numbering::Modulo));
        assert!(
            numbering(json!({"slots": 64}))
                .unwrap_err()
                .contains("needs the numbering slots")
        );
        assert!(
            numbering(json!({"numbering": "slots", "slots": 17}))
                .unwrap_err()
                .contains("power of two")
        );
    }

    #[test]
    fn everything_wrong_is_named() {
        let text = after(
            &Settings::default(),
            &json!({
                "numbering": "hash", "consistency": 1, "trust_fin": "yes", "settle_ms": -1, "lease_ms": 1.5,
                "max_drain_ms": 4_294_967_296u64, "color": "blue", "reset_grace_ms": 7_000, "max_slots": 3,
            }),
        )
        .unwrap_err();
        let expected = [
            "numbering: expected modulo or slots",
            "consistency: expected available or exclusive",
            "trust_fin: expected true or false",
            "settle_ms: expected a whole number",
            "lease_ms: expected a whole number",
            "max_drain_ms: expected a whole number",
            "color: unknown",
            "reset_grace_ms must be at most lease_ms",
            "max_slots must be at least 1, and needs the numbering slots",
        ];
        for part in expected {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn a_setting_that_is_given_twice_is_refused() {
        let body =
            br#"{"settle_ms": 30, "trust_fin": true, "settle_ms": 40, "color": 1, "color": 1}"#;
        let text = change(&Settings::default(), body).unwrap_err();
        assert_eq!(
            text,
            "settle_ms: given twice; color: unknown; see /api/v1/openapi.json; color: given twice"
        );
    }

    #[test]
    fn only_an_object_is_a_body() {
        for body in ["", "[]", "null", "7", "{", "{} {}"] {
            assert!(
                change(&Settings::default(), body.as_bytes()).is_err(),
                "{body:?}"
            );
        }
        assert_eq!(
            after(&Settings::default(), &json!({})),
            Ok(Settings::default())
        );
    }
}
