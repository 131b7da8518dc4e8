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
//! | [`index`] | `index.json`: seq_len, vocabulary, and samples, size and hash of every shard |
//! | [`hash`] | content hashes, `xxh3-128:...` |
//! | [`error`] | [`DataError`], the one error of this crate |
//! | [`prepare`] | documents to shards |
//!
//! Start here: [`index`].

#![forbid(unsafe_code)]

pub mod error;
pub mod hash;
pub mod index;
pub mod prepare;

pub use error::DataError;
