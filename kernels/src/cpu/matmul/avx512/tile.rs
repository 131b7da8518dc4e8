//! The sums of a tile of the output, held in registers.

use std::arch::x86_64::*;

use super::ahead::Ahead;
use super::{LANES, ROWS, first};

/// Terms between two opportunities to ask for memory.
const TERMS: usize = 8;

/// Where a tile of sums goes.
pub(super) struct Tile {
    pub(super) out: *mut f32,
    pub(super) row_stride: isize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Whether sums are added to the output, or replace it.
    pub(super) adds: bool,
}

/// Where a tile finds its rows of a.
#[derive(Clone, Copy)]
pub(super) enum TileRows {
    /// Packed: [`ROWS`] elements for each k.
    Packed(*const f32),
    /// Contiguous along k, so many elements from row to row.
    Unpacked(*const f32, isize),
}

/// What to ask for while a tile is busy, and how many lines of it.
pub(super) struct Upcoming {
    /// Rows of a that the next tile packs or reads.
    pub(super) a: Ahead,
    /// Columns of b that come after these, for all tiles of these to share.
    pub(super) b: Ahead,
    pub(super) b_share: usize,
}

/// `out[rows, columns] (+)= a b` for a sliver of each.
///
/// # Safety
/// `a` holds k elements of each row ([`ROWS`] where packed), `b` k times V registers, and `out` is writable.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn tile<const V: usize>(
    to: Tile,
    a: TileRows,
    b: *const f32,
    k: usize,
    upcoming: &mut Upcoming,
) {
    // SAFETY: the caller's promise; rows past the last one read the last one, and their sums are dropped.
    unsafe {
        match a {
            TileRows::Packed(a) => {
                let element = |row: usize, k: usize| a.add(k * ROWS + row);
                sum_and_store::<V>(to, element, b, k, upcoming);
            }
            TileRows::Unpacked(a, stride) => {
                let last = to.rows - 1;
                let starts: [*const f32; ROWS] =
                    std::array::from_fn(|row| a.offset(row.min(last) as isize * stride));
                let element = |row: usize, k: usize| starts[row].add(k);
                sum_and_store::<V>(to, element, b, k, upcoming);
            }
        }
    }
}

/// # Safety
/// As [`tile`]; `element(row, k)` may be read.
#[inline(always)]
unsafe fn sum_and_store<const V: usize>(
    to: Tile,
    element: impl Fn(usize, usize) -> *const f32,
    b: *const f32,
    k: usize,
    upcoming: &mut Upcoming,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); V]; ROWS];
        let opportunities = k.div_ceil(TERMS);
        let Upcoming { a, b: next_b, b_share } = upcoming;
        let columns = to.columns.min(V * LANES);
        let mut out = Ahead::block(to.out, to.row_stride, to.rows, columns);
        let shares = [
            out.share(opportunities),
            a.share(opportunities),
            b_share.div_ceil(opportunities.max(1)),
        ];
        for first_k in (0..k).step_by(TERMS) {
            out.ask::<_MM_HINT_T0>(shares[0]);
            a.ask::<_MM_HINT_T1>(shares[1]);
            next_b.ask::<_MM_HINT_T1>(shares[2]);
            for k in first_k..k.min(first_k + TERMS) {
                let columns: [__m512; V] =
                    std::array::from_fn(|v| _mm512_loadu_ps(b.add((k * V + v) * LANES)));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*element(row, k));
                    for (sum, &column) in sums.iter_mut().zip(&columns) {
                        *sum = _mm512_fmadd_ps(x, column, *sum);
                    }
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            if row < to.rows {
                for (v, &sum) in sums.iter().enumerate() {
                    let mask = first(to.columns.saturating_sub(v * LANES));
                    let out = to.out.offset(row as isize * to.row_stride).add(v * LANES);
                    store(out, mask, sum, to.adds);
                }
            }
        }
    }
}

/// # Safety
/// The lanes of `mask` may be written, and read where `adds`.
#[target_feature(enable = "avx512f")]
unsafe fn store(out: *mut f32, mask: __mmask16, sum: __m512, adds: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let sum = if adds { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum) } else { sum };
        _mm512_mask_storeu_ps(out, mask, sum);
    }
}
