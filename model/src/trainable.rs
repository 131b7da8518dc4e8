//! What the training graph needs of a model; a user's own model implements [`Trainable`].
//!
//! A model is stateless: parameters are leased to it block by block ([`ParameterSource`]), activations live in a
//! workspace that is planned once per shape, and gradients leave through a [`GradientSink`]. So it knows nothing of
//! workers, lanes or sharding. What it must promise for the weights to be the same to the bit everywhere:
//!
//! - a sample's loss and data gradients depend on nothing else in the microbatch;
//! - gradients of parameters are formed per grain from +0.0, of the *sum* of losses, and added
//!   to the sink's accumulators grain by grain, in order.

use tidemill_kernels::{Backend, SliceMut};

use crate::error::Result;
use crate::layout::Layout;
use crate::parameter_source::ParameterSource;
use crate::sample::{Microbatch, MicrobatchShape, Sample};

/// A backend and the device stream that a model enqueues its kernels on.
pub struct Device<'a, B: Backend> {
    /// The backend.
    pub backend: &'a B,
    /// The device stream.
    pub stream: &'a mut B::DeviceStream,
}

/// What one grain adds to the loss of its lane.
///
/// A model of tokens counts those that it predicts, with losses in nats. Another counts what its mean loss is over, such as
/// samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GrainLoss {
    /// The sum of the losses of what is counted, added in row order.
    pub loss_sum: f64,
    /// The number of counted tokens, or of what else is counted.
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
    /// What it is trained on: [`Tokens`](crate::sample::Tokens), or a type of the model's own.
    type Sample: Sample;

    /// Activations and scratch for microbatches up to a planned shape.
    type Workspace: Send;

    /// The parameters, blocks and uses.
    fn layout(&self) -> &Layout;

    /// The initial parameter arena: a pure function of `seed`.
    fn initialize(&self, seed: u64) -> Vec<f32>;

    /// What identifies the model in a checkpoint: its `config.json`, in the Hugging Face layout where
    /// there is one.
    fn config_json(&self) -> serde_json::Value;

    /// Allocates everything that microbatches up to `shape` need.
    ///
    /// # Errors
    /// A shape that the model cannot take, or a device without room.
    fn plan(&self, device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<Self::Workspace>;

    /// The counted tokens of a microbatch, where they can be told without computing it: they are those that its losses come with.
    /// The optimizer divides by those of the whole step; where it is told them before, it forms mean gradients while the rest of the
    /// backward pass still runs.
    fn counted_tokens(&self, microbatch: Microbatch<'_, Self::Sample>) -> Option<u64> {
        let _ = microbatch;
        None
    }

    /// The losses of a microbatch, grain by grain. It enters the blocks of `parameters` forward.
    ///
    /// # Errors
    /// Samples that it cannot take, such as tokens outside its vocabulary, or a device that fails.
    fn forward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, Self::Sample>,
    ) -> Result<Vec<GrainLoss>>;

    /// The losses of a microbatch, to the bits of [`forward`](Self::forward), and of each grain whether what it predicts is what the model
    /// finds likeliest, at every counted place. None, as it stands here, of a model that does not tell.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_greedy(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, Self::Sample>,
    ) -> Result<(Vec<GrainLoss>, Option<Vec<bool>>)> {
        Ok((self.forward(device, workspace, parameters, microbatch)?, None))
    }

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
        microbatch: Microbatch<'_, Self::Sample>,
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
    /// Samples that it cannot take, a device that fails, or a sink that is gone.
    fn forward_backward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, Self::Sample>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Vec<GrainLoss>>;
}
