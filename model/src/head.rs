//! The last block of a language model: from the residual stream to a loss for every row.
//!
//! ```text
//! f = norm(residual);  logits = scale f table^T;  loss = cross_entropy(logits, target)
//! ```
//!
//! Logits are formed a chunk of rows at a time
//! ([`CrossEntropy::logit_chunk_rows`](tidemill_kernels::backend::CrossEntropy::logit_chunk_rows)): the whole logit
//! matrix is never held. Chunks start at the first row of a grain and never cross one. Forward and
//! backward are one pass over the chunks, because the gradient of a chunk's logits overwrites them.
//! A grain's gradient of the table is the sum of one product for each chunk, in order; where a
//! grain is a single chunk, the product is added to the lane directly.

use std::ops::Range;

use tidemill_kernels::backend::{LogitGradient, Output};
use tidemill_kernels::shape::{CrossEntropyShape, GrainRows};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::block::ResidualGradient;
use crate::error::Result;
use crate::lease::Lease;
use crate::norm::{Norm, NormPass, NormScratch, Normed};
use crate::sample::MicrobatchShape;
use crate::trainable::{Device, GradientSink};

/// A final norm and a table of one row for each token.
#[derive(Clone, Debug)]
pub struct Head {
    /// The norm before the table.
    pub norm: Norm,
    /// The table's place in its segment; rows past the vocabulary are padding.
    pub table: Range<usize>,
    /// v, tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, elements of a row.
    pub width: usize,
    /// The factor that logits are multiplied by.
    pub logit_scale: f32,
    /// The index of the norm's use.
    pub norm_use: usize,
    /// The index of the table's use.
    pub table_use: usize,
}

/// Memory that a [`Head`] needs while it runs.
pub struct HeadScratch<B: Backend> {
    /// `normed[b t, d]`
    normed: Normed<B>,
    norm: NormScratch<B>,
    /// `grad_normed[b t, d]`
    grad_normed: B::Buffer<B::Activation>,
    /// `logits[chunk rows, v]`, then their gradient.
    logits: B::Buffer<B::Activation>,
    /// `grad_table[v, d]` of one grain; empty where every grain is a single chunk.
    grad_table: B::Buffer<f32>,
}

/// The arguments of a pass of the head.
pub struct HeadPass<'a, B: Backend> {
    /// The segment that holds the norm.
    pub norm: Lease<'a, B>,
    /// The segment that holds the table.
    pub table: Lease<'a, B>,
    /// `input[b t, d]`: the residual stream.
    pub input: &'a B::Buffer<f32>,
    /// `targets[b t]`
    pub targets: Slice<'a, B, u32>,
    /// The shape of this microbatch.
    pub shape: MicrobatchShape,
}

impl Head {
    /// Memory for microbatches up to `shape`.
    ///
    /// # Errors
    /// A shape of size zero, or a device without room.
    pub fn plan<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<HeadScratch<B>> {
        let grains = shape.grain_rows()?;
        let normed = self.norm.plan_normed(device, grains.rows())?;
        let norm = self.norm.plan_scratch(device, grains)?;
        let Device { backend, stream } = device;
        let grain_rows = grains.range(0).len();
        let chunk_rows = backend.logit_chunk_rows().min(grain_rows);
        let grad_table = if chunk_rows < grain_rows { self.table.len() } else { 0 };
        Ok(HeadScratch {
            normed,
            norm,
            grad_normed: backend.allocate(stream, grains.rows() * self.width)?,
            logits: backend.allocate(stream, chunk_rows * self.table_rows())?,
            grad_table: backend.allocate(stream, grad_table)?,
        })
    }

