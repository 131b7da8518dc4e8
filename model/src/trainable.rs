//! The interface between the training graph and a model; a user's own model implements
//! [`Trainable`].
//!
//! A model is stateless: it leases parameters block by block ([`ParameterSource`]), keeps
//! activations in a workspace that is planned once per shape, and hands gradients to a
//! [`GradientSink`]. So it knows nothing of workers, lanes or owners. To keep the weights the
//! same to the bit everywhere, it must ensure:
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

/// The contribution of one grain to the loss of its lane.
///
/// A model of tokens counts its targets, with losses in nats. Another model counts the units that
/// its mean loss is over, such as samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GrainLoss {
    /// The sum of the losses of counted units, added in row order.
    pub loss_sum: f64,
    /// The number of counted tokens or other units.
    pub tokens: u64,
}

/// The receiver of the gradients of a backward pass: the accumulators of the current lane.
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
    /// The type of its samples: [`Tokens`](crate::sample::Tokens), or a type of the model's own.
    type Sample: Sample;

    /// Activations and scratch for microbatches up to a planned shape.
    type Workspace: Send;

    /// The parameters, blocks and uses.
    fn layout(&self) -> &Layout;

    /// The initial parameter arena: a pure function of `seed`.
    fn initialize(&self, seed: u64) -> Vec<f32>;

    /// The identity of the model in a checkpoint: its `config.json`, in the Hugging Face layout
    /// where there is one.
    fn config_json(&self) -> serde_json::Value;

    /// Allocates everything that microbatches up to `shape` need.
    ///
    /// # Errors
    /// A shape that the model cannot take, or a device without room.
    fn plan(&self, device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<Self::Workspace>;

    /// The counted tokens of a microbatch, if the model can count them without computing it: the
    /// same number that its losses come with. The optimizer divides by the count of the whole step;
    /// with the count known early, it forms mean gradients while the rest of the backward pass
    /// still runs.
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

    /// The losses of a microbatch, to the bits of [`forward`](Self::forward), and for each grain
    /// whether the model finds the target most likely at every counted place. The default is
    /// `None`, for a model that does not compute this.
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

    /// `so_far` and the losses of the next samples of the same grain, which are the one grain of
    /// `microbatch`. A grain that is longer than the workspace is computed piece after piece this
    /// way.
    ///
    /// By default each piece is summed by itself. A model that adds row after row to `so_far`
    /// instead, as [`GrainLoss`] says, gives such a grain the same bits as in one piece.
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
    /// Samples that it cannot take, a device that fails, or a receiver that is gone.
    fn forward_backward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, Self::Sample>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Vec<GrainLoss>>;
}
