//! A language model: an embedding, a list of blocks, and a head, over one flat arena of parameters.
//!
//! ```text
//! tokens -> embedding -> block 0 -> ... -> block n-1 -> norm, head -> loss of every row
//! ```
//!
//! [`LanguageModel`] holds what all families share: it moves tokens to the device, runs the list of
//! blocks forward and backward, and sums losses grain by grain. Blocks are of any kinds
//! ([`AnyBlock`]), from this crate and from others side by side. A family is a file that lists its
//! blocks, such as [`mamba`](mod@crate::mamba). This module knows nothing of parallelism.
//!
//! The input of every block is kept until its backward pass has run; each block keeps whatever else
//! it needs, unless the model is told to recompute that ([`Recompute`]).

mod assemble;
mod batch;
mod block_list;
mod memory;
mod positions;
mod saved;
mod tokens;

pub use assemble::{NewPositions, Stem};
pub use positions::Positions;
pub use saved::Recompute;
use serde_json::Value;
use tidemill_kernels::Backend;
use tidemill_kernels::backend::{KernelGroup, Output};

use crate::block::{AnyBlock, BlockPass, ResidualGradient};
use crate::embedding::Embedding;
use crate::error::Result;
use crate::head::{Head, HeadPass, HeadScratch};
use crate::language_model::batch::{Batch, BatchRows, counted_tokens, grain_losses};
use crate::language_model::positions::PositionIndices;
use crate::language_model::saved::SavedBlocks;
use crate::layout::{Direction, Layout};
use crate::lease::Lease;
use crate::parameter_list::ParameterList;
use crate::parameter_source::ParameterSource;
use crate::parameters::Parameters;
use crate::sample::{Microbatch, MicrobatchShape, Tokens};
use crate::trainable::{Device, GradientSink, GrainLoss, Trainable};
pub(crate) use block_list::{BlockList, SharedMemory};

/// A language model on a backend.
#[derive(Debug)]
pub struct LanguageModel<B: Backend> {
    parameters: ParameterList,
    config_json: Value,
    recompute: Recompute,
    embedding: Embedding,
    embedding_place: Place,
    positions: Option<Positions>,
    blocks: BlockList<B>,
    /// The places of the blocks, one for each.
    block_places: Vec<Place>,
    head: Head,
    /// The segments of the head: that of its norm and that of its table.
    head_segments: [usize; 2],
    /// The index of the head among the blocks.
    head_block: usize,
}

/// The place in the layout of a block with one segment.
#[derive(Clone, Copy, Debug)]
struct Place {
    segment: usize,
    block: usize,
    use_index: usize,
}

/// Activations and scratch of a [`LanguageModel`].
pub struct Workspace<B: Backend> {
    batch: Batch<B>,
    /// Present in a model with learned positions.
    position_indices: Option<PositionIndices<B>>,
    /// `residuals[i][b t, d]`: the input of block i; the last is the head's.
    residuals: Vec<B::Buffer<f32>>,
    saved: SavedBlocks,
    scratch: SharedMemory,
    head: HeadScratch<B>,
    grad: ResidualGradient<B>,
}

/// The result that a forward pass leaves for every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Losses,
    LossesAndLikeliest,
}

impl<B: Backend> LanguageModel<B> {
    /// The same model, with `recompute` saying whether blocks keep or recompute the values that
    /// backward needs.
    pub fn with_recompute(mut self, recompute: Recompute) -> Self {
        self.recompute = recompute;
        self
    }

    /// Whether blocks keep or recompute the values that backward needs.
    pub fn recompute(&self) -> Recompute {
        self.recompute
    }

    /// The parts that do not depend on the backend: the parameters and the `config.json`.
    pub(crate) fn into_parameters(self) -> (ParameterList, Value) {
        (self.parameters, self.config_json)
    }

    /// The parameters, blocks and uses.
    pub fn layout(&self) -> &Layout {
        self.parameters.layout()
    }

