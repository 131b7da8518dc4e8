//! Initial parameters: a pure function of the seed and of each tensor's name.
//!
//! Every tensor draws from a ChaCha stream of its own, keyed by the seed and a hash of its name, so
//! that adding a tensor or a block changes no other tensor. Uniform numbers are made from integers
//! and all transcendental functions come from `libm`, so the same seed gives the same bits on every
//! platform.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::layout::Tensor;

/// The distribution that a tensor is drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initializer {
    /// Every element the same.
    Constant(f32),
    /// Normal with mean 0.
    Normal {
        /// The standard deviation.
        standard_deviation: f64,
    },
    /// Uniform in `[-bound, bound)`.
    Uniform {
        /// The bound.
        bound: f64,
    },
    /// `ln(1), ln(2), ..., ln(n)` in every row: Mamba's `A_log` (S4D-real, Gu et al., 2022).
    LogOfColumn,
    /// `ln(a)`, a uniform in `[least, most)`: Mamba-2's `A_log`.
    LogOfUniform {
        /// The least value that is drawn.
        least: f64,
        /// An upper bound that is not drawn itself.
        most: f64,
    },
    /// `softplus^-1(dt)` where `dt` is log-uniform in `[least, most]` but at least `floor`: the bias of Mamba's step sizes.
    InverseSoftplusOfLogUniform {
        /// The least step size that is drawn.
        least: f64,
        /// The largest step size that is drawn.
        most: f64,
        /// Smaller draws are raised to this value.
        floor: f64,
    },
}

impl Initializer {
    /// Writes `out`, the logical elements of `tensor`.
    pub(crate) fn fill(self, out: &mut [f32], tensor: &Tensor, seed: u64) {
        let mut draws = Draws::new(seed, &tensor.name);
        match self {
            Self::Constant(value) => out.fill(value),
            Self::Normal { standard_deviation } => {
                out.fill_with(|| (standard_deviation * draws.normal()) as f32);
            }
            Self::Uniform { bound } => {
                out.fill_with(|| ((2.0 * draws.uniform() - 1.0) * bound) as f32);
            }
            Self::LogOfColumn => {
                let columns = tensor.shape.last().copied().unwrap_or(1);
                for (index, value) in out.iter_mut().enumerate() {
                    *value = libm::log((index % columns + 1) as f64) as f32;
                }
            }
            Self::LogOfUniform { least, most } => {
                out.fill_with(|| libm::log(least + draws.uniform() * (most - least)) as f32);
            }
            Self::InverseSoftplusOfLogUniform { least, most, floor } => {
                let (low, high) = (libm::log(least), libm::log(most));
                out.fill_with(|| {
                    let dt = libm::exp(draws.uniform() * (high - low) + low).max(floor);
                    (dt + libm::log(-libm::expm1(-dt))) as f32
                });
            }
        }
    }
}

/// The random numbers of one tensor.
struct Draws {
    generator: ChaCha8Rng,
}

impl Draws {
    fn new(seed: u64, name: &str) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&fnv1a(name.as_bytes()).to_le_bytes());
        Self { generator: ChaCha8Rng::from_seed(key) }
    }

    /// Uniform in `[0, 1)`, a multiple of 2^-53.
    fn uniform(&mut self) -> f64 {
        (self.generator.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Normal with mean 0 and standard deviation 1 (Box and Muller, 1958).
    fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.uniform()));
        radius * libm::cos(std::f64::consts::TAU * self.uniform())
    }
}

/// The 64-bit FNV-1a hash: short, and the same everywhere.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Decay, Reading};

    fn tensor(name: &str, shape: &[usize]) -> Tensor {
        let stored_elements = shape.iter().product();
        Tensor {
            name: name.into(),
            shape: shape.to_vec(),
            offset: 0,
            row_multiple: 1,
            stored_elements,
            decay: Decay::Decayed,
            reading: Reading::Both,
        }
    }

    fn draw(initializer: Initializer, name: &str, seed: u64) -> Vec<f32> {
        let mut arena = vec![f32::NAN; 20_000];
        initializer.fill(&mut arena, &tensor(name, &[1250, 16]), seed);
        arena
    }

    #[test]
    fn draws_depend_on_seed_and_name_alone() {
        let normal = Initializer::Normal { standard_deviation: 0.5 };
        assert_eq!(draw(normal, "a", 1), draw(normal, "a", 1));
        assert_ne!(draw(normal, "a", 1), draw(normal, "a", 2));
        assert_ne!(draw(normal, "a", 1), draw(normal, "b", 1));
        // The published test vector of FNV-1a.
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let moments = |values: &[f32]| {
            let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
            (mean, variance / values.len() as f64)
        };
        // Five standard errors of 20,000 draws.
        let (mean, variance) =
            moments(&draw(Initializer::Normal { standard_deviation: 0.5 }, "a", 1));
        assert!(mean.abs() < 5.0 * 0.5 / 141.0 && (variance / 0.25 - 1.0).abs() < 0.05);
        let uniform = draw(Initializer::Uniform { bound: 3.0 }, "a", 1);
        let (mean, variance) = moments(&uniform);
        assert!(mean.abs() < 5.0 * 1.75 / 141.0 && (variance / 3.0 - 1.0).abs() < 0.05);
        assert!(uniform.iter().all(|x| x.abs() <= 3.0));
    }

    #[test]
    fn step_sizes_come_back_through_softplus() {
        let initializer =
            Initializer::InverseSoftplusOfLogUniform { least: 1e-3, most: 0.1, floor: 1e-4 };
        for bias in draw(initializer, "dt", 3) {
            let dt = f64::from(bias).exp().ln_1p();
            assert!((0.999e-3..0.1001).contains(&dt), "{dt}");
        }
        let rates = draw(Initializer::LogOfUniform { least: 1.0, most: 16.0 }, "a", 3);
        let rates: Vec<f64> = rates.iter().map(|&log| f64::from(log).exp()).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        assert!(rates.iter().all(|rate| (0.9999..16.0001).contains(rate)));
        // Five standard errors of 20,000 draws.
        assert!((mean - 8.5).abs() < 5.0 * 4.34 / 141.0, "{mean}");
        let a_log = draw(Initializer::LogOfColumn, "a", 0);
        assert_eq!(a_log[16..18], [0.0, std::f32::consts::LN_2]);
    }
}
