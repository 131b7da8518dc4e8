//! Parquet shards to a deterministic, elastic stream of samples, and documents to shards.
//!
//! Training that gives the same weights for any number of workers needs its samples in one
//! canonical order that depends only on the data and a seed; and resuming after a kill
//! needs that order at any place, at once. This crate is that order, the data set under it, and a
//! reader that decodes ahead of its consumer. It knows nothing of dataflows or devices and can be
//! used alone.
//!
//! Bytes flow from a store to a sample, and from documents to shards:
//!
//! ```text
//! store --fetch: the prefetcher, in the order of need--> cache::disk: whole shards
//!     --shard: footer, pages, checks--> cache::memory: decoded pieces --reader: a worker pool--> samples
//! documents --prepare--> shards and index.json, in a folder or a store
//! ```
//!
//! A local shard is read where it is, without `fetch` and `cache::disk`. [`order`] says which samples are next, and so which
//! shards to fetch, to keep and to evict.
//!
//! | module | holds |
//! |---|---|
//! | [`store`] | paths and URLs, and remote stores |
//! | [`fetch`] | remote shards, downloaded ahead of the reader by a prefetcher |
//! | `cache` | downloaded shards on disk, and decoded pieces of them in memory |
//! | `shard` | one shard: its footer, its pages, its rows |
//! | [`data_set`] | a folder or URL of shards, opened: [`index`](data_set::index) is `index.json`; [`table`](data_set::table) streams rows of any columns |
//! | [`order`] | the canonical order: position -> sample, computed for any position at once; [`mixture`](order::mixture) mixes several data sets in exact shares, [`cursor`](order::cursor) is where a stream is, [`statistics`](order::statistics) measures how well an order mixes |
//! | [`reader`] | samples of planned positions, decoded ahead on threads under a memory bound |
//! | [`prepare`] | documents to shards |
//! | [`tokenizer`] | byte-level byte pairs, trained on exact counts |
//! | `live` | documents that come and go in a user's own dataflow: verdicts and counts as differences |
//! | [`hash`] | content hashes, `xxh3-128:...` |
//! | [`error`] | [`DataError`], the error of all modules except `prepare`, which has an error of its own |
//!
//! Features, all on except `live`: `stores` (of the crate `object_store`), `s3`, `gcs`, `azure` and `web` (stores in a network; `remote` is all four), `prepare`, `mds` (MosaicML's data sets as inputs of `prepare`), `live`.
//! Without them a crate that trains on local shards needs no TLS, no HTTP, no asynchronous runtime and no tokenizer.
//!
//! Start here: the example of [`reader`], or of [`table`](data_set::table) for rows that are not tokens; then [`order`].

#![forbid(unsafe_code)]
// Without `prepare` some items that reading and preparing share are unused.
#![cfg_attr(not(feature = "prepare"), allow(dead_code, unused_imports))]

mod cache;
pub mod data_set;
pub mod error;
pub mod fetch;
pub mod hash;
#[cfg(feature = "live")]
pub mod live;
pub mod order;
#[cfg(feature = "prepare")]
pub mod prepare;
pub mod reader;
mod shard;
pub mod store;
#[cfg(feature = "prepare")]
pub mod tokenizer;

pub use data_set::{CacheSettings, DataSet, DataSettings};
pub use error::DataError;
pub use order::mixture::Mixture;
pub use reader::Sample;
pub use shard::Shard;
