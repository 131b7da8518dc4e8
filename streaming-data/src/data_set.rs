//! A data set: shards in a stored order, and the form of their samples.
//!
//! Opening a folder with an `index.json` reads the index only (the file system is asked for the sizes of the
//! shards, so that a truncated one is known before a run begins).
//! A folder of Parquet files without an index is a data set too: its shards are all `*.parquet`
//! files in byte order of their names, and their footers are read.
//!
//! The folder may be the URL of a remote store (see [`crate::store`]). With an index that is one
//! request for any number of shards; without one it is a listing, and a request or two for
//! each footer, several at once. A defect of a remote shard is found when it is read.
//!
//! Contract: opening the same files gives the same data set wherever they lie. A data set is cheap
//! to clone; clones share footers and the results of verification.

pub mod index;
pub(crate) mod shards;
pub mod table;

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
#[cfg(feature = "stores")]
use object_store::ObjectStore;
use tidemill_files::{Kind, read};

use self::{
    index::{Index, Selection},
    shards::{Files, Opened, Shards},
};
use crate::{
    cache::memory::BoundedCache,
    error::DataError,
    hash::ContentHash,
    order::{CanonicalOrder, SampleId, ShuffleSettings},
    shard::{DecodedTokens, Footer, Pieces, RowKind, RowRule, Scratch, Shard, ShardFile},
    store::{Location, RemoteFolder, StoreSettings},
};

/// Memory for the places of pages, and for dictionaries; one dictionary may take 256 KiB.
const PIECES_BYTES: usize = 32 << 20;

/// How a data set of a remote store is read; nothing here changes a sample.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DataSettings {
    /// How the store is used.
    pub store: StoreSettings,
    /// Where downloaded shards are kept.
    pub cache: CacheSettings,
}

/// Where downloaded shards are kept; see [`crate::fetch`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheSettings {
    /// The folder, which processes and data sets may share; `tidemill` in `$XDG_CACHE_HOME`, or in
    /// `~/.cache`, where none is given. It is made when the first shard is to be kept.
    pub dir: Option<PathBuf>,
    /// The most bytes that the folder may hold, shards of all processes and data sets counted. Without a
    /// limit no shard is ever evicted.
    pub limit_bytes: Option<u64>,
}

impl CacheSettings {
    /// The folder of these settings, or else that of the environment; `of` is the place of the data set whose shards would be kept in it.
    ///
    /// # Errors
    /// [`DataError::Location`] where neither names one.
    pub fn folder(&self, of: &Location) -> Result<PathBuf, DataError> {
        if let Some(folder) = &self.dir {
            return Ok(folder.clone());
        }
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let caches = variable("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache")));
        caches.map(|caches| caches.join("tidemill")).ok_or_else(|| DataError::Location {
            text: of.to_string(),
            found: "no folder to keep its files in".to_owned(),
            expected: "cache_dir in the settings, or XDG_CACHE_HOME or HOME in the environment"
                .to_owned(),
        })
    }
}

/// A data set; see the [module](self).
#[derive(Clone)]
pub struct DataSet {
    shards: Shards,
    content: Arc<Content>,
}

struct Content {
    row_tokens: usize,
    vocab_size: Option<u32>,
    selection: Option<Selection>,
    is_updatable: bool,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
    pad_token_id: Option<u32>,
    tokenizer_file: Option<String>,
    /// Keyed by shard and row group.
    pieces: BoundedCache<(usize, usize), Pieces>,
}

/// The unit of decoding: a piece of a row group of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) shard: usize,
    pub(crate) group: usize,
    pub(crate) piece: usize,
}

impl DataSet {
    /// Opens a folder with an `index.json`, or one of `*.parquet` files; a path that is a URL is
    /// that of a remote store, used as [`DataSettings::default`] says.
    ///
    /// # Errors
    /// [`DataError::NotAFolder`], [`DataError::NoShards`]; defects of the index;
    /// [`DataError::MissingShard`] and [`DataError::ShardBytes`] for a local shard that is not as
    /// the index says. Without an index, defects of a footer, and
    /// [`DataError::EmptyShard`]. [`DataError::Location`] and [`DataError::Store`] for a URL.
    pub fn open(path: impl AsRef<Path>) -> Result<DataSet, DataError> {
        DataSet::open_with(path, &DataSettings::default())
    }

    /// As [`DataSet::open`], with settings for a remote store.
    ///
    /// # Errors
    /// As [`DataSet::open`].
    pub fn open_with(
        path: impl AsRef<Path>,
        settings: &DataSettings,
    ) -> Result<DataSet, DataError> {
        DataSet::of(Opened::new(path.as_ref(), settings)?)
    }

    /// Opens a version of a data set that is kept up to date, by its fingerprint: the newest, or another as long as
    /// it is there; none where it is not.
    ///
    /// # Errors
    /// As [`DataSet::open`].
    pub fn open_version(
        path: impl AsRef<Path>,
        fingerprint: ContentHash,
        settings: &DataSettings,
    ) -> Result<Option<DataSet>, DataError> {
        let opened = Opened::version(path.as_ref(), fingerprint, settings)?;
        opened.map(DataSet::of).transpose()
    }

