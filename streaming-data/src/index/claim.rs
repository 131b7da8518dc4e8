//! The index of a data set in a store while that is being prepared: who prepares it.
//!
//! It is an `index.json` with the single key `preparing`, which every version of this crate refuses
//! to take for an index.

use serde::Deserialize;

/// The key, whose value differs between any two runs of `prepare`.
pub(crate) const CLAIM_KEY: &str = "preparing";

#[derive(Deserialize)]
struct Claim {
    #[serde(rename = "preparing")]
    _token: String,
}

/// Whether an index is not one, but says that it is to come.
pub(crate) fn is_claim(index: &[u8]) -> bool {
    serde_json::from_slice::<Claim>(index).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_told_from_indexes() {
        assert!(is_claim(format!("{{\"{CLAIM_KEY}\": \"1\"}}").as_bytes()));
        for other in ["", "{}", "{\"format_version\": 1}", "{\"preparing\": 1}"] {
            assert!(!is_claim(other.as_bytes()), "{other}");
        }
    }
}
