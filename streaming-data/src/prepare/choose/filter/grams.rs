//! Runs of n words that are told apart by hashes.
//!
//! The hash of a run is a polynomial in a prime field, so that the hashes of runs of n + 1 words follow from the hashes of
//! runs of n with one product each: all lengths together cost about as much as reading the text. Two runs that differ
//! share a hash once in 10^18, the same in every run of the program.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
};

use xxhash_rust::xxh3::xxh3_64;

use super::symbols::characters;

/// The condition for two runs to be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Equality {
    /// Their words are equal one by one.
    Words,
    /// Their words are equal when concatenated without spaces, as datatrove compares them.
    Letters,
}

/// 2^61 - 1.
const PRIME: u64 = (1 << 61) - 1;

/// Any number below the prime.
const BASE: u64 = 0x0b5d_17a3_9c64_2ee9;

/// A value that is nothing of the form `a + b * c`.
fn product(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let folded = (product as u64 & PRIME) + (product >> 61) as u64;
    if folded >= PRIME { folded - PRIME } else { folded }
}

fn sum(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= PRIME { sum - PRIME } else { sum }
}

/// A word in these sums.
#[derive(Debug, Clone, Copy)]
struct Term {
    hash: u64,
    /// Factor for the hash of the words in front, when this word is appended to them.
    power: u64,
}

/// The runs of n words of a text, for one n after the other.
#[derive(Debug)]
pub(super) struct Grams {
    terms: Vec<Term>,
    /// Characters of words 0 to i, not including i.
    characters: Vec<usize>,
    length: usize,
    /// Hash of the run that begins at each word.
    hashes: Vec<u64>,
}

impl Grams {
    /// The runs of one word.
    pub(super) fn new(words: &[&str], equality: Equality) -> Grams {
        let term = |word: &&str| match equality {
            Equality::Words => Term { hash: xxh3_64(word.as_bytes()) % PRIME, power: BASE },
            Equality::Letters => word.bytes().fold(Term { hash: 0, power: 1 }, |term, byte| Term {
                hash: sum(product(term.hash, BASE), u64::from(byte) + 1),
                power: product(term.power, BASE),
            }),
        };
        let terms: Vec<Term> = words.iter().map(term).collect();
        let hashes = terms.iter().map(|term| term.hash).collect();
        let mut behind = 0;
        let mut ends = Vec::with_capacity(words.len() + 1);
        ends.push(0);
        for word in words {
            behind += characters(word);
            ends.push(behind);
        }
        Grams { terms, characters: ends, length: 1, hashes }
    }

    /// Goes on to the runs of this length, which is not below the present one.
    pub(super) fn grow_to(&mut self, length: usize) {
        while self.length < length {
            self.hashes.pop();
            for (at, hash) in self.hashes.iter_mut().enumerate() {
                let Term { hash: last, power } = self.terms[at + self.length];
                *hash = sum(product(*hash, power), last);
            }
            self.length += 1;
        }
    }

    /// Characters of the run that begins at a word, without spaces.
    fn characters_of(&self, at: usize) -> usize {
        self.characters_between(at, at + self.length)
    }

    fn characters_between(&self, from: usize, to: usize) -> usize {
        self.characters[to] - self.characters[from]
    }

    /// The first place of the most frequent run, and how often the run occurs in all; of several equally frequent runs,
    /// the one that occurs first. `None` where there is no run.
    pub(super) fn most_frequent(&self) -> Option<(usize, usize)> {
        let mut counts: HashMap<u64, (usize, usize), Spread> =
            HashMap::with_capacity_and_hasher(self.hashes.len(), Spread::default());
        let (mut first, mut most) = (0, 0);
        for (at, &hash) in self.hashes.iter().enumerate() {
            let (stands_first, count) = counts.entry(hash).or_insert((at, 0));
            *count += 1;
            if *count > most || (*count == most && *stands_first < first) {
                (first, most) = (*stands_first, *count);
            }
        }
        (most > 0).then_some((first, most))
    }

    /// Characters of the most frequent run, with its spaces, times how often it occurs.
    pub(super) fn most_frequent_characters(&self) -> usize {
        self.most_frequent().map_or(0, |(at, count)| {
            let spaces = self.length - 1;
            (self.characters_of(at) + spaces) * count
        })
    }

