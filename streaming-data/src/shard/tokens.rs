//! Decoded tokens, in the narrowest form that holds them, and the check that they are tokens.

use std::ops::Range;

use super::RowRule;
use crate::cache::memory::Weigh;

/// The largest token of the narrow form.
const NARROW_LAST: u32 = u16::MAX as u32;

/// Consecutive tokens of one row group.
///
/// Two bytes a token until one needs more: it halves the memory of a window, whether or not
/// it is known how large the vocabulary is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DecodedTokens {
    /// Place of the first among the tokens of its row group.
    first: u64,
    /// The largest token.
    last: u32,
    tokens: Tokens,
}

/// Tokens in one of two forms.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tokens {
    Narrow(Vec<u16>),
    Wide(Vec<u32>),
}

/// A token outside the vocabulary; `at` is its place among the tokens to append.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) at: usize,
    pub(crate) token: i128,
}

impl DecodedTokens {
    /// No tokens yet; the first one will be token `first` of its row group. Has room for `capacity` tokens.
    pub(crate) fn with_capacity(first: u64, capacity: usize, rule: RowRule) -> DecodedTokens {
        let tokens = Tokens::Narrow(Vec::with_capacity(capacity));
        DecodedTokens { first, last: rule.last_token(), tokens }
    }

    /// Tokens so far.
    pub(crate) fn len(&self) -> usize {
        match &self.tokens {
            Tokens::Narrow(tokens) => tokens.len(),
            Tokens::Wide(tokens) => tokens.len(),
        }
    }

    /// Their places in the row group.
    pub(crate) fn places(&self) -> Range<u64> {
        self.first..self.first + self.len() as u64
    }

    /// Appends a copy of the tokens at `places` to `out`, and returns their number.
    pub(crate) fn copy_to(&self, places: Range<u64>, out: &mut Vec<u32>) -> usize {
        let held = self.places();
        let (start, end) = (places.start.max(held.start), places.end.min(held.end));
        if start >= end {
            return 0;
        }
        let range = (start - self.first) as usize..(end - self.first) as usize;
        let count = range.len();
        match &self.tokens {
            Tokens::Narrow(tokens) => out.extend(tokens[range].iter().map(|&t| u32::from(t))),
            Tokens::Wide(tokens) => out.extend_from_slice(&tokens[range]),
        }
        count
    }

    /// Keeps only the tokens at `places`.
    pub(crate) fn cut(self, places: Range<u64>) -> DecodedTokens {
        let held = self.places();
        let start = places.start.clamp(held.start, held.end);
        let end = places.end.clamp(start, held.end);
        let range = (start - self.first) as usize..(end - self.first) as usize;
        let tokens = match self.tokens {
            Tokens::Narrow(tokens) => Tokens::Narrow(tokens[range].to_vec()),
            Tokens::Wide(tokens) => Tokens::Wide(tokens[range].to_vec()),
        };
        DecodedTokens { first: start, last: self.last, tokens }
    }

    /// The tokens alone.
    pub(super) fn into_tokens(self) -> Tokens {
        self.tokens
    }

    /// The tokens; appended ones must be in the vocabulary.
    pub(super) fn tokens_mut(&mut self) -> &mut Tokens {
        &mut self.tokens
    }

    /// The tokens in four bytes each, from now on; appended ones must be in the vocabulary.
    pub(super) fn widened(&mut self) -> &mut Vec<u32> {
        if let Tokens::Narrow(narrow) = &self.tokens {
            let mut wide = Vec::with_capacity(narrow.capacity());
            wide.extend(narrow.iter().map(|&token| u32::from(token)));
            self.tokens = Tokens::Wide(wide);
        }
        match &mut self.tokens {
            Tokens::Wide(tokens) => tokens,
            Tokens::Narrow(_) => unreachable!("it was just widened"),
        }
    }

    /// Appends tokens that must all be in the vocabulary; none when one is not.
    ///
    /// Two passes, the first without a branch, so that both are vectorised.
    pub(crate) fn append<E: TokenElement>(
        &mut self,
        elements: impl Iterator<Item = E> + Clone,
    ) -> Result<(), Outside> {
        let last = self.last;
        let (are_tokens, are_narrow) =
            elements.clone().fold((true, true), |(tokens, narrow), element| {
                (tokens & element.is_within(last), narrow & element.is_within(NARROW_LAST))
            });
        if !are_tokens {
            let (at, element) = elements
                .enumerate()
                .find(|(_, element)| !element.is_within(last))
                .expect("one element is outside");
            return Err(Outside { at, token: element.value() });
        }
        match &mut self.tokens {
            Tokens::Narrow(tokens) if are_narrow => {
                tokens.extend(elements.map(|e| e.truncate() as u16));
            }
            _ => self.widened().extend(elements.map(|e| e.truncate())),
        }
        Ok(())
    }
}

