//! Files: careful reads of files from others, durable writes of our own.
//!
//! | module | purpose |
//! |---|---|
//! | [`mod@read`] | files that others made: opened without blocking, and read up to a limit |
//! | [`durable`] | files that are complete or absent after a power cut |
//! | [`lock`] | locks on files that end with the process, on NFS too |
//! | [`scratch`] | temporary folders, removed after a kill too |

#![forbid(unsafe_code)]

pub mod durable;
pub mod lock;
pub mod read;
pub mod scratch;

pub use read::{Kind, Refused, open, read};
