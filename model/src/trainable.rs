//! What the training graph needs of a model; a user's own model implements [`Trainable`].
//!
//! A model is stateless: parameters are leased to it block by block ([`ParameterSource`]), activations live in a
//! workspace that is planned once per shape, and gradients leave through a [`GradientSink`]. So it knows nothing of
//! workers, lanes or sharding. What it must promise for the weights to be the same to the bit everywhere:
//!
//! - a sample's loss and data gradients depend on nothing else in the microbatch;
//! - gradients of parameters are formed per grain from +0.0, of the *sum* of token losses, and added
//!   to the sink's accumulators grain by grain, in order.

use std::ops::Range;

use tidemill_kernels::shape::{GrainRows, SequenceShape};
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::layout::Layout;
use crate::lease::Lease;
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

/// A worker's replica of the parameters: fp32 masters, and copies in activation precision where
/// these differ.
pub struct Parameters<B: Backend> {
    master: B::Buffer<f32>,
    compute: B::ComputeWeights,
}

impl<B: Backend> Parameters<B> {
    /// Parameters on the device from a host arena of `layout.parameter_elements()` elements.
    ///
    /// # Errors
    /// An arena of another length, or a device without room.
    pub fn from_host(device: &mut Device<'_, B>, layout: &Layout, arena: &[f32]) -> Result<Self> {
        let elements = layout.parameter_elements();
        if arena.len() != elements {
            return Err(ModelError::ArenaSize { expected: elements, found: arena.len() });
        }
        let mut parameters = Self::zeros(device, elements)?;
        parameters.write(device, 0, arena)?;
        Ok(parameters)
    }

    /// `elements` zeros: of a whole arena, or of what a worker has of one.
    ///
    /// # Errors
    /// A device without room.
    pub fn zeros(device: &mut Device<'_, B>, elements: usize) -> Result<Self> {
        let Device { backend, stream } = device;
        Ok(Self {
            master: backend.allocate(stream, elements)?,
            compute: backend.compute_weights(stream, elements)?,
        })
    }

    /// Replaces the masters from element `start` and refreshes their copies.
    ///
    /// # Errors
    /// A range that leaves the arena, or a device that fails.
    pub fn write(&mut self, device: &mut Device<'_, B>, start: usize, host: &[f32]) -> Result<()> {
        self.update(device, start..start.saturating_add(host.len()), |device, master| {
            Ok(device.backend.write(device.stream, master, host)?)
        })
    }

    /// Lets `change` change the masters of `range` in place and refreshes their copies.
    ///
    /// # Errors
    /// A range that leaves the arena, an error of `change`, or a device that fails.
    pub fn update(
        &mut self,
        device: &mut Device<'_, B>,
        range: Range<usize>,
        change: impl FnOnce(&mut Device<'_, B>, SliceMut<'_, B, f32>) -> Result<()>,
    ) -> Result<()> {
        change(device, SliceMut::new(&mut self.master, range.start, range.len())?)?;
        let Device { backend, stream } = device;
        let (compute, master) = (&mut self.compute, &self.master);
        Ok(backend.refresh_compute_weights(stream, compute, master, range.start, range.len())?)
    }

    /// The masters of `range`.
    ///
    /// # Errors
    /// A range that leaves the arena.
    pub fn masters(&self, range: Range<usize>) -> Result<Slice<'_, B, f32>> {
        Ok(Slice::new(&self.master, range.start, range.len())?)
    }

    /// Copies the masters from element `start` to `host`.
    ///
    /// # Errors
    /// A range that leaves the arena, or a device that fails.
    pub fn read(&self, device: &mut Device<'_, B>, start: usize, host: &mut [f32]) -> Result<()> {
        let from = Slice::new(&self.master, start, host.len())?;
        Ok(device.backend.read(device.stream, host, from)?)
    }

    /// Copies the masters of `range` to pinned memory from element `start` on, and returns at once.
    ///
    /// # Errors
    /// A range that leaves the arena or the pinned memory, or a device that fails.
    pub fn read_async(
        &self,
        device: &mut Device<'_, B>,
        range: Range<usize>,
        to: &mut B::Pinned<f32>,
        start: usize,
    ) -> Result<()> {
        let from = Slice::new(&self.master, range.start, range.len())?;
        Ok(device.backend.read_async(device.stream, to, start, from)?)
    }

    /// Copies the masters to the host.
    ///
    /// # Errors
    /// A device that fails.
    pub fn to_host(&self, device: &mut Device<'_, B>) -> Result<Vec<f32>> {
        let mut arena = vec![0.0; B::elements(&self.master)];
        self.read(device, 0, &mut arena)?;
        Ok(arena)
    }

    /// The same elements in activation precision: what matrix products read.
    ///
    /// # Errors
    /// A range that leaves the arena.
    pub fn copies(&self, range: Range<usize>) -> Result<Slice<'_, B, B::Activation>> {
        let copies = B::compute_buffer(&self.master, &self.compute);
        Ok(Slice::new(copies, range.start, range.len())?)
    }

    /// The parameters of segment `segment` of `layout`, in any order: for generation and scoring, which keep all of them.
    /// Training leases from a [`ParameterSource`].
    ///
    /// # Errors
    /// A layout that is not the one of these parameters.
    pub fn lease(&self, layout: &Layout, segment: usize) -> Result<Lease<'_, B>> {
        let range = layout.segments()[segment].range.clone();
        Ok(Lease::whole(self.masters(range.clone())?, self.copies(range)?))
    }
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
