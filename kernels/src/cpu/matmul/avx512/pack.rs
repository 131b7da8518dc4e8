//! Packing for AVX-512: slivers of an operand, k by k, so that a tile's loop reads memory in order.

use std::arch::x86_64::*;

use super::super::Operand;
use super::{LANES, ROWS, first};
use crate::cpu::simd::avx512::transpose;

/// Packs `width` columns of `b[k, width]`: k by k, [`COLUMNS`] elements each, or [`LANES`] where no more are there; the rest
/// zeros.
///
/// # Safety
/// The operand may be read, and `to` holds the sliver.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pack_columns(to: *mut f32, b: Operand, k: usize, width: usize) {
    let registers = width.div_ceil(LANES);
    for register in 0..registers {
        let lanes = LANES.min(width - register * LANES);
        let stride = registers * LANES;
        // SAFETY: as the caller's; these are columns of the sliver.
        unsafe {
            let to = to.add(register * LANES);
            let b = b.from(0, register * LANES);
            pack_lanes(to, stride, Lines::columns(b), k, lanes);
        }
    }
}

/// Packs `rows` rows of `a[rows, k]`: k by k, [`ROWS`] elements each, the rest zeros.
///
/// # Safety
/// The operand may be read, and `to` holds the sliver and [`LANES`] elements more.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pack_rows(to: *mut f32, a: Operand, k: usize, rows: usize) {
    // SAFETY: the caller's promise. A register has more lanes than a sliver has rows: each is written over the end of the
    // one before it.
    unsafe { pack_lanes(to, ROWS, Lines::rows(a), k, rows) }
}

/// Lines along k: columns of b, or rows of a.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    pub(super) start: *const f32,
    /// Elements from line to line.
    pub(super) line_stride: isize,
    /// Elements from k to k + 1.
    pub(super) k_stride: isize,
}

impl Lines {
    pub(super) fn columns(b: Operand) -> Self {
        Self { start: b.start, line_stride: b.column_stride, k_stride: b.row_stride }
    }

    pub(super) fn rows(a: Operand) -> Self {
        Self { start: a.start, line_stride: a.row_stride, k_stride: a.column_stride }
    }

    /// # Safety
    /// The element may be read.
    #[inline(always)]
    pub(super) unsafe fn at(self, line: usize, k: usize) -> *const f32 {
        let offset = line as isize * self.line_stride + k as isize * self.k_stride;
        // SAFETY: the caller's promise.
        unsafe { self.start.offset(offset) }
    }
}

/// For each k, the `lanes` lines' elements as one register at `to + stride k`, in order of k; lanes past the last are zero.
///
/// # Safety
/// The lines may be read, and whole registers written.
#[target_feature(enable = "avx512f")]
unsafe fn pack_lanes(to: *mut f32, stride: usize, lines: Lines, k: usize, lanes: usize) {
    // SAFETY: the caller's promise; loads are masked to the lines, and to k, that there are.
    unsafe {
        if lines.line_stride == 1 {
            for k in 0..k {
                let x = _mm512_maskz_loadu_ps(first(lanes), lines.at(0, k));
                _mm512_storeu_ps(to.add(k * stride), x);
            }
        } else if lines.k_stride == 1 {
            for first_k in (0..k).step_by(LANES) {
                let count = LANES.min(k - first_k);
                let tile = transposed(lines, first_k, count, lanes);
                for (k, &x) in tile[..count].iter().enumerate() {
                    _mm512_storeu_ps(to.add((first_k + k) * stride), x);
                }
            }
        } else {
            for k in 0..k {
                let mut x = [0.0; LANES];
                for (line, x) in x[..lanes].iter_mut().enumerate() {
                    *x = *lines.at(line, k);
                }
                _mm512_storeu_ps(to.add(k * stride), _mm512_loadu_ps(x.as_ptr()));
            }
        }
    }
}

/// The elements `first_k .. first_k + count` of `lanes` lines whose k is contiguous: register k holds the lines' elements
/// there, zeros past the last line; registers past `count` hold zeros.
///
/// # Safety
/// The lines may be read.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transposed(
    lines: Lines,
    first_k: usize,
    count: usize,
    lanes: usize,
) -> [__m512; LANES] {
    let mask = first(count);
    let mut rows = [_mm512_setzero_ps(); LANES];
    if lanes == LANES && count == LANES {
        for (line, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *row = unsafe { _mm512_loadu_ps(lines.at(line, first_k)) };
        }
    } else {
        for (line, row) in rows[..lanes].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *row = unsafe { _mm512_maskz_loadu_ps(mask, lines.at(line, first_k)) };
        }
    }
    transpose(rows)
}
