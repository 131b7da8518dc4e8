//! A Mamba model as the recurrence that it is: a state per layer, moved on by every token.
//!
//! Memory does not grow with the number of tokens. Tokens enter in pieces of at most [`PIECE_POSITIONS`]: projections
//! run over all rows of a piece at once, as matrix products want it, and only convolution and scan go position by
//! position. Since every row of a product is independent of the others, how tokens are cut into
//! pieces does not change a bit: a prompt fed at once and one fed token by token end in the same state.

use tidemill_kernels::backend::{Output, ScanInputs};
use tidemill_kernels::shape::{ConvShape, GrainRows, ScanShape, SequenceShape};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::layer_block::LayerBlock;
use crate::mamba::{Mamba, MambaBlock};
use crate::norm::{NormPass, NormScratch};
use crate::trainable::{Device, Lease, Parameters};

/// Positions of a sample that are computed at once.
pub const PIECE_POSITIONS: usize = 128;

/// The states of `samples` sequences of a model, and the memory to move them on.
pub struct Recurrence<'m, B: Backend> {
    model: &'m Mamba,
    parameters: &'m Parameters<B>,
    samples: usize,
    /// Positions of the newest piece.
    positions: usize,
    states: Vec<LayerState<B>>,
    tokens: B::Buffer<u32>,
    activations: Activations<B>,
    logits: B::Buffer<f32>,
    host_logits: Vec<f32>,
    position: Position<B::Graph>,
}

/// What one layer remembers of the past.
struct LayerState<B: Backend> {
    /// `conv[b, e, k - 1]`: the last inputs of the convolution, oldest first.
    conv: B::Buffer<f32>,
    /// `scan[b, e, n]`
    scan: B::Buffer<f32>,
}

/// Activations of one piece; rows are ordered by sample, then by position.
struct Activations<B: Backend> {
    /// `residual[b t, d]`
    residual: B::Buffer<f32>,
    norm: NormScratch<B>,
    /// `normed[b t, d]`
    normed: B::Buffer<B::Activation>,
    /// `xz[b t, 2 e]`
    xz: B::Buffer<B::Activation>,
    /// `x[b t, e]`, after the convolution.
    x: B::Buffer<B::Activation>,
    /// `dt_bc[b t, r + 2 n]`
    dt_bc: B::Buffer<B::Activation>,
    /// `delta_raw[b t, e]`
    delta_raw: B::Buffer<B::Activation>,
    /// `gated[b t, e]`
    gated: B::Buffer<B::Activation>,
}

impl<'m, B: Backend> Recurrence<'m, B> {
    /// `samples` sequences of which nothing has been seen.
    ///
    /// # Errors
    /// No samples, or a device without room.
    pub fn new(
        device: &mut Device<'_, B>,
        model: &'m Mamba,
        parameters: &'m Parameters<B>,
        samples: usize,
    ) -> Result<Self> {
        let rows = SequenceShape::new(samples, PIECE_POSITIONS)?.rows();
        let block = widest(model.bodies())?;
        let (d, e, columns) = (block.width, block.inner, block.dt_bc_width());
        let norm = block.norm.plan(device, GrainRows::new(rows, rows)?)?;
        let Device { backend, stream } = device;
        let mut states = Vec::with_capacity(model.bodies().len());
        for LayerBlock::Mamba(block) in model.bodies() {
            // One tap remembers nothing, but no device likes a buffer of no elements.
            let conv = (samples * block.inner * (block.taps - 1)).max(1);
            states.push(LayerState {
                conv: backend.allocate(stream, conv)?,
                scan: backend.allocate(stream, samples * block.inner * block.states)?,
            });
        }
        let table_rows = model.head().table.len() / model.width();
        Ok(Self {
            model,
            parameters,
            samples,
            positions: 0,
            states,
            tokens: backend.allocate(stream, rows)?,
            activations: Activations {
                residual: backend.allocate(stream, rows * d)?,
                norm,
                normed: backend.allocate(stream, rows * d)?,
                xz: backend.allocate(stream, rows * 2 * e)?,
                x: backend.allocate(stream, rows * e)?,
                dt_bc: backend.allocate(stream, rows * columns)?,
                delta_raw: backend.allocate(stream, rows * e)?,
                gated: backend.allocate(stream, rows * e)?,
            },
            logits: backend.allocate(stream, samples * table_rows)?,
            host_logits: vec![0.0; samples * table_rows],
            position: Position::New,
        })
    }

