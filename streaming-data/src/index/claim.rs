//! The index of a data set in a store while that is being prepared: who prepares it.
//!
//! It is an `index.json` with the single key `preparing`, which every version of this crate refuses
//! to take for an index.

use std::hash::{BuildHasher, RandomState};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Claim {
    /// Differs between any two runs of `prepare`.
    preparing: String,
}

/// The text of a claim that no other run makes.
pub(crate) fn new_claim() -> Bytes {
    // The standard library's hashers have keys from the operating system's randomness.
    let keys = RandomState::new();
    let token = [1, 2].map(|half: u8| format!("{:016x}", keys.hash_one(half))).concat();
    let claim = Claim { preparing: token };
    let mut text = serde_json::to_vec_pretty(&claim).expect("a claim has only JSON values");
    text.push(b'\n');
    text.into()
}

/// Whether an index is not one, but says that it is to come.
pub(crate) fn is_claim(index: &[u8]) -> bool {
    serde_json::from_slice::<Claim>(index).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_differ_and_are_told_from_indexes() {
        let claims = [new_claim(), new_claim()];
        assert_ne!(claims[0], claims[1]);
        assert!(claims.iter().all(|claim| is_claim(claim)));
        for other in ["", "{}", "{\"format_version\": 1}", "{\"preparing\": 1}"] {
            assert!(!is_claim(other.as_bytes()), "{other}");
        }
    }
}
