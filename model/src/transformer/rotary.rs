//! Rotary positions (RoFormer, Su et al., 2021): the angles by which the pairs of a head are
//! turned.
//!
//! ```text
//! angle_i(position) = position theta^(-2 i / p),   i < p / 2
//! ```
//!
//! The first half of a head holds the first parts of its pairs, the second half the second parts,
//! as in transformers. Cosines and sines are computed in f64 on the host and rounded once, so that
//! every device turns by the same numbers. A document's first token has position 0, wherever it
//! lies in its sample; a sequence in generation counts from its own first token.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};
use tidemill_kernels::{Backend, SliceMut};

use crate::error::{ModelError, Result};
use crate::trainable::Device;

/// Rotary positions of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// g, heads of keys and values: `h / g` heads of queries share each (grouped-query attention,
    /// Ainslie et al., 2023). The backward rotation adds the gradients of shared heads.
    pub key_value_heads: usize,
    /// The base of the angles' geometric sequence.
    pub theta: f64,
    /// How the angles are changed for a longer context.
    pub scaling: Option<RopeScaling>,
}

/// How Llama 3.1 stretches the slow angles to contexts longer than the original one. With `w = 2 pi
/// / frequency`, the positions of a full turn, and L the original positions:
///
/// ```text
/// frequency            where w < L / high_freq_factor
/// frequency / factor   where w > L / low_freq_factor
/// (1 - s) frequency / factor + s frequency,  s = (L / w - low) / (high - low),  between the two
/// ```
///
/// The source is transformers' `rope_type` `llama3`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// The factor by which the context is longer.
    pub factor: f64,
    /// The most turns within the original context of a slow angle.
    pub low_freq_factor: f64,
    /// The least turns within the original context of a fast angle.
    pub high_freq_factor: f64,
    /// L
    pub original_max_position_embeddings: usize,
}

impl RopeScaling {
    /// Refuses numbers that define no angles.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the key.
    pub fn check(&self) -> Result<()> {
        let Self { factor, low_freq_factor: low, high_freq_factor: high, .. } = *self;
        for (key, value) in [("rope_scaling.factor", factor), ("rope_scaling.low_freq_factor", low)]
        {
            if !(value.is_finite() && value > 0.0) {
                return Err(ModelError::config(key, "a number above 0", value));
            }
        }
        if !(high.is_finite() && high > low) {
            let expected = format!("a number above low_freq_factor, which is {low}");
            return Err(ModelError::config("rope_scaling.high_freq_factor", expected, high));
        }
        if self.original_max_position_embeddings == 0 {
            let key = "rope_scaling.original_max_position_embeddings";
            return Err(ModelError::config(key, "at least 1", 0));
        }
        Ok(())
    }

    fn scaled(&self, frequency: f64) -> f64 {
        let turns = self.original_max_position_embeddings as f64 * frequency / TAU;
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        if turns > high {
            frequency
        } else if turns < low {
            frequency / self.factor
        } else {
            let share = (turns - low) / (high - low);
            (1.0 - share) * frequency / self.factor + share * frequency
        }
    }
}

impl Rotary {
    /// `table[positions, p]`: for each position the cosines of its `p / 2` angles, then their
    /// sines.
    pub fn table(&self, positions: usize, head_width: usize) -> Vec<f32> {
        let half = head_width / 2;
        let frequency = |i: usize| {
            let frequency = libm::pow(self.theta, -((2 * i) as f64) / head_width as f64);
            self.scaling.map_or(frequency, |scaling| scaling.scaled(frequency))
        };
        let frequencies: Vec<f64> = (0..half).map(frequency).collect();
        let mut table = Vec::with_capacity(positions.saturating_mul(2 * half));
        for position in 0..positions {
            let angles = frequencies.iter().map(|frequency| position as f64 * frequency);
            table.extend(angles.clone().map(|angle| libm::cos(angle) as f32));
            table.extend(angles.map(|angle| libm::sin(angle) as f32));
        }
        table
    }

    /// [`table`](Self::table) on the device.
    pub(crate) fn table_on<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        positions: usize,
        head_width: usize,
    ) -> Result<B::Buffer<f32>> {
        let Device { backend, stream } = device;
        let table = self.table(positions, head_width);
        let mut buffer = backend.allocate(stream, table.len())?;
        backend.write(stream, SliceMut::all(&mut buffer), &table)?;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Rotary = Rotary { key_value_heads: 1, theta: 10_000.0, scaling: None };

    #[test]
    fn angles_by_hand() {
        let table = PLAIN.table(3, 4);
        assert_eq!(table[..4], [1.0, 1.0, 0.0, 0.0]);
        let expected = [2.0_f64.cos(), 0.02_f64.cos(), 2.0_f64.sin(), 0.02_f64.sin()];
        assert_eq!(table[8..], expected.map(|x| x as f32));
    }

    /// The values of transformers 4.57 for Llama 3.1's numbers: a fast angle, one between, and a
    /// slow one.
    #[test]
    fn slow_angles_are_stretched() {
        let scaling = RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        scaling.check().expect("Llama 3.1's");
        for (frequency, expected) in [
            (1.0, 1.0),
            (TAU / 1024.0, TAU / 1024.0),
            // One turn in 4,096 positions: two in the original context, a third of the way from 1
            // to 4.
            (TAU / 4096.0, TAU / 4096.0 * (2.0 / 3.0 / 8.0 + 1.0 / 3.0)),
            (TAU / 10_000.0, TAU / 80_000.0),
        ] {
            let found = scaling.scaled(frequency);
            assert!((found / expected - 1.0).abs() < 1e-12, "{frequency}: {found}");
        }
        let upside_down = RopeScaling { high_freq_factor: 0.5, ..scaling };
        let error = upside_down.check().expect_err("refused").to_string();
        assert!(error.starts_with("rope_scaling.high_freq_factor: expected a number above"));
    }
}
