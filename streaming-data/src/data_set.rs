//! A data set: shards in a stored order, and what every sample of them is.
//!
//! Opened from a folder with an `index.json`, nothing but the index is read (the sizes of the
//! shards are asked from the file system, so that a truncated one is known before a run begins).
//! A folder of Parquet files without an index is a data set too: its shards are all `*.parquet`
//! files in byte order of their names, and their footers are read.
//!
//! The folder may be the URL of a remote store (see [`crate::store`]). With an index that is one
//! request, whatever the number of shards; without one it is a listing, and a request or two for
//! each footer, several at once. What is wrong with a remote shard is known when it is read.
//!
//! Contract: opening the same files gives the same data set wherever they lie. A data set is cheap
//! to clone; clones share what has been verified and the footers that have been read.

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use object_store::ObjectStore;

use crate::{
    cache::BoundedCache,
    error::DataError,
    hash::ContentHash,
    index::{INDEX_FILE, Index},
    order::{CanonicalOrder, SampleId, ShuffleSettings},
    shard::{DecodedTokens, Footer, Pieces, RowRule, Scratch, Shard, ShardFile},
    store::{Location, RemoteFolder, StoreSettings},
};

mod unindexed;

/// Memory for footers that may be needed again; one takes about 1 KB per row group.
const FOOTERS_BYTES: usize = 32 << 20;

/// Memory for the places of pages, and for dictionaries, of which one may take 256 KiB.
const PIECES_BYTES: usize = 32 << 20;

/// Files that are open because they may be needed again.
const OPEN_FILES: usize = 256;

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
    /// What the folder may hold, all its shards counted, whoever downloaded them. Without a limit
    /// nothing is ever dropped.
    pub limit_bytes: Option<u64>,
}

/// A data set; see the [module](self).
#[derive(Clone)]
pub struct DataSet {
    content: Arc<Content>,
}

struct Content {
    /// The folder's path, or the text of its URL.
    path: PathBuf,
    location: Location,
    /// Where it is remote.
    remote: Option<Remote>,
    row_tokens: usize,
    vocab_size: Option<u32>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
    pad_token_id: Option<u32>,
    tokenizer_file: Option<String>,
    fingerprint: ContentHash,
    samples: u64,
    shards: Vec<Shard>,
    footers: BoundedCache<usize, Footer>,
    /// By shard and row group.
    pieces: BoundedCache<(usize, usize), Pieces>,
    files: BoundedCache<usize, ShardFile>,
}

/// What a data set of a remote store is read with.
pub(crate) struct Remote {
    pub(crate) folder: RemoteFolder,
    pub(crate) settings: DataSettings,
}

/// What is decoded at once: a piece of a row group of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) shard: usize,
    pub(crate) group: usize,
    pub(crate) piece: usize,
}

/// Where the shards of a data set are read from.
pub(crate) trait Files {
    /// A shard to read from. It is held while it is read, and not longer.
    fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError>;
}

