//! What has been read once, kept: downloaded shards on disk, decoded pieces of row groups in memory.

pub mod disk;
pub mod memory;
