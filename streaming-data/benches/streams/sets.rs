//! Data sets for the measurements.

use std::{
    fs::{self, File},
    path::Path,
    sync::Arc,
};

use arrow::{
    array::{ArrayRef, FixedSizeListArray, Int32Array, ListArray, RecordBatch},
    buffer::OffsetBuffer,
    datatypes::{DataType, Field, Schema},
};
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, Encoding, ZstdLevel},
    file::properties::{WriterProperties, WriterPropertiesBuilder},
};
use tempfile::TempDir;
use tidemill_streaming_data::{
    data_set::index::{INDEX_FILE, ShardEntry, TOKENS_COLUMN},
    hash::ContentHash,
};

use crate::large::{ROW_TOKENS, VOCABULARY, index_of};

/// The form of a shard's pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pages {
    /// As `prepare` writes them: row groups of 1 MiB, lists of fixed size that are never null, plain, zstd.
    Prepared,
    /// One row group, lists that might be null, plain, zstd.
    Plain,
    /// pyarrow's defaults: one row group, lists that might be null, dictionaries, snappy.
    Dictionary,
}

impl Pages {
    pub const ALL: [Pages; 3] = [Pages::Prepared, Pages::Plain, Pages::Dictionary];

    pub fn name(self) -> &'static str {
        match self {
            Pages::Prepared => "prepared",
            Pages::Plain => "plain",
            Pages::Dictionary => "dictionary",
        }
    }

    fn properties(self) -> WriterProperties {
        let zstd = Compression::ZSTD(ZstdLevel::try_new(1).unwrap());
        let plain = |builder: WriterPropertiesBuilder| {
            builder
                .set_dictionary_enabled(false)
                .set_encoding(Encoding::PLAIN)
                .set_compression(zstd)
        };
        let builder = WriterProperties::builder();
        match self {
            Pages::Prepared => {
                plain(builder).set_max_row_group_row_count(Some((1 << 20) / (4 * ROW_TOKENS)))
            }
            Pages::Plain => plain(builder),
            Pages::Dictionary => builder.set_compression(Compression::SNAPPY),
        }
        .build()
    }

    fn rows(self, tokens: ArrayRef) -> ArrayRef {
        let is_fixed = self == Pages::Prepared;
        let item = Arc::new(Field::new_list_field(DataType::Int32, !is_fixed));
        if is_fixed {
            return Arc::new(FixedSizeListArray::new(item, ROW_TOKENS as i32, tokens, None));
        }
        let lengths = std::iter::repeat_n(ROW_TOKENS, tokens.len() / ROW_TOKENS);
        Arc::new(ListArray::new(item, OffsetBuffer::from_lengths(lengths), tokens, None))
    }
}

/// Writes shards of equal numbers of samples, and an index.
pub fn written(pages: Pages, shards: u64, samples: u64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let entries = (0..shards).map(|shard| {
        let file = format!("shard-{shard:05}.parquet");
        write(&folder.path().join(&file), pages, shard, samples);
        let bytes = fs::read(folder.path().join(&file)).unwrap();
        ShardEntry {
            file,
            samples,
            bytes: bytes.len() as u64,
            hash: ContentHash::of(&bytes),
            footer: None,
        }
    });
    let index = index_of(entries.collect());
    fs::write(folder.path().join(INDEX_FILE), index.to_bytes()).unwrap();
    folder
}

fn write(path: &Path, pages: Pages, shard: u64, samples: u64) {
    let first = shard * samples * ROW_TOKENS as u64;
    let tokens = first..first + samples * ROW_TOKENS as u64;
    let tokens: ArrayRef = Arc::new(Int32Array::from_iter_values(tokens.map(token)));
    let rows = pages.rows(tokens);
    let field = Field::new(TOKENS_COLUMN, rows.data_type().clone(), pages != Pages::Prepared);
    let schema = Arc::new(Schema::new(vec![field]));
    let batch = RecordBatch::try_new(Arc::clone(&schema), vec![rows]).unwrap();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, schema, Some(pages.properties())).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// Frequent and rare tokens, as in text: log-uniform, which is Zipf's law with exponent 1.
fn token(at: u64) -> i32 {
    // splitmix64.
    let mut x = at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let uniform = ((x ^ (x >> 31)) >> 11) as f64 / (1_u64 << 53) as f64;
    f64::from(VOCABULARY).powf(uniform) as i32 - 1
}
