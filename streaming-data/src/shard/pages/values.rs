//! The values of a data page: PLAIN, or indices into the dictionary of its column.

use super::levels::{Run, Runs};
use crate::shard::{
    RowRule,
    tokens::{DecodedTokens, Tokens},
};

/// How the bytes of a PLAIN value are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    Signed32,
    Unsigned32,
    Signed64,
    Unsigned64,
}

impl Width {
    /// Calls `append` for the values, which must be `count`.
    fn append(self, values: &[u8], count: usize, tokens: &mut DecodedTokens) -> Option<()> {
        fn chunks<const N: usize>(values: &[u8], count: usize) -> Option<&[[u8; N]]> {
            let (values, rest) = values.as_chunks::<N>();
            (rest.is_empty() && values.len() == count).then_some(values)
        }
        match self {
            Width::Signed32 => {
                tokens.append(chunks(values, count)?.iter().map(|&v| i32::from_le_bytes(v)))
            }
            Width::Unsigned32 => {
                tokens.append(chunks(values, count)?.iter().map(|&v| u32::from_le_bytes(v)))
            }
            Width::Signed64 => {
                tokens.append(chunks(values, count)?.iter().map(|&v| i64::from_le_bytes(v)))
            }
            Width::Unsigned64 => {
                tokens.append(chunks(values, count)?.iter().map(|&v| u64::from_le_bytes(v)))
            }
        }
        .ok()
    }
}

/// Appends the values of a PLAIN page; `None` when they are not `count`, or not all tokens.
///
/// A null has a level but no value, so that as many values as levels mean no null.
pub(super) fn append_plain(
    values: &[u8],
    width: Width,
    count: usize,
    tokens: &mut DecodedTokens,
) -> Option<()> {
    width.append(values, count, tokens)
}

/// Entries that an index of 16 bits reaches; a table of this size needs no bounds check.
const SHORT: usize = 1 << 16;

/// The tokens of a dictionary, checked, in the narrowest form that holds them.
#[derive(Debug)]
pub(super) struct Dictionary {
    /// Entries; an index must be below.
    length: usize,
    entries: Entries,
}

#[derive(Debug)]
enum Entries {
    Narrow(Box<[u16; SHORT]>),
    Wide(Box<[u32; SHORT]>),
    /// More entries than [`SHORT`].
    Large(Vec<u32>),
}

impl Dictionary {
    /// Reads the values of a dictionary page; `None` when they are not `count`, or not all tokens.
    pub(super) fn new(
        values: &[u8],
        width: Width,
        count: usize,
        rule: RowRule,
    ) -> Option<Dictionary> {
        // A damaged header may state anything, and no value takes less than a byte.
        let capacity = count.min(values.len());
        let mut tokens = DecodedTokens::with_capacity(0, capacity, rule);
        append_plain(values, width, count, &mut tokens)?;
        let entries = match tokens.into_tokens() {
            Tokens::Narrow(tokens) if tokens.len() <= SHORT => Entries::Narrow(padded(tokens)?),
            Tokens::Narrow(tokens) => Entries::Large(tokens.into_iter().map(u32::from).collect()),
            Tokens::Wide(tokens) if tokens.len() <= SHORT => Entries::Wide(padded(tokens)?),
            Tokens::Wide(tokens) => Entries::Large(tokens),
        };
        Some(Dictionary { length: count, entries })
    }

    /// Memory that it holds.
    pub(super) fn bytes(&self) -> usize {
        match &self.entries {
            Entries::Narrow(_) => 2 * SHORT,
            Entries::Wide(_) => 4 * SHORT,
            Entries::Large(tokens) => 4 * tokens.capacity(),
        }
    }

