//! The pairs that are merged, the most frequent first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::ControlFlow;

use hashbrown::HashMap;

/// Tokens before any merge: one for each byte.
pub const BYTES: usize = 256;

/// The character for a byte where tokens are written as text, as GPT-2 chooses it: a visible one for each byte.
pub fn byte_char(byte: u8) -> char {
    let is_seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_seen(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !is_seen(byte)).count() as u32;
    char::from_u32(u32::from('\u{100}') + before).unwrap_or_default()
}

/// A vocabulary: bytes, and tokens merged of them.
///
/// Every two tokens that are side by side in a word are a pair. The pair that occurs most often in all words is merged next; of
/// several, the one with the smallest left token, then the smallest right one. Ids count from 0: first the bytes, in the order of their
/// characters, then the merged pairs, in order. It is the rule of Hugging Face's trainer, whose own counts have 31 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BytePairs {
    tokens: Vec<Vec<u8>>,
    merges: Vec<[u32; 2]>,
}

impl BytePairs {
    /// Trains on words and how often each occurs, until there are `size` tokens or no pair occurs `least_count` times (at least once). After
    /// each merge `progress` is called with the number of tokens, and its answer can stop the training: then there is no vocabulary.
    ///
    /// # Panics
    /// With more different tokens, or more words, than a 32-bit number counts.
    pub fn train<W: AsRef<str>>(
        words: impl IntoIterator<Item = (W, u64)>,
        size: usize,
        least_count: u64,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Option<Self> {
        let mut bytes: Vec<u8> = (0..=u8::MAX).collect();
        bytes.sort_by_key(|&byte| byte_char(byte));
        let mut ids = [0; BYTES];
        bytes.iter().zip(0..).for_each(|(&byte, id)| ids[usize::from(byte)] = id);
        let tokens: Vec<Vec<u8>> = bytes.into_iter().map(|byte| vec![byte]).collect();
        let known = tokens.iter().cloned().zip(0..).collect();
        let mut training = Training::default();
        words
            .into_iter()
            .for_each(|(word, count)| training.add(word.as_ref().as_bytes(), count, &ids));
        let trained = Self { tokens, merges: Vec::new() };
        trained.merge(training, known, size, least_count.max(1), progress)
    }

    fn merge(
        mut self,
        mut training: Training,
        mut known: HashMap<Vec<u8>, u32>,
        size: usize,
        least_count: u64,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Option<Self> {
        while self.tokens.len() < size {
            let Some(pair) = training.most_frequent(least_count) else { break };
            let bytes = pair.map(|token| &*self.tokens[token as usize]).concat();
            // The same bytes may have been merged of other halves.
            let token = *known.entry(bytes).or_insert_with_key(|bytes| {
                self.tokens.push(bytes.clone());
                u32::try_from(self.tokens.len() - 1).expect("fewer tokens than that")
            });
            self.merges.push(pair);
            training.join(pair, token);
            if progress(self.tokens.len()).is_break() {
                return None;
            }
        }
        Some(self)
    }

    /// The bytes of each token.
    pub fn tokens(&self) -> &[Vec<u8>] {
        &self.tokens
    }

    /// The tokens that were merged, in order.
    pub fn merges(&self) -> &[[u32; 2]] {
        &self.merges
    }

    /// Token `id` as it is written.
    ///
    /// # Panics
    /// There is no such token.
    pub fn text(&self, id: u32) -> String {
        self.tokens[id as usize].iter().map(|&byte| byte_char(byte)).collect()
    }
}

/// A word: the range of its tokens among the tokens of all words.
#[derive(Clone, Copy, Debug)]
struct Word {
    start: usize,
    tokens: usize,
    count: u64,
}

/// How often a pair occurs, and in which words it may be.
#[derive(Debug, Default)]
struct Occurrences {
    count: u64,
    words: Vec<u32>,
}

/// The words, as merges make fewer tokens of them.
#[derive(Debug, Default)]
struct Training {
    words: Vec<Word>,
    tokens: Vec<u32>,
    pairs: HashMap<[u32; 2], Occurrences>,
    /// Pairs by their counts when they were put here: no less than their counts now, or put here once more since.
    order: BinaryHeap<(u64, Reverse<[u32; 2]>)>,
}

impl Training {
    fn add(&mut self, word: &[u8], count: u64, ids: &[u32; BYTES]) {
        let (start, index) = (self.tokens.len(), index(self.words.len()));
        self.tokens.extend(word.iter().map(|&byte| ids[usize::from(byte)]));
        self.words.push(Word { start, tokens: word.len(), count });
        for pair in self.tokens[start..].windows(2) {
            let pair = [pair[0], pair[1]];
            let occurrences = self.pairs.entry(pair).or_default();
            occurrences.count = occurrences.count.saturating_add(count);
            if occurrences.words.last() != Some(&index) {
                occurrences.words.push(index);
            }
        }
    }

    /// The pair that occurs most often, if that is `least_count` times.
    fn most_frequent(&mut self, least_count: u64) -> Option<[u32; 2]> {
        if self.order.is_empty() {
            self.order = self.pairs.iter().map(|(&pair, of)| (of.count, Reverse(pair))).collect();
        }
        while let Some((counted, Reverse(pair))) = self.order.pop() {
            let count = self.pairs.get(&pair).map_or(0, |occurrences| occurrences.count);
            if count == counted {
                return (count >= least_count).then_some(pair);
            }
            // It occurs less often since, and comes later; or it is here a second time.
            if count > 0 && count < counted {
                self.order.push((count, Reverse(pair)));
            }
        }
        None
    }

    /// Puts `token` in the place of `pair`, wherever it occurs.
    fn join(&mut self, pair: [u32; 2], token: u32) {
        let Some(Occurrences { mut words, .. }) = self.pairs.remove(&pair) else { return };
        words.sort_unstable();
        words.dedup();
        let mut more = Vec::new();
        for index in words {
            let Word { start, tokens, count } = self.words[index as usize];
            let of_word = &mut self.tokens[start..start + tokens];
            if !of_word.windows(2).any(|of| of == pair) {
                continue;
            }
            for of in of_word.windows(2).filter(|of| *of != pair) {
                if let Some(occurrences) = self.pairs.get_mut(&[of[0], of[1]]) {
                    occurrences.count = occurrences.count.saturating_sub(count);
                }
            }
            let left = joined(of_word, pair, token);
            self.words[index as usize].tokens = left;
            for of in self.tokens[start..start + left].windows(2) {
                let of = [of[0], of[1]];
                let occurrences = self.pairs.entry(of).or_default();
                occurrences.count = occurrences.count.saturating_add(count);
                if of.contains(&token) {
                    more.push(of);
                    if occurrences.words.last() != Some(&index) {
                        occurrences.words.push(index);
                    }
                }
            }
        }
        more.sort_unstable();
        more.dedup();
        for pair in more {
            self.order.push((self.pairs[&pair].count, Reverse(pair)));
        }
    }
}

fn index(words: usize) -> u32 {
    u32::try_from(words).expect("fewer words than that")
}

/// Joins `pair` in a word from left to right; answers how many tokens are left, which are the first.
fn joined(word: &mut [u32], pair: [u32; 2], token: u32) -> usize {
    let (mut from, mut to) = (0, 0);
    while from < word.len() {
        let is_pair = word[from..].starts_with(&pair);
        word[to] = if is_pair { token } else { word[from] };
        from += if is_pair { 2 } else { 1 };
        to += 1;
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(words: &[(&str, u64)], size: usize, least_count: u64) -> BytePairs {
        let words = words.iter().copied();
        BytePairs::train(words, size, least_count, &mut |_| ControlFlow::Continue(())).unwrap()
    }

    fn merged(pairs: &BytePairs) -> Vec<String> {
        pairs.merges().iter().map(|merge| merge.map(|token| pairs.text(token)).join(" ")).collect()
    }

    /// The definition: all pairs of all words are counted again before each merge.
    fn by_definition(words: &[(&str, u64)], size: usize) -> Vec<String> {
        let start = train(&[], size, 1);
        let id = |byte: u8| start.tokens.iter().position(|token| *token == [byte]).unwrap() as u32;
        let mut words: Vec<(Vec<u32>, u64)> =
            words.iter().map(|(word, count)| (word.bytes().map(id).collect(), *count)).collect();
        let mut trained = start.clone();
        while trained.tokens.len() < size {
            let mut counts = std::collections::BTreeMap::<[u32; 2], u64>::new();
            for (word, count) in &words {
                word.windows(2).for_each(|of| *counts.entry([of[0], of[1]]).or_default() += count);
            }
            let most = counts.iter().max_by_key(|(pair, count)| (**count, Reverse(**pair)));
            let Some((&pair, _)) = most else { break };
            let bytes = pair.map(|token| trained.tokens[token as usize].clone()).concat();
            let known = trained.tokens.iter().position(|token| *token == bytes);
            let token = known.unwrap_or(trained.tokens.len()) as u32;
            if known.is_none() {
                trained.tokens.push(bytes);
            }
            trained.merges.push(pair);
            for (word, _) in &mut words {
                let left = joined(word, pair, token);
                word.truncate(left);
            }
        }
        merged(&trained)
    }

    #[test]
    fn the_most_frequent_pair_is_merged_and_of_several_the_first() {
        let words = [("low", 5), ("lower", 2), ("newest", 6), ("widest", 3)];
        let pairs = train(&words, 262, 1);
        assert_eq!(merged(&pairs), ["e s", "es t", "l o", "lo w", "e w", "n ew"]);
        assert_eq!(pairs.tokens().len(), 262);
        assert_eq!(pairs.text(257), "est");
        // No pair occurs a hundred times, and a word of one letter has none.
        assert!(train(&words, 300, 100).merges().is_empty());
        assert!(train(&[("a", u64::MAX)], 300, 1).merges().is_empty());
    }

    /// For any words: long runs of one letter, overlaps, tokens that come about in two ways.
    #[test]
    fn what_is_merged_is_what_the_definition_says() {
        let made = |seed: u64| {
            let mut state = seed;
            let mut next = move |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let letters = 2 + seed % 4;
            let word = |length: u64, next: &mut dyn FnMut(u64) -> u64| -> String {
                (0..length).map(|_| char::from(b'a' + next(letters) as u8)).collect()
            };
            (0..40).map(|_| (word(1 + next(9), &mut next), 1 + next(5))).collect::<Vec<_>>()
        };
        for seed in 0..60 {
            let words = made(seed);
            let words: Vec<_> = words.iter().map(|(word, count)| (&**word, *count)).collect();
            assert_eq!(merged(&train(&words, 320, 1)), by_definition(&words, 320), "{seed}");
            // Nothing wraps, and the order of the words is not looked at.
            let many = words.iter().rev().map(|(word, count)| (*word, count << 50));
            let many: Vec<_> = many.collect();
            assert_eq!(train(&many, 320, 1), train(&words, 320, 1), "{seed}");
        }
    }

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let characters: std::collections::BTreeSet<_> = (0..=u8::MAX).map(byte_char).collect();
        assert_eq!(characters.len(), BYTES);
        assert_eq!([b' ', b'\n', b'a', 0xad].map(byte_char), ['Ġ', 'Ċ', 'a', 'Ń']);
        assert!(characters.iter().all(|c| !c.is_whitespace() && !c.is_control()));
    }

    #[test]
    fn training_can_be_broken_off() {
        let words = [("abcdefgh", 3)];
        let mut seen = Vec::new();
        let trained = BytePairs::train(words, 300, 1, &mut |tokens| {
            seen.push(tokens);
            if seen.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!((trained, seen), (None, vec![257, 258]));
    }
}
