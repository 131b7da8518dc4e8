//! Rows of any columns, streamed in the canonical order as Arrow record batches.
//!
//! A [`Table`] is a folder or URL of Parquet files of one schema, which may be any; an `index.json` of
//! [`prepare`](crate::prepare) is used where there is one, for hashes and sizes. Of each file only the
//! columns that are asked for are read. The order is that of [`crate::order`]: a pure function of the
//! numbers of rows and the settings, random-access, the same for any number of readers.
//!
//! Contract of a [`TableDecoder`]'s readers, in addition to the contract of [`crate::reader`]:
//! - A [`RowBatch`] holds the rows of consecutive positions of one range of the plan: `batch_rows`,
//!   or the remaining rows of the range; it never crosses from one range to the next.
//! - Memory: three quarters of `memory_bytes` hold decoded slices of row groups, about 4 MiB each
//!   and larger where a row is larger; one quarter holds batches that wait, at least one. Beyond
//!   that each thread holds the pages of the row group that it is decoding, a slice and twice the
//!   rows of its batch; and up to eight row groups with slices that are not decoded yet keep
//!   their pages.
//! - Pages can only be decoded one after the other: a `full` shuffle of row groups of many slices
//!   decodes much more than it yields. `window` is the order to stream with.
//!
//! ```
//! # use std::{num::NonZeroU64, sync::Arc};
//! # use arrow::array::*;
//! use tidemill_streaming_data::{
//!     DataSettings,
//!     data_set::table::{Columns, Table, TableDecoder, TableSettings},
//!     order::{ShuffleOrder, ShuffleSettings},
//! };
//!
//! # let folder = tempfile::tempdir()?;
//! # let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..100).map(|i| i.to_string())));
//! # let batch = RecordBatch::try_from_iter([("text", texts.clone()), ("other", texts)])?;
//! # let file = std::fs::File::create(folder.path().join("0.parquet"))?;
//! # let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None)?;
//! # writer.write(&batch)?;
//! # writer.close()?;
//! // A folder with one Parquet file of 100 rows, one column of which is `text`.
//! let columns = Columns::Named(vec!["text".to_owned()]);
//! let table = Table::open(folder.path(), &columns, &DataSettings::default())?;
//! let shuffle = ShuffleSettings {
//!     order: ShuffleOrder::Window,
//!     window_samples: NonZeroU64::new(64).unwrap(),
//!     seed: 17,
//! };
//! let decoder = TableDecoder::new(&table, shuffle, TableSettings::default())?;
//! // The second of two workers that share steps of 20 rows.
//! let plan = (0..5).map(|step| step * 20 + 10..step * 20 + 20);
//! let mut rows = 0;
//! for batch in decoder.reader(plan) {
//!     let batch = batch?;
//!     assert_eq!(batch.rows.schema().fields().len(), 1);
//!     assert_eq!(batch.rows.num_rows() as u64, batch.positions.end - batch.positions.start);
//!     rows += batch.rows.num_rows();
//! }
//! assert_eq!(rows, 50);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::{num::NonZeroUsize, ops::Range, path::Path, sync::Arc};

use arrow_array::RecordBatch;
use arrow_schema::{Field, Schema, SchemaRef};

use crate::{
    data_set::{
        DataSettings,
        shards::{Opened, Shards},
    },
    error::DataError,
    hash::ContentHash,
    order::{CanonicalOrder, ShuffleSettings, cursor::StreamIdentity},
    reader::{Reader, TableOwner},
    shard::{Footer, RowKind, Shard, ShardFile},
};

/// Which columns are read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Columns {
    /// All.
    #[default]
    All,
    /// The columns of these names, in this order.
    Named(Vec<String>),
}

/// Parquet files of one schema; see the [module](self). Clones share footers and open files.
#[derive(Clone)]
pub struct Table {
    shards: Shards,
    schema: SchemaRef,
}

impl Table {
    /// Opens a folder of Parquet files, or the URL of one.
    ///
    /// # Errors
    /// As [`DataSet::open_with`](crate::DataSet::open_with), and [`DataError::Column`] for a shard
    /// that lacks a column, or has one of another type than the first shard.
    pub fn open(
        path: impl AsRef<Path>,
        columns: &Columns,
        settings: &DataSettings,
    ) -> Result<Table, DataError> {
        let opened = Opened::new(path.as_ref(), settings)?;
        let schema_of = |footer: &Footer, file: &ShardFile| {
            let schema = projected(footer.schema(), columns, file.path())?;
            Ok((RowKind::Columns(schema.clone()), schema))
        };
        let (shards, schema) = match opened.index() {
            None => opened.unindexed(&schema_of)?,
            Some(index) => opened.indexed_by_first(index, &schema_of)?,
        };
        Ok(Table { shards, schema })
    }

    /// The folder, or the text of its URL.
    pub fn path(&self) -> &Path {
        self.shards.path()
    }

    /// The columns that are read.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Rows of all shards.
    pub fn rows(&self) -> u64 {
        self.shards.samples()
    }

    /// The shards in stored order.
    pub fn shards(&self) -> &[Shard] {
        self.shards.shards()
    }

    /// The identity of the data, as [`DataSet::fingerprint`](crate::DataSet::fingerprint).
    pub fn fingerprint(&self) -> ContentHash {
        self.shards.fingerprint()
    }

    /// The order of the rows under some settings.
    ///
    /// # Errors
    /// As [`CanonicalOrder::new`]; not for a table that opened.
    pub fn order(&self, shuffle: ShuffleSettings) -> Result<CanonicalOrder, DataError> {
        self.shards.order(shuffle)
    }

