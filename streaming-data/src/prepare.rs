//! Documents to shards.
