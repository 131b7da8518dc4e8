//! Sixteen lanes in two AVX2 registers.

use std::arch::x86_64::*;

use super::{LANES, Lanes, Simd, Tile};

/// The proof that the processor has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The processor has AVX2 and FMA.
    #[inline(always)]
    pub(crate) unsafe fn assume_available() -> Self {
        Self(())
    }
}

/// Calls intrinsics; every block is sound for the one reason below.
macro_rules! available {
    ($body:expr) => {
        // SAFETY: an `Avx2` exists only where the processor has the instructions
        // (`assume_available`), and memory is reached through references to whole arrays, each
        // pointer being at most 8 elements before its array's end.
        unsafe { $body }
    };
}

type Pair = [__m256; 2];

impl Simd for Avx2 {
    type Vector = Pair;
    type Doubles = [__m256d; 4];
    const HOLDS_MANY: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        available!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn prefetch(self, address: *const f32) {
        available!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Pair {
        available!([_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))])
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], v: Pair) {
        available!({
            _mm256_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v[1]);
        });
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        available!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        available!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        available!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        available!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul_add(self, a: Pair, b: Pair, c: Pair) -> Pair {
        available!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn neg_mul_add(self, a: Pair, b: Pair, c: Pair) -> Pair {
        available!([_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        available!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: Pair, b: Pair) -> Pair {
        available!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn abs(self, a: Pair) -> Pair {
        available!({
            let magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
            [_mm256_and_ps(a[0], magnitude), _mm256_and_ps(a[1], magnitude)]
        })
    }

    #[inline(always)]
    fn sqrt(self, a: Pair) -> Pair {
        available!([_mm256_sqrt_ps(a[0]), _mm256_sqrt_ps(a[1])])
    }

    #[inline(always)]
    fn select_by_sign(self, x: Pair, positive: Pair, negative: Pair) -> Pair {
        available!([
            _mm256_blendv_ps(positive[0], negative[0], x[0]),
            _mm256_blendv_ps(positive[1], negative[1], x[1]),
        ])
    }

    #[inline(always)]
    fn scale_by_power(self, p: Pair, r: Pair) -> Pair {
        available!({
            let mut scaled = p;
            for half in 0..2 {
                let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(r[half]));
                scaled[half] =
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p[half]), power));
            }
            scaled
        })
    }

    #[inline(always)]
    fn sums(self, tile: &Tile) -> Pair {
        let mut sums = Lanes::ZERO;
        for (out, rows) in sums.0.chunks_exact_mut(4).zip(tile.chunks_exact(4)) {
            available!({
                let mut quarters = [_mm_setzero_ps(); 4];
                for (quarter, row) in quarters.iter_mut().zip(rows) {
                    let by_8 = _mm256_add_ps(
                        _mm256_loadu_ps(row.0.as_ptr()),
                        _mm256_loadu_ps(row.0.as_ptr().add(8)),
                    );
                    *quarter =
                        _mm_add_ps(_mm256_castps256_ps128(by_8), _mm256_extractf128_ps::<1>(by_8));
                }
                let a = _mm_add_ps(
                    _mm_unpacklo_ps(quarters[0], quarters[1]),
                    _mm_unpackhi_ps(quarters[0], quarters[1]),
                );
                let b = _mm_add_ps(
                    _mm_unpacklo_ps(quarters[2], quarters[3]),
                    _mm_unpackhi_ps(quarters[2], quarters[3]),
                );
                let four = _mm_add_ps(_mm_shuffle_ps::<0x44>(a, b), _mm_shuffle_ps::<0xEE>(a, b));
                _mm_storeu_ps(out.as_mut_ptr(), four);
            });
        }
        self.load(&sums.0)
    }

    #[inline(always)]
    fn zero_doubles(self) -> [__m256d; 4] {
        available!([_mm256_setzero_pd(); 4])
    }

    #[inline(always)]
    fn add_squares(self, mut sums: [__m256d; 4], x: Pair) -> [__m256d; 4] {
        available!({
            for half in 0..2 {
                let low = _mm256_cvtps_pd(_mm256_castps256_ps128(x[half]));
                let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(x[half]));
                sums[2 * half] = _mm256_fmadd_pd(low, low, sums[2 * half]);
                sums[2 * half + 1] = _mm256_fmadd_pd(high, high, sums[2 * half + 1]);
            }
        });
        sums
    }

    #[inline(always)]
    fn doubles(self, sums: [__m256d; 4]) -> [f64; LANES] {
        let mut lanes = [0.0; LANES];
        for (out, four) in lanes.chunks_exact_mut(4).zip(sums) {
            available!(_mm256_storeu_pd(out.as_mut_ptr(), four));
        }
        lanes
    }
}