    /// The model.
    pub fn model(&self) -> &'m Mamba {
        self.model
    }

    /// The parameters.
    pub fn parameters(&self) -> &'m Parameters<B> {
        self.parameters
    }

    /// Forgets everything seen.
    ///
    /// # Errors
    /// A device that fails.
    pub fn reset(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        self.positions = 0;
        for state in &mut self.states {
            device.backend.fill_zero(device.stream, SliceMut::all(&mut state.conv))?;
            device.backend.fill_zero(device.stream, SliceMut::all(&mut state.scan))?;
        }
        Ok(())
    }

    /// Moves every sequence on by the same number of tokens: `tokens[b, t]`.
    ///
    /// # Errors
    /// A number of tokens that is not a multiple of the samples, a token outside the vocabulary, or a device that fails.
    pub fn advance(&mut self, device: &mut Device<'_, B>, tokens: &[u32]) -> Result<()> {
        if !tokens.len().is_multiple_of(self.samples) {
            return Err(ModelError::Microbatch {
                what: "tokens of a piece",
                expected: format!("a multiple of {} samples", self.samples),
                found: tokens.len(),
            });
        }
        let vocab_size = self.model.vocab_size();
        if let Some(index) = tokens.iter().position(|token| *token as usize >= vocab_size) {
            let what = format!("position {index}");
            return Err(ModelError::Token { what, token: tokens[index], vocab_size });
        }
        let positions = tokens.len() / self.samples;
        let mut piece = Vec::with_capacity(self.samples * PIECE_POSITIONS);
        for first in (0..positions).step_by(PIECE_POSITIONS) {
            let last = (first + PIECE_POSITIONS).min(positions);
            piece.clear();
            for sample in tokens.chunks_exact(positions) {
                piece.extend_from_slice(&sample[first..last]);
            }
            self.advance_piece(device, &piece)?;
        }
        Ok(())
    }

    /// The logits after the newest token of every sequence: `logits[b, v]`, without padding.
    ///
    /// # Errors
    /// Nothing seen yet, or a device that fails.
    pub fn logits(&mut self, device: &mut Device<'_, B>) -> Result<&[f32]> {
        let (samples, head) = (self.samples, self.model.head());
        let table_rows = head.table.len() / head.width;
        self.normalize_last(device)?;
        let [_, table] = self.model.head_parameters(self.parameters)?;
        let Device { backend, stream } = device;
        backend.matmul_f32(
            stream,
            SliceMut::all(&mut self.logits).matrix(samples, table_rows)?,
            Slice::all(&self.activations.normed).matrix(samples, head.width)?,
            table.weight(&head.table, table_rows, head.width)?.transposed(),
            Output::Overwrite,
        )?;
        self.host_logits.resize(samples * table_rows, 0.0);
        backend.read(stream, &mut self.host_logits, Slice::all(&self.logits))?;
        for sample in 1..samples {
            let first = sample * table_rows;
            self.host_logits.copy_within(first..first + head.vocab_size, sample * head.vocab_size);
        }
        self.host_logits.truncate(samples * head.vocab_size);
        Ok(&self.host_logits)
    }

    /// The head's input for every row of the newest piece, normalized: `normed[b t, d]`.
    pub(crate) fn normalized_piece(
        &mut self,
        device: &mut Device<'_, B>,
    ) -> Result<Matrix<'_, B, B::Activation>> {
        let (rows, width) = (self.samples * self.positions, self.model.width());
        let head = self.model.head();
        let [parameters, _] = self.model.head_parameters(self.parameters)?;
        let grains = GrainRows::new(rows, rows)?;
        let Activations { residual, normed, norm, .. } = &mut self.activations;
        let input = Slice::all(residual).matrix(rows, width)?;
        let pass = NormPass { parameters, input, grains };
        head.norm.forward(device, SliceMut::all(normed).matrix(rows, width)?, norm, pass)?;
        Ok(Slice::all(&self.activations.normed).matrix(rows, width)?)
    }

    /// `normed[b, d]` of the newest position alone.
    fn normalize_last(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (samples, head) = (self.samples, self.model.head());
        let last = self.positions.checked_sub(1).ok_or_else(|| ModelError::Microbatch {
            what: "tokens before logits",
            expected: "at least 1".to_owned(),
            found: 0,
        })?;
        let stride = self.positions * head.width;
        let [parameters, _] = self.model.head_parameters(self.parameters)?;
        let Activations { residual, normed, norm, .. } = &mut self.activations;
        let input = Matrix::new(residual, last * head.width, samples, head.width, stride, 1)?;
        let pass = NormPass { parameters, input, grains: GrainRows::new(samples, samples)? };
        head.norm.forward(device, SliceMut::all(normed).matrix(samples, head.width)?, norm, pass)
    }

    /// `tokens[b, t]` with t at most [`PIECE_POSITIONS`], all inside the vocabulary.
    fn advance_piece(&mut self, device: &mut Device<'_, B>, tokens: &[u32]) -> Result<()> {
        let (rows, positions) = (tokens.len(), tokens.len() / self.samples);
        let Device { backend, stream } = device;
        backend.write(stream, SliceMut::new(&mut self.tokens, 0, rows)?, tokens)?;
        if positions == 1 {
            self.run_position(device)?;
        } else {
            self.run_piece(device, positions)?;
        }
        self.positions = positions;
        Ok(())
    }

    /// One position of every sample: the same kernels on the same buffers for every token, so they are recorded once and
    /// enqueued together from then on.
    fn run_position(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        if let Position::Recorded(graph) = &self.position {
            return Ok(device.backend.replay(device.stream, graph)?);
        }
        if let Position::Ran = self.position {
            let backend = device.backend;
            // What a kernel of ours answers is the model's error, which the recording only passes on.
            let mut failed = Ok(());
            let recorded = backend.record_graph(device.stream, &mut |stream| {
                failed = self.run_piece(&mut Device { backend, stream }, 1);
                Ok(())
            });
            failed?;
            if let Some(graph) = recorded? {
                backend.replay(device.stream, &graph)?;
                self.position = Position::Recorded(graph);
                return Ok(());
            }
            self.position = Position::Enqueued;
        }
        if let Position::New = self.position {
            self.position = Position::Ran;
        }
        self.run_piece(device, 1)
    }

    /// From the tokens on the device to the head's input.
    fn run_piece(&mut self, device: &mut Device<'_, B>, positions: usize) -> Result<()> {
        let (samples, model) = (self.samples, self.model);
        let rows = samples * positions;
        let Device { backend, stream } = device;
        let table =
            model.embedding_parameters(self.parameters)?.vector(&model.embedding().table)?;
        let width = model.width();
        backend.embedding_forward(
            stream,
            SliceMut::all(&mut self.activations.residual).matrix(rows, width)?,
            table.matrix(table.elements() / width, width)?,
            Slice::new(&self.tokens, 0, rows)?,
        )?;
        for (layer, (LayerBlock::Mamba(block), state)) in
            model.bodies().iter().zip(&mut self.states).enumerate()
        {
            let lease = model.body_parameters(self.parameters, layer)?;
            let pass = LayerPass { block, lease, samples, positions };
            pass.run(device, &mut self.activations, state)?;
        }
        Ok(())
    }
}

