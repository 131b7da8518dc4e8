//! Sums between workers whose bits do not depend on how many workers there are.
//!
//! A global batch is cut into lanes, and the gradients of the lanes are summed by one fixed binary
//! tree, independent of the workers that computed them and of when they arrive. This crate holds that tree, the containers
//! that timely exchanges at the speed of a memory copy, and the pacing that bounds their memory.
//!
//! | module | holds |
//! |---|---|
//! | [`tree`] | the canonical tree over lanes, and how lanes are cut over workers |
//! | [`node`] | [`Node`], the lanes of a sum |
//! | [`lane_schedule`] | which worker sums which lanes of a step, and when |
//! | [`plan`] | the parameter arena cut into chunks |
//! | [`bucket`] | runs of chunks that are summed and gathered together, and the owners of their parts |
//! | [`carry`] | the timely operators that carry chunks between processes |
//! | [`chunk`] | [`Chunk`], one message, and the pact that routes it whole |
//! | [`communicator`] | sums and copies between workers, over memory, a vendor's library or timely |
//! | [`credit`] | credit windows: a bound on the bytes in flight |
//! | [`error`] | [`CollectiveError`], the one error of this crate |
//!
//! Start here: [`tree`], then [`communicator`].

#![forbid(unsafe_code)]

pub mod bucket;
pub mod carry;
pub mod chunk;
pub mod communicator;
pub mod credit;
pub mod error;
pub mod lane_schedule;
pub mod node;
pub mod plan;
pub mod tree;

pub use bucket::{BUCKET_ELEMENTS, Bucket, BucketOwners, BucketPlan, SegmentUses};
pub use carry::Carry;
pub use chunk::{Chunk, ChunkHeader, Part, StatePart, by_destination};
pub use credit::{Credit, CreditLedger, CreditWindow, DEFAULT_WINDOW_BYTES, PacedQueue};
pub use error::{CollectiveError, Result};
pub use lane_schedule::LaneSchedule;
pub use node::Node;
pub use plan::{CHUNK_ELEMENTS, ChunkPlan, ChunkStart, PlannedChunk};
pub use tree::{Tree, lane_cut};
