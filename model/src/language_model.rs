//! A language model: an embedding, a list of blocks, and a head, over one flat arena of parameters.
//!
//! ```text
//! tokens -> embedding -> block 0 -> ... -> block n-1 -> norm, head -> loss of every row
//! ```
//!
//! [`LanguageModel`] holds what all families share: it moves tokens to the device, walks the list of blocks forward and
//! backward, and sums losses grain by grain. A family is a file that lists its blocks, such as
//! [`mamba`](crate::mamba). No parallelism is known here.
//!
//! The input of every block is kept until its backward pass has run; everything else that must be kept is the block's own
//! matter.

mod batch;

use serde_json::Value;
use tidemill_kernels::Backend;

use crate::block::{Block, BlockPass, ResidualGradient};
use crate::embedding::Embedding;
use crate::error::Result;
use crate::head::{Head, HeadPass, HeadScratch};
use crate::initialization::Initializer;
use crate::language_model::batch::{Batch, BatchRows, grain_losses};
use crate::layout::{Decay, Layout};
use crate::norm::Norm;
use crate::parameter_list::{NewTensor, ParameterList};
use crate::trainable::{
    Device, GradientSink, GrainLoss, Lease, Microbatch, MicrobatchShape, Parameters, Trainable,
};

/// Rows of embedding tables are padded to a multiple of this in memory, so that no matrix product has a ragged edge.
pub const VOCABULARY_ROW_MULTIPLE: usize = 8;

/// What surrounds the blocks of a language model.
#[derive(Clone, Debug)]
pub struct Stem<'a> {
    /// v, tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, the width of the residual stream.
    pub width: usize,
    /// Added to the mean square before the root of the last norm.
    pub norm_eps: f32,
    /// The name of the embedding table in files.
    pub embedding_name: &'a str,
    /// The name of the last norm's weight in files.
    pub norm_name: &'a str,
    /// The name of the head's table in files; `None` where the head reads the embedding table.
    pub head_name: Option<&'a str>,
    /// The standard deviation of the initial tables.
    pub embedding_standard_deviation: f64,
}

/// A language model whose blocks are of kind `Body`.
#[derive(Debug)]
pub struct LanguageModel<Body> {
    parameters: ParameterList,
    config_json: Value,
    embedding: Embedding,
    embedding_place: Place,
    bodies: Vec<Body>,
    /// One for each body.
    body_places: Vec<Place>,
    head: Head,
    /// The segments of norm and table.
    head_segments: [usize; 2],
    /// The index of the head among the blocks.
    head_block: usize,
}

/// Where a block of one segment stands in the layout.
#[derive(Clone, Copy, Debug)]
struct Place {
    segment: usize,
    block: usize,
    use_index: usize,
}

/// Activations and scratch of a [`LanguageModel`].
pub struct Workspace<B: Backend, Body: Block<B>> {
    batch: Batch<B>,
    /// `residuals[i][b t, d]`: the input of block i; the last is the head's.
    residuals: Vec<B::Buffer<f32>>,
    saved: Vec<Body::Saved>,
    scratch: Body::Scratch,
    head: HeadScratch<B>,
    grad: ResidualGradient<B>,
}

