//! The index's [`Selection`]: the settings by which documents and lines are left out.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{
    duplicates::{SHINGLE_WORDS, SIGNATURES},
    exclude::Exclusions,
    filter::SPLITTER,
};
use crate::prepare::{Dedup, PrepareSettings};
use crate::{
    data_set::index::{Index, Selection, SelectionDifference},
    prepare::PrepareError,
};

/// The selection that the settings ask for; `None` where everything is kept.
pub(crate) fn selection(settings: &PrepareSettings, exclusions: &Exclusions) -> Option<Selection> {
    let mut asked = Map::new();
    if !settings.filters.is_empty() {
        asked.insert("filters".to_owned(), json!(settings.filters.sets()));
        asked.insert("words".to_owned(), json!(SPLITTER));
    }
    match settings.dedup.dedup {
        Dedup::None => {}
        Dedup::Exact => _ = asked.insert("dedup".to_owned(), json!({ "kind": "exact" })),
        dedup @ (Dedup::ExactWords | Dedup::Near) => {
            let how = json!({
                "kind": dedup.name(),
                "signatures": SIGNATURES,
                "shingle_words": SHINGLE_WORDS,
            });
            asked.insert("dedup".to_owned(), how);
        }
    }
    if let Some((hash, keys)) = exclusions.identity() {
        asked.insert("exclude".to_owned(), json!({ "keys": keys, "hash": hash }));
    }
    (!asked.is_empty()).then(|| Selection::new(Value::Object(asked)))
}

/// The error that something is at the place of the output; it says so where that is a data set with another
/// selection.
pub(crate) fn with_selection(
    error: PrepareError,
    output: &Path,
    asked: Option<&Selection>,
) -> PrepareError {
    let index = match &error {
        PrepareError::OutputExists { .. } => Index::read(output).ok(),
        _ => None,
    };
    let difference = index.and_then(|index| Selection::difference(index.selection.as_ref(), asked));
    match difference {
        Some(SelectionDifference { key, found, other: asked }) => {
            PrepareError::OtherSelection { path: output.to_owned(), key, found, asked }
        }
        None => error,
    }
}