    /// Characters of the runs that occurred before, counted without overlap.
    pub(super) fn repeated_characters(&self) -> usize {
        let mut seen: HashMap<u64, (), Spread> =
            HashMap::with_capacity_and_hasher(self.hashes.len(), Spread::default());
        let (mut repeated, mut at) = (0, 0);
        while at < self.hashes.len() {
            match seen.entry(self.hashes[at]) {
                Entry::Occupied(_) => {
                    repeated += self.characters_of(at);
                    at += self.length;
                }
                Entry::Vacant(vacant) => {
                    vacant.insert(());
                    at += 1;
                }
            }
        }
        repeated
    }

    /// Characters of all words in runs that were there before, each once, with the spaces between them.
    pub(super) fn covered_characters(&self) -> usize {
        let mut seen: HashMap<u64, (), Spread> =
            HashMap::with_capacity_and_hasher(self.hashes.len(), Spread::default());
        let (mut covered, mut covered_to) = (0, 0);
        for (at, &hash) in self.hashes.iter().enumerate() {
            if seen.insert(hash, ()).is_none() {
                continue;
            }
            let (from, to) = (covered_to.max(at), at + self.length);
            let spaces = (to - from).min(self.length - 1);
            covered += self.characters_between(from, to) + spaces;
            covered_to = to;
        }
        covered
    }
}

/// For each rule about the most frequent n-gram: n, the threshold in `$rules`, and the key of the rule.
macro_rules! top_runs {
    ($rules:expr) => {
        [
            (2, $rules.max_top_2_gram_characters, "max_top_2_gram_characters"),
            (3, $rules.max_top_3_gram_characters, "max_top_3_gram_characters"),
            (4, $rules.max_top_4_gram_characters, "max_top_4_gram_characters"),
        ]
    };
}

/// As [`top_runs`], for runs that were there before.
macro_rules! duplicate_runs {
    ($rules:expr) => {
        [
            (5, $rules.max_duplicate_5_gram_characters, "max_duplicate_5_gram_characters"),
            (6, $rules.max_duplicate_6_gram_characters, "max_duplicate_6_gram_characters"),
            (7, $rules.max_duplicate_7_gram_characters, "max_duplicate_7_gram_characters"),
            (8, $rules.max_duplicate_8_gram_characters, "max_duplicate_8_gram_characters"),
            (9, $rules.max_duplicate_9_gram_characters, "max_duplicate_9_gram_characters"),
            (10, $rules.max_duplicate_10_gram_characters, "max_duplicate_10_gram_characters"),
        ]
    };
}

pub(super) use {duplicate_runs, top_runs};

/// Places hashes, which are random already, in a table.
type Spread = BuildHasherDefault<SpreadHash>;

#[derive(Default)]
pub(super) struct SpreadHash(u64);

impl Hasher for SpreadHash {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64(bytes);
    }

    fn write_u64(&mut self, hash: u64) {
        // The upper bits of a number below the prime are zero.
        self.0 = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grams(text: &str, length: usize, equality: Equality) -> Grams {
        let words: Vec<&str> = text.split(' ').collect();
        let mut grams = Grams::new(&words, equality);
        grams.grow_to(length);
        grams
    }

    #[test]
    fn runs_are_equal_if_their_words_or_letters_are() {
        for length in 1..5 {
            let grams = grams("to be or not to be or to be or not", length, Equality::Words);
            let words: Vec<&str> = "to be or not to be or to be or not".split(' ').collect();
            let runs: Vec<_> = words.windows(length).collect();
            for (a, hash) in runs.iter().zip(&grams.hashes) {
                for (b, other) in runs.iter().zip(&grams.hashes) {
                    assert_eq!(hash == other, a == b, "{a:?} {b:?}");
                }
            }
        }
        let letters = grams("ab c x a bc", 2, Equality::Letters);
        assert_eq!(letters.hashes[0], letters.hashes[3]);
        let words = grams("ab c x a bc", 2, Equality::Words);
        assert_ne!(words.hashes[0], words.hashes[3]);
    }

    #[test]
    fn of_equally_frequent_runs_the_first_counts() {
        let grams = grams("aa b cccc d aa b cccc d", 2, Equality::Words);
        assert_eq!(grams.most_frequent(), Some((0, 2)));
        assert_eq!(grams.most_frequent_characters(), 2 * "aa b".len());
    }

    #[test]
    fn repeated_runs_do_not_overlap_and_covered_words_count_once() {
        let grams = grams("a b a b a b a b", 2, Equality::Words);
        // Runs at 2, 4 and 6 were there before.
        assert_eq!(grams.repeated_characters(), 6);
        // All words from the third on, and a space for each but the first.
        assert_eq!(grams.covered_characters(), 6 + 6 - 1);
        let none = Grams::new(&[], Equality::Words);
        assert_eq!((none.most_frequent(), none.repeated_characters()), (None, 0));
    }
}
