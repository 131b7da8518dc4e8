//! The number types of device memory, as bodies see them: on the host every number is an `f32`, which holds those of
//! each type exactly.

use half::bf16;
use tidemill_kernels::Element;

/// A type of numbers that kernels read and write.
pub trait Number: Element + PartialEq + std::fmt::Debug {
    /// A NaN that no arithmetic produces.
    const POISON: Self;
    /// The largest relative error of rounding an fp32 result to this type.
    const ROUNDING: f64;

    /// The nearest number of this type.
    fn rounded(value: f32) -> Self;

    /// The same number; of a NaN, the bits too.
    fn widened(self) -> f32;
}

impl Number for f32 {
    const POISON: Self = f32::from_bits(0x7fc0_dead);
    const ROUNDING: f64 = 0.0;

    fn rounded(value: f32) -> Self {
        value
    }

    fn widened(self) -> f32 {
        self
    }
}

impl Number for bf16 {
    const POISON: Self = bf16::from_bits(0x7fda);
    const ROUNDING: f64 = 1.0 / 256.0;

    fn rounded(value: f32) -> Self {
        bf16::from_f32(value)
    }

    fn widened(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// Whole numbers of sixteen bits, such as the remainders of masters; each of them is a number that a kernel may write.
impl Number for u16 {
    const POISON: Self = 0xdead;
    const ROUNDING: f64 = 0.0;

    fn rounded(value: f32) -> Self {
        value as Self
    }

    fn widened(self) -> f32 {
        f32::from(self)
    }
}

/// `values` rounded to `T`.
pub fn rounded<T: Number>(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| T::rounded(value).widened()).collect()
}