impl<Body> LanguageModel<Body> {
    /// The model of `layers` blocks; `add_body` adds the tensors of a block to its segment.
    ///
    /// Segments are `embedding`, `layers.0` and so on, `norm_f` and, where the head has a table of its own, `lm_head`.
    pub fn assemble(
        stem: &Stem<'_>,
        layers: usize,
        config_json: Value,
        mut add_body: impl FnMut(&mut ParameterList, usize) -> Body,
    ) -> Self {
        let mut parameters = ParameterList::new();
        let table = |parameters: &mut ParameterList, name: &str| {
            let tensor = NewTensor {
                name: name.to_owned(),
                shape: &[stem.vocab_size, stem.width],
                decay: Decay::Decayed,
                initializer: Initializer::Normal {
                    standard_deviation: stem.embedding_standard_deviation,
                },
            };
            parameters.padded_tensor(tensor, VOCABULARY_ROW_MULTIPLE)
        };
        let embedding_segment = parameters.segment("embedding");
        let embedding_table = table(&mut parameters, stem.embedding_name);
        let mut bodies = Vec::with_capacity(layers);
        let mut body_segments = Vec::with_capacity(layers);
        for layer in 0..layers {
            body_segments.push(parameters.segment(format!("layers.{layer}")));
            bodies.push(add_body(&mut parameters, layer));
        }
        let norm_segment = parameters.segment("norm_f");
        let norm = parameters.tensor(NewTensor {
            name: stem.norm_name.to_owned(),
            shape: &[stem.width],
            decay: Decay::Exempt,
            initializer: Initializer::Constant(1.0),
        });
        let (head_segment, head_table) = match stem.head_name {
            Some(name) => (parameters.segment("lm_head"), table(&mut parameters, name)),
            None => (embedding_segment, embedding_table.clone()),
        };
        let place = |parameters: &mut ParameterList, name: String, segment| Place {
            segment,
            block: parameters.layout().blocks().len(),
            use_index: parameters.block(name, &[segment]),
        };
        let embedding_place = place(&mut parameters, "embedding".to_owned(), embedding_segment);
        let body_places: Vec<_> = body_segments
            .into_iter()
            .enumerate()
            .map(|(layer, segment)| place(&mut parameters, format!("layers.{layer}"), segment))
            .collect();
        let head_block = parameters.layout().blocks().len();
        let norm_use = parameters.block("head", &[norm_segment, head_segment]);
        Self {
            parameters,
            config_json,
            embedding: Embedding { table: embedding_table, width: stem.width },
            embedding_place,
            bodies,
            body_places,
            head: Head {
                norm: Norm { weight: norm, width: stem.width, eps: stem.norm_eps },
                table: head_table,
                vocab_size: stem.vocab_size,
                width: stem.width,
                norm_use,
                table_use: norm_use + 1,
            },
            head_segments: [norm_segment, head_segment],
            head_block,
        }
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
    pub fn bodies(&self) -> &[Body] {
        &self.bodies
    }

    /// The first block.
    pub fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    /// The last block.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The parameters of the head: those of its norm, then those of its table.
    ///
    /// # Errors
    /// Parameters of another layout.
    pub fn head_parameters<'a, B: Backend>(
        &self,
        parameters: &'a Parameters<B>,
    ) -> Result<[Lease<'a, B>; 2]> {
        let [norm, table] = self.head_segments;
        Ok([parameters.lease(self.layout(), norm)?, parameters.lease(self.layout(), table)?])
    }

    /// The parameters of the embedding.
    ///
    /// # Errors
    /// Parameters of another layout.
    pub fn embedding_parameters<'a, B: Backend>(
        &self,
        parameters: &'a Parameters<B>,
    ) -> Result<Lease<'a, B>> {
        parameters.lease(self.layout(), self.embedding_place.segment)
    }

    /// The parameters of block `layer` between embedding and head.
    ///
    /// # Errors
    /// Parameters of another layout.
    pub fn body_parameters<'a, B: Backend>(
        &self,
        parameters: &'a Parameters<B>,
        layer: usize,
    ) -> Result<Lease<'a, B>> {
        parameters.lease(self.layout(), self.body_places[layer].segment)
    }

    /// The loss of every row of a microbatch, `[b, t]` in nats: the negative log-probability of its target, 0
    /// where that is ignored.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, a microbatch larger than the workspace, or a device that fails.
    pub fn row_losses<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B, Body>,
        parameters: &Parameters<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<f32>>
    where
        Body: Block<B>,
    {
        let shape = microbatch.shape();
        workspace.batch.upload(device, microbatch, self.vocab_size())?;
        self.run_blocks(device, workspace, parameters, shape)?;
        let Workspace { batch, residuals, head, .. } = workspace;
        let BatchRows { targets, losses } = batch.rows(shape)?;
        let [norm, table] = self.head_parameters(parameters)?;
        let input = &residuals[self.bodies.len()];
        self.head.forward(
            device,
            losses,
            &HeadPass { norm, table, input, targets, shape },
            head,
        )?;
        batch.read_losses(device, shape)
    }

    /// From tokens to the head's input.
    fn run_blocks<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B, Body>,
        parameters: &Parameters<B>,
        shape: MicrobatchShape,
    ) -> Result<()>
    where
        Body: Block<B>,
    {
        let Workspace { batch, residuals, saved, scratch, .. } = workspace;
        let starts = batch.starts(shape)?;
        let lease = self.embedding_parameters(parameters)?;
        self.embedding.forward(device, &mut residuals[0], lease, batch.tokens(shape)?)?;
        for (layer, (body, saved)) in self.bodies.iter().zip(saved).enumerate() {
            let (inputs, outputs) = residuals.split_at_mut(layer + 1);
            let lease = self.body_parameters(parameters, layer)?;
            let pass = BlockPass { parameters: lease, input: &inputs[layer], shape, starts };
            body.forward(device, &mut outputs[0], pass, saved, scratch)?;
        }
        Ok(())
    }

    /// From the gradient of the head's input to that of the embedding table.
    fn run_blocks_backward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Workspace<B, Body>,
        parameters: &Parameters<B>,
        shape: MicrobatchShape,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<()>
    where
        Body: Block<B>,
    {
        let Workspace { batch, residuals, saved, scratch, grad, .. } = workspace;
        let starts = batch.starts(shape)?;
        for (layer, body) in self.bodies.iter().enumerate().rev() {
            let lease = self.body_parameters(parameters, layer)?;
            let pass = BlockPass { parameters: lease, input: &residuals[layer], shape, starts };
            let Place { block, use_index, .. } = self.body_places[layer];
            let lane = sink.accumulator(use_index);
            body.backward(device, grad, lane, pass, &mut saved[layer], scratch)?;
            sink.block_done(device, block)?;
        }
        let Place { block, use_index, .. } = self.embedding_place;
        let (lane, tokens) = (sink.accumulator(use_index), batch.tokens(shape)?);
        self.embedding.backward(device, lane, grad.gradient(), tokens, shape)?;
        sink.block_done(device, block)
    }
}