    /// Appends the tokens of a page of indices: a byte that says how many bits each has, then a
    /// hybrid. `None` when there are fewer than `count`, or one is beyond the dictionary.
    pub(super) fn append(
        &self,
        indices: &[u8],
        count: usize,
        tokens: &mut DecodedTokens,
    ) -> Option<()> {
        let (&bit_width, indices) = indices.split_first()?;
        let bit_width = usize::from(bit_width);
        if bit_width > 32 {
            return None;
        }
        let runs = Runs::new(indices, bit_width);
        let largest = match (&self.entries, tokens.tokens_mut()) {
            (Entries::Narrow(table), Tokens::Narrow(out)) => {
                look_up(runs, bit_width, count, out, |index| table[usize::from(index as u16)])?
            }
            (Entries::Narrow(table), Tokens::Wide(out)) => {
                let entry = |index| u32::from(table[usize::from(index as u16)]);
                look_up(runs, bit_width, count, out, entry)?
            }
            (Entries::Wide(table), _) => {
                let entry = |index| table[usize::from(index as u16)];
                look_up(runs, bit_width, count, tokens.widened(), entry)?
            }
            (Entries::Large(table), _) => {
                let entry = |index| table.get(index as usize).copied().unwrap_or(0);
                look_up(runs, bit_width, count, tokens.widened(), entry)?
            }
        };
        // Indices beyond the entries are padding, and are thrown away with the page.
        (count == 0 || (largest as usize) < self.length).then_some(())
    }
}

/// The tokens, filled up with zeros.
fn padded<T: Copy + Default>(mut tokens: Vec<T>) -> Option<Box<[T; SHORT]>> {
    if tokens.len() > SHORT {
        return None;
    }
    tokens.resize(SHORT, T::default());
    tokens.into_boxed_slice().try_into().ok()
}

/// Appends the answers of `entry` for `count` indices; answers the largest index.
fn look_up<T: Copy + Default>(
    mut runs: Runs<'_>,
    bit_width: usize,
    count: usize,
    out: &mut Vec<T>,
    entry: impl Fn(u32) -> T + Copy,
) -> Option<u32> {
    let (mut left, mut largest) = (count, 0);
    while left > 0 {
        match runs.next()? {
            Run::Repeated { value, count } => {
                let count = count.min(left);
                out.extend(std::iter::repeat_n(entry(value), count));
                largest = largest.max(value);
                left -= count;
            }
            Run::Packed(packed) => {
                let values = match bit_width {
                    // Nothing is stored: a run of zeros would have been written, but this is one.
                    0 => return None,
                    width => left.min(packed.len() * 8 / width),
                };
                if values == 0 {
                    return None;
                }
                largest = largest.max(look_up_packed(packed, bit_width, values, out, entry));
                left -= values;
            }
        }
    }
    Some(largest)
}

/// Calls [`unpack_all`] for the width of the bits: the shifts of each are constants.
fn look_up_packed<T: Copy + Default>(
    packed: &[u8],
    bit_width: usize,
    count: usize,
    out: &mut Vec<T>,
    entry: impl Fn(u32) -> T + Copy,
) -> u32 {
    macro_rules! of_width {
        ($($width:literal)*) => {
            match bit_width {
                $($width => unpack_all::<$width, T>(packed, count, out, entry),)*
                _ => unreachable!("a width is 1 to 32 bits"),
            }
        };
    }
    of_width!(
        1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
    )
}

/// Groups that are looked up at once.
const BLOCK_GROUPS: usize = 32;

