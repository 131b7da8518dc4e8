//! `[data]`: the data that a run is trained on, one data set or several mixed.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tidemill_streaming_data::hash::ContentHash;
use tidemill_streaming_data::order::cursor::Cursor;
use tidemill_streaming_data::order::mixture::{Amount, Part};
use tidemill_streaming_data::order::{ShuffleOrder, ShuffleSettings};
use tidemill_streaming_data::store::Location;
use tidemill_streaming_data::{CacheSettings, DataSet, DataSettings as RemoteSettings, Mixture};

use super::config::expect;
use crate::error::{JobError, Result};
use crate::run_folder::RunFolder;

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSettings {
    /// The data set's folder or URL, where there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dataset: Option<PathBuf>,
    /// The canonical order of samples.
    #[serde(default = "default_shuffle")]
    pub shuffle: ShuffleOrder,
    /// Samples of one window of `shuffle = "window"`.
    #[serde(default = "default_window_samples")]
    pub window_samples: u64,
    /// Memory for decoded samples, per process, in MiB; those of the steps that are read ahead come on top.
    #[serde(default = "default_cache_mib")]
    pub cache_mib: u64,
    /// The folder on disk in which shards of remote data sets are kept, and below `runs` the working files of a run in a store;
    /// processes and runs may share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_dir: Option<PathBuf>,
    /// How many bytes of shards that folder may hold; without a limit nothing is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_limit_bytes: Option<u64>,
    /// Steps whose samples are read ahead; never numerics.
    #[serde(default = "default_read_ahead_steps")]
    pub read_ahead_steps: u64,
    /// Whether the documents of a sample see each other.
    #[serde(default)]
    pub document_boundaries: DocumentBoundaries,
    /// Which version of data sets that are kept up to date is read.
    #[serde(default, skip_serializing_if = "DataFollow::is_default")]
    pub follow: DataFollow,
    /// `[[data.streams]]`: data sets that are mixed, in place of `dataset`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub streams: Vec<StreamSettings>,
}

/// A `[[data.streams]]`. At most one of `proportion`, `repeat` and `samples` says how much of it is read; its data set
/// once an epoch where none does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamSettings {
    /// The stream's name in errors; the data set's path if it has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The data set's folder or URL.
    pub dataset: PathBuf,
    /// Its share of all samples, relative to those of the other streams, which must all have one then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proportion: Option<f64>,
    /// How often its samples are read in an epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeat: Option<f64>,
    /// How many samples are read in an epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
}

/// The effect of a boundary, where a sample goes on with another document after the token that ends one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DocumentBoundaries {
    /// Nothing: a sample is one text.
    #[default]
    Ignore,
    /// The model begins again, and the first token of a document is not predicted.
    Reset,
}

/// Which version of a data set a run reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataFollow {
    /// The newest version when the run began, for ever.
    #[default]
    Began,
    /// At the end of each epoch the run moves to the newest: at the first step that begins with all samples of the epoch
    /// behind it. The steps of the run stay; checkpoints say when it moved, and to which version.
    Latest,
}

impl DataFollow {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

fn default_shuffle() -> ShuffleOrder {
    ShuffleOrder::Window
}

fn default_window_samples() -> u64 {
    16_384
}

fn default_cache_mib() -> u64 {
    256
}

fn default_read_ahead_steps() -> u64 {
    2
}

impl DataSettings {
    /// The rules that one key alone cannot know.
    ///
    /// # Errors
    /// The first rule that is broken, naming its keys.
    pub(super) fn check(&self) -> Result<()> {
        expect(self.window_samples > 0, "data.window_samples", "at least 1", 0)?;
        let cache_mib = self.cache_mib;
        expect((1..=1 << 24).contains(&cache_mib), "data.cache_mib", "1 to 16777216", cache_mib)?;
        let steps = self.read_ahead_steps;
        expect((1..=1024).contains(&steps), "data.read_ahead_steps", "1 to 1024", steps)?;
        let found = match (&self.dataset, self.streams.len()) {
            (Some(_), 0) | (None, 1..) => None,
            (None, 0) => Some("neither"),
            (Some(_), 1..) => Some("both"),
        };
        let keys = "data.dataset, data.streams";
        expect(found.is_none(), keys, "exactly one of them", found.unwrap_or_default())?;
        for stream in &self.streams {
            let StreamSettings { proportion, repeat, samples, .. } = stream;
            let given = [proportion.is_some(), repeat.is_some(), samples.is_some()];
            let given = given.into_iter().filter(|&given| given).count();
            let key = format!("data.streams.{}", stream.name());
            expect(given <= 1, &key, "at most one of proportion, repeat and samples", given)?;
        }
        Ok(())
    }