    /// Opens a data set below a prefix of a store that the caller made; `name` is a URL for
    /// messages, and for telling its objects from others in the cache.
    ///
    /// # Errors
    /// As [`DataSet::open`].
    #[cfg(feature = "stores")]
    pub fn open_store(
        store: Arc<dyn ObjectStore>,
        prefix: object_store::path::Path,
        name: &str,
        settings: &DataSettings,
    ) -> Result<DataSet, DataError> {
        let location = Location::parse(name)?;
        if location.local().is_some() {
            return Err(DataError::Location {
                text: name.to_owned(),
                found: "a path".to_owned(),
                expected: "a URL that names the store".to_owned(),
            });
        }
        let folder = RemoteFolder::of_store(store, prefix, location, &settings.store);
        DataSet::of(Opened::of_store(folder, settings)?)
    }

    /// The data set of a folder, by its index, or by the footers where there is none.
    fn of(opened: Opened) -> Result<DataSet, DataError> {
        let (shards, rule, index) = match opened.index() {
            Some(index) => {
                let (row_tokens, vocab_size) = (index.seq_len + 1, Some(index.vocab_size));
                let rule = RowRule { row_tokens, vocab_size };
                (opened.indexed(index, RowKind::Tokens(rule))?, rule, Some(index))
            }
            None => {
                let (shards, rule) = opened.unindexed(&tokens_of_first)?;
                (shards, rule, None)
            }
        };
        let content = Content {
            row_tokens: rule.row_tokens,
            vocab_size: rule.vocab_size,
            selection: index.and_then(|index| index.selection.clone()),
            is_updatable: index.is_some_and(|index| index.state.is_some()),
            bos_token_id: index.and_then(|index| index.bos_token_id),
            eos_token_id: index.and_then(|index| index.eos_token_id),
            pad_token_id: index.and_then(|index| index.pad_token_id),
            tokenizer_file: index.and_then(|index| index.tokenizer_file.clone()),
            pieces: BoundedCache::new(PIECES_BYTES),
        };
        Ok(DataSet { shards, content: Arc::new(content) })
    }

    /// The folder, or the text of its URL.
    pub fn path(&self) -> &Path {
        self.shards.path()
    }

    /// The documents and lines that were left out, where the index names any.
    pub fn selection(&self) -> Option<&Selection> {
        self.content.selection.as_ref()
    }

    /// Whether an index says that the data set can be kept up to date.
    pub fn is_updatable(&self) -> bool {
        self.content.is_updatable
    }

    /// Predicted tokens per sample: a sample has one token more.
    pub fn seq_len(&self) -> usize {
        self.content.row_tokens - 1
    }

    /// Size of the vocabulary, where an index states it: every token is below it.
    pub fn vocab_size(&self) -> Option<u32> {
        self.content.vocab_size
    }

