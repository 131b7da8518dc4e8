//! Tokens that are drawn from rows of logits, and the settings of the draw.

use super::Runtime;
use crate::error::{KernelError, Result};
use crate::view::{Matrix, Slice, SliceMut};

/// The settings of a [draw](Draw::draw) from a row of logits. They apply in the order of the fields, each to the probabilities that
/// the one before has left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawSettings {
    /// Logits are divided by it.
    pub temperature: f64,
    /// Only the k most likely tokens, and those that are as likely as the last of them; 0 for all.
    pub top_k: usize,
    /// Only the fewest most likely tokens whose probabilities reach this sum, of equal ones the lowest; 1 for all (Holtzman et al., 2020).
    pub top_p: f64,
    /// Only tokens at least this many times as likely as the most likely one; 0 for all (Nguyen et al., 2024).
    pub min_p: f64,
}

/// A token drawn from each row of logits. See the [module](super) for what every kernel promises.
pub trait Draw: Runtime {
    /// `tokens[row]` is drawn from `scale logits[row, column]` by `uniforms[row]`, in [0, 1), as
    /// [`draw`](crate::draw) defines it, or is `NO_TOKEN`(super::NO_TOKEN): where one of the row's logits is no finite number, and where roundings in
    /// another order than the definition's might change the token. So a row's token, where it has one, is the definition's to the bit,
    /// whatever else is in the batch. `NO_TOKEN` is as rare as that: of v columns at most 8 v^2 2^-53 of the draws, one in 450,000 at
    /// 50,257; more where many weights are equal and `top_p` cuts among them.
    ///
    /// # Errors
    /// More or fewer tokens or uniform numbers than rows, columns that are not contiguous, settings that
    /// [`check`](DrawSettings::check) refuses, or a device that fails.
    fn draw(
        &self,
        stream: &mut Self::DeviceStream,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, f32>,
        uniforms: Slice<'_, Self, f64>,
        scale: f32,
        settings: &DrawSettings,
    ) -> Result<()>;
}

/// Temperatures that a finite fp32, other than zero, can be divided by without overflow or underflow in f64.
const TEMPERATURES: std::ops::RangeInclusive<f64> = 1e-200..=1e200;
/// The least probability ratio beside 0: relative errors of smaller weights are not bounded.
const LEAST_RATIO: f64 = 1e-290;

impl DrawSettings {
    /// Asks every value to be one that every device can draw with.
    ///
    /// # Errors
    /// A temperature outside 10^-200 to 10^200, a sum of probabilities that is not above 0 and at most 1, or a ratio that is neither 0 nor
    /// from 10^-290 to 1.
    pub fn check(&self) -> Result<()> {
        let refused = |what, expected, found: f64| {
            Err(KernelError::shape("draw", what, expected, format!("{found:e}")))
        };
        if !TEMPERATURES.contains(&self.temperature) {
            return refused("temperature", "1e-200 to 1e200", self.temperature);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refused("top_p", "a number above 0 and at most 1", self.top_p);
        }
        if self.min_p != 0.0 && !(LEAST_RATIO..=1.0).contains(&self.min_p) {
            return refused("min_p", "0, or 1e-290 to 1", self.min_p);
        }
        Ok(())
    }
}
