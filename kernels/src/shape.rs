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

mod attention;
mod head_scan;

pub use self::attention::{AttentionShape, MOST_HEAD_WIDTH};
pub use self::head_scan::{HeadScanShape, HeadScanSizes};
use crate::error::{KernelError, Result};

fn at_least_one(kernel: &'static str, what: &'static str, found: usize) -> Result<()> {
    if found == 0 { Err(KernelError::shape(kernel, what, "at least 1", 0)) } else { Ok(()) }
}

/// The most that kernels add to a size to round it up to whole tiles.
const PADDING: usize = 64;

/// Asks the product of `sizes`, elements of up to eight bytes, to be a size of memory that there may be; so no kernel and no
/// launcher has to look whether products of the shape's sizes wrap.
fn countable(kernel: &'static str, what: &'static str, sizes: &[usize]) -> Result<()> {
    const MOST: usize = isize::MAX as usize / size_of::<f64>();
    let product = sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
    match product {
        Some(product) if product <= MOST => Ok(()),
        _ => Err(KernelError::shape(kernel, what, format!("at most {MOST}"), format!("{sizes:?}"))),
    }
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
        let start = grain.saturating_mul(self.rows_per_grain).min(self.rows);
        start..start.saturating_add(self.rows_per_grain).min(self.rows)
    }
}

/// Sequences in a microbatch: b samples of t positions each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceShape {
    samples: usize,
    positions: usize,
}

impl SequenceShape {
    /// `samples` samples of `positions` positions.
    ///
    /// # Errors
    /// A size of zero, or more rows than can be counted.
    pub fn new(samples: usize, positions: usize) -> Result<Self> {
        at_least_one("sequences", "samples", samples)?;
        at_least_one("sequences", "positions", positions)?;
        countable("sequences", "rows", &[samples, positions])?;
        Ok(Self { samples, positions })
    }

    /// b, samples.
    pub fn samples(self) -> usize {
        self.samples
    }

    /// t, positions of each sample.
    pub fn positions(self) -> usize {
        self.positions
    }

    /// b * t.
    pub fn rows(self) -> usize {
        self.samples * self.positions
    }
}

/// The statistic that the elements of a row are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm: the root of the mean square.
    RootMeanSquare,
    /// Layer norm: the deviation from the mean.
    Layer,
}

impl NormKind {
    /// The names of its kernels in errors, forward and backward.
    pub(crate) fn kernels(self) -> [&'static str; 2] {
        match self {
            Self::RootMeanSquare => ["rms_norm_forward", "rms_norm_backward"],
            Self::Layer => ["layer_norm_forward", "layer_norm_backward"],
        }
    }
}

/// A norm over rows of `width` elements: RMSNorm (Zhang and Sennrich, 2019) or layer norm (Ba et al., 2016). Where a row holds several
/// heads, each of them is normed by itself with the same weight (Henry et al., 2020).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormShape {
    kind: NormKind,
    grains: GrainRows,
    heads: usize,
    width: usize,
    eps: f32,
}

impl NormShape {
    /// An RMSNorm over `grains.rows()` rows of `width` elements.
    ///
    /// # Errors
    /// A width of zero, more elements than can be counted, or an `eps` that is negative or not finite.
    pub fn rms(grains: GrainRows, width: usize, eps: f32) -> Result<Self> {
        Self::new(NormKind::RootMeanSquare, grains, 1, width, eps)
    }

    /// An RMSNorm over each of the `heads` heads, of `width` elements, that follow each other in each of `grains.rows()` rows of activations.
    ///
    /// # Errors
    /// No heads, and as of [`rms`](Self::rms).
    pub fn rms_of_heads(grains: GrainRows, heads: usize, width: usize, eps: f32) -> Result<Self> {
        Self::new(NormKind::RootMeanSquare, grains, heads, width, eps)
    }

    /// A layer norm over `grains.rows()` rows of `width` elements.
    ///
    /// # Errors
    /// As of [`rms`](Self::rms).
    pub fn layer(grains: GrainRows, width: usize, eps: f32) -> Result<Self> {
        Self::new(NormKind::Layer, grains, 1, width, eps)
    }