    /// Token that begins a document, where an index states it.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.content.bos_token_id
    }

    /// Token that ends a document, where an index states it.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.content.eos_token_id
    }

    /// Token that fills, where an index states it.
    pub fn pad_token_id(&self) -> Option<u32> {
        self.content.pad_token_id
    }

    /// Where the folder is.
    pub fn location(&self) -> &Location {
        self.shards.location()
    }

    /// Where the tokenizer that made the tokens is, where an index names it.
    pub fn tokenizer_location(&self) -> Option<Location> {
        self.content.tokenizer_file.as_ref().map(|file| self.location().join(file))
    }

    /// Reads the tokenizer that made the tokens, where an index names it.
    ///
    /// # Errors
    /// [`DataError::Io`] or [`DataError::Store`] when it cannot be read.
    pub fn read_tokenizer(&self) -> Result<Option<Bytes>, DataError> {
        let Some(name) = &self.content.tokenizer_file else { return Ok(None) };
        match self.shards.remote() {
            Some(remote) => remote.folder.get(name).map(Some),
            None => {
                let path = self.path().join(name);
                let bytes = read(&path, Kind::Tokenizer).map_err(DataError::io("read", &path))?;
                Ok(Some(bytes.into()))
            }
        }
    }

    /// Samples in all shards.
    pub fn samples(&self) -> u64 {
        self.shards.samples()
    }

    /// The shards in stored order.
    pub fn shards(&self) -> &[Shard] {
        self.shards.shards()
    }

    /// The identity of the data; the path does not enter.
    ///
    /// With an index it is [`Index::fingerprint`](crate::data_set::index::Index::fingerprint). Without one, the
    /// hash of a shard is taken over the size of its file and the bytes of its footer, which state the place, the compressed and
    /// uncompressed sizes and (as most writers do) the statistics of every column of every row
    /// group. That tells data sets apart without reading them whole, but it does not find a few
    /// changed bytes; `prepare` writes hashes that do.
    pub fn fingerprint(&self) -> ContentHash {
        self.shards.fingerprint()
    }

    /// The order of this data set's samples under some settings.
    ///
    /// # Errors
    /// As [`CanonicalOrder::new`]; not for a data set that opened.
    pub fn order(&self, settings: ShuffleSettings) -> Result<CanonicalOrder, DataError> {
        self.shards.order(settings)
    }

    /// The tokens of one sample, decoded by the caller's thread: for looking at a data set. To
    /// read many, use a [`Decoder`](crate::reader::Decoder).
    ///
    /// # Errors
    /// A defect of the shard or the row.
    ///
    /// # Panics
    /// If the data set has no such shard, or the shard no such row.
    pub fn sample(&self, sample: SampleId) -> Result<Vec<u32>, DataError> {
        let shard = &self.shards()[sample.shard];
        assert!(sample.row < shard.samples(), "no row {} in {:?}", sample.row, shard);
        let mut scratch = Scratch::default();
        let files = &self.shards;
        let footer = files.footer(sample.shard, files)?;
        let (group, first_row) = footer.group_of(sample.row);
        let row = sample.row - first_row;
        let pieces = self.pieces(sample.shard, &footer, group, files, &mut scratch)?;
        let mut tokens = Vec::with_capacity(self.content.row_tokens);
        for piece in pieces.of_row(row) {
            let place = Place { shard: sample.shard, group, piece };
            let decoded = self.decode(place, &footer, &pieces, files, &mut scratch)?;
            decoded.copy_to(self.places_of(row), &mut tokens);
        }
        Ok(tokens)
    }

    /// A data set in a store, whose index was read already.
    pub(crate) fn of_folder(
        folder: RemoteFolder,
        index: &Index,
        settings: &DataSettings,
    ) -> Result<DataSet, DataError> {
        DataSet::of(Opened::with_index(folder, index.clone(), settings))
    }

    /// The row group that has a row of a shard, and the first row of that.
    pub(crate) fn group_of(&self, shard: usize, row: u64) -> Result<(usize, u64), DataError> {
        Ok(self.shards.footer(shard, &self.shards)?.group_of(row))
    }

    /// All tokens of a row group, row after row.
    pub(crate) fn group_tokens(&self, shard: usize, group: usize) -> Result<Vec<u32>, DataError> {
        let (files, mut scratch) = (&self.shards, Scratch::default());
        let footer = files.footer(shard, files)?;
        let pieces = self.pieces(shard, &footer, group, files, &mut scratch)?;
        let rows = footer.group_rows(group) as u64;
        let places = 0..rows * self.content.row_tokens as u64;
        let mut tokens = Vec::with_capacity(places.end as usize);
        for piece in pieces.all() {
            let place = Place { shard, group, piece };
            let decoded = self.decode(place, &footer, &pieces, files, &mut scratch)?;
            decoded.copy_to(places.clone(), &mut tokens);
        }
        Ok(tokens)
    }

    /// Places of a row's tokens in its row group.
    pub(crate) fn places_of(&self, row: u64) -> Range<u64> {
        let row_tokens = self.content.row_tokens as u64;
        row * row_tokens..(row + 1) * row_tokens
    }

    /// The shards, with rows of any kind.
    pub(crate) fn all(&self) -> &Shards {
        &self.shards
    }

    /// How a row group is decoded.
    pub(crate) fn pieces(
        &self,
        shard: usize,
        footer: &Footer,
        group: usize,
        files: &dyn Files,
        scratch: &mut Scratch,
    ) -> Result<Arc<Pieces>, DataError> {
        self.content.pieces.get_or_load((shard, group), || {
            footer.pieces(&*files.file(shard)?, group, self.row_rule(), scratch)
        })
    }

    /// The tokens of a piece of a row group.
    pub(crate) fn decode(
        &self,
        place: Place,
        footer: &Footer,
        pieces: &Pieces,
        files: &dyn Files,
        scratch: &mut Scratch,
    ) -> Result<DecodedTokens, DataError> {
        let Place { shard, group, piece } = place;
        footer.decode(&*files.file(shard)?, group, pieces, piece, self.row_rule(), scratch)
    }

    fn row_rule(&self) -> RowRule {
        RowRule { row_tokens: self.content.row_tokens, vocab_size: self.content.vocab_size }
    }
}

impl std::fmt::Debug for DataSet {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("DataSet")
            .field("path", &self.path())
            .field("seq_len", &self.seq_len())
            .field("vocab_size", &self.vocab_size())
            .field("samples", &self.samples())
            .field("shards", &self.shards().len())
            .field("fingerprint", &self.fingerprint())
            .finish_non_exhaustive()
    }
}

/// The rule that the first shard of a data set without an index sets for all.
fn tokens_of_first(footer: &Footer, file: &ShardFile) -> Result<(RowKind, RowRule), DataError> {
    let row_tokens = footer.first_row_tokens(file)?;
    if row_tokens < 2 {
        return Err(DataError::RowLength {
            path: file.path().to_owned(),
            row: 0,
            expected: 2,
            found: row_tokens,
        });
    }
    let rule = RowRule { row_tokens, vocab_size: None };
    Ok((RowKind::Tokens(rule), rule))
}