    /// The identity of a stream of the rows, on which they depend: for a [`Cursor`](crate::order::cursor::Cursor); the columns
    /// that are read do not enter. `seq_len` is 0.
    pub fn identity(&self, shuffle: ShuffleSettings) -> StreamIdentity {
        StreamIdentity {
            fingerprint: self.fingerprint(),
            samples: self.rows(),
            seq_len: 0,
            shuffle,
            parts: Vec::new(),
        }
    }

    /// The shards, with rows of any kind.
    pub(crate) fn all(&self) -> &Shards {
        &self.shards
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.schema.fields().iter().map(|field| field.name()).collect();
        formatter
            .debug_struct("Table")
            .field("path", &self.path())
            .field("columns", &names)
            .field("rows", &self.rows())
            .field("shards", &self.shards().len())
            .finish_non_exhaustive()
    }
}

/// The columns that are asked for, as the first shard has them.
fn projected(schema: &SchemaRef, columns: &Columns, path: &Path) -> Result<SchemaRef, DataError> {
    let names: Vec<&str> = match columns {
        Columns::All => schema.fields().iter().map(|field| field.name().as_str()).collect(),
        Columns::Named(names) => names.iter().map(String::as_str).collect(),
    };
    let wrong = |found: String, expected: &str| DataError::Column {
        path: path.to_owned(),
        found,
        expected: expected.to_owned(),
    };
    let mut fields = Vec::new();
    for name in &names {
        let there = || {
            let there: Vec<_> = schema.fields().iter().map(|field| field.name().as_str()).collect();
            format!("columns [{}]", there.join(", "))
        };
        let field = schema
            .field_with_name(name)
            .map_err(|_| wrong(there(), &format!("a column {name}")))?;
        if names.iter().filter(|other| other == &name).count() > 1 {
            return Err(wrong(format!("column {name} twice"), "every column once"));
        }
        // Shards may differ in the columns that can be null.
        fields.push(Field::new(*name, field.data_type().clone(), true));
    }
    if fields.is_empty() {
        return Err(wrong("no column".to_owned(), "one column at least"));
    }
    Ok(Arc::new(Schema::new(fields)))
}

/// Rows of consecutive positions.
#[derive(Debug, Clone, PartialEq)]
pub struct RowBatch {
    /// Their positions in the canonical order.
    pub positions: Range<u64>,
    /// The rows, in the order of the positions.
    pub rows: RecordBatch,
}

/// The resources of a [`TableDecoder`]; none of them changes a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableSettings {
    /// Threads that read and decode.
    pub threads: NonZeroUsize,
    /// Memory for decoded slices of row groups and batches that wait; see the [module](self).
    pub memory_bytes: usize,
    /// Rows of a batch, at most.
    pub batch_rows: NonZeroUsize,
}

impl Default for TableSettings {
    /// Two threads, 512 MiB, 1,024 rows.
    fn default() -> TableSettings {
        TableSettings {
            threads: NonZeroUsize::MIN.saturating_add(1),
            memory_bytes: 512 << 20,
            batch_rows: NonZeroUsize::MIN.saturating_add(1023),
        }
    }
}

/// Decodes rows for the readers of a process; see the [module](self). Clones are the same decoder.
#[derive(Clone)]
pub struct TableDecoder {
    owner: TableOwner,
}

impl TableDecoder {
    /// Starts the threads. Nothing is read before there is a reader.
    ///
    /// # Errors
    /// As [`Decoder::new`](crate::reader::Decoder::new).
    pub fn new(
        table: &Table,
        shuffle: ShuffleSettings,
        settings: TableSettings,
    ) -> Result<TableDecoder, DataError> {
        Ok(TableDecoder { owner: TableOwner::start(table, shuffle, settings)? })
    }

    /// A reader of the positions of a plan, one range after the other, as
    /// [`Decoder::reader`](crate::reader::Decoder::reader).
    pub fn reader<P>(&self, plan: P) -> Reader<RowBatch>
    where
        P: IntoIterator<Item = Range<u64>, IntoIter: Send + 'static>,
    {
        self.reader_with_wake(plan, || {})
    }

    /// A reader that calls `wake` when [`Reader::try_next`] has something to say again, as
    /// [`Decoder::reader_with_wake`](crate::reader::Decoder::reader_with_wake).
    pub fn reader_with_wake<P>(
        &self,
        plan: P,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Reader<RowBatch>
    where
        P: IntoIterator<Item = Range<u64>, IntoIter: Send + 'static>,
    {
        self.owner.reader(Box::new(plan.into_iter()), wake)
    }
}

#[cfg(all(test, feature = "prepare"))]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::prepare::{ByteTokenizer, PrepareSettings, prepare};

    /// The first shard defines the columns: its footer is read once, and not again for its rows.
    #[test]
    fn what_was_read_of_the_first_shard_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (text, set) = (folder.path().join("a.txt"), folder.path().join("set"));
        std::fs::write(&text, "a text of some words").unwrap();
        let settings = PrepareSettings::new(vec![text], set.clone(), NonZeroUsize::MIN);
        prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(())).unwrap();
        let table = Table::open(&set, &Columns::All, &DataSettings::default()).unwrap();
        assert_eq!((table.schema().field(0).name().as_str(), table.rows()), ("tokens", 20));
        assert!(table.all().has_footer(0));
    }
}
