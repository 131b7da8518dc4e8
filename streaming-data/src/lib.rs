//! Parquet shards to a deterministic, elastic stream of samples, and documents to shards.
//!
//! Training that gives the same weights for any number of workers needs its samples in one
//! canonical order that depends on nothing but the data and a seed; and resuming after a kill
//! needs that order at any place, at once. This crate is that order, the data set under it, and a
//! reader that decodes ahead of its consumer. It knows nothing of dataflows or devices and can be
//! used alone.
//!
//! | module | holds |
//! |---|---|
//! | [`data_set`] | a folder or URL of shards, with or without an index, opened |
//! | [`order`] | the canonical order: position -> sample, computed for any position at once |
//! | [`mixture`] | what is read: one data set, or several mixed in exact shares |
//! | [`reader`] | samples of planned positions, decoded ahead on threads under a memory bound |
//! | [`store`] | paths and URLs, and remote stores behind them |
//! | [`fetch`] | remote shards on their way, ahead of the reader, and the cache on disk |
//! | [`cursor`] | where a stream is, and whether another stream may go on from there |
//! | [`table`] | rows of any columns, streamed in the same order as Arrow record batches |
//! | [`survey`] | how well an order mixes, and what reading it costs |
//! | [`prepare`] | documents to shards |
//! | `live` (a feature) | documents that come and go in a dataflow of one's own: verdicts and counts as differences |
//! | [`tokenizer`] | byte-level byte pairs, trained on exact counts |
//! | [`index`] | `index.json`: seq_len, vocabulary, and samples, size and hash of every shard |
//! | [`hash`] | content hashes, `xxh3-128:...` |
//! | [`error`] | [`DataError`], the error of all but `prepare`, which has one of its own |
//!
//! Start here: the example of [`reader`], or of [`table`] for rows that are not tokens; then [`order`].

#![forbid(unsafe_code)]

mod cache;
pub mod cursor;
pub mod data_set;
pub mod error;
pub mod fetch;
pub mod hash;
pub mod index;
#[cfg(feature = "live")]
pub mod live;
pub mod mixture;
pub mod order;
pub mod prepare;
pub mod reader;
mod shard;
mod shard_cache;
mod shards;
pub mod store;
pub mod survey;
pub mod table;
pub mod tokenizer;

pub use data_set::{CacheSettings, DataSet, DataSettings};
pub use error::DataError;
pub use mixture::Mixture;
pub use reader::Sample;
pub use shard::Shard;
