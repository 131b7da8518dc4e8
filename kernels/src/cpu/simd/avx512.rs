//! Sixteen lanes in one AVX-512 register.

use std::arch::x86_64::*;

use super::{LANES, Simd, Tile};

/// The proof that the processor has AVX-512 (F, BW, DQ, VL), AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL, AVX2 and FMA.
    #[inline(always)]
    pub(crate) unsafe fn assume_available() -> Self {
        Self(())
    }
}

/// Calls intrinsics; every block is sound for the one reason below.
macro_rules! available {
    ($body:expr) => {
        // SAFETY: an `Avx512` exists only where the processor has the instructions
        // (`assume_available`), and memory is reached through references to whole arrays.
        unsafe { $body }
    };
}

impl Simd for Avx512 {
    type Vector = __m512;
    type Doubles = [__m512d; 2];
    const HOLDS_MANY: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        available!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn prefetch(self, address: *const f32) {
        available!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        available!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], v: __m512) {
        available!(_mm512_storeu_ps(to.as_mut_ptr(), v));
    }

    /// Masked where the row ends: a call of `memcpy`, even one that never runs, would keep no register of the loop around it.
    #[inline(always)]
    fn load_row_or(self, row: &[f32], padding: f32) -> __m512 {
        available!(match row.first_chunk() {
            Some(whole) => self.load(whole),
            None => _mm512_mask_loadu_ps(self.splat(padding), lanes_of(row), row.as_ptr()),
        })
    }

    #[inline(always)]
    fn store_row(self, row: &mut [f32], v: __m512) {
        available!(match row.first_chunk_mut() {
            Some(whole) => self.store(whole, v),
            None => _mm512_mask_storeu_ps(row.as_mut_ptr(), lanes_of(row), v),
        })
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        available!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        available!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        available!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        available!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        available!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn neg_mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        available!(_mm512_fnmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        available!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        available!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        available!(_mm512_abs_ps(a))
    }

    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        available!(_mm512_sqrt_ps(a))
    }

    #[inline(always)]
    fn select_by_sign(self, x: __m512, positive: __m512, negative: __m512) -> __m512 {
        available!({
            let signs = _mm512_cmplt_epi32_mask(_mm512_castps_si512(x), _mm512_setzero_si512());
            _mm512_mask_blend_ps(signs, positive, negative)
        })
    }

    #[inline(always)]
    fn scale_by_power(self, p: __m512, r: __m512) -> __m512 {
        available!({
            let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(r));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power))
        })
    }

    /// Four rounds of adding halves while transposing; the same tree as `sum` for every row.
    #[inline(always)]
    fn sums(self, tile: &Tile) -> __m512 {
        available!({
            let mut by_8 = [_mm512_setzero_ps(); 8];
            for (row, halves) in by_8.iter_mut().enumerate() {
                let a = _mm512_loadu_ps(tile[row].0.as_ptr());
                let b = _mm512_loadu_ps(tile[row + 8].0.as_ptr());
                *halves = _mm512_add_ps(
                    _mm512_shuffle_f32x4::<0x44>(a, b),
                    _mm512_shuffle_f32x4::<0xEE>(a, b),
                );
            }
            let mut by_4 = [_mm512_setzero_ps(); 4];
            for (row, quarters) in by_4.iter_mut().enumerate() {
                let (a, b) = (by_8[row], by_8[row + 4]);
                *quarters = _mm512_add_ps(
                    _mm512_shuffle_f32x4::<0x88>(a, b),
                    _mm512_shuffle_f32x4::<0xDD>(a, b),
                );
            }
            // At distance 2 and then 1: lanes i and i + 2 of a quarter are added first, then i and i + 1.
            let a = _mm512_add_ps(
                _mm512_unpacklo_ps(by_4[0], by_4[1]),
                _mm512_unpackhi_ps(by_4[0], by_4[1]),
            );
            let b = _mm512_add_ps(
                _mm512_unpacklo_ps(by_4[2], by_4[3]),
                _mm512_unpackhi_ps(by_4[2], by_4[3]),
            );
            let sums =
                _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xEE>(a, b));
            _mm512_shuffle_f32x4::<0xD8>(sums, sums)
        })
    }

    #[inline(always)]
    fn transpose(self, rows: [__m512; LANES]) -> [__m512; LANES] {
        available!(transpose(rows))
    }

    #[inline(always)]
    fn zero_doubles(self) -> [__m512d; 2] {
        available!([_mm512_setzero_pd(); 2])
    }

    #[inline(always)]
    fn add_squares(self, sums: [__m512d; 2], x: __m512) -> [__m512d; 2] {
        available!({
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x));
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
            let high = _mm512_cvtps_pd(_mm256_castpd_ps(high));
            [_mm512_fmadd_pd(low, low, sums[0]), _mm512_fmadd_pd(high, high, sums[1])]
        })
    }

    #[inline(always)]
    fn doubles(self, sums: [__m512d; 2]) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        let (low, high) = lanes.split_at_mut(8);
        available!({
            _mm512_storeu_pd(low.as_mut_ptr(), sums[0]);
            _mm512_storeu_pd(high.as_mut_ptr(), sums[1]);
        });
        lanes
    }
}

/// The lanes that a row of less than sixteen elements fills.
#[inline(always)]
fn lanes_of(row: &[f32]) -> __mmask16 {
    (1 << row.len()) - 1
}

/// The transpose of a 16 x 16 tile: first pairs of rows are mingled, then pairs of pairs, then quarters of registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(rows: [__m512; LANES]) -> [__m512; LANES] {
    let zero = _mm512_setzero_ps();
    let mut pairs = [zero; LANES];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    // Register 4 i + j: quarter q holds column 4 q + j of rows 4 i .. 4 i + 4.
    let mut fours = [zero; LANES];
    for i in 0..4 {
        for half in 0..2 {
            let (x, y) = (pairs[4 * i + half], pairs[4 * i + 2 + half]);
            fours[4 * i + 2 * half] = _mm512_shuffle_ps::<0x44>(x, y);
            fours[4 * i + 2 * half + 1] = _mm512_shuffle_ps::<0xee>(x, y);
        }
    }
    let mut columns = [zero; LANES];
    for j in 0..4 {
        let upper = (fours[j], fours[4 + j]);
        let lower = (fours[8 + j], fours[12 + j]);
        let a = _mm512_shuffle_f32x4::<0x44>(upper.0, upper.1);
        let b = _mm512_shuffle_f32x4::<0xee>(upper.0, upper.1);
        let c = _mm512_shuffle_f32x4::<0x44>(lower.0, lower.1);
        let d = _mm512_shuffle_f32x4::<0xee>(lower.0, lower.1);
        columns[j] = _mm512_shuffle_f32x4::<0x88>(a, c);
        columns[4 + j] = _mm512_shuffle_f32x4::<0xdd>(a, c);
        columns[8 + j] = _mm512_shuffle_f32x4::<0x88>(b, d);
        columns[12 + j] = _mm512_shuffle_f32x4::<0xdd>(b, d);
    }
    columns
}