    /// The initial parameter arena: a pure function of `seed`.
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        self.parameters.initialize(seed)
    }

    /// The Hugging Face `config.json`.
    pub fn config_json(&self) -> &Value {
        &self.config_json
    }

    /// v, the tokens of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.head.vocab_size
    }

    /// d, the width of the residual stream.
    pub fn width(&self) -> usize {
        self.head.width
    }

    /// The blocks between embedding and head.
    pub fn blocks(&self) -> &[Box<dyn AnyBlock<B>>] {
        self.blocks.as_slice()
    }

    /// The blocks between embedding and head, and which of them share memory.
    pub(crate) fn block_list(&self) -> &BlockList<B> {
        &self.blocks
    }

    /// The first block.
    pub fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    /// The learned positions, which the first block adds; `None` where the model has none.
    pub fn positions(&self) -> Option<&Positions> {
        self.positions.as_ref()
    }

    /// The last block.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The parameters of the head: those of its norm, then those of its table.
    ///
    /// # Errors
    /// Parameters of another layout.
    pub fn head_parameters<'a>(&self, parameters: &'a Parameters<B>) -> Result<[Lease<'a, B>; 2]> {
        let [norm, table] = self.head_segments;
        Ok([parameters.lease(self.layout(), norm)?, parameters.lease(self.layout(), table)?])
    }

    /// The parameters of the embedding.
    ///
    /// # Errors
    /// Parameters of another layout.
    pub fn embedding_parameters<'a>(&self, parameters: &'a Parameters<B>) -> Result<Lease<'a, B>> {
        parameters.lease(self.layout(), self.embedding_place.segment)
    }

    /// The parameters of the learned positions; `None` where the model has none.
    ///
    /// # Errors
    /// Parameters of another layout.
    pub fn position_parameters<'a>(
        &self,
        parameters: &'a Parameters<B>,
    ) -> Result<Option<Lease<'a, B>>> {
        let lease = |place: Place| parameters.lease(self.layout(), place.segment);
        self.positions.as_ref().map(|positions| lease(positions.place)).transpose()
    }

    /// The parameters of block `index` of those between embedding and head.
    ///
    /// # Errors
    /// Parameters of another layout.
    pub fn block_parameters<'a>(
        &self,
        parameters: &'a Parameters<B>,
        index: usize,
    ) -> Result<Lease<'a, B>> {
        parameters.lease(self.layout(), self.block_places[index].segment)
    }

    /// The loss of every row of a microbatch, `[b, t]` in nats: the negative log-probability of its target, 0
    /// where that is ignored.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, a microbatch larger than the workspace, or a device that fails.
    pub fn row_losses(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B>,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<f32>> {
        self.enqueue_losses(device, workspace, parameters, microbatch, Wanted::Losses)?;
        workspace.batch.read_losses(device, microbatch.shape())
    }

    /// Forms the losses of a microbatch on the device.
    fn enqueue_losses(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B>,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
        wanted: Wanted,
    ) -> Result<()> {
        let shape = microbatch.shape();
        self.upload(device, workspace, microbatch)?;
        self.run_blocks(device, workspace, parameters, shape)?;
        let Workspace { batch, residuals, head, .. } = workspace;
        if wanted == Wanted::LossesAndLikeliest {
            batch.make_likeliest(device)?;
        }
        let BatchRows { targets, losses, likeliest } = batch.rows(shape)?;
        parameters.enter(device, self.head_block, Direction::Forward)?;
        let [norm, table] = self.lease_head(parameters)?;
        let input = &residuals[self.blocks().len()];
        let pass = HeadPass { norm, table, input, targets, shape };
        match likeliest.filter(|_| wanted == Wanted::LossesAndLikeliest) {
            Some(likeliest) => self.head.forward_likeliest(device, losses, likeliest, &pass, head),
            None => self.head.forward(device, losses, &pass, head),
        }
    }

    /// Checks a microbatch and copies it to the device.
    fn upload(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<()> {
        workspace.batch.upload(device, microbatch, self.vocab_size())?;
        if let (Some(positions), Some(indices)) = (&self.positions, &mut workspace.position_indices)
        {
            positions.check(microbatch.positions)?;
            indices.upload(device, microbatch.shape())?;
        }
        Ok(())
    }

    /// The parameters of the head's norm, then those of its table. The head must have been entered.
    fn lease_head<'a>(&self, parameters: &'a dyn ParameterSource<B>) -> Result<[Lease<'a, B>; 2]> {
        Ok([parameters.lease(self.head.norm_use)?, parameters.lease(self.head.table_use)?])
    }

    /// Runs the model from the tokens to the head's input.
    fn run_blocks(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B>,
        parameters: &mut dyn ParameterSource<B>,
        shape: MicrobatchShape,
    ) -> Result<()> {
        let Workspace { batch, position_indices, residuals, saved, scratch, .. } = workspace;
        let starts = batch.starts(shape)?;
        let Place { block, use_index, .. } = self.embedding_place;
        parameters.enter(device, block, Direction::Forward)?;
        let (lease, tokens) = (parameters.lease(use_index)?, batch.tokens(shape)?);
        self.embedding.forward(device, &mut residuals[0], lease, tokens, Output::Overwrite)?;
        if let (Some(positions), Some(indices)) = (&self.positions, position_indices) {
            let lease = parameters.lease(positions.place.use_index)?;
            let (out, rows) = (&mut residuals[0], indices.rows(shape)?);
            positions.embedding.forward(device, out, lease, rows, Output::Add)?;
        }
        for (index, entry) in self.blocks().iter().enumerate() {
            let Place { block, use_index, .. } = self.block_places[index];
            parameters.enter(device, block, Direction::Forward)?;
            let lease = parameters.lease(use_index)?;
            let (inputs, outputs) = residuals.split_at_mut(index + 1);
            let pass = BlockPass { parameters: lease, input: &inputs[index], shape, starts };
            let scratch = self.blocks.shared(scratch, index);
            entry.forward(device, &mut outputs[0], pass, saved.fill(index), scratch)?;
        }
        Ok(())
    }

    /// Runs backward from the gradient of the head's input to that of the embedding table.
    fn run_blocks_backward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B>,
        parameters: &mut dyn ParameterSource<B>,
        shape: MicrobatchShape,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<()> {
        let Workspace { batch, position_indices, residuals, saved, scratch, grad, .. } = workspace;
        let starts = batch.starts(shape)?;
        for (index, entry) in self.blocks().iter().enumerate().rev() {
            let Place { block, use_index, .. } = self.block_places[index];
            parameters.enter(device, block, Direction::Backward)?;
            let lease = parameters.lease(use_index)?;
            let (inputs, outputs) = residuals.split_at_mut(index + 1);
            let pass = BlockPass { parameters: lease, input: &inputs[index], shape, starts };
            let (lost, saved) = (saved.is_lost(index), saved.fill(index));
            let scratch = self.blocks.shared(scratch, index);
            if lost {
                // The forward pass runs once more and writes the same bits to the block's output,
                // which is not read again.
                entry.forward(device, &mut outputs[0], pass, saved, scratch)?;
            }
            let lane = sink.accumulator(use_index);
            entry.backward(device, grad, lane, pass, saved, scratch)?;
            sink.block_done(device, block)?;
        }
        let Place { block, use_index, .. } = self.embedding_place;
        parameters.enter(device, block, Direction::Backward)?;
        let (lane, tokens) = (sink.accumulator(use_index), batch.tokens(shape)?);
        self.embedding.backward(device, lane, grad.gradient(), tokens, shape)?;
        if let (Some(positions), Some(indices)) = (&self.positions, position_indices) {
            let (lane, rows) = (sink.accumulator(positions.place.use_index), indices.rows(shape)?);
            positions.embedding.backward(device, lane, grad.gradient(), rows, shape)?;
        }
        sink.block_done(device, block)
    }
}