    /// `cache_mib` in bytes.
    pub(super) fn cache_bytes(&self) -> usize {
        usize::try_from(self.cache_mib << 20).unwrap_or(usize::MAX)
    }

    /// How samples are ordered, given the run's seed.
    pub(super) fn shuffle(&self, seed: u64) -> ShuffleSettings {
        let window_samples = NonZeroU64::new(self.window_samples).unwrap_or(NonZeroU64::MIN);
        ShuffleSettings { order: self.shuffle, window_samples, seed }
    }

    /// Opens a data set; where it is remote, its shards are kept as these settings say.
    ///
    /// # Errors
    /// Faults of the data set.
    pub(super) fn open_one(&self, dataset: &Path) -> Result<DataSet> {
        Ok(DataSet::open_with(dataset, &self.remote())?)
    }

    /// Opens a version of a data set where there is such a one, else the newest.
    fn open_version(&self, dataset: &Path, version: Option<ContentHash>) -> Result<DataSet> {
        let version =
            version.map(|version| DataSet::open_version(dataset, version, &self.remote()));
        match version.transpose()?.flatten() {
            Some(data_set) => Ok(data_set),
            None => self.open_one(dataset),
        }
    }

    /// Settings of remote data.
    pub(super) fn remote(&self) -> RemoteSettings {
        let cache =
            CacheSettings { dir: self.cache_dir.clone(), limit_bytes: self.cache_limit_bytes };
        RemoteSettings { cache, ..RemoteSettings::default() }
    }

    /// Opens the data sets of the run in the folder `run_dir`: the newest versions, or those that the run's latest checkpoint has
    /// read last, as long as they are there; with the cursor of that.
    ///
    /// # Errors
    /// Faults of a data set, of the mixture, or of the run's latest checkpoint.
    pub(super) fn open_for(&self, seed: u64, run_dir: &Path) -> Result<(Mixture, Option<Cursor>)> {
        let newest = self.open(seed, None)?;
        if !newest.parts().iter().any(|part| part.data_set.is_updatable()) {
            let expected = "\"began\", as no data set was prepared with --updatable";
            expect(self.follow == DataFollow::Began, "data.follow", expected, "\"latest\"")?;
            return Ok((newest, None));
        }
        let saved = RunFolder::latest_state(run_dir, &self.remote())?.map(|state| state.cursor);
        let data = match &saved {
            Some(cursor) if *cursor.current().0 != newest.identity() => {
                let (stream, _) = cursor.current();
                let versions = match &stream.parts[..] {
                    [] => vec![stream.fingerprint],
                    parts => parts.iter().map(|part| part.fingerprint).collect(),
                };
                let data = self.open(seed, Some(&versions))?;
                Self::check_versions(&data, &versions)?;
                data
            }
            _ => newest,
        };
        Ok((data, saved))
    }

    /// Checks that a run has found the versions that it goes on from.
    ///
    /// # Errors
    /// A version that is gone.
    fn check_versions(data: &Mixture, versions: &[ContentHash]) -> Result<()> {
        let are_as_many = data.parts().len() == versions.len();
        let is_gone = |(part, version): &(&Part, &ContentHash)| {
            part.data_set.is_updatable() && part.data_set.fingerprint() != **version
        };
        match data.parts().iter().zip(versions).find(is_gone).filter(|_| are_as_many) {
            None => Ok(()),
            Some((part, version)) => {
                let place = part.data_set.location();
                let expected =
                    format!("version {version} of {place}, which the latest checkpoint has read");
                let found = "others alone: `prune` has removed it, or this is another data set";
                Err(JobError::value("data", expected, found))
            }
        }
    }

