//! Byte-level byte-pair encoding, trained on exact counts.
//!
//! Texts are cut into words ([`words`]), whose occurrences are counted ([`WordCounts`]); the vocabulary then is a function of the
//! counts alone ([`BytePairs`]): the same for any number of threads, and any order of the texts. Counts have 64 bits and nothing is
//! approximate, so that ten terabytes of text are counted as well as ten kilobytes.
//!
//! Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare Words with Subword Units"; the bytes and the words are GPT-2's
//! (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

mod byte_pairs;
mod word_counts;
mod words;

pub use byte_pairs::{BYTES, BytePairs, byte_char};
pub use word_counts::WordCounts;
pub use words::words;
