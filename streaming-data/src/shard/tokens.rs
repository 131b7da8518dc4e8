//! Decoded rows, in the narrowest form that holds them, and the check that they are tokens.

use super::RowRule;
use crate::cache::Weigh;

/// The rows of one row group, `tokens[rows, row_tokens]`.
///
/// Two bytes a token where the vocabulary allows: it halves what a window costs in memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DecodedRows {
    row_tokens: usize,
    /// The largest token.
    last: u32,
    tokens: Tokens,
}

#[derive(Debug, PartialEq, Eq)]
enum Tokens {
    Narrow(Vec<u16>),
    Wide(Vec<u32>),
}

/// A token that is not in the vocabulary, by its place among those that were to be appended.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) at: usize,
    pub(crate) token: i128,
}

impl DecodedRows {
    /// No rows yet, room for some.
    pub(crate) fn with_capacity(rows: usize, rule: RowRule) -> DecodedRows {
        let (row_tokens, last) = (rule.row_tokens, rule.last_token());
        let capacity = rows * row_tokens;
        let tokens = if last <= u32::from(u16::MAX) {
            Tokens::Narrow(Vec::with_capacity(capacity))
        } else {
            Tokens::Wide(Vec::with_capacity(capacity))
        };
        DecodedRows { row_tokens, last, tokens }
    }

    /// Tokens so far.
    pub(crate) fn len(&self) -> usize {
        match &self.tokens {
            Tokens::Narrow(tokens) => tokens.len(),
            Tokens::Wide(tokens) => tokens.len(),
        }
    }

    /// Rows so far.
    pub(crate) fn rows(&self) -> usize {
        self.len() / self.row_tokens
    }

    /// A copy of a row.
    pub(crate) fn row(&self, row: usize) -> Vec<u32> {
        let places = row * self.row_tokens..(row + 1) * self.row_tokens;
        match &self.tokens {
            Tokens::Narrow(tokens) => tokens[places].iter().map(|&t| u32::from(t)).collect(),
            Tokens::Wide(tokens) => tokens[places].to_vec(),
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
        if !elements.clone().fold(true, |all, element| all & element.is_within(last)) {
            let (at, element) = elements
                .enumerate()
                .find(|(_, element)| !element.is_within(last))
                .expect("one element is outside");
            return Err(Outside { at, token: element.value() });
        }
        match &mut self.tokens {
            // `last` fits the form, so what is within it does.
            Tokens::Narrow(tokens) => tokens.extend(elements.map(|e| e.truncate() as u16)),
            Tokens::Wide(tokens) => tokens.extend(elements.map(|e| e.truncate())),
        }
        Ok(())
    }
}

impl Weigh for DecodedRows {
    fn weight_bytes(&self) -> usize {
        size_of::<DecodedRows>()
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

    fn no_rows(vocab_size: Option<u32>) -> DecodedRows {
        DecodedRows::with_capacity(2, RowRule { row_tokens: 3, vocab_size })
    }

    fn outside<E: TokenElement>(elements: &[E], vocab_size: Option<u32>) -> Option<(usize, i128)> {
        let mut rows = no_rows(vocab_size);
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
    fn rows_come_back_from_both_forms() {
        for (vocab_size, token_bytes) in [(Some(0x1_0000), 2), (Some(0x1_0001), 4), (None, 4)] {
            let mut rows = no_rows(vocab_size);
            rows.append([1_i64, 2, 3, 4].into_iter()).unwrap();
            rows.append([5_u16, 65_535].into_iter()).unwrap();
            assert_eq!(rows.rows(), 2);
            assert_eq!([rows.row(0), rows.row(1)], [vec![1, 2, 3], vec![4, 5, 65_535]]);
            assert_eq!(rows.weight_bytes(), size_of::<DecodedRows>() + 6 * token_bytes);
        }
    }
}
