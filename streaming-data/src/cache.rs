//! Caches: downloaded shards on disk, decoded pieces of row groups in memory.

pub mod disk;
pub mod memory;
