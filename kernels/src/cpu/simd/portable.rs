//! Sixteen lanes in an array: any processor, and the definition of the other two.

use super::{LANES, Lanes, Simd, Tile};

/// Needs no proof: every processor has it.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type Array = [f32; LANES];

/// `f` of each lane.
macro_rules! lanewise {
    (|$($lane:ident),+| $body:expr) => {{
        let mut out = [0.0; LANES];
        for (i, out) in out.iter_mut().enumerate() {
            $(let $lane = $lane[i];)+
            *out = $body;
        }
        out
    }};
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

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn add(self, a: Array, b: Array) -> Array {
        lanewise!(|a, b| a + b)
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn sub(self, a: Array, b: Array) -> Array {
        lanewise!(|a, b| a - b)
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn mul(self, a: Array, b: Array) -> Array {
        lanewise!(|a, b| a * b)
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn div(self, a: Array, b: Array) -> Array {
        lanewise!(|a, b| a / b)
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn mul_add(self, a: Array, b: Array, c: Array) -> Array {
        lanewise!(|a, b, c| a.mul_add(b, c))
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn neg_mul_add(self, a: Array, b: Array, c: Array) -> Array {
        lanewise!(|a, b, c| (-a).mul_add(b, c))
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn max(self, a: Array, b: Array) -> Array {
        lanewise!(|a, b| if a > b { a } else { b })
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn min(self, a: Array, b: Array) -> Array {
        lanewise!(|a, b| if a < b { a } else { b })
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn abs(self, a: Array) -> Array {
        lanewise!(|a| a.abs())
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn sqrt(self, a: Array) -> Array {
        lanewise!(|a| a.sqrt())
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn select_by_sign(self, x: Array, positive: Array, negative: Array) -> Array {
        lanewise!(|x, positive, negative| if x.is_sign_negative() { negative } else { positive })
    }

    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    fn scale_by_power(self, p: Array, r: Array) -> Array {
        lanewise!(|p, r| f32::from_bits(p.to_bits().wrapping_add(r.to_bits() << 23)))
    }

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
