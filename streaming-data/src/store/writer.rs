//! The mark that tells the writers of a folder apart.

use std::hash::{BuildHasher, RandomState};

/// Hexadecimal digits of a [`new_token`].
pub(crate) const TOKEN_DIGITS: usize = 16;

/// The owner of the claim when an object was to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claimed {
    /// This writer: the object is written.
    Ours,
    /// Another writer: the object is not written.
    Others,
}

/// A token that no other writer has, in hexadecimal digits.
pub fn new_token() -> String {
    // The standard library's hashers have keys from the operating system's randomness.
    format!("{:016x}", RandomState::new().hash_one(TOKEN_DIGITS))
}
