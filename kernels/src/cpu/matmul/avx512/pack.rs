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

/// Packs `rows` rows of `a[rows, k]` in slivers of [`ROWS`] rows: k by k, as many elements each, the
/// rest zeros.
///
/// # Safety
/// The operand may be read, and `to` holds the slivers and [`LANES`] elements more.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pack_rows(to: *mut f32, a: Operand, k: usize, rows: usize) {
    let lines = Lines::rows(a);
    let slivers = rows / ROWS;
    // The rest of k.
    let tail = match (lines.line_stride, lines.k_stride) {
        (1, _) => k % 4,
        (_, 1) => k % LANES,
        _ => k,
    };
    // SAFETY: the caller's promise. A register has more lanes than a sliver has rows: each is written over the end of the
    // one before it, and the last of a sliver reaches into the next, which is written later.
    unsafe {
        for sliver in 0..rows.div_ceil(ROWS) {
            let done = if sliver < slivers { k - tail } else { 0 };
            let rest = Lines { start: lines.at(sliver * ROWS, done), ..lines };
            let to = to.add((sliver * k + done) * ROWS);
            pack_lanes(to, ROWS, rest, k - done, ROWS.min(rows - sliver * ROWS));
        }
        match (lines.line_stride, lines.k_stride) {
            (1, _) => pack_contiguous_rows(to, lines, k, slivers),
            (_, 1) => pack_strided_rows(to, lines, k, slivers),
            _ => {}
        }
    }
}

/// Packs whole slivers of rows that lie side by side, as far as k goes in fours.
///
/// Four k make three registers, each of them the parts of two or three k, so that no store straddles cache lines. All slivers
/// take their parts of a k together, while its cache lines are near.
///
/// # Safety
/// As [`pack_rows`], of `slivers` times [`ROWS`] rows.
#[target_feature(enable = "avx512f")]
unsafe fn pack_contiguous_rows(to: *mut f32, lines: Lines, k: usize, slivers: usize) {
    for four in 0..k / 4 {
        for sliver in 0..slivers {
            // SAFETY: the caller's promise; lanes outside of a mask are not read.
            unsafe {
                let [k0, k1, k2, k3] =
                    std::array::from_fn(|k| lines.at(sliver * ROWS, 4 * four + k));
                let to = to.add((sliver * k + 4 * four) * ROWS);
                let x = _mm512_maskz_loadu_ps(0x0fff, k0);
                let x = _mm512_mask_loadu_ps(x, 0xf000, k1.wrapping_sub(12));
                _mm512_storeu_ps(to, x);
                let x = _mm512_maskz_loadu_ps(0x00ff, k1.add(4));
                let x = _mm512_mask_loadu_ps(x, 0xff00, k2.wrapping_sub(8));
                _mm512_storeu_ps(to.add(LANES), x);
                let x = _mm512_maskz_loadu_ps(0x000f, k2.add(8));
                let x = _mm512_mask_loadu_ps(x, 0xfff0, k3.wrapping_sub(4));
                _mm512_storeu_ps(to.add(2 * LANES), x);
            }
        }
    }
}

/// Packs whole slivers of rows that are contiguous along k, as far as k goes in sixteens.
///
/// A 12 x 16 tile is transposed in registers. Quarters of four rows come first; then the quarters of the k that a cache line
/// takes its elements from are put side by side, three lines for four k.
///
/// # Safety
/// As [`pack_rows`], of `slivers` times [`ROWS`] rows.
#[target_feature(enable = "avx512f")]
unsafe fn pack_strided_rows(to: *mut f32, lines: Lines, k: usize, slivers: usize) {
    let tiles = k / LANES;
    for (sliver, tile) in (0..slivers).flat_map(|sliver| (0..tiles).map(move |tile| (sliver, tile)))
    {
        // SAFETY: the caller's promise.
        unsafe {
            // fours[i][j]: quarter q holds k = 4 q + j of rows 4 i .. 4 i + 4.
            let fours: [[__m512; 4]; 3] = std::array::from_fn(|i| {
                quarters(std::array::from_fn(|row| {
                    _mm512_loadu_ps(lines.at(sliver * ROWS + 4 * i + row, tile * LANES))
                }))
            });
            let [x, y, z] = fours;
            let thirds =
                [[x[0], y[0], z[0], x[1]], [y[1], z[1], x[2], y[2]], [z[2], x[3], y[3], z[3]]];
            let to = to.add((sliver * k + tile * LANES) * ROWS);
            for (third, registers) in thirds.into_iter().enumerate() {
                for (four, x) in transposed_quarters(registers).into_iter().enumerate() {
                    _mm512_storeu_ps(to.add((3 * four + third) * LANES), x);
                }
            }
        }
    }
}

/// Four rows: quarter q of register j holds column 4 q + j of them.
#[inline]
#[target_feature(enable = "avx512f")]
fn quarters(rows: [__m512; 4]) -> [__m512; 4] {
    let (a, b) = (_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpacklo_ps(rows[2], rows[3]));
    let (c, d) = (_mm512_unpackhi_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[2], rows[3]));
    [
        _mm512_shuffle_ps::<0x44>(a, b),
        _mm512_shuffle_ps::<0xee>(a, b),
        _mm512_shuffle_ps::<0x44>(c, d),
        _mm512_shuffle_ps::<0xee>(c, d),
    ]
}

/// Register t of the result holds quarters t of the registers, in order.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed_quarters(registers: [__m512; 4]) -> [__m512; 4] {
    let [w, x, y, z] = registers;
    let (a, b) = (_mm512_shuffle_f32x4::<0x44>(w, x), _mm512_shuffle_f32x4::<0x44>(y, z));
    let (c, d) = (_mm512_shuffle_f32x4::<0xee>(w, x), _mm512_shuffle_f32x4::<0xee>(y, z));
    [
        _mm512_shuffle_f32x4::<0x88>(a, b),
        _mm512_shuffle_f32x4::<0xdd>(a, b),
        _mm512_shuffle_f32x4::<0x88>(c, d),
        _mm512_shuffle_f32x4::<0xdd>(c, d),
    ]
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
                let to = to.add(first_k * stride);
                if count == LANES && lanes == LANES {
                    // Indexed by constants alone, the tile stays in registers.
                    let rows = std::array::from_fn(|line| _mm512_loadu_ps(lines.at(line, first_k)));
                    for (k, x) in transpose(rows).into_iter().enumerate() {
                        _mm512_storeu_ps(to.add(k * stride), x);
                    }
                } else {
                    let tile = transposed(lines, first_k, count, lanes);
                    for (k, &x) in tile[..count].iter().enumerate() {
                        _mm512_storeu_ps(to.add(k * stride), x);
                    }
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
