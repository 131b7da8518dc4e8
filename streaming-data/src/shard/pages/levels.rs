//! The "RLE / bit-packing hybrid" of the Parquet format: levels, and indices into a dictionary.
//!
//! A general reader spends most of its time on the levels that give lists their shape. Where every
//! row is known to have the same length they only have to be *compared* with the expected ones, at
//! eight to a byte or thousands to a run. A repetition level is 0 where a row begins, else 1; a
//! definition level is the largest possible one where there is a value, and less for a null.

/// A part of a hybrid: the same value again and again, or values of some bits each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Run<'a> {
    Repeated {
        value: u32,
        count: usize,
    },
    /// Groups of eight values, `bit_width` bytes each; after the last value, padding.
    Packed(&'a [u8]),
}

/// The runs of a hybrid of values of `bit_width` bits; an item is `None` where they are damaged.
pub(super) struct Runs<'a> {
    bytes: &'a [u8],
    bit_width: usize,
}

impl<'a> Runs<'a> {
    /// `bit_width` is at most 32.
    pub(super) fn new(bytes: &'a [u8], bit_width: usize) -> Runs<'a> {
        debug_assert!(bit_width <= 32);
        Runs { bytes, bit_width }
    }

    /// The next run; none at the end or where the bytes are invalid.
    pub(super) fn next(&mut self) -> Option<Run<'a>> {
        let header = self.varint()?;
        let count = usize::try_from(header >> 1).ok()?;
        if count == 0 {
            return None;
        }
        if header & 1 == 1 {
            let length = count.checked_mul(self.bit_width)?;
            // Writers may leave out the padding of the last group.
            let (packed, rest) = self.bytes.split_at(length.min(self.bytes.len()));
            self.bytes = rest;
            return Some(Run::Packed(packed));
        }
        let (value, rest) = self.bytes.split_at_checked(self.bit_width.div_ceil(8))?;
        self.bytes = rest;
        let value = value.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte));
        Some(Run::Repeated { value, count })
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..35).step_by(7) {
            let (&byte, rest) = self.bytes.split_first()?;
            self.bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

/// Whether `count` levels of `bit_width` bits are all `level`.
pub(super) fn are_all(levels: &[u8], count: usize, bit_width: usize, level: u32) -> bool {
    let mut left = count;
    let mut runs = Runs::new(levels, bit_width);
    while left > 0 {
        match runs.next() {
            Some(Run::Repeated { value, count }) if value == level => left -= count.min(left),
            Some(Run::Packed(packed)) => {
                let held = (packed.len() * 8).checked_div(bit_width).unwrap_or(0);
                let values = left.min(held);
                let all = (0..values).all(|at| bits_at(packed, at * bit_width, bit_width) == level);
                if !all || values == 0 {
                    return false;
                }
                left -= values;
            }
            _ => return false,
        }
    }
    true
}

/// Up to 8 bits at an offset in bits: levels are narrow, and packed ones rare.
fn bits_at(bytes: &[u8], offset: usize, width: usize) -> u32 {
    (0..width)
        .map(|bit| {
            let at = offset + bit;
            u32::from(bytes[at / 8] >> (at % 8) & 1) << bit
        })
        .sum()
}

/// Whether `count` repetition levels, the first of them at `position` of its column, say that a
/// row begins at every multiple of `row_tokens` and nowhere else.
pub(super) fn are_rows(levels: &[u8], count: usize, position: u64, row_tokens: usize) -> bool {
    let mut left = count;
    // Levels before the next that begins a row.
    let into_row = (position % row_tokens as u64) as usize;
    let mut until_row = (row_tokens - into_row) % row_tokens;
    let mut runs = Runs::new(levels, 1);
    while left > 0 {
        match runs.next() {
            Some(Run::Repeated { value, count }) => {
                let count = count.min(left);
                match value {
                    0 if count == 1 && until_row == 0 => until_row = row_tokens - 1,
                    1 if count <= until_row => until_row -= count,
                    _ => return false,
                }
                left -= count;
            }
            Some(Run::Packed(packed)) if !packed.is_empty() => {
                for &byte in packed {
                    // The last byte of a page is padded.
                    let here = left.min(8);
                    // Most bytes lie within a row.
                    if byte == 0xff && here == 8 && until_row >= 8 {
                        until_row -= 8;
                    } else {
                        for bit in 0..here {
                            let begins_row = byte >> bit & 1 == 0;
                            if begins_row != (until_row == 0) {
                                return false;
                            }
                            until_row = if begins_row { row_tokens - 1 } else { until_row - 1 };
                        }
                    }
                    left -= here;
                }
            }
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_in_runs_and_packed_are_compared_with_rows() {
        // Rows of 11: 0, seven 1 packed; then a run of three 1; then the next row.
        let row = [0b11, 0b1111_1110, 3 << 1, 1];
        let two: Vec<u8> = [row, row].concat();
        assert!(are_rows(&two, 22, 0, 11));
        assert!(are_rows(&two, 22, 33, 11));
        assert!(!are_rows(&two, 22, 1, 11), "rows do not begin there");
        assert!(!are_rows(&two, 22, 0, 10), "rows are longer");
        assert!(!are_rows(&two, 22, 0, 22), "rows are shorter");
        assert!(!are_rows(&two, 23, 0, 11), "levels are missing");
        assert!(!are_rows(&row[..3], 11, 0, 11), "a run without its value");
        // The middle of a row only, as a version 1 page may begin.
        assert!(are_rows(&[5 << 1, 1], 5, 2, 11));
        assert!(!are_rows(&[5 << 1, 1], 5, 7, 11));
        assert!(!are_rows(&[5 << 1, 0], 5, 0, 11), "five rows of one token");
        assert!(are_rows(&[1 << 1, 0], 1, 11, 11));
        // A packed byte with five bits of padding.
        assert!(are_rows(&[0b11, 0b0000_0110], 3, 0, 3));
        assert!(!are_rows(&[0b11, 0b0000_0110], 4, 0, 4));
        assert!(!are_rows(&[0], 1, 0, 3), "an empty run");
        assert!(!are_rows(&[0xff; 9], 1, 0, 3), "a header without an end");
        // A whole byte within a row of 12 that began before it, and one that reaches beyond.
        assert!(are_rows(&[0b11, 0xff], 8, 1, 12));
        assert!(!are_rows(&[0b11, 0xff], 8, 5, 12));
    }

    #[test]
    fn levels_are_compared_with_a_level_in_both_forms() {
        // 100 threes in a run; then 16 packed threes of two bits; the first 11 of them count.
        assert!(are_all(&[0xc8, 0x01, 3], 100, 2, 3));
        assert!(!are_all(&[0xc8, 0x01, 3], 101, 2, 3), "too few");
        assert!(!are_all(&[0xc8, 0x01, 2], 100, 2, 3), "nulls");
        assert!(are_all(&[0b101, 0xff, 0xff, 0xff, 0b0011_1111], 15, 2, 3));
        assert!(!are_all(&[0b101, 0xff, 0xff, 0xff, 0b0011_1111], 16, 2, 3));
        assert!(!are_all(&[0b11], 1, 2, 3), "packed values that are not there");
        assert!(are_all(&[], 0, 2, 3));
    }
}
