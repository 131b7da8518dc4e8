//! The sums of a tile of the output, held in registers.

use std::arch::x86_64::*;

use super::ahead::Ahead;
use super::{LANES, ROWS, Target, first};

/// Terms between two opportunities to ask for memory.
const TERMS: usize = 8;

/// The place that a tile of sums is written to.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) to: Target,
    /// Whether sums are added to the contents of `to`, or replace them.
    pub(super) adds: bool,
    /// Sums of earlier blocks that lie elsewhere, which these are added to first.
    pub(super) before: Option<Target>,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// The layout of a tile's rows of a.
#[derive(Clone, Copy)]
pub(super) enum TileRows {
    /// Packed: [`ROWS`] elements for each k.
    Packed(*const f32),
    /// Contiguous along k; the number is the elements from row to row.
    Unpacked(*const f32, isize),
}

/// The memory to prefetch while tiles are computed, and the number of cache lines of it for each tile.
pub(super) struct Upcoming {
    /// Rows of a that are packed or read next.
    pub(super) a: Ahead,
    pub(super) a_share: usize,
    /// Columns of b that come after these.
    pub(super) b: Ahead,
    pub(super) b_share: usize,
}

impl Upcoming {
    pub(super) fn nothing() -> Self {
        Self { a: Ahead::nothing(), a_share: 0, b: Ahead::nothing(), b_share: 0 }
    }
}

impl Tile {
    /// `to[rows, columns] (+)= before + a b` for a sliver of each.
    ///
    /// # Safety
    /// `a` holds k elements of each row ([`ROWS`] where packed), `b` k times the columns in whole registers, both targets have the
    /// tile's elements, and `to` is writable.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn sum(self, a: TileRows, b: *const f32, k: usize, upcoming: &mut Upcoming) {
        // SAFETY: the caller's promise. Fewer rows are fewer registers, but enough to keep the processor busy.
        unsafe {
            match (self.rows, self.columns > LANES) {
                (..=4, true) => self.sum_rows::<4, 2>(a, b, k, upcoming),
                (..=8, true) => self.sum_rows::<8, 2>(a, b, k, upcoming),
                (_, true) => self.sum_rows::<ROWS, 2>(a, b, k, upcoming),
                (_, false) => self.sum_rows::<ROWS, 1>(a, b, k, upcoming),
            }
        }
    }

    /// # Safety
    /// As [`sum`](Self::sum), of at most R rows and V registers of columns.
    #[target_feature(enable = "avx512f")]
    unsafe fn sum_rows<const R: usize, const V: usize>(
        self,
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
                    self.sum_and_store::<R, V>(element, b, k, upcoming);
                }
                TileRows::Unpacked(a, stride) => {
                    let last = self.rows - 1;
                    let starts: [*const f32; R] =
                        std::array::from_fn(|row| a.offset(row.min(last) as isize * stride));
                    let element = |row: usize, k: usize| starts[row].add(k);
                    self.sum_and_store::<R, V>(element, b, k, upcoming);
                }
            }
        }
    }

    /// # Safety
    /// As [`sum_rows`](Self::sum_rows); `element(row, k)` may be read.
    #[inline(always)]
    unsafe fn sum_and_store<const R: usize, const V: usize>(
        self,
        element: impl Fn(usize, usize) -> *const f32,
        b: *const f32,
        k: usize,
        upcoming: &mut Upcoming,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); V]; R];
            let opportunities = k.div_ceil(TERMS);
            let Upcoming { a, a_share, b: next_b, b_share } = upcoming;
            let columns = self.columns.min(V * LANES);
            let lines =
                |target: Target| Ahead::block(target.start, target.row_stride, self.rows, columns);
            let mut out = lines(self.to);
            let shares = [
                out.share(opportunities),
                a_share.div_ceil(opportunities.max(1)),
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
            let masks: [__mmask16; V] =
                std::array::from_fn(|v| first(self.columns.saturating_sub(v * LANES)));
            if let Some(before) = self.before {
                add_from(&mut sums, before, self.rows, masks);
            }
            if self.adds {
                add_from(&mut sums, self.to, self.rows, masks);
            }
            for (row, sums) in sums.iter().enumerate() {
                if row < self.rows {
                    let to = self.to.from(row, 0).start;
                    for (v, &sum) in sums.iter().enumerate() {
                        _mm512_mask_storeu_ps(to.add(v * LANES), masks[v], sum);
                    }
                }
            }
        }
    }
}

/// `sums[row] += from[row]` for the rows and columns that there are.
///
/// # Safety
/// The elements of those rows and columns may be read.
#[inline(always)]
unsafe fn add_from<const R: usize, const V: usize>(
    sums: &mut [[__m512; V]; R],
    from: Target,
    rows: usize,
    masks: [__mmask16; V],
) {
    for (row, sums) in sums.iter_mut().enumerate() {
        if row < rows {
            // SAFETY: the caller's promise; lanes past the last column are masked.
            unsafe {
                let from = from.from(row, 0).start;
                for (v, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_maskz_loadu_ps(masks[v], from.add(v * LANES));
                    *sum = _mm512_add_ps(x, *sum);
                }
            }
        }
    }
}