/// How single positions are enqueued.
enum Position<G> {
    /// None has been: scratch memory is not there yet.
    New,
    /// One has been.
    Ran,
    /// All at once.
    Recorded(G),
    /// Kernel by kernel, on a device without graphs.
    Enqueued,
}

/// One layer over one piece.
struct LayerPass<'a, B: Backend> {
    block: &'a MambaBlock,
    lease: Lease<'a, B>,
    samples: usize,
    positions: usize,
}

impl<B: Backend> LayerPass<'_, B> {
    /// `residual += mixer(norm(residual))`, the state moved on.
    fn run(
        &self,
        device: &mut Device<'_, B>,
        activations: &mut Activations<B>,
        state: &mut LayerState<B>,
    ) -> Result<()> {
        let (block, rows) = (self.block, self.samples * self.positions);
        let (d, e) = (block.width, block.inner);
        let places = &block.tensors;
        let Activations { residual, norm, normed, xz, x, dt_bc, delta_raw, gated } = activations;
        let pass = NormPass {
            parameters: self.lease,
            input: Slice::all(residual).matrix(rows, d)?,
            grains: GrainRows::new(rows, rows)?,
        };
        block.norm.forward(device, SliceMut::all(normed).matrix(rows, d)?, norm, pass)?;
        device.backend.matmul(
            device.stream,
            SliceMut::all(xz).matrix(rows, 2 * e)?,
            Slice::all(normed).matrix(rows, d)?,
            self.lease.weight(&places.in_proj, 2 * e, d)?.transposed(),
            Output::Overwrite,
        )?;
        for position in 0..self.positions {
            self.convolve(device, x, state, xz, position)?;
        }
        let columns = block.dt_bc_width();
        device.backend.matmul(
            device.stream,
            SliceMut::all(dt_bc).matrix(rows, columns)?,
            Slice::all(x).matrix(rows, e)?,
            self.lease.weight(&places.x_proj, columns, e)?.transposed(),
            Output::Overwrite,
        )?;
        device.backend.matmul(
            device.stream,
            SliceMut::all(delta_raw).matrix(rows, e)?,
            Slice::all(dt_bc).matrix(rows, columns)?.columns(0, block.rank)?,
            self.lease.weight(&places.dt_proj, e, block.rank)?.transposed(),
            Output::Overwrite,
        )?;
        for position in 0..self.positions {
            let inputs = ScanInputs {
                delta_raw: self.at(delta_raw, position, e)?,
                delta_bias: self.lease.vector(&places.dt_bias)?,
                x: self.at(x, position, e)?,
                bc: self.at(dt_bc, position, columns)?.columns(block.rank, 2 * block.states)?,
                z: self.at(xz, position, 2 * e)?.columns(e, e)?,
                a_log: self.lease.vector(&places.a_log)?,
                d: self.lease.vector(&places.d)?,
                starts: None,
            };
            self.scan(device, gated, state, inputs, position)?;
        }
        Ok(device.backend.matmul_f32(
            device.stream,
            SliceMut::all(residual).matrix(rows, d)?,
            Slice::all(gated).matrix(rows, e)?,
            self.lease.weight(&places.out_proj, d, e)?.transposed(),
            Output::Add,
        )?)
    }

    fn convolve(
        &self,
        device: &mut Device<'_, B>,
        x: &mut B::Buffer<B::Activation>,
        state: &mut LayerState<B>,
        xz: &B::Buffer<B::Activation>,
        position: usize,
    ) -> Result<()> {
        let MambaBlock { tensors, inner, taps, .. } = self.block;
        let bias = tensors.conv_bias.as_ref().map(|place| self.lease.vector(place)).transpose()?;
        let elements = self.samples * inner * (taps - 1);
        Ok(device.backend.causal_conv1d_silu_step(
            device.stream,
            self.at_mut(x, position, *inner)?,
            SliceMut::new(&mut state.conv, 0, elements)?,
            self.at(xz, position, 2 * inner)?.columns(0, *inner)?,
            self.lease.vector(&tensors.conv_weight)?,
            bias,
            ConvShape::new(self.one_position()?, self.samples, *inner, *taps)?,
        )?)
    }

    fn scan(
        &self,
        device: &mut Device<'_, B>,
        gated: &mut B::Buffer<B::Activation>,
        state: &mut LayerState<B>,
        inputs: ScanInputs<'_, B>,
        position: usize,
    ) -> Result<()> {
        let MambaBlock { inner, states, .. } = self.block;
        Ok(device.backend.selective_scan_step(
            device.stream,
            self.at_mut(gated, position, *inner)?,
            SliceMut::all(&mut state.scan),
            inputs,
            ScanShape::new(self.one_position()?, self.samples, *inner, *states)?,
        )?)
    }

    fn one_position(&self) -> Result<SequenceShape> {
        Ok(SequenceShape::new(self.samples, 1)?)
    }

    /// The rows of one position of `buffer[b t, columns]`, one of each sample.
    fn at<'b>(
        &self,
        buffer: &'b B::Buffer<B::Activation>,
        position: usize,
        columns: usize,
    ) -> Result<Matrix<'b, B, B::Activation>> {
        let stride = self.positions * columns;
        Ok(Matrix::new(buffer, position * columns, self.samples, columns, stride, 1)?)
    }

    /// [`at`](Self::at), to be written.
    fn at_mut<'b>(
        &self,
        buffer: &'b mut B::Buffer<B::Activation>,
        position: usize,
        columns: usize,
    ) -> Result<MatrixMut<'b, B, B::Activation>> {
        let stride = self.positions * columns;
        Ok(MatrixMut::new(buffer, position * columns, self.samples, columns, stride)?)
    }
}

/// The block whose activations are as wide as any: all blocks of a Mamba model have the same sizes.
fn widest(blocks: &[LayerBlock]) -> Result<&MambaBlock> {
    let none = || ModelError::config("n_layers", "at least 1", 0);
    blocks
        .iter()
        .map(|LayerBlock::Mamba(block)| block)
        .max_by_key(|block| block.inner)
        .ok_or_else(none)
}
