//! Checked shapes: constructing one is the validation, and a kernel takes the checked shape.
//!
//! The letters, used everywhere in this workspace:
//!
//! | letter | meaning | | letter | meaning |
//! |---|---|---|---|---|
//! | b | samples | | k | convolution width |
//! | t | positions of a sample | | h | heads |
//! | d | model width | | p | head width |
//! | e | inner (expanded) width | | f | MLP width |
//! | n | state size | | v | vocabulary |
//! | r | rank of dt | | | |
//!
//! A *row* is one position of one sample; rows are ordered by sample, then by position.

use crate::error::{KernelError, Result};

fn at_least_one(kernel: &'static str, what: &'static str, found: usize) -> Result<()> {
    if found == 0 { Err(KernelError::shape(kernel, what, "at least 1", 0)) } else { Ok(()) }
}

/// How the rows of a microbatch divide into grains: grain `g` holds rows
/// `g * rows_per_grain .. min((g + 1) * rows_per_grain, rows)`; the last may be short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrainRows {
    rows: usize,
    rows_per_grain: usize,
}

impl GrainRows {
    /// `rows` rows cut into grains of `rows_per_grain`.
    ///
    /// # Errors
    /// A size of zero.
    pub fn new(rows: usize, rows_per_grain: usize) -> Result<Self> {
        at_least_one("grains", "rows", rows)?;
        at_least_one("grains", "rows per grain", rows_per_grain)?;
        Ok(Self { rows, rows_per_grain })
    }

    /// The number of grains.
    pub fn grains(self) -> usize {
        self.rows.div_ceil(self.rows_per_grain)
    }

    /// The number of rows of all grains.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// The rows of every grain but perhaps the last.
    pub fn rows_per_grain(self) -> usize {
        self.rows_per_grain
    }

    /// The rows of grain `grain`.
    pub fn range(self, grain: usize) -> std::ops::Range<usize> {
        let start = (grain * self.rows_per_grain).min(self.rows);
        start..(start + self.rows_per_grain).min(self.rows)
    }
}

/// Sequences in a microbatch: b samples of t positions each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceShape {
    /// b, samples.
    pub samples: usize,
    /// t, positions of each sample.
    pub positions: usize,
}

impl SequenceShape {
    /// `samples` samples of `positions` positions.
    ///
    /// # Errors
    /// A size of zero.
    pub fn new(samples: usize, positions: usize) -> Result<Self> {
        at_least_one("sequences", "samples", samples)?;
        at_least_one("sequences", "positions", positions)?;
        Ok(Self { samples, positions })
    }

    /// b * t.
    pub fn rows(self) -> usize {
        self.samples * self.positions
    }
}

/// RMSNorm over rows of `width` elements (Zhang and Sennrich, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormShape {
    /// Rows, and how they divide into grains.
    pub grains: GrainRows,
    /// d, elements of a row.
    pub width: usize,
    /// Added to the mean square before the root.
    pub eps: f32,
}

impl NormShape {
    /// A norm over `grains.rows()` rows of `width` elements.
    ///
    /// # Errors
    /// A width of zero, or an `eps` that is negative or not finite.
    pub fn new(grains: GrainRows, width: usize, eps: f32) -> Result<Self> {
        at_least_one("rms_norm", "width", width)?;
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(KernelError::shape("rms_norm", "eps", "a finite number >= 0", eps));
        }
        Ok(Self { grains, width, eps })
    }
}

/// Causal depthwise convolution: `width` taps over each of `channels` channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    /// b and t.
    pub sequences: SequenceShape,
    /// Samples of every grain but perhaps the last.
    pub samples_per_grain: usize,
    /// e, channels.
    pub channels: usize,
    /// k, taps.
    pub width: usize,
}

impl ConvShape {
    /// A convolution of `width` taps over `channels` channels.
    ///
    /// # Errors
    /// A size of zero, or more than 16 taps.
    pub fn new(
        sequences: SequenceShape,
        samples_per_grain: usize,
        channels: usize,
        width: usize,
    ) -> Result<Self> {
        at_least_one("causal_conv1d", "samples per grain", samples_per_grain)?;
        at_least_one("causal_conv1d", "channels", channels)?;
        if !(1..=16).contains(&width) {
            return Err(KernelError::shape("causal_conv1d", "width", "1 to 16 taps", width));
        }
        Ok(Self { sequences, samples_per_grain, channels, width })
    }

    /// The grains, counted in rows.
    pub fn grains(self) -> GrainRows {
        GrainRows {
            rows: self.sequences.rows(),
            rows_per_grain: self.samples_per_grain * self.sequences.positions,
        }
    }
}

/// Selective scan of `channels` channels with `states` states each (Gu and Dao, 2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    /// b and t.
    pub sequences: SequenceShape,
    /// Samples of every grain but perhaps the last.
    pub samples_per_grain: usize,
    /// e, channels.
    pub channels: usize,
    /// n, states of a channel.
    pub states: usize,
}

impl ScanShape {
    /// A scan over `channels` channels of `states` states.
    ///
    /// # Errors
    /// A size of zero, or more than 256 states.
    pub fn new(
        sequences: SequenceShape,
        samples_per_grain: usize,
        channels: usize,
        states: usize,
    ) -> Result<Self> {
        at_least_one("selective_scan", "samples per grain", samples_per_grain)?;
        at_least_one("selective_scan", "channels", channels)?;
        if !(1..=256).contains(&states) {
            return Err(KernelError::shape("selective_scan", "states", "1 to 256", states));
        }
        Ok(Self { sequences, samples_per_grain, channels, states })
    }

    /// The grains, counted in rows.
    pub fn grains(self) -> GrainRows {
        GrainRows {
            rows: self.sequences.rows(),
            rows_per_grain: self.samples_per_grain * self.sequences.positions,
        }
    }
}

/// Cross-entropy of `rows` rows of logits over `vocab_size` tokens, the rows `row_stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropyShape {
    /// Rows of logits.
    pub rows: usize,
    /// v, the logical vocabulary.
    pub vocab_size: usize,
    /// Elements between rows of logits, at least `vocab_size`; what lies past it is padding.
    pub row_stride: usize,
}

impl CrossEntropyShape {
    /// `rows` rows over `vocab_size` tokens.
    ///
    /// # Errors
    /// A size of zero, or rows that overlap.
    pub fn new(rows: usize, vocab_size: usize, row_stride: usize) -> Result<Self> {
        at_least_one("cross_entropy", "rows", rows)?;
        at_least_one("cross_entropy", "vocab size", vocab_size)?;
        if row_stride < vocab_size {
            return Err(KernelError::shape(
                "cross_entropy",
                "row stride",
                format!("at least {vocab_size}"),
                row_stride,
            ));
        }
        Ok(Self { rows, vocab_size, row_stride })
    }
}