impl<B: Backend> Trainable<B> for LanguageModel<B> {
    type Sample = Tokens;
    type Workspace = Workspace<B>;

    fn layout(&self) -> &Layout {
        self.parameters.layout()
    }

    fn initialize(&self, seed: u64) -> Vec<f32> {
        self.parameters.initialize(seed)
    }

    fn config_json(&self) -> Value {
        self.config_json.clone()
    }

    fn plan(&self, device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<Self::Workspace> {
        let of_blocks = self.blocks().iter().flat_map(|block| block.kernels());
        let of_all = [
            KernelGroup::Embedding,
            self.head.norm.kernels(),
            KernelGroup::CrossEntropy,
            KernelGroup::GradientSums,
        ];
        let kernels: Vec<_> = of_all.into_iter().chain(of_blocks).collect();
        device.backend.prepare(&kernels)?;
        let elements = shape.sequences()?.rows() * self.head.width;
        let blocks = self.blocks().len();
        let mut residuals = Vec::with_capacity(blocks + 1);
        for _ in 0..=blocks {
            residuals.push(device.backend.allocate(device.stream, elements)?);
        }
        let mut position_indices = None;
        if let Some(positions) = &self.positions {
            positions.check(shape.positions)?;
            position_indices = Some(PositionIndices::plan(device, shape)?);
        }
        Ok(Workspace {
            batch: Batch::plan(device, shape)?,
            position_indices,
            residuals,
            saved: SavedBlocks::plan(&self.blocks, self.recompute, device, shape)?,
            scratch: self.blocks.plan_shared(|block| block.plan_scratch(device, shape))?,
            head: self.head.plan(device, shape)?,
            grad: ResidualGradient::new(device, elements)?,
        })
    }

    fn counted_tokens(&self, microbatch: Microbatch<'_>) -> Option<u64> {
        Some(counted_tokens(microbatch))
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>> {
        let losses = self.row_losses(device, workspace, parameters, microbatch)?;
        Ok(grain_losses(&losses, workspace.batch.host_targets(), microbatch))
    }

    fn forward_greedy(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<(Vec<GrainLoss>, Option<Vec<bool>>)> {
        let wanted = Wanted::LossesAndLikeliest;
        self.enqueue_losses(device, workspace, parameters, microbatch, wanted)?;
        let batch = &workspace.batch;
        let losses = batch.read_losses(device, microbatch.shape())?;
        let greedy = batch.read_greedy(device, microbatch)?;
        Ok((grain_losses(&losses, batch.host_targets(), microbatch), Some(greedy)))
    }

    fn forward_onto(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
        so_far: GrainLoss,
    ) -> Result<GrainLoss> {
        let losses = self.row_losses(device, workspace, parameters, microbatch)?;
        Ok(so_far.with_rows(&losses, workspace.batch.host_targets()))
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Vec<GrainLoss>> {
        let shape = microbatch.shape();
        self.upload(device, workspace, microbatch)?;
        self.run_blocks(device, workspace, parameters, shape)?;
        let Workspace { batch, residuals, head, grad, .. } = workspace;
        let BatchRows { targets, losses, .. } = batch.rows(shape)?;
        parameters.enter(device, self.head_block, Direction::Backward)?;
        let [norm, table] = self.lease_head(parameters)?;
        let input = &residuals[self.blocks().len()];
        let pass = HeadPass { norm, table, input, targets, shape };
        self.head.forward_backward(device, losses, grad, &pass, head, sink)?;
        sink.block_done(device, self.head_block)?;
        self.run_blocks_backward(device, workspace, parameters, shape, sink)?;
        // The losses are read last: on a device with a queue, a read waits for all work enqueued
        // before it.
        let losses = workspace.batch.read_losses(device, shape)?;
        Ok(grain_losses(&losses, workspace.batch.host_targets(), microbatch))
    }
}
