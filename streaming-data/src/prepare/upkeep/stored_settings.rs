//! The settings of a data set's preparation, as its state has them.

use std::{
    env,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::UpdateSettings;
use crate::prepare::{
    Dedup, DedupSettings, FilterSettings, Layout, PrepareError, PrepareSettings, Reporting,
    Strictness, TokenizedBy, choose::filter::FilterSet,
};

/// Settings of a preparation, except settings that change no byte. Paths are absolute: an update may begin
/// in another folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StoredSettings {
    inputs: Vec<String>,
    glob: String,
    text_key: Option<String>,
    seq_len: Option<NonZeroUsize>,
    vocab_size: Option<u32>,
    shard_samples: Option<NonZeroUsize>,
    filters: Vec<FilterSet>,
    dedup: Dedup,
    exclude: Option<String>,
    strictness: Strictness,
    /// Data sets without reports say nothing of them.
    #[serde(default, skip_serializing_if = "is_without")]
    reporting: Reporting,
    /// The folder in which paths began that were not absolute.
    pub base: String,
}

impl StoredSettings {
    /// The settings, except settings that change no byte.
    ///
    /// # Errors
    /// [`PrepareError::PathNotUtf8`], or an error of the operating system where there is no current folder.
    pub(crate) fn of(settings: &PrepareSettings) -> Result<StoredSettings, PrepareError> {
        let base = env::current_dir().map_err(PrepareError::io("look at", "."))?;
        let absolute = |path: &PathBuf| {
            let absolute = std::path::absolute(path).map_err(PrepareError::io("look at", path))?;
            text(&absolute)
        };
        Ok(StoredSettings {
            inputs: settings.inputs.iter().map(absolute).collect::<Result<_, _>>()?,
            glob: settings.glob.clone(),
            text_key: settings.text_key.clone(),
            seq_len: settings.seq_len,
            vocab_size: settings.vocab_size,
            shard_samples: settings.shard_samples,
            filters: settings.filters.sets().to_vec(),
            dedup: settings.dedup.dedup,
            exclude: settings.exclude.as_ref().map(absolute).transpose()?,
            strictness: settings.strictness,
            reporting: settings.reporting,
            base: text(&base)?,
        })
    }

    /// Files and folders with documents.
    pub(crate) fn inputs(&self) -> Vec<PathBuf> {
        self.inputs.iter().map(PathBuf::from).collect()
    }

    /// The settings of a preparation of the same to the same place.
    pub(crate) fn settings(&self, update: &UpdateSettings) -> PrepareSettings {
        PrepareSettings {
            inputs: self.inputs(),
            output: update.output.clone(),
            store: update.store.clone(),
            glob: self.glob.clone(),
            text_key: self.text_key.clone(),
            seq_len: self.seq_len,
            vocab_size: self.vocab_size,
            tokenized_by: TokenizedBy::Unknown,
            filters: FilterSettings::of_sets(self.filters.clone()),
            dedup: DedupSettings { dedup: self.dedup, memory_bytes: update.dedup_memory_bytes },
            exclude: self.exclude.as_ref().map(PathBuf::from),
            workers: update.workers,
            strictness: self.strictness,
            shard_samples: self.shard_samples,
            layout: Layout::Updatable,
            reporting: self.reporting,
        }
    }
}

fn is_without(reporting: &Reporting) -> bool {
    *reporting == Reporting::None
}

fn text(path: &Path) -> Result<String, PrepareError> {
    let not_utf8 = || PrepareError::PathNotUtf8 { path: path.to_owned() };
    Ok(path.to_str().ok_or_else(not_utf8)?.to_owned())
}
