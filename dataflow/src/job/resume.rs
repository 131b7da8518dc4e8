//! Settings that may not change when a run is resumed, key by key.
//!
//! Settings that are numerics are flattened to the keys that the user writes (`optimizer.betas`), kept in
//! `trainer.json`, and compared on resume. Everything else (steps, workers, processes, microbatch, checkpoints,
//! caches, compute threads) may change. The kind of device may change too, which is reported.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use tidemill_streaming_data::DataError;

use super::resolve::{DOCUMENTS_KEY, name_as_in_table};
use crate::checkpoint::TrainerState;
use crate::error::{JobError, Result};

/// Flattens `value` under `prefix`: tables become dotted keys, all else stays a value.
pub fn flatten(prefix: &str, value: &impl Serialize, into: &mut BTreeMap<String, Value>) {
    let value = serde_json::to_value(value).expect("settings hold only JSON");
    flatten_value(prefix, value, into);
}

fn flatten_value(prefix: &str, value: Value, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                flatten_value(&format!("{prefix}.{key}"), value, into);
            }
        }
        value => {
            into.insert(prefix.to_owned(), value);
        }
    }
}

/// The settings of a model that its data set decides unless a user does.
const KEYS_OF_DATA: [&str; 4] =
    ["model.vocab_size", "model.bos_token_id", "model.eos_token_id", "model.pad_token_id"];

/// Compares a saved run with the one that its config asks for. A checkpoint without a setting of document boundaries is from a run
/// that ignored them, and one whose sizes have the names of `config.json` has them by the keys of `[model]` too.
///
/// # Errors
/// The first key that may not change and did, with both values. A name comes before the settings that follow from it, and the data
/// before the sizes of a model that follow from it.
pub fn check(saved: &TrainerState, now: &TrainerState, checkpoint: &Path) -> Result<()> {
    let mut saved = saved.clone();
    name_as_in_table(&mut saved.settings);
    let saved = &saved;
    let keys: BTreeSet<&String> = saved.settings.keys().chain(now.settings.keys()).collect();
    let (of_data, keys): (Vec<_>, Vec<_>) =
        keys.into_iter().partition(|key| KEYS_OF_DATA.contains(&key.as_str()));
    let (names, others): (Vec<_>, Vec<_>) =
        keys.into_iter().partition(|key| key.ends_with(".name"));
    check_settings(names.into_iter().chain(others), saved, now, checkpoint)?;
    saved.cursor.check_resume(&now.cursor.stream).map_err(|error| match error {
        DataError::ResumeMismatch { key, saved, now } => JobError::Resume {
            key: format!("data.{key}"),
            saved,
            found: now,
            checkpoint: checkpoint.to_owned(),
        },
        other => other.into(),
    })?;
    check_settings(of_data.into_iter(), saved, now, checkpoint)
}

/// Compares settings of these keys.
fn check_settings<'k>(
    keys: impl Iterator<Item = &'k String>,
    saved: &TrainerState,
    now: &TrainerState,
    checkpoint: &Path,
) -> Result<()> {
    for key in keys {
        let absent = if key == DOCUMENTS_KEY { Value::from("ignore") } else { Value::Null };
        let before = saved.settings.get(key).unwrap_or(&absent);
        let after = now.settings.get(key).unwrap_or(&absent);
        if before != after {
            return Err(JobError::Resume {
                key: key.clone(),
                saved: in_words(before),
                found: in_words(after),
                checkpoint: checkpoint.to_owned(),
            });
        }
    }
    Ok(())
}

fn in_words(value: &Value) -> String {
    match value {
        Value::Null => "not set".to_owned(),
        value => value.to_string(),
    }
}

/// The keys of the kind of device that differ, in words; empty where the bits go on as they were.
pub fn device_changes(saved: &TrainerState, now: &TrainerState) -> Vec<String> {
    let absent = Value::Null;
    now.device
        .iter()
        .filter(|(key, value)| saved.device.get(*key) != Some(value))
        .map(|(key, value)| {
            let before = saved.device.get(key).unwrap_or(&absent);
            format!("{key} was {before} and is {value}")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::state_for_tests;

    #[test]
    fn a_change_is_named_with_both_values() {
        let mut saved = state_for_tests(1);
        saved.settings.insert("batch.lanes".into(), Value::from(8));
        let mut now = saved.clone();
        assert!(check(&saved, &now, Path::new("c")).is_ok());
        now.settings.insert("batch.lanes".into(), Value::from(4));
        let error = check(&saved, &now, Path::new("c")).unwrap_err().to_string();
        for part in ["batch.lanes", "8", "4"] {
            assert!(error.contains(part), "{error}");
        }
        now.settings.clear();
        assert!(check(&saved, &now, Path::new("c")).is_err());
        now.settings.clone_from(&saved.settings);
        now.settings.insert(DOCUMENTS_KEY.to_owned(), "ignore".into());
        assert!(check(&saved, &now, Path::new("c")).is_ok());
        now.settings.insert(DOCUMENTS_KEY.to_owned(), "reset".into());
        assert!(check(&saved, &now, Path::new("c")).is_err());
        let mut now = saved.clone();
        now.cursor.stream.samples += 1;
        let error = check(&saved, &now, Path::new("c")).unwrap_err().to_string();
        assert!(error.contains("data.samples is 100"), "{error}");
        // A data set with another tokenizer is refused too.
        saved.settings.insert("model.bos_token_id".to_owned(), 256.into());
        let error = check(&saved, &now, Path::new("c")).unwrap_err().to_string();
        assert!(error.contains("data.samples is 100"), "{error}");
        now.cursor = saved.cursor.clone();
        let error = check(&saved, &now, Path::new("c")).unwrap_err().to_string();
        assert!(error.contains("model.bos_token_id is 256"), "{error}");
    }

    #[test]
    fn sizes_by_their_names_in_files_are_those_of_the_table() {
        let mut saved = state_for_tests(1);
        let mut now = saved.clone();
        saved.settings.insert("model.head_dim".into(), Value::from(64));
        now.settings.insert("model.head_width".into(), Value::from(64));
        assert!(check(&saved, &now, Path::new("c")).is_ok());
        now.settings.insert("model.head_width".into(), Value::from(32));
        let error = check(&saved, &now, Path::new("c")).unwrap_err().to_string();
        assert!(error.contains("model.head_width is 64"), "{error}");
    }

    #[test]
    fn tables_become_dotted_keys() {
        let mut into = BTreeMap::new();
        flatten("a", &serde_json::json!({"b": {"c": 1}, "d": [1, 2]}), &mut into);
        assert_eq!(into["a.b.c"], Value::from(1));
        assert_eq!(into["a.d"], serde_json::json!([1, 2]));
    }
}
