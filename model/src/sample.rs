//! What a model is trained on: a sample of it, and the samples that it computes with at once.
//!
//! The graph carries samples from their source to the model and looks at nothing of them but their length. Tokens are one kind; a
//! model of other data has a type of its own.

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
    /// t, the positions of a sample. All samples of a run have as many as its plan says: one, where a sample is no sequence.
    fn positions(&self) -> usize {
        1
    }
}

/// `tokens[t + 1]`: inputs are the first t, targets the last t.
///
/// A token with the bit [`UNCOUNTED`] is read like every other, and not counted as a target.
/// [`IGNORED_TARGET`](tidemill_kernels::IGNORED_TARGET) fills the end of samples that are shorter than others: as a target
/// it is not counted, as an input it reads as token 0.
pub type Tokens = Vec<u32>;

/// The bit of a token that is given and not to be predicted, such as those of a question; no vocabulary is as large.
pub const UNCOUNTED: u32 = 1 << 31;

impl Sample for Tokens {
    fn positions(&self) -> usize {
        self.len().saturating_sub(1)
    }
}

/// The shape of a microbatch: of the one at hand, or of the largest that a workspace must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicrobatchShape {
    /// b, samples at most.
    pub samples: usize,
    /// t, positions of each sample.
    pub positions: usize,
    /// Samples of every grain but perhaps the last.
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

    /// The rows, b * t, and how they divide into grains.
    ///
    /// # Errors
    /// A size of zero.
    pub fn grain_rows(self) -> Result<GrainRows> {
        let rows = self.sequences()?.rows();
        Ok(GrainRows::new(rows, self.samples_per_grain.saturating_mul(self.positions))?)
    }
}

/// Consecutive samples of one lane: a whole number of grains, the last of which may be short.
#[derive(Debug)]
pub struct Microbatch<'a, S = Tokens> {
    /// `samples[b]`
    pub samples: &'a [S],
    /// t, positions of each sample.
    pub positions: usize,
    /// Samples of every grain but perhaps the last.
    pub samples_per_grain: usize,
    /// The token that ends a document, where documents see nothing of each other: as an input it is the last of its document,
    /// and its target, which begins the next, is not counted. `None`: a sample is one document, or holds no tokens.
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