impl DataSet {
    /// Opens a folder with an `index.json`, or one of `*.parquet` files; a path that is a URL is
    /// that of a remote store, used as [`DataSettings::default`] says.
    ///
    /// # Errors
    /// [`DataError::NotAFolder`], [`DataError::NoShards`]; what is wrong with the index;
    /// [`DataError::MissingShard`] and [`DataError::ShardBytes`] for a local shard that is not as
    /// the index says. Without an index, what is wrong with a footer, and
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
        let location = Location::of_path(path.as_ref())?;
        match location.local().map(Path::to_owned) {
            Some(path) => open_local(&path, location),
            None => {
                let folder = RemoteFolder::open(location, &settings.store)?;
                open_remote(folder, settings)
            }
        }
    }

    /// Opens a data set below a prefix of a store that the caller made; `name` is a URL for
    /// messages, and for telling its objects from others in the cache.
    ///
    /// # Errors
    /// As [`DataSet::open`].
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
        open_remote(RemoteFolder::of_store(store, prefix, location, &settings.store), settings)
    }

    /// The folder, or the text of its URL.
    pub fn path(&self) -> &Path {
        &self.content.path
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
        &self.content.location
    }

    /// Where the tokenizer that made the tokens is, where an index names it.
    pub fn tokenizer_location(&self) -> Option<Location> {
        self.content.tokenizer_file.as_ref().map(|file| self.content.location.join(file))
    }

    /// Reads the tokenizer that made the tokens, where an index names it.
    ///
    /// # Errors
    /// [`DataError::Io`] or [`DataError::Store`] when it cannot be read.
    pub fn read_tokenizer(&self) -> Result<Option<Bytes>, DataError> {
        let Some(name) = &self.content.tokenizer_file else { return Ok(None) };
        match &self.content.remote {
            Some(remote) => remote.folder.get(name).map(Some),
            None => {
                let path = self.content.path.join(name);
                let bytes = fs::read(&path).map_err(DataError::io("read", &path))?;
                Ok(Some(bytes.into()))
            }
        }
    }

    /// Samples in all shards.
    pub fn samples(&self) -> u64 {
        self.content.samples
    }

    /// The shards in stored order.
    pub fn shards(&self) -> &[Shard] {
        &self.content.shards
    }

    /// The identity of the data; the path does not enter.
    ///
    /// With an index it is [`Index::fingerprint`]. Without one, the hash of a shard is taken over
    /// the size of its file and the bytes of its footer, which state the place, the compressed and
    /// uncompressed sizes and (as most writers do) the statistics of every column of every row
    /// group. That tells data sets apart without reading them whole, but it does not find a few
    /// changed bytes; `prepare` writes hashes that do.
    pub fn fingerprint(&self) -> ContentHash {
        self.content.fingerprint
    }

    /// The order of this data set's samples under some settings.
    ///
    /// # Errors
    /// As [`CanonicalOrder::new`]; not for a data set that opened.
    pub fn order(&self, settings: ShuffleSettings) -> Result<CanonicalOrder, DataError> {
        let samples: Vec<u64> = self.shards().iter().map(Shard::samples).collect();
        CanonicalOrder::new(&samples, settings)
    }

    /// The tokens of one sample, decoded by the caller's thread: for looking at a data set. To
    /// read many, use a [`Decoder`](crate::reader::Decoder).
    ///
    /// # Errors
    /// What is wrong with the shard or the row.
    ///
    /// # Panics
    /// If the data set has no such shard, or the shard no such row.
    pub fn sample(&self, sample: SampleId) -> Result<Vec<u32>, DataError> {
        let shard = &self.shards()[sample.shard];
        assert!(sample.row < shard.samples(), "no row {} in {:?}", sample.row, shard);
        let mut scratch = Scratch::default();
        let footer = self.footer(sample.shard, self)?;
        let (group, first_row) = footer.group_of(sample.row);
        let row = sample.row - first_row;
        let pieces = self.pieces(sample.shard, &footer, group, self, &mut scratch)?;
        let mut tokens = Vec::with_capacity(self.content.row_tokens);
        for piece in pieces.of_row(row) {
            let place = Place { shard: sample.shard, group, piece };
            let decoded = self.decode(place, &footer, &pieces, self, &mut scratch)?;
            decoded.copy_to(self.places_of(row), &mut tokens);
        }
        Ok(tokens)
    }

    /// Places of a row's tokens among those of its row group.
    pub(crate) fn places_of(&self, row: u64) -> Range<u64> {
        let row_tokens = self.content.row_tokens as u64;
        row * row_tokens..(row + 1) * row_tokens
    }

    /// The footer of a shard, whose content is verified before.
    pub(crate) fn footer(&self, shard: usize, files: &dyn Files) -> Result<Arc<Footer>, DataError> {
        self.content.footers.get_or_load(shard, || {
            let file = files.file(shard)?;
            self.shards()[shard].footer(&file, self.row_rule())
        })
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

    /// What it is read with, where it is remote.
    pub(crate) fn remote(&self) -> Option<&Remote> {
        self.content.remote.as_ref()
    }

    /// Whether the footer of a shard is in memory.
    pub(crate) fn has_footer(&self, shard: usize) -> bool {
        self.content.footers.holds(&shard)
    }

    fn row_rule(&self) -> RowRule {
        RowRule { row_tokens: self.content.row_tokens, vocab_size: self.content.vocab_size }
    }
}

impl Files for DataSet {
    /// The file; of a remote shard, ranges.
    fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        let entry = &self.shards()[shard];
        self.content.files.get_or_load(shard, || match &self.content.remote {
            Some(remote) => Ok(entry.ranges(&remote.folder)),
            None => entry.open_local(),
        })
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

fn open_local(path: &Path, location: Location) -> Result<DataSet, DataError> {
    let found = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => None,
        Ok(_) => Some("a file"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some("nothing"),
        Err(error) => return Err(DataError::io("open data set", path)(error)),
    };
    if let Some(found) = found {
        return Err(DataError::NotAFolder { path: path.to_owned(), found });
    }
    let index = path.join(INDEX_FILE);
    let content = if index.try_exists().map_err(DataError::io("look at index", &index))? {
        let content = indexed(Index::read(path)?, location);
        content.shards.iter().try_for_each(Shard::check_size)?;
        content
    } else {
        unindexed::open(unindexed::Folder::Local(path), location)?
    };
    Ok(DataSet { content: Arc::new(content) })
}

fn open_remote(folder: RemoteFolder, settings: &DataSettings) -> Result<DataSet, DataError> {
    let location = folder.location().clone();
    let content = match folder.get_if_there(INDEX_FILE)? {
        Some(bytes) => {
            let path = PathBuf::from(location.join(INDEX_FILE).to_string());
            indexed(Index::from_bytes(&bytes, &path)?, location)
        }
        None => unindexed::open(unindexed::Folder::Remote(&folder), location)?,
    };
    let remote = Some(Remote { folder, settings: settings.clone() });
    Ok(DataSet { content: Arc::new(Content { remote, ..content }) })
}

/// What an index says.
fn indexed(index: Index, location: Location) -> Content {
    let (fingerprint, samples) = (index.fingerprint(), index.samples());
    let shard = |entry: crate::index::ShardEntry| {
        Shard::new(&location, entry.file, entry.samples, entry.bytes, Some(entry.hash))
    };
    Content {
        row_tokens: index.seq_len + 1,
        vocab_size: Some(index.vocab_size),
        bos_token_id: index.bos_token_id,
        eos_token_id: index.eos_token_id,
        pad_token_id: index.pad_token_id,
        tokenizer_file: index.tokenizer_file,
        fingerprint,
        samples,
        shards: index.shards.into_iter().map(shard).collect(),
        path: path_of(&location),
        location,
        remote: None,
        footers: BoundedCache::new(FOOTERS_BYTES),
        pieces: BoundedCache::new(PIECES_BYTES),
        files: BoundedCache::new(OPEN_FILES),
    }
}

/// The path, or the text of the URL, for what works with paths.
fn path_of(location: &Location) -> PathBuf {
    location.local().map_or_else(|| location.to_string().into(), Path::to_owned)
}