fn unpack_all<const WIDTH: usize, T: Copy + Default>(
    packed: &[u8],
    count: usize,
    out: &mut Vec<T>,
    entry: impl Fn(u32) -> T + Copy,
) -> u32 {
    let mut largest = 0;
    let mut left = count;
    // The largest index is kept by lanes, which become one vector.
    let mut largest_of = [0_u32; 8];
    let mut block = [T::default(); 8 * BLOCK_GROUPS];
    let mut at = 0;
    // A group is read in words of eight bytes, the last of which reaches past its end.
    while left >= block.len() && packed.len() - at >= BLOCK_GROUPS * WIDTH + 8 {
        for (group, places) in block.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let start = at + group * WIDTH;
            let indices = unpack::<WIDTH>(&packed[start..start + WIDTH + 8]);
            for ((place, most), index) in places.iter_mut().zip(&mut largest_of).zip(indices) {
                *place = entry(index);
                *most = index.max(*most);
            }
        }
        out.extend_from_slice(&block);
        at += BLOCK_GROUPS * WIDTH;
        left -= block.len();
    }
    while left > 0 {
        let mut group = [0; 40];
        let rest = &packed[at..];
        let length = rest.len().min(WIDTH);
        group[..length].copy_from_slice(&rest[..length]);
        let here = left.min(8);
        for &index in &unpack::<WIDTH>(&group[..WIDTH + 8])[..here] {
            out.push(entry(index));
            largest = index.max(largest);
        }
        at += length;
        left -= here;
    }
    largest_of.into_iter().fold(largest, u32::max)
}