    fn new(
        kind: NormKind,
        grains: GrainRows,
        heads: usize,
        width: usize,
        eps: f32,
    ) -> Result<Self> {
        let kernel = match kind {
            NormKind::RootMeanSquare => "rms_norm",
            NormKind::Layer => "layer_norm",
        };
        at_least_one(kernel, "heads", heads)?;
        at_least_one(kernel, "width", width)?;
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(KernelError::shape(kernel, "eps", "a finite number >= 0", eps));
        }
        countable(kernel, "elements", &[grains.rows(), heads, width])?;
        Ok(Self { kind, grains, heads, width, eps })
    }

    /// Which norm.
    pub fn kind(self) -> NormKind {
        self.kind
    }

    /// Rows, and how they divide into grains.
    pub fn grains(self) -> GrainRows {
        self.grains
    }

    /// h, the parts of a row that are normed each by itself.
    pub fn heads(self) -> usize {
        self.heads
    }

    /// d, the elements that are normed together: those of a row, or of a head.
    pub fn width(self) -> usize {
        self.width
    }

    /// h d, elements of a row.
    pub fn columns(self) -> usize {
        self.heads * self.width
    }

    /// The rows, or the heads of rows, that have a statistic of their own, and how they divide into grains.
    pub fn normed(self) -> GrainRows {
        let GrainRows { rows, rows_per_grain } = self.grains;
        GrainRows {
            rows: rows * self.heads,
            rows_per_grain: rows_per_grain.saturating_mul(self.heads),
        }
    }

    /// Elements of the statistics: one of each that is normed, or two of a layer norm.
    pub fn statistics(self) -> usize {
        let each = match self.kind {
            NormKind::RootMeanSquare => 1,
            NormKind::Layer => 2,
        };
        each * self.normed().rows()
    }

    /// Added to the mean square, or to the variance, before the root.
    pub fn eps(self) -> f32 {
        self.eps
    }
}

/// Asks the limit of a clamp to be one.
pub(crate) fn check_limit(kernel: &'static str, limit: f32) -> Result<()> {
    if limit.is_finite() && limit > 0.0 {
        return Ok(());
    }
    Err(KernelError::shape(kernel, "limit", "a finite number > 0", limit))
}

/// Causal depthwise convolution: `width` taps over each of `channels` channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    sequences: SequenceShape,
    samples_per_grain: usize,
    channels: usize,
    width: usize,
}

impl ConvShape {
    /// A convolution of `width` taps over `channels` channels.
    ///
    /// # Errors
    /// A size of zero, more than 16 taps, or more elements than can be counted.
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
        let samples = samples_per_grain.min(sequences.samples);
        countable("causal_conv1d", "elements", &[sequences.rows(), channels, width + 1])?;
        Ok(Self { sequences, samples_per_grain: samples, channels, width })
    }

    /// b and t.
    pub fn sequences(self) -> SequenceShape {
        self.sequences
    }

    /// Samples of every grain but perhaps the last; at most b.
    pub fn samples_per_grain(self) -> usize {
        self.samples_per_grain
    }

    /// e, channels.
    pub fn channels(self) -> usize {
        self.channels
    }

    /// k, taps.
    pub fn width(self) -> usize {
        self.width
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
    sequences: SequenceShape,
    samples_per_grain: usize,
    channels: usize,
    states: usize,
}

impl ScanShape {
    /// A scan over `channels` channels of `states` states.
    ///
    /// # Errors
    /// A size of zero, more than 256 states, or more elements than can be counted.
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
        let samples = samples_per_grain.min(sequences.samples);
        // Memory of kernels is for positions and channels rounded up.
        let [t, e] = [sequences.positions, channels].map(|size| size.saturating_add(PADDING));
        let sizes = [sequences.samples, t, e, states + 2];
        countable("selective_scan", "elements", &sizes)?;
        Ok(Self { sequences, samples_per_grain: samples, channels, states })
    }

    /// b and t.
    pub fn sequences(self) -> SequenceShape {
        self.sequences
    }

    /// Samples of every grain but perhaps the last; at most b.
    pub fn samples_per_grain(self) -> usize {
        self.samples_per_grain
    }

    /// e, channels.
    pub fn channels(self) -> usize {
        self.channels
    }

    /// n, states of a channel.
    pub fn states(self) -> usize {
        self.states
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyShape {
    rows: usize,
    vocab_size: usize,
    row_stride: usize,
    logit_scale: f32,
}

impl CrossEntropyShape {
    /// `rows` rows over `vocab_size` tokens.
    ///
    /// # Errors
    /// A size of zero, rows that overlap, or more elements than can be counted.
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
        countable("cross_entropy", "elements", &[rows, row_stride])?;
        Ok(Self { rows, vocab_size, row_stride, logit_scale: 1.0 })
    }

    /// The same of logits that are multiplied by `logit_scale` first; 1 where nothing is said.
    ///
    /// # Errors
    /// A scale that is not a finite number above 0.
    pub fn with_logit_scale(self, logit_scale: f32) -> Result<Self> {
        if !(logit_scale.is_finite() && logit_scale > 0.0) {
            let expected = "a finite number above 0";
            return Err(KernelError::shape("cross_entropy", "logit scale", expected, logit_scale));
        }
        Ok(Self { logit_scale, ..self })
    }

    /// The factor of the logits.
    pub fn logit_scale(self) -> f32 {
        self.logit_scale
    }

    /// Rows of logits.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// v, the logical vocabulary.
    pub fn vocab_size(self) -> usize {
        self.vocab_size
    }

    /// Elements between rows of logits, at least `vocab_size`; what lies past it is padding.
    pub fn row_stride(self) -> usize {
        self.row_stride
    }
}
