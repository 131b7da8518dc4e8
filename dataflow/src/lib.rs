//! Tidemill trains sequence models as a timely-dataflow graph.
//!
//! This crate is the graph, the job, the cluster and the program. It re-exports the crates below it:
//! [`kernels`], [`model`], [`streaming_data`] and [`collective`].
//!
//! | module | content |
//! |---|---|
//! | [`operators`] | the graph: one verb a file, extension traits on timely streams |
//! | [`batch`] | how a step's samples are cut into lanes, grains and microbatches |
//! | [`parallel`] | the state that workers share out in place of holding all of it each |
//! | [`cluster`] | workers over threads, processes and hosts, and how they fail |
//! | [`communicators`] | the connections by which workers sum gradients and share parameters |
//! | [`device`] | devices: from `[device]` to a backend |
//! | [`prepare`] | data sets that several processes prepare |
//! | [`job`] | `RUN.toml` to a graph: the one place where concrete types meet |
//! | [`checkpoint`] | a run's state in the Hugging Face layout, complete or absent |
//! | [`metrics`], [`history`], [`run_folder`] | the other files of a run's folder |
//! | [`inference`] | a trained model, opened to generate and score |
//! | `cli` | the program (feature `cli`, which embedders leave off) |
//!
//! Start here: [`job::train`] runs a `RUN.toml`; [`operators::train`] puts training into a timely program of
//! yours.
//!
//! # Glossary
//!
//! *step*: one optimizer update, and the timestamp. *position*: place in the endless canonical order.
//! *sample*: `seq_len + 1` tokens, or another item that a model is trained on. *global batch*: the samples of a step. *lane*: a fixed part of the global batch;
//! lanes are summed by a fixed binary tree. *grain*: consecutive samples of a lane whose parameter gradients are
//! formed together. *microbatch*: grains in flight together; memory, never numerics. *use*: one block's use of a
//! segment of parameters, with a gradient slot of its own. *shard*: one Parquet file. *sharding*: which
//! state workers share out (`parallel.shard`). *chunk*: the part of a
//! segment in one message. *round*: the lanes of a step that are summed together, one a worker where gradients are
//! shared out. *bucket*: whole segments of parameters that are summed, updated and gathered together. *ticket*: the
//! message between operators that says how far a bucket has come; it carries no values. *node*: a place in the tree
//! over the lanes, which stands for the sum of the lanes below it. *worker*: timely's index, one device each.
//! *rank*: the place of a worker among those that train. *owner*: the rank that sums and updates a range of a bucket
//! and holds the optimizer's state for it. *process*: one operating-system process. *cursor*: where the stream is. A
//! GPU queue is a *device stream*; a *stream* is timely's.

#![forbid(unsafe_code)]

pub mod batch;
pub mod checkpoint;
#[cfg(feature = "cli")]
pub mod cli;
pub mod cluster;
pub mod communicators;
pub mod device;
pub mod error;
pub mod history;
pub mod inference;
pub mod job;
mod memory;
pub mod metrics;
pub mod operators;
pub mod parallel;
#[cfg(feature = "prepare")]
pub mod prepare;
mod printable;
mod refusal;
pub mod run_folder;
mod state_arenas;
pub mod tensorboard;

pub use error::{JobError, Result};
pub use tidemill_collective as collective;
pub use tidemill_evaluation as evaluation;
pub use tidemill_kernels as kernels;
pub use tidemill_model as model;
pub use tidemill_streaming_data as streaming_data;
