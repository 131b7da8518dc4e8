//! The settings that tokens are drawn with.

use crate::error::{KernelError, Result};

/// What a [draw](super::Backend::draw) leaves of a row of logits, in the order of the fields, each over the probabilities that the one before has left.
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
