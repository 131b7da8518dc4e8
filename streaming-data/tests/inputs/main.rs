//! Inputs of `prepare` that hold many documents: the same documents give the same shards, to the
//! byte, in whatever form they come and for any number of workers; and what is wrong is named.
//!
//! Seen red: see the first lines of each file.

mod duplicates;
mod filters;
mod json_lines;
mod mds;
#[path = "../support/outcome.rs"]
mod outcome;
mod parquet_files;
mod support;
