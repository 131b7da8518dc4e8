//! How often each word occurs.

use std::hash::BuildHasher;
use std::sync::{Mutex, PoisonError};

use hashbrown::{DefaultHashBuilder, HashMap};

use super::words::words;

/// The words are divided among this many maps, so that threads seldom wait for one.
const MAPS: usize = 64;

type Counts = HashMap<Box<str>, u64>;

/// How often each word occurs in the texts that were added, by any threads.
///
/// It takes about 100 bytes of memory for each different word.
#[derive(Debug)]
pub struct WordCounts {
    hasher: DefaultHashBuilder,
    maps: Vec<Mutex<Counts>>,
}

impl Default for WordCounts {
    fn default() -> Self {
        let maps = (0..MAPS).map(|_| Mutex::default()).collect();
        Self { hasher: DefaultHashBuilder::default(), maps }
    }
}

impl WordCounts {
    /// Adds the words of a text.
    pub fn add_text(&self, text: &str) {
        let mut of_text = HashMap::<&str, u64>::new();
        words(text).for_each(|word| *of_text.entry(word).or_insert(0) += 1);
        of_text.into_iter().for_each(|(word, count)| self.add(word, count));
    }

    /// Adds `count` occurrences of a word.
    pub fn add(&self, word: &str, count: u64) {
        let map = (self.hasher.hash_one(word) >> 32) as usize % MAPS;
        let mut map = self.maps[map].lock().unwrap_or_else(PoisonError::into_inner);
        match map.get_mut(word) {
            Some(counted) => *counted = counted.saturating_add(count),
            None => drop(map.insert(word.into(), count)),
        }
    }

    /// The words and their counts, in an order of their own.
    pub fn into_words(self) -> impl Iterator<Item = (Box<str>, u64)> {
        let maps = self.maps.into_iter();
        maps.flat_map(|map| map.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// The number of different words.
    pub fn words(&self) -> usize {
        let words = |map: &Mutex<Counts>| map.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.maps.iter().map(words).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_over_texts_and_threads() {
        let counts = WordCounts::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..25).for_each(|_| counts.add_text("to be or not to be")));
            }
        });
        counts.add(" be", u64::MAX - 3);
        assert_eq!(counts.words(), 5);
        let mut found: Vec<_> = counts.into_words().collect();
        found.sort();
        let expected = [(" be", u64::MAX), (" not", 100), (" or", 100), (" to", 100), ("to", 100)];
        assert_eq!(found, expected.map(|(word, count)| (Box::from(word), count)));
    }
}