impl Weigh for DecodedTokens {
    fn weight_bytes(&self) -> usize {
        size_of::<DecodedTokens>()
            + match &self.tokens {
                Tokens::Narrow(tokens) => 2 * tokens.capacity(),
                Tokens::Wide(tokens) => 4 * tokens.capacity(),
            }
    }
}

/// An integer type that a column of tokens may have.
pub(crate) trait TokenElement: Copy {
    /// Whether it is 0 to `last`.
    fn is_within(self, last: u32) -> bool;
    /// Its low 32 bits.
    fn truncate(self) -> u32;
    /// Its value, for a message.
    fn value(self) -> i128;
}

/// Up to 32 bits: sign extension makes every negative value larger than any `last` below 2^31.
macro_rules! narrow_element {
    ($($type:ty),*) => {$(
        impl TokenElement for $type {
            fn is_within(self, last: u32) -> bool {
                let last = if <$type>::MIN == 0 { last } else { last.min(i32::MAX as u32) };
                self as u32 <= last
            }
            fn truncate(self) -> u32 {
                self as u32
            }
            fn value(self) -> i128 {
                self as i128
            }
        }
    )*};
}

narrow_element!(i8, i16, i32, u8, u16, u32);

impl TokenElement for i64 {
    fn is_within(self, last: u32) -> bool {
        self as u64 <= u64::from(last)
    }
    fn truncate(self) -> u32 {
        self as u32
    }
    fn value(self) -> i128 {
        i128::from(self)
    }
}

impl TokenElement for u64 {
    fn is_within(self, last: u32) -> bool {
        self <= u64::from(last)
    }
    fn truncate(self) -> u32 {
        self as u32
    }
    fn value(self) -> i128 {
        i128::from(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_tokens(vocab_size: Option<u32>) -> DecodedTokens {
        DecodedTokens::with_capacity(12, 6, RowRule { row_tokens: 3, vocab_size })
    }

    fn outside<E: TokenElement>(elements: &[E], vocab_size: Option<u32>) -> Option<(usize, i128)> {
        let mut rows = no_tokens(vocab_size);
        rows.append([0_u8, 0].into_iter()).unwrap();
        let result = rows.append(elements.iter().copied());
        assert_eq!(rows.len(), if result.is_ok() { 2 + elements.len() } else { 2 });
        result.err().map(|outside| (outside.at, outside.token))
    }

    #[test]
    fn every_integer_type_is_checked_at_its_edges() {
        assert_eq!(outside(&[0_i8, 127], Some(128)), None);
        assert_eq!(outside(&[0_i8, -1], Some(128)), Some((1, -1)));
        assert_eq!(outside(&[i16::MAX, -2], None), Some((1, -2)));
        assert_eq!(outside(&[i32::MIN, 0], None), Some((0, i128::from(i32::MIN))));
        assert_eq!(outside(&[i32::MAX, 0], None), None);
        assert_eq!(outside(&[255_u8, 3], Some(255)), Some((0, 255)));
        assert_eq!(outside(&[65_535_u16, 3], Some(65_536)), None);
        assert_eq!(outside(&[3_u16, 259], Some(259)), Some((1, 259)));
        assert_eq!(outside(&[u32::MAX, 3], None), None);
        assert_eq!(outside(&[u32::MAX, 3], Some(u32::MAX)), Some((0, i128::from(u32::MAX))));
        assert_eq!(outside(&[1_i64 << 32, 0], None), Some((0, 1 << 32)));
        assert_eq!(outside(&[3_i64, -1], None), Some((1, -1)));
        assert_eq!(outside(&[3_u64, u64::MAX], None), Some((1, i128::from(u64::MAX))));
        assert_eq!(outside(&[3_u64, 99], Some(100)), None);
    }

    #[test]
    fn tokens_come_back_from_both_forms() {
        for (last, token_bytes) in [(65_535, 2), (65_536, 4), (u32::MAX, 4)] {
            let mut decoded = no_tokens(None);
            decoded.append([1_i64, 2, 3, 4].into_iter()).unwrap();
            decoded.append([last].into_iter()).unwrap();
            // Appended numbers are as wide as necessary, and no narrower than the numbers before them.
            decoded.append([6_u8].into_iter()).unwrap();
            assert_eq!(decoded.weight_bytes(), size_of::<DecodedTokens>() + 6 * token_bytes);
            let copy = |decoded: &DecodedTokens, places| {
                let mut out = vec![9];
                assert_eq!(decoded.copy_to(places, &mut out), out.len() - 1);
                out.split_off(1)
            };
            assert_eq!(decoded.places(), 12..18);
            assert_eq!(copy(&decoded, 0..100), [1, 2, 3, 4, last, 6]);
            assert_eq!(copy(&decoded, 9..14), [1, 2]);
            assert_eq!(copy(&decoded, 16..19), [last, 6]);
            assert!(copy(&decoded, 0..12).is_empty() && copy(&decoded, 18..20).is_empty());
            let cut = decoded.cut(10..15);
            assert_eq!((cut.places(), copy(&cut, 0..100)), (12..15, vec![1, 2, 3]));
        }
    }
}
