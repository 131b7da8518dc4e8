//! Shards in a stored order, with rows of any kind: where they are, the footers and open files that all
//! readers share, and the checks that every shard must pass.
//!
//! [`DataSet`](crate::DataSet) adds rows of tokens, [`Table`](crate::data_set::table::Table) rows of any
//! columns.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    cache::memory::BoundedCache,
    data_set::{
        DataSettings,
        index::{Index, ShardEntry},
    },
    error::DataError,
    hash::ContentHash,
    order::{CanonicalOrder, ShuffleSettings},
    shard::{Footer, RowKind, Shard, ShardFile},
    store::{Location, RemoteFolder},
};

mod opening;
mod unindexed;

pub(crate) use opening::Opened;

/// Memory for footers that may be needed again; one takes about 1 KB per row group.
const FOOTERS_BYTES: usize = 32 << 20;

/// Files that stay open because they may be needed again.
const OPEN_FILES: usize = 256;

/// See the [module](self). Clones share everything.
#[derive(Clone)]
pub(crate) struct Shards {
    content: Arc<Content>,
}

struct Content {
    /// The folder's path, or the text of its URL.
    path: PathBuf,
    location: Location,
    /// Where it is remote.
    remote: Option<Remote>,
    rows: RowKind,
    fingerprint: ContentHash,
    samples: u64,
    shards: Vec<Shard>,
    footers: BoundedCache<usize, Footer>,
    files: BoundedCache<usize, ShardFile>,
}

/// A remote folder, and the settings to read it with.
#[derive(Clone)]
pub(crate) struct Remote {
    pub(crate) folder: RemoteFolder,
    pub(crate) settings: DataSettings,
}

/// Where shards are read from.
pub(crate) trait Files {
    /// A shard to read from, held only while it is read.
    fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError>;
}

/// The shards of a folder, and their identity.
struct Listed {
    rows: RowKind,
    fingerprint: ContentHash,
    shards: Vec<Shard>,
}

impl Listed {
    /// The index of these rows.
    fn of_index(index: &Index, shards: Vec<Shard>, rows: RowKind) -> Listed {
        Listed { rows, fingerprint: index.fingerprint(), shards }
    }
}

/// The shards of an index.
fn shards_of(index: &Index, location: &Location) -> Vec<Shard> {
    let shard = |entry: &ShardEntry| {
        Shard::new(location, entry.file.clone(), entry.samples, entry.bytes, Some(entry.hash))
            .with_footer(entry.footer)
    };
    index.shards.iter().map(shard).collect()
}

/// The form of rows that the first shard gives for all, and a value for the caller.
pub(crate) type OfFirst<'a, T> =
    dyn Fn(&Footer, &ShardFile) -> Result<(RowKind, T), DataError> + 'a;

impl Shards {
    fn new(listed: Listed, location: Location, remote: Option<Remote>) -> Shards {
        let Listed { rows, fingerprint, shards } = listed;
        let content = Content {
            path: path_of(&location),
            location,
            remote,
            rows,
            fingerprint,
            samples: shards.iter().map(Shard::samples).sum(),
            shards,
            footers: BoundedCache::new(FOOTERS_BYTES),
            files: BoundedCache::new(OPEN_FILES),
        };
        Shards { content: Arc::new(content) }
    }

    /// Keeps the footer of the first shard, which was read before the form of its rows was known.
    fn with_first(self, file: ShardFile, footer: Footer) -> Shards {
        self.content.files.put(0, file);
        self.content.footers.put(0, footer);
        self
    }

    /// The folder, or the text of its URL.
    pub(crate) fn path(&self) -> &Path {
        &self.content.path
    }

    /// Where the folder is.
    pub(crate) fn location(&self) -> &Location {
        &self.content.location
    }

    /// The remote folder and its settings, where it is remote.
    pub(crate) fn remote(&self) -> Option<&Remote> {
        self.content.remote.as_ref()
    }

    /// The form of every row.
    pub(crate) fn rows(&self) -> &RowKind {
        &self.content.rows
    }

    /// The identity of the data; the path does not enter.
    pub(crate) fn fingerprint(&self) -> ContentHash {
        self.content.fingerprint
    }

    /// Rows of all shards.
    pub(crate) fn samples(&self) -> u64 {
        self.content.samples
    }

    /// The shards in stored order.
    pub(crate) fn shards(&self) -> &[Shard] {
        &self.content.shards
    }

    /// The order of all rows under some settings.
    pub(crate) fn order(&self, settings: ShuffleSettings) -> Result<CanonicalOrder, DataError> {
        let samples: Vec<u64> = self.shards().iter().map(Shard::samples).collect();
        CanonicalOrder::new(&samples, settings)
    }

    /// The footer of a shard, verified where its hash is known. A local shard whose hash is known
    /// and whose footer does not state hashes of its row groups is verified as a whole before.
    pub(crate) fn footer(&self, shard: usize, files: &dyn Files) -> Result<Arc<Footer>, DataError> {
        self.content.footers.get_or_load(shard, || {
            let file = files.file(shard)?;
            self.shards()[shard].footer(&file, self.rows())
        })
    }

    /// Whether the footer of a shard is in memory.
    pub(crate) fn has_footer(&self, shard: usize) -> bool {
        self.content.footers.holds(&shard)
    }
}

impl Files for Shards {
    /// The file; of a remote shard, ranges.
    fn file(&self, shard: usize) -> Result<Arc<ShardFile>, DataError> {
        let entry = &self.shards()[shard];
        self.content.files.get_or_load(shard, || open(entry, self.content.remote.as_ref()))
    }
}

/// The file of a shard; of a remote one, ranges.
fn open(shard: &Shard, remote: Option<&Remote>) -> Result<ShardFile, DataError> {
    match remote {
        Some(remote) => Ok(shard.ranges(&remote.folder)),
        None => shard.open_local(),
    }
}

/// The path, or the text of the URL, for callers that work with paths.
fn path_of(location: &Location) -> PathBuf {
    location.local().map_or_else(|| location.to_string().into(), Path::to_owned)
}
