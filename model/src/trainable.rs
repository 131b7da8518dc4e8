//! What the training graph needs of a model; a user's own model implements [`Trainable`].
//!
//! A model is stateless: parameters are leased to it block by block ([`ParameterSource`]), activations live in a
//! workspace that is planned once per shape, and gradients leave through a [`GradientSink`]. So it knows nothing of
//! workers, lanes or sharding. What it must promise for the weights to be the same to the bit everywhere:
//!
//! - a sample's loss and data gradients depend on nothing else in the microbatch;
//! - gradients of parameters are formed per grain from +0.0, of the *sum* of token losses, and added
//!   to the sink's accumulators grain by grain, in order.

use tidemill_kernels::shape::{GrainRows, SequenceShape};
use tidemill_kernels::{Backend, SliceMut};

use crate::error::Result;
use crate::layout::Layout;
use crate::parameter_source::ParameterSource;

/// A backend and the device stream that a model enqueues its kernels on.
pub struct Device<'a, B: Backend> {
    /// The backend.
    pub backend: &'a B,
    /// The device stream.
    pub stream: &'a mut B::DeviceStream,
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
#[derive(Clone, Copy, Debug)]
pub struct Microbatch<'a> {
    /// `tokens[b, t + 1]`: inputs are columns `0..t`, targets are columns `1..=t`.
    ///
    /// [`IGNORED_TARGET`](tidemill_kernels::IGNORED_TARGET) fills the end of samples that are shorter than others: as a target
    /// it is not counted, as an input it reads as token 0.
    pub tokens: &'a [u32],
    /// b, samples.
    pub samples: usize,
    /// t, positions.
    pub positions: usize,
    /// Samples of every grain but perhaps the last.
    pub samples_per_grain: usize,
    /// The token that ends a document, where documents see nothing of each other: as an input it is the last of its document,
    /// and its target, which begins the next, is not counted. `None`: a sample is one document.
    pub document_end: Option<u32>,
}

impl Microbatch<'_> {
    /// The shape.
    pub fn shape(&self) -> MicrobatchShape {
        let Self { samples, positions, samples_per_grain, .. } = *self;
        MicrobatchShape { samples, positions, samples_per_grain }
    }

    /// The number of grains.
    pub fn grains(&self) -> usize {
        self.samples.div_ceil(self.samples_per_grain)
    }
}

/// What one grain adds to the loss of its lane.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GrainLoss {
    /// The sum of the losses of counted tokens, in nats, added in row order.
    pub loss_sum: f64,
    /// The number of counted tokens.
    pub tokens: u64,
}

/// Where a backward pass leaves its gradients: the accumulators of the current lane.
pub trait GradientSink<B: Backend> {
    /// The lane's accumulator of use `use_index` of the model's layout, as long as its segment. Gradients are
    /// *added* to it, grain by grain, in order.
    fn accumulator(&mut self, use_index: usize) -> SliceMut<'_, B, f32>;

    /// Says that every use of block `block` now holds all grains of this microbatch. Called exactly once per
    /// block and backward pass, the last block first.
    ///
    /// # Errors
    /// A receiver that is gone; the model then returns this error at once.
    fn block_done(&mut self, device: &mut Device<'_, B>, block: usize) -> Result<()>;
}

/// A model that the training graph can train on backend `B`.
pub trait Trainable<B: Backend>: Send + Sync + 'static {
    /// Activations and scratch for microbatches up to a planned shape.
    type Workspace: Send;

    /// The parameters, blocks and uses.
    fn layout(&self) -> &Layout;

    /// The initial parameter arena: a pure function of `seed`.
    fn initialize(&self, seed: u64) -> Vec<f32>;

    /// What identifies the model in a checkpoint: its `config.json`, in the Hugging Face layout where
    /// there is one.
    fn config_json(&self) -> serde_json::Value;

    /// The number of tokens of the vocabulary: inputs and targets lie below it.
    fn vocab_size(&self) -> usize;

    /// Allocates everything that microbatches up to `shape` need.
    ///
    /// # Errors
    /// A shape that the model cannot take, or a device without room.
    fn plan(&self, device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<Self::Workspace>;

    /// The counted tokens of a microbatch, where they can be told without computing it: they are those that its losses come with.
    /// The optimizer divides by those of the whole step; where it is told them before, it forms mean gradients while the rest of the
    /// backward pass still runs.
    fn counted_tokens(&self, microbatch: Microbatch<'_>) -> Option<u64> {
        let _ = microbatch;
        None
    }

    /// The losses of a microbatch, grain by grain. It enters the blocks of `parameters` forward.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, or a device that fails.
    fn forward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>>;

    /// `so_far` and the losses of the next samples of the same grain, which are the one grain of `microbatch`: what a grain
    /// that is longer than the workspace goes through, piece after piece.
    ///
    /// As it stands here each piece is summed apart. A model that adds row after row to `so_far` instead, as
    /// [`GrainLoss`] says, gives such a grain the bits that it would have as a whole.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_onto(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
        so_far: GrainLoss,
    ) -> Result<GrainLoss> {
        let pieces = self.forward(device, workspace, parameters, microbatch)?;
        Ok(pieces.iter().fold(so_far, |sum, piece| GrainLoss {
            loss_sum: sum.loss_sum + piece.loss_sum,
            tokens: sum.tokens + piece.tokens,
        }))
    }

    /// The losses of a microbatch, grain by grain, its gradients added to `sink`. It enters the blocks of `parameters` forward,
    /// then backward.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, a device that fails, or a sink that is gone.
    fn forward_backward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Vec<GrainLoss>>;
}
