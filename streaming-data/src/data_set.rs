//! A data set: shards in a stored order, and what every sample of them is.
//!
//! Opened from a folder with an `index.json`, nothing but the index is read (the sizes of the
//! shards are asked from the file system, so that a truncated one is known before a run begins).
//! A folder of Parquet files without an index is a data set too: its shards are all `*.parquet`
//! files in byte order of their names, and their footers are read.
//!
//! Contract: opening the same files gives the same data set wherever they lie. A data set is cheap
//! to clone; clones share what has been verified and the footers that have been read.

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    cache::BoundedCache,
    error::DataError,
    hash::{ContentHash, ContentHasher},
    index::{INDEX_FILE, Index, fingerprint},
    order::{CanonicalOrder, SampleId, ShuffleSettings},
    shard::{DecodedTokens, Footer, Pieces, RowRule, Scratch, Shard},
};

/// Memory for footers that may be needed again; one takes about 1 KB per row group.
const FOOTERS_BYTES: usize = 32 << 20;

/// Memory for the places of pages, and for dictionaries, of which one may take 256 KiB.
const PIECES_BYTES: usize = 32 << 20;

/// A data set; see the [module](self).
#[derive(Clone)]
pub struct DataSet {
    content: Arc<Content>,
}

struct Content {
    path: PathBuf,
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
}

/// What is decoded at once: a piece of a row group of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) shard: usize,
    pub(crate) group: usize,
    pub(crate) piece: usize,
}

impl DataSet {
    /// Opens a folder with an `index.json`, or one of `*.parquet` files.
    ///
    /// # Errors
    /// [`DataError::RemoteStore`] for a URL; [`DataError::NotAFolder`], [`DataError::NoShards`];
    /// what is wrong with the index; [`DataError::MissingShard`] and [`DataError::ShardBytes`] for
    /// a shard that is not as the index says. Without an index, what is wrong with a footer, and
    /// [`DataError::EmptyShard`].
    pub fn open(path: impl AsRef<Path>) -> Result<DataSet, DataError> {
        let path = path.as_ref();
        if let Some(url) = path.to_str().filter(|path| path.contains("://")) {
            return Err(DataError::RemoteStore { url: url.to_owned() });
        }
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
            open_indexed(path)?
        } else {
            open_unindexed(path)?
        };
        Ok(DataSet { content: Arc::new(content) })
    }

    /// The folder.
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

    /// The tokenizer that made the tokens, where an index names it.
    pub fn tokenizer_path(&self) -> Option<PathBuf> {
        self.content.tokenizer_file.as_ref().map(|file| self.content.path.join(file))
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
        let footer = self.footer(sample.shard)?;
        let (group, first_row) = footer.group_of(sample.row);
        let row = sample.row - first_row;
        let pieces = self.pieces(sample.shard, &footer, group, &mut scratch)?;
        let mut tokens = Vec::with_capacity(self.content.row_tokens);
        for piece in pieces.of_row(row) {
            let place = Place { shard: sample.shard, group, piece };
            let decoded = self.decode(place, &footer, &pieces, &mut scratch)?;
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
    pub(crate) fn footer(&self, shard: usize) -> Result<Arc<Footer>, DataError> {
        self.content.footers.get_or_load(shard, || self.shards()[shard].open(self.row_rule()))
    }

    /// How a row group is decoded.
    pub(crate) fn pieces(
        &self,
        shard: usize,
        footer: &Footer,
        group: usize,
        scratch: &mut Scratch,
    ) -> Result<Arc<Pieces>, DataError> {
        self.content.pieces.get_or_load((shard, group), || {
            footer.pieces(self.shards()[shard].path(), group, self.row_rule(), scratch)
        })
    }

    /// The tokens of a piece of a row group.
    pub(crate) fn decode(
        &self,
        place: Place,
        footer: &Footer,
        pieces: &Pieces,
        scratch: &mut Scratch,
    ) -> Result<DecodedTokens, DataError> {
        let Place { shard, group, piece } = place;
        let path = self.shards()[shard].path();
        footer.decode(path, group, pieces, piece, self.row_rule(), scratch)
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

fn open_indexed(path: &Path) -> Result<Content, DataError> {
    let index = Index::read(path)?;
    let (fingerprint, samples) = (index.fingerprint(), index.samples());
    let shards: Vec<Shard> = index
        .shards
        .iter()
        .map(|s| Shard::new(path.join(&s.file), s.samples, s.bytes, Some(s.hash)))
        .collect();
    shards.iter().try_for_each(Shard::check_size)?;
    Ok(Content {
        path: path.to_owned(),
        row_tokens: index.seq_len + 1,
        vocab_size: Some(index.vocab_size),
        bos_token_id: index.bos_token_id,
        eos_token_id: index.eos_token_id,
        pad_token_id: index.pad_token_id,
        tokenizer_file: index.tokenizer_file,
        fingerprint,
        samples,
        shards,
        footers: BoundedCache::new(FOOTERS_BYTES),
        pieces: BoundedCache::new(PIECES_BYTES),
    })
}

fn open_unindexed(path: &Path) -> Result<Content, DataError> {
    let mut shards = Vec::new();
    let mut identities = Vec::new();
    let mut rule = None;
    for file in parquet_files(path)? {
        let footer = Footer::read(&file)?;
        if footer.samples() == 0 {
            return Err(DataError::EmptyShard { path: file });
        }
        match rule {
            None => rule = Some(first_rule(&footer, &file)?),
            Some(rule) => footer.check_column(&file, rule)?,
        }
        let mut identity = ContentHasher::new();
        identity.update(&footer.file_bytes().to_be_bytes());
        identity.update(&footer.hash().to_be_bytes());
        identities.push((footer.samples(), identity.finish()));
        shards.push(Shard::new(file, footer.samples(), footer.file_bytes(), None));
    }
    let Some(rule) = rule else { return Err(DataError::NoShards { path: path.to_owned() }) };
    Ok(Content {
        path: path.to_owned(),
        row_tokens: rule.row_tokens,
        vocab_size: rule.vocab_size,
        bos_token_id: None,
        eos_token_id: None,
        pad_token_id: None,
        tokenizer_file: None,
        fingerprint: fingerprint(identities.into_iter()),
        samples: shards.iter().map(Shard::samples).sum(),
        shards,
        footers: BoundedCache::new(FOOTERS_BYTES),
        pieces: BoundedCache::new(PIECES_BYTES),
    })
}

/// The rule that the first shard of a data set without an index sets for all.
fn first_rule(footer: &Footer, file: &Path) -> Result<RowRule, DataError> {
    let row_tokens = footer.first_row_tokens(file)?;
    if row_tokens < 2 {
        return Err(DataError::RowLength {
            path: file.to_owned(),
            row: 0,
            expected: 2,
            found: row_tokens,
        });
    }
    Ok(RowRule { row_tokens, vocab_size: None })
}

/// The Parquet files of a folder in byte order of their names.
fn parquet_files(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let io = |error| DataError::io("list data set", folder)(error);
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "parquet") && path.is_file() {
            files.push(path);
        }
    }
    files.sort_by(|one, other| {
        let name = |path: &PathBuf| path.file_name().map(|n| n.as_encoded_bytes().to_vec());
        name(one).cmp(&name(other))
    });
    Ok(files)
}
