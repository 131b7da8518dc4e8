//! The claim, which replaces the index of a data set while it is being prepared in a store and names the run of
//! `prepare`.
//!
//! It is an `index.json` with the single key `preparing`, which every version of this crate refuses
//! to take for an index.

use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Claim<'a> {
    preparing: &'a str,
}

/// The claim, as bytes in the place of the index; the token differs between any two runs of `prepare`.
pub(crate) fn claim_of(token: &str) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(&Claim { preparing: token }).expect("it is JSON");
    bytes.push(b'\n');
    bytes
}

/// Whether the bytes in the place of the index are a claim.
pub(crate) fn is_claim(index: &[u8]) -> bool {
    serde_json::from_slice::<Claim<'_>>(index).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_told_from_indexes() {
        assert!(is_claim(b"{\"preparing\": \"1\"}") && is_claim(&claim_of("1")));
        for other in ["", "{}", "{\"format_version\": 1}", "{\"preparing\": 1}"] {
            assert!(!is_claim(other.as_bytes()), "{other}");
        }
    }
}
