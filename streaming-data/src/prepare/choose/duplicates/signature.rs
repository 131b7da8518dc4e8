//! A document's signature: the numbers by which it is compared once its text is gone.

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::{
    Dedup,
    shingles::{mix, shingles, words},
    sketch::{BANDS, bands, minima},
};

/// Name and version of the way signatures are made; the index of a data set that was compared by them states it.
pub(crate) const SIGNATURES: &str = "shingles-1";

/// The buckets of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    /// Hash of the text, or of its words.
    pub copies: u128,
    /// Hashes of the bands, where near copies are looked for.
    pub near: Option<[u64; BANDS]>,
}

/// Makes signatures; it holds only scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Signer {
    words: Vec<u64>,
    shingles: Vec<u64>,
}

impl Signer {
    /// The signature of a text, by what counts as a duplicate.
    pub(crate) fn sign(&mut self, text: &str, dedup: Dedup) -> Signature {
        let copies = match dedup {
            Dedup::ExactWords => self.hash_of_words(text),
            Dedup::None | Dedup::Exact | Dedup::Near => xxh3_128(text.as_bytes()),
        };
        let near = match dedup {
            Dedup::Near => Some(self.bands(text, copies)),
            Dedup::None | Dedup::Exact | Dedup::ExactWords => None,
        };
        Signature { copies, near }
    }

    fn hash_of_words(&mut self, text: &str) -> u128 {
        words(text, &mut self.words);
        if self.words.is_empty() {
            return xxh3_128(text.as_bytes());
        }
        let mut hasher = Xxh3::new();
        for word in &self.words {
            hasher.update(&word.to_le_bytes());
        }
        hasher.digest128()
    }

    fn bands(&mut self, text: &str, copies: u128) -> [u64; BANDS] {
        words(text, &mut self.words);
        shingles(&self.words, &mut self.shingles);
        if self.shingles.is_empty() {
            // Without a word, a text is like its copies only.
            return std::array::from_fn(|band| mix(copies as u64 ^ mix(band as u64)));
        }
        bands(&minima(&self.shingles))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_depends_on_the_text_alone() {
        let mut signer = Signer::default();
        let long = "The tide turns the mill twice a day, and that is what it is for. ".repeat(20);
        for dedup in [Dedup::Exact, Dedup::ExactWords, Dedup::Near] {
            for text in [long.as_str(), "a b", "", "!", "--"] {
                let first = signer.sign(text, dedup);
                signer.sign("something else in between of more than five words", dedup);
                assert_eq!(signer.sign(text, dedup), first);
                assert_eq!(Signer::default().sign(text, dedup), first);
            }
        }
        let near = |text| Signer::default().sign(text, Dedup::Near).near;
        assert_ne!(near("!"), near("?"), "texts without words are told apart");
        assert_eq!(near(&long), near(&long.to_uppercase()));
        let exact = |text, dedup| Signer::default().sign(text, dedup).copies;
        assert_eq!(exact("The mill.", Dedup::ExactWords), exact("the  mill", Dedup::ExactWords));
        assert_ne!(exact("The mill.", Dedup::Exact), exact("the  mill", Dedup::Exact));
    }

    /// Signatures are compared with signatures of other versions of this program: different ones need a new name
    /// ([`SIGNATURES`]).
    #[test]
    fn signatures_are_pinned() {
        let text = "In 1872, the tide turned the mill at Saint-Malo: 12 times; Ωμέγα!";
        let Signature { copies, near } = Signer::default().sign(text, Dedup::Near);
        let near = near.unwrap();
        assert_eq!(copies, 55_114_930_700_157_340_745_989_826_033_468_294_601);
        assert_eq!((near[0], near[13]), (7_089_903_826_038_238_933, 120_860_491_796_895_815));
    }
}
