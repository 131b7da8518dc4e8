//! Inputs of tests: a small generator of fixed seeds.

use super::number::{Number, rounded};

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Inputs {
    state: u64,
}

impl Inputs {
    /// The inputs of one case; a failing assertion names the seed in its label.
    pub fn new(seed: u64) -> Self {
        Self { state: seed.wrapping_mul(0x2545_f491_4f6c_dd1d) }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// `elements` numbers, uniform within `low .. high`.
    pub fn uniform(&mut self, elements: usize, low: f32, high: f32) -> Vec<f32> {
        let unit = |word: u64| (word >> 40) as f32 / (1_u64 << 24) as f32;
        (0..elements).map(|_| low + (high - low) * unit(self.next())).collect()
    }

    /// [`uniform`](Self::uniform) numbers that a `T` holds exactly, so that a kernel and its definition see the same.
    pub fn uniform_of<T: Number>(&mut self, elements: usize, low: f32, high: f32) -> Vec<f32> {
        rounded::<T>(&self.uniform(elements, low, high))
    }

    /// One of `choices` numbers from 0.
    pub fn pick(&mut self, choices: usize) -> usize {
        (self.next() % choices as u64) as usize
    }

    /// `rows` tokens of a vocabulary.
    pub fn tokens(&mut self, rows: usize, vocab_size: usize) -> Vec<u32> {
        (0..rows).map(|_| self.pick(vocab_size) as u32).collect()
    }
}

/// `elements` numbers over the range in which the sigmoid rises from 0 to 1.
pub fn from_tail_to_tail(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| (i as f32 - (elements / 2) as f32) * 0.28).collect()
}

/// The same numbers in `f64`.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}
