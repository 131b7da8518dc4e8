//! Prefetches memory, so that it arrives while the registers are busy.
//!
//! In training, operands and outputs come from the last-level cache or from memory: without
//! prefetches a product of 512 rows waits for them a quarter of its time.

use std::arch::x86_64::*;

use super::pack::Lines;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Cache lines of a block of memory, row by row, of which some have been asked for.
pub(super) struct Ahead {
    row: *const f32,
    /// Elements from row to row.
    row_stride: isize,
    rows: usize,
    lines_of_row: usize,
    /// The next line of the row.
    line: usize,
}

impl Ahead {
    /// `rows` rows of `elements` elements.
    pub(super) fn block(
        start: *const f32,
        row_stride: isize,
        rows: usize,
        elements: usize,
    ) -> Self {
        let bytes = start.addr() % LINE + elements * size_of::<f32>();
        Self { row: start, row_stride, rows, lines_of_row: bytes.div_ceil(LINE), line: 0 }
    }

    /// `count` lines of an operand, and `k` elements of each; nothing where neither is contiguous.
    pub(super) fn lines(lines: Lines, count: usize, k: usize) -> Self {
        let Lines { start, line_stride, k_stride } = lines;
        match (line_stride, k_stride) {
            (_, 1) => Self::block(start, line_stride, count, k),
            (1, _) => Self::block(start, k_stride, k, count),
            _ => Self::nothing(),
        }
    }

    pub(super) fn nothing() -> Self {
        Self::block(std::ptr::null(), 0, 0, 0)
    }

    /// The number of lines to prefetch at each of `times` opportunities.
    pub(super) fn share(&self, times: usize) -> usize {
        (self.rows * self.lines_of_row - self.line).div_ceil(times.max(1))
    }

    /// Asks for the next `count` lines, as far as there are any, to the cache of `HINT`.
    #[inline(always)]
    pub(super) fn ask<const HINT: i32>(&mut self, count: usize) {
        for _ in 0..count {
            if self.rows == 0 {
                return;
            }
            let line = self.row.wrapping_byte_add(self.line * LINE);
            // SAFETY: a prefetch may name any address.
            unsafe { _mm_prefetch::<HINT>(line.cast()) };
            self.line += 1;
            if self.line == self.lines_of_row {
                self.line = 0;
                self.rows -= 1;
                self.row = self.row.wrapping_offset(self.row_stride);
            }
        }
    }
}
