//! From `RUN.toml` to a graph: the one place where concrete types meet.
//!
//! [`RunConfig`] is the config as the user wrote it, [`ResolvedRun`] its resolved form with data set and model, and [`train`]
//! runs it: on this process's workers, and together with other processes where [`TrainOptions::cluster`] says so. Where the
//! run folder holds a checkpoint, the run resumes from it.

pub mod config;
pub mod data;
mod data_versions;
mod decisions;
mod elsewhere;
mod epochs;
#[cfg(test)]
mod fixtures;
mod journal;
mod mail;
pub(crate) mod memory;
mod open_run;
pub mod questions;
mod remarks;
mod resolve;
mod restore;
mod resume;
mod shared_checkpoints;
mod shared_folder;
mod source;
mod state_sink;
mod train;
mod versioned_samples;
mod worker;

pub use config::RunConfig;
pub use resolve::ResolvedRun;
pub use source::DecodedSamples;
pub use train::{Observer, StopRequest, TrainEvent, TrainOptions, TrainSummary, train};