/// Eight values of `WIDTH` bits each, in `WIDTH` bytes, after which eight more can be read.
#[inline(always)]
fn unpack<const WIDTH: usize>(bytes: &[u8]) -> [u32; 8] {
    let bytes = &bytes[..WIDTH + 8];
    let mask = ((1_u64 << WIDTH) - 1) as u32;
    std::array::from_fn(|at| {
        let bit = at * WIDTH;
        let word = &bytes[bit / 8..bit / 8 + 8];
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        (word >> (bit % 8)) as u32 & mask
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: RowRule = RowRule { row_tokens: 3, vocab_size: Some(60_000) };

    /// Values packed as the format has them: the first in the lowest bits.
    fn pack(values: &[u32], width: usize) -> Vec<u8> {
        let mut bytes = vec![0; values.len().div_ceil(8) * width];
        for (at, &value) in values.iter().enumerate() {
            for bit in 0..width {
                let place = at * width + bit;
                bytes[place / 8] |= (((value >> bit) & 1) as u8) << (place % 8);
            }
        }
        bytes
    }

    fn page(values: &[u32], width: usize) -> Vec<u8> {
        let header = (values.len().div_ceil(8) << 1 | 1) as u32;
        let mut bytes = vec![width as u8];
        let mut rest = header;
        while rest >= 0x80 {
            bytes.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
        bytes.extend(pack(values, width));
        bytes
    }

    fn dictionary(count: usize, rule: RowRule) -> Dictionary {
        let values: Vec<u8> = (0..count as i32).flat_map(|i| (i * 3 + 1).to_le_bytes()).collect();
        Dictionary::new(&values, Width::Signed32, count, rule).unwrap()
    }

    fn tokens(
        dictionary: &Dictionary,
        page: &[u8],
        count: usize,
        rule: RowRule,
    ) -> Option<Vec<u32>> {
        let mut tokens = DecodedTokens::with_capacity(0, count, rule);
        dictionary.append(page, count, &mut tokens)?;
        let mut out = Vec::new();
        tokens.copy_to(0..count as u64, &mut out);
        Some(out)
    }

    #[test]
    fn indices_of_every_width_are_looked_up() {
        for width in 1..=20 {
            let entries = (1_usize << width).min(if width > 16 { 70_000 } else { 19_000 });
            let rule = RowRule { vocab_size: (width <= 16).then_some(60_000), ..RULE };
            let dictionary = dictionary(entries, rule);
            for count in [1, 7, 8, 9, 255, 256, 257, 1000] {
                let indices: Vec<u32> =
                    (0..count as u64).map(|i| (i * i * 7 % entries as u64) as u32).collect();
                let expected: Vec<u32> = indices.iter().map(|i| i * 3 + 1).collect();
                let page = page(&indices, width);
                assert_eq!(tokens(&dictionary, &page, count, rule), Some(expected), "{width} bits");
                assert_eq!(tokens(&dictionary, &page, count + 8, rule), None, "too few");
                assert_eq!(tokens(&dictionary, &page[..page.len() - width], count, rule), None);
            }
        }
    }

    /// Pages of one piece may come from tables of any form, in any order.
    #[test]
    fn tokens_are_as_wide_as_the_widest_of_a_piece() {
        let rule = RowRule { vocab_size: None, ..RULE };
        let of = |values: &[u32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Dictionary::new(&bytes, Width::Unsigned32, values.len(), rule).unwrap()
        };
        let large: Vec<u32> = (0..70_000).map(|at| at * 7).collect();
        let tables = [(of(&[9, 65_535]), 65_535), (of(&[9, 65_536]), 65_536), (of(&large), 7)];
        assert!(matches!(tables[0].0.entries, Entries::Narrow(_)));
        assert!(matches!(tables[1].0.entries, Entries::Wide(_)));
        assert!(matches!(tables[2].0.entries, Entries::Large(_)));
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 0, 1], [0, 0, 1], [0, 0, 0], [2, 1, 0]] {
            let mut tokens = DecodedTokens::with_capacity(0, 99, rule);
            let mut expected = Vec::new();
            for at in order {
                let (table, token) = &tables[at];
                for count in [5, 300] {
                    table.append(&page(&vec![1; count], 1), count, &mut tokens).unwrap();
                    expected.extend(vec![*token; count]);
                }
                table.append(&[1, 3 << 1, 1], 3, &mut tokens).unwrap();
                expected.extend([*token; 3]);
            }
            let mut out = Vec::new();
            tokens.copy_to(0..expected.len() as u64, &mut out);
            assert_eq!(out, expected, "{order:?}");
            assert_eq!(matches!(tokens.into_tokens(), Tokens::Narrow(_)), order == [0, 0, 0]);
        }
        // More entries than there are tokens of two bytes, one of which comes again.
        let twice: Vec<u32> = (0..70_000).map(|at| at % 65_000).collect();
        let table = of(&twice);
        let page = page(&[69_999, 3], 17);
        assert_eq!(self::tokens(&table, &page, 2, rule), Some(vec![4_999, 3]));
    }

    #[test]
    fn runs_and_groups_follow_each_other() {
        let dictionary = dictionary(100, RULE);
        // Ten of index 5, then eight packed, then three of index 99.
        let mut bytes = vec![7, 10 << 1, 5];
        bytes.push(0b11);
        bytes.extend(pack(&[0, 1, 2, 3, 4, 5, 6, 7], 7));
        bytes.extend([3 << 1, 99]);
        let mut expected = vec![16; 10];
        expected.extend((0..8).map(|i| i * 3 + 1));
        expected.extend([298; 3]);
        assert_eq!(tokens(&dictionary, &bytes, 21, RULE), Some(expected));
        assert_eq!(tokens(&dictionary, &bytes, 22, RULE), None);
    }

    #[test]
    fn indices_beyond_the_dictionary_and_entries_outside_of_the_vocabulary_are_refused() {
        for (entries, index) in [(100, 100), (100, 127), (1, 1)] {
            let dictionary = dictionary(entries, RULE);
            assert_eq!(tokens(&dictionary, &page(&[0, index], 7), 2, RULE), None);
            assert_eq!(tokens(&dictionary, &[7, 2, index as u8], 1, RULE), None, "in a run");
        }
        // A dictionary of one entry needs no bits.
        assert_eq!(tokens(&dictionary(1, RULE), &[0, 5 << 1], 5, RULE), Some(vec![1; 5]));
        assert_eq!(tokens(&dictionary(1, RULE), &[33, 5 << 1], 5, RULE), None);
        assert_eq!(tokens(&dictionary(1, RULE), &[], 5, RULE), None);
        let outside = 60_000_i32.to_le_bytes();
        assert!(Dictionary::new(&outside, Width::Signed32, 1, RULE).is_none());
        assert!(Dictionary::new(&outside, Width::Signed32, 2, RULE).is_none(), "too few");
    }
}
