//! An imaginary data set of 50 million samples in 5,000 shards: its index, and files of the right sizes, or a
//! store in memory that has the index alone.

use std::{
    fs::{self, File},
    sync::Arc,
};

use object_store::{ObjectStoreExt, memory::InMemory};
use tempfile::TempDir;
use tidemill_streaming_data::{
    data_set::index::{
        Column, FORMAT_VERSION, FooterEntry, INDEX_FILE, Index, ShardEntry, TOKENS_COLUMN,
    },
    hash::{ContentHash, HASH_ALGORITHM},
};

pub const SHARDS: usize = 5_000;
pub const SHARD_SAMPLES: u64 = 10_000;
pub const SAMPLES: u64 = SHARDS as u64 * SHARD_SAMPLES;
pub const SHARD_BYTES: u64 = 20_000_000;

/// Tokens of a row.
pub const ROW_TOKENS: usize = 2049;

pub const VOCABULARY: u32 = 50_257;

/// The index that `prepare` would write for shards of [`ROW_TOKENS`].
pub fn index_of(shards: Vec<ShardEntry>) -> Index {
    Index {
        format_version: FORMAT_VERSION,
        seq_len: ROW_TOKENS - 1,
        vocab_size: VOCABULARY,
        bos_token_id: None,
        eos_token_id: Some(0),
        pad_token_id: None,
        tokenizer_file: None,
        hash_algorithm: HASH_ALGORITHM.into(),
        row_group_samples: 127,
        columns: vec![Column {
            name: TOKENS_COLUMN.into(),
            kind: "fixed_size_list".into(),
            element: "int32".into(),
            length: ROW_TOKENS,
        }],
        selection: None,
        state: None,
        shards,
    }
}

/// The index.
pub fn index() -> Index {
    let shard = |at: usize| ShardEntry {
        file: format!("shard-{at:05}.parquet"),
        samples: SHARD_SAMPLES,
        bytes: SHARD_BYTES,
        hash: ContentHash::of(&at.to_be_bytes()),
        footer: Some(FooterEntry { bytes: 15_000, hash: ContentHash::of(&[at as u8]) }),
    };
    index_of((0..SHARDS).map(shard).collect())
}

/// A folder of the index and of shards of the right sizes, which hold nothing: opening does not read
/// them.
pub fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let index = index();
    for shard in &index.shards {
        // No disk is used for what is never written.
        File::create(folder.path().join(&shard.file)).unwrap().set_len(shard.bytes).unwrap();
    }
    fs::write(folder.path().join(INDEX_FILE), index.to_bytes()).unwrap();
    folder
}

/// A store with the index alone, below `set`.
pub fn store() -> Arc<InMemory> {
    let store = InMemory::new();
    let bytes = index().to_bytes();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let path = format!("set/{INDEX_FILE}").into();
    runtime.block_on(store.put(&path, bytes.into())).unwrap();
    Arc::new(store)
}