    /// Opens the data sets: the newest versions, or these of the parts, as far as they are there.
    ///
    /// # Errors
    /// Faults of a data set or of the mixture.
    pub(super) fn open(&self, seed: u64, versions: Option<&[ContentHash]>) -> Result<Mixture> {
        let shuffle = self.shuffle(seed);
        let version = |at: usize| versions.and_then(|versions| versions.get(at).copied());
        if let Some(dataset) = &self.dataset {
            return Ok(Mixture::of(self.open_version(dataset, version(0))?, shuffle)?);
        }
        let part = |(at, stream): (usize, &StreamSettings)| -> Result<Part> {
            let data_set = self.open_version(&stream.dataset, version(at))?;
            Ok(Part { name: stream.name(), data_set, amount: stream.amount() })
        };
        let parts = self.streams.iter().enumerate().map(part).collect::<Result<_>>()?;
        let mixture = Mixture::new(parts, shuffle)?;
        check_tokenizers(&mixture)?;
        Ok(mixture)
    }
}

/// The versions of the parts.
pub(super) fn versions_of(mixture: &Mixture) -> Vec<ContentHash> {
    mixture.parts().iter().map(|part| part.data_set.fingerprint()).collect()
}

/// Checks that a run that reads `current`, with a model of `vocab_size` tokens, may continue with `newest`.
///
/// # Errors
/// The keys in which they differ.
pub(super) fn check_follows(newest: &Mixture, current: &Mixture, vocab_size: usize) -> Result<()> {
    let (found, expected) = (newest.seq_len(), current.seq_len());
    expect(found == expected, "data.follow", &format!("samples of seq_len {expected}"), found)?;
    if let Some(size) = newest.vocab_size().filter(|size| *size as usize > vocab_size) {
        let expected = format!("at most the {vocab_size} tokens of the model");
        return Err(JobError::value("data.follow", expected, size));
    }
    let ends = [newest, current].map(|it| it.eos_token_id());
    let in_words = |end: Option<u32>| end.map_or_else(|| "none".to_owned(), |id| id.to_string());
    let expected = format!("an eos_token_id of {}", in_words(ends[1]));
    expect(ends[0] == ends[1], "data.follow", &expected, in_words(ends[0]))?;
    for (newest, current) in newest.parts().iter().zip(current.parts()) {
        if newest.data_set.read_tokenizer()? != current.data_set.read_tokenizer()? {
            let expected = format!("the tokenizer of {} as it was", current.name);
            return Err(JobError::value("data.follow", expected, "another"));
        }
    }
    Ok(())
}

impl StreamSettings {
    fn name(&self) -> String {
        let place = || match Location::of_path(&self.dataset) {
            Ok(location) => location.to_string(),
            // The error leaves out parts that may be a secret.
            Err(_) => "a data set".to_owned(),
        };
        self.name.clone().unwrap_or_else(place)
    }

    fn amount(&self) -> Amount {
        match (self.proportion, self.repeat, self.samples) {
            (Some(proportion), ..) => Amount::Proportion(proportion),
            (_, _, Some(samples)) => Amount::Samples(samples),
            (_, repeat, _) => Amount::Repeat(repeat.unwrap_or(1.0)),
        }
    }
}

/// Tokens of different tokenizers cannot be mixed: where data sets carry theirs, they must be equal.
fn check_tokenizers(mixture: &Mixture) -> Result<()> {
    let mut first = None;
    for part in mixture.parts() {
        let Some(bytes) = part.data_set.read_tokenizer()? else { continue };
        match &first {
            None => first = Some((&part.name, bytes)),
            Some((_, expected)) if *expected == bytes => {}
            Some((name, _)) => {
                let expected = format!("the tokenizer.json of data.streams.{name}");
                let key = format!("data.streams.{} (its tokenizer)", part.name);
                let found = part.data_set.tokenizer_location();
                let found = found.map_or_else(|| "another".to_owned(), |it| it.to_string());
                return Err(JobError::value(&key, expected, found));
            }
        }
    }
    Ok(())
}
