//! Training data: a sample, and the samples of one microbatch.
//!
//! The graph carries samples from their source to the model and reads nothing of them but their
//! length. Tokens are one kind of sample; a model of other data has a sample type of its own.

use tidemill_kernels::shape::{GrainRows, SequenceShape};

use crate::error::Result;

/// A sample as a model takes it.
///
/// ```
/// /// Features, and what is to be told from them.
/// #[derive(Clone)]
/// struct Measurement {
///     features: [f32; 3],
///     target: f32,
/// }
///
/// impl tidemill_model::Sample for Measurement {}
/// ```
pub trait Sample: Clone + Send + 'static {
    /// t, the positions of a sample, equal for all samples of a run, as its plan says; 1 where a
    /// sample is not a sequence.
    fn positions(&self) -> usize {
        1
    }
}

/// `tokens[t + 1]`: inputs are the first t, targets the last t.
///
/// A token with the bit [`UNCOUNTED`] is an input like every other, but not counted as a target.
/// [`IGNORED_TARGET`](tidemill_kernels::IGNORED_TARGET) fills the end of short samples: as a target
/// it is not counted, as an input it reads as token 0.
pub type Tokens = Vec<u32>;

/// The bit of a token that is given and not predicted, such as those of a question; every
/// vocabulary is smaller than this bit.
pub const UNCOUNTED: u32 = 1 << 31;

impl Sample for Tokens {
    fn positions(&self) -> usize {
        self.len().saturating_sub(1)
    }
}

/// The shape of a microbatch: of one microbatch, or the largest that a workspace must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicrobatchShape {
    /// b, the samples, or the most samples.
    pub samples: usize,
    /// t, positions of each sample.
    pub positions: usize,
    /// The samples of every grain, except that the last may have fewer.
    pub samples_per_grain: usize,
}

impl MicrobatchShape {
    /// b and t.
    ///
    /// # Errors
    /// A size of zero.
    pub fn sequences(self) -> Result<SequenceShape> {
        Ok(SequenceShape::new(self.samples, self.positions)?)
    }

    /// The b * t rows, and how they divide into grains.
    ///
    /// # Errors
    /// A size of zero.
    pub fn grain_rows(self) -> Result<GrainRows> {
        let rows = self.sequences()?.rows();
        Ok(GrainRows::new(rows, self.samples_per_grain.saturating_mul(self.positions))?)
    }
}

/// Consecutive samples of one lane: whole grains, except that the last may be short.
#[derive(Debug)]
pub struct Microbatch<'a, S = Tokens> {
    /// `samples[b]`
    pub samples: &'a [S],
    /// t, positions of each sample.
    pub positions: usize,
    /// The samples of every grain, except that the last may have fewer.
    pub samples_per_grain: usize,
    /// The token that ends a document, where a sample holds several documents that do not attend to
    /// each other. It is the last input of its document; its target, the first token of the next
    /// document, is not counted. `None`: a sample is one document, or holds no tokens.
    pub document_end: Option<u32>,
}

impl<S> Clone for Microbatch<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Microbatch<'_, S> {}

impl<'a, S> Microbatch<'a, S> {
    /// The shape.
    pub fn shape(self) -> MicrobatchShape {
        let Self { samples, positions, samples_per_grain, .. } = self;
        MicrobatchShape { samples: samples.len(), positions, samples_per_grain }
    }

    /// The samples of each grain, in order.
    pub fn grains(self) -> std::slice::Chunks<'a, S> {
        self.samples.chunks(self.samples_per_grain.max(1))
    }
}
