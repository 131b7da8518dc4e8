//! Files: those of others read with care, our own written to stay.
//!
//! | module | what it is for |
//! |---|---|
//! | [`mod@read`] | files that others made: opened without waiting, and read with a bound |
//! | [`durable`] | files that are there after a power cut, wholly or not at all |
//! | [`lock`] | files by which a process holds something, on NFS too |
//! | [`scratch`] | folders in the making, of which a kill leaves nothing that stays |

#![forbid(unsafe_code)]

pub mod durable;
pub mod lock;
pub mod read;
pub mod scratch;

pub use read::{Kind, Refused, open, read};
