//! Products of a few rows, as in generation: nothing is packed, b is read in place.

use std::arch::x86_64::*;

use super::super::{Operand, Part};
use super::pack::{Lines, transposed};
use super::{BLOCK, LANES, first};

/// # Safety
/// As [`product`]; b has a unit stride, and there are 1 to [`FEW_ROWS`] rows.
pub(super) unsafe fn few_rows(part: &Part) {
    // SAFETY: the caller's promise.
    unsafe {
        match part.rows {
            1 => rows::<1>(part),
            2 => rows::<2>(part),
            3 => rows::<3>(part),
            4 => rows::<4>(part),
            5 => rows::<5>(part),
            6 => rows::<6>(part),
            7 => rows::<7>(part),
            _ => rows::<8>(part),
        }
    }
}

/// A product of R rows: sixteen columns at a time, b read where it lies.
///
/// # Safety
/// As [`few_rows`].
#[target_feature(enable = "avx512f")]
unsafe fn rows<const R: usize>(part: &Part) {
    for column in (0..part.columns).step_by(LANES) {
        let lanes = LANES.min(part.columns - column);
        let mut total = [_mm512_setzero_ps(); R];
        let mut adds = part.beta != 0.0;
        // SAFETY: as the caller's; lanes past the last column are masked, and these are columns and blocks of k of the part.
        unsafe {
            let out = |row: usize| part.out.from(row, column).start;
            if adds {
                for (row, total) in total.iter_mut().enumerate() {
                    *total = _mm512_maskz_loadu_ps(first(lanes), out(row));
                }
            }
            for first_k in (0..part.k).step_by(BLOCK) {
                let k = BLOCK.min(part.k - first_k);
                let lines = Lines::columns(part.b.from(first_k, column));
                let sums = row_sums::<R>(part.a.from(0, first_k), lines, k, lanes);
                for (total, sum) in total.iter_mut().zip(sums) {
                    *total = if adds { _mm512_add_ps(*total, sum) } else { sum };
                }
                adds = true;
            }
            for (row, &total) in total.iter().enumerate() {
                match part.sum {
                    None => _mm512_mask_storeu_ps(out(row), first(lanes), total),
                    Some(sum) => {
                        let sum = sum.from(row, column).start;
                        let total = _mm512_add_ps(_mm512_maskz_loadu_ps(first(lanes), sum), total);
                        _mm512_mask_storeu_ps(sum, first(lanes), total);
                    }
                }
            }
        }
    }
}

/// The sums of one block of k.
///
/// # Safety
/// As [`rows`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn row_sums<const R: usize>(
    a: Operand,
    lines: Lines,
    k: usize,
    lanes: usize,
) -> [__m512; R] {
    let mut sums = [_mm512_setzero_ps(); R];
    // SAFETY: the caller's promise; loads are masked to the columns, and to k, that there are.
    unsafe {
        let add = |sums: &mut [__m512; R], k: usize, x: __m512| {
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_fmadd_ps(_mm512_set1_ps(*a.at(row, k)), x, *sum);
            }
        };
        if lines.line_stride == 1 {
            for k in 0..k {
                add(&mut sums, k, _mm512_maskz_loadu_ps(first(lanes), lines.at(0, k)));
            }
        } else {
            for first_k in (0..k).step_by(LANES) {
                let count = LANES.min(k - first_k);
                let tile = transposed(lines, first_k, count, lanes);
                for (k, &x) in tile[..count].iter().enumerate() {
                    add(&mut sums, first_k + k, x);
                }
            }
        }
    }
    sums
}
