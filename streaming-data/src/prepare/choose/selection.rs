//! What the index says of documents and lines that are left out.

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

/// What was asked for; nothing where all is to be kept.
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

/// The error that there is something in the place of the output; where that is a data set of which other
/// documents or lines were left out, it says so.
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