impl<B: Backend, Body: Block<B>> Trainable<B> for LanguageModel<Body> {
    type Workspace = Workspace<B, Body>;

    fn layout(&self) -> &Layout {
        self.parameters.layout()
    }

    fn initialize(&self, seed: u64) -> Vec<f32> {
        self.parameters.initialize(seed)
    }

    fn config_json(&self) -> Value {
        self.config_json.clone()
    }

    fn vocab_size(&self) -> usize {
        self.head.vocab_size
    }

    fn plan(&self, device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<Self::Workspace> {
        let elements = shape.sequences()?.rows() * self.head.width;
        let layers = self.bodies.len();
        let mut residuals = Vec::with_capacity(layers + 1);
        for _ in 0..=layers {
            residuals.push(device.backend.allocate(device.stream, elements)?);
        }
        let mut saved = Vec::with_capacity(layers);
        for body in &self.bodies {
            saved.push(body.plan_saved(device, shape)?);
        }
        let bodies: Vec<_> = self.bodies.iter().collect();
        Ok(Workspace {
            batch: Batch::plan(device, shape)?,
            residuals,
            saved,
            scratch: Body::plan_scratch(&bodies, device, shape)?,
            head: self.head.plan(device, shape)?,
            grad: ResidualGradient::new(device, elements)?,
        })
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &Parameters<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>> {
        let losses = self.row_losses(device, workspace, parameters, microbatch)?;
        Ok(grain_losses(&losses, workspace.batch.host_targets(), microbatch))
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut Self::Workspace,
        parameters: &Parameters<B>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Vec<GrainLoss>> {
        let shape = microbatch.shape();
        workspace.batch.upload(device, microbatch, self.head.vocab_size)?;
        self.run_blocks(device, workspace, parameters, shape)?;
        let Workspace { batch, residuals, head, grad, .. } = workspace;
        let BatchRows { targets, losses } = batch.rows(shape)?;
        let [norm, table] = self.head_parameters(parameters)?;
        let layers = self.bodies.len();
        let pass = HeadPass { norm, table, input: &residuals[layers], targets, shape };
        self.head.forward_backward(device, losses, grad, &pass, head, sink)?;
        sink.block_done(device, self.head_block)?;
        self.run_blocks_backward(device, workspace, parameters, shape, sink)?;
        // Read last: on a device with a queue of its own, reading waits for everything before it.
        let losses = workspace.batch.read_losses(device, shape)?;
        Ok(grain_losses(&losses, workspace.batch.host_targets(), microbatch))
    }
}
