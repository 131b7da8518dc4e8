//! Sixteen lanes in an array: any processor, and the definition of the other two.

use super::{LANES, Lanes, Simd, Tile};

/// Needs no proof: every processor has it.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type Array = [f32; LANES];

/// A method that computes `$body` of each lane. On x86-64, whose processors hardly ever lack AVX2, it is called, which builds in less time
/// than inlining it everywhere.
macro_rules! lanewise {
    ($method:ident($($lane:ident),+) => $body:expr) => {
        #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
        #[cfg_attr(target_arch = "x86_64", inline(never))]
        fn $method(self, $($lane: Array),+) -> Array {
            let mut out = [0.0; LANES];
            for (i, out) in out.iter_mut().enumerate() {
                $(let $lane = $lane[i];)+
                *out = $body;
            }
            out
        }
    };
}

impl Simd for Portable {
    type Vector = Array;
    type Doubles = [f64; LANES];
    const HOLDS_MANY: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Array {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, from: &Array) -> Array {
        *from
    }

    #[inline(always)]
    fn store(self, to: &mut Array, v: Array) {
        *to = v;
    }

    lanewise!(add(a, b) => a + b);
    lanewise!(sub(a, b) => a - b);
    lanewise!(mul(a, b) => a * b);
    lanewise!(div(a, b) => a / b);
    lanewise!(mul_add(a, b, c) => a.mul_add(b, c));
    lanewise!(neg_mul_add(a, b, c) => (-a).mul_add(b, c));
    lanewise!(max(a, b) => if a > b { a } else { b });
    lanewise!(min(a, b) => if a < b { a } else { b });
    lanewise!(abs(a) => a.abs());
    lanewise!(sqrt(a) => a.sqrt());
    lanewise!(select_by_sign(x, positive, negative) => {
        if x.is_sign_negative() { negative } else { positive }
    });
    lanewise!(scale_by_power(p, r) => f32::from_bits(p.to_bits().wrapping_add(r.to_bits() << 23)));

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn sums(self, tile: &Tile) -> Array {
        let mut sums = [0.0; LANES];
        for (sum, Lanes(row)) in sums.iter_mut().zip(tile) {
            *sum = self.sum(*row);
        }
        sums
    }

    #[inline(always)]
    fn zero_doubles(self) -> [f64; LANES] {
        [0.0; LANES]
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn add_squares(self, mut sums: [f64; LANES], x: Array) -> [f64; LANES] {
        for (sum, x) in sums.iter_mut().zip(x) {
            // The product is exact, so this is the fused multiply-add of the other paths.
            *sum += f64::from(x) * f64::from(x);
        }
        sums
    }

    #[inline(always)]
    fn doubles(self, sums: [f64; LANES]) -> [f64; LANES] {
        sums
    }
}
