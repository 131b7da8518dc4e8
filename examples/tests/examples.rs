//! The tests that stand in examples, which are programs: Cargo runs none of theirs.

#[allow(dead_code, reason = "an example's `main` has no caller here")]
#[path = "../stream_a_dataset.rs"]
mod stream_a_dataset;