    /// Writes the loss of every row.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        losses: &mut B::Buffer<f32>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
    ) -> Result<()> {
        self.forward_with(device, losses, None, pass, scratch)
    }

    /// Writes the loss of every row, to the bits of [`forward`](Self::forward), and the most likely token of every row, as
    /// [`Likeliest::likeliest_of_activations`](tidemill_kernels::backend::Likeliest::likeliest_of_activations) finds it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_likeliest<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        losses: &mut B::Buffer<f32>,
        likeliest: &mut B::Buffer<u32>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
    ) -> Result<()> {
        self.forward_with(device, losses, Some(likeliest), pass, scratch)
    }

    fn forward_with<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        losses: &mut B::Buffer<f32>,
        mut likeliest: Option<&mut B::Buffer<u32>>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
    ) -> Result<()> {
        self.norm.forward(device, &mut scratch.normed, self.norm_pass(pass)?)?;
        let grains = pass.shape.grain_rows()?;
        for grain in 0..grains.grains() {
            for rows in chunks(device.backend, grains.range(grain)) {
                self.chunk_logits(device, pass, scratch, &rows)?;
                if let Some(likeliest) = likeliest.as_deref_mut() {
                    let Device { backend, stream } = device;
                    let tokens = SliceMut::new(likeliest, rows.start, rows.len())?;
                    let logits = Slice::new(&scratch.logits, 0, rows.len() * self.table_rows())?;
                    let logits = logits.matrix(rows.len(), self.table_rows())?;
                    let logits = logits.columns(0, self.vocab_size)?;
                    backend.likeliest_of_activations(stream, tokens, logits, self.logit_scale)?;
                }
                self.chunk_losses(device, losses, pass, scratch, rows, LogitGradient::None)?;
            }
        }
        Ok(())
    }

    /// Writes the loss of every row and the gradient of the sum of losses with respect to the
    /// residual stream, and adds the gradients of norm and table to `sink`.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward_backward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        losses: &mut B::Buffer<f32>,
        grad: &mut ResidualGradient<B>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<()> {
        self.norm.forward(device, &mut scratch.normed, self.norm_pass(pass)?)?;
        let grains = pass.shape.grain_rows()?;
        for grain in 0..grains.grains() {
            let lane = sink.accumulator(self.table_use);
            let lane = lane.sub(self.table.start, self.table.len())?;
            self.grain_gradients(device, losses, lane, pass, scratch, grains.range(grain))?;
        }
        self.norm_backward(device, grad, sink.accumulator(self.norm_use), pass, scratch)
    }

    fn table_rows(&self) -> usize {
        self.table.len() / self.width
    }

    fn norm_pass<'a, B: Backend>(&self, pass: &HeadPass<'a, B>) -> Result<NormPass<'a, B>> {
        let grains = pass.shape.grain_rows()?;
        let input = Slice::all(pass.input).matrix(grains.rows(), self.width)?;
        Ok(NormPass { parameters: pass.norm, input, grains })
    }

    /// Writes the logits of `rows` to the scratch.
    fn chunk_logits<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
        rows: &Range<usize>,
    ) -> Result<()> {
        let table_rows = self.table_rows();
        Ok(device.backend.matmul(
            device.stream,
            SliceMut::all(&mut scratch.logits).matrix(rows.len(), table_rows)?,
            rows_of(&scratch.normed, rows)?,
            pass.table.weight(&self.table, table_rows, self.width)?.transposed(),
            Output::Overwrite,
        )?)
    }

    /// The losses of `rows`, whose logits are in the scratch; where their gradient is wanted, it
    /// overwrites the logits.
    fn chunk_losses<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        losses: &mut B::Buffer<f32>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
        rows: Range<usize>,
        gradient: LogitGradient,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let table_rows = self.table_rows();
        Ok(backend.cross_entropy(
            stream,
            SliceMut::new(losses, rows.start, rows.len())?,
            SliceMut::new(&mut scratch.logits, 0, rows.len() * table_rows)?,
            pass.targets.sub(rows.start, rows.len())?,
            gradient,
            CrossEntropyShape::new(rows.len(), self.vocab_size, table_rows)?
                .with_logit_scale(self.logit_scale)?,
        )?)
    }

    /// Writes the losses of the grain of `rows` and the gradient of its normed rows, and adds the
    /// gradient of the table to `lane`.
    fn grain_gradients<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        losses: &mut B::Buffer<f32>,
        lane: SliceMut<'_, B, f32>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
        rows: Range<usize>,
    ) -> Result<()> {
        let (width, table_rows) = (self.width, self.table_rows());
        let mut output = Output::Overwrite;
        for chunk in chunks(device.backend, rows.clone()) {
            let gradient = LogitGradient::InPlace;
            self.chunk_logits(device, pass, scratch, &chunk)?;
            self.chunk_losses(device, losses, pass, scratch, chunk.clone(), gradient)?;
            let Device { backend, stream } = device;
            let HeadScratch { normed, grad_normed, logits, grad_table, .. } = &mut *scratch;
            let grad_logits = Slice::all(&*logits).matrix(chunk.len(), table_rows)?;
            let first = chunk.start * width;
            backend.matmul(
                stream,
                MatrixMut::new(grad_normed, first, chunk.len(), width, width)?,
                grad_logits,
                pass.table.weight(&self.table, table_rows, width)?,
                Output::Overwrite,
            )?;
            let normed = rows_of(normed, &chunk)?;
            if chunk == rows {
                let lane = lane.matrix(table_rows, width)?;
                let grain = GrainRows::new(rows.len(), rows.len())?;
                return Ok(backend.weight_gradient_add(
                    stream,
                    lane,
                    grad_logits,
                    normed,
                    grain,
                )?);
            }
            let out = SliceMut::all(grad_table).matrix(table_rows, width)?;
            backend.matmul_f32(stream, out, grad_logits.transposed(), normed, output)?;
            output = Output::Add;
        }
        let gradient = Slice::new(&scratch.grad_table, 0, self.table.len())?;
        Ok(device.backend.accumulate(device.stream, lane, gradient)?)
    }

    fn norm_backward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        mut lane: SliceMut<'_, B, f32>,
        pass: &HeadPass<'_, B>,
        scratch: &mut HeadScratch<B>,
    ) -> Result<()> {
        let (rows, width) = (pass.targets.elements(), self.width);
        let zero = SliceMut::new(grad.gradient_mut(), 0, rows * width)?;
        device.backend.fill_zero(device.stream, zero)?;
        self.norm.backward(
            device,
            grad,
            &mut lane,
            Slice::all(&scratch.grad_normed).matrix(rows, width)?,
            (&scratch.normed, &mut scratch.norm),
            self.norm_pass(pass)?,
        )
    }
}

/// `rows` cut into the chunks of `backend`, the last of which may be short.
fn chunks<B: Backend>(backend: &B, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (end, chunk_rows) = (rows.end, backend.logit_chunk_rows().max(1));
    rows.step_by(chunk_rows).map(move |first| first..(first + chunk_rows).min(end))
}

/// `rows` of `normed`.
fn rows_of<'a, B: Backend>(
    normed: &'a Normed<B>,
    rows: &Range<usize>,
) -> Result<Matrix<'a, B, B::Activation>> {
    Ok(normed.rows(rows.end)?.rows(rows.start, rows.len())?)
}
