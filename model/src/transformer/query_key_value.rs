//! The steps between the projections and attention: clipping, norms of queries and of keys, rotary
//! positions.
//!
//! ```text
//! [q | k | v] = clamp([q | k | v], -clip, clip)        where the model clips
//! q, k        = layer_norm(q), layer_norm(k)           over all heads together, as in MPT, or
//! q, k        = rms_norm(q), rms_norm(k)               of each head, as in Qwen3, where the model norms
//! q, k        = turned by their positions              where the model has rotary positions
//! ```
//!
//! All are cheap, so forward keeps only the projections' product and backward recomputes them. In a
//! model without norms, rotary positions are applied to the kept product in place.

use tidemill_kernels::backend::RotaryInputs;
use tidemill_kernels::shape::{AttentionShape, GrainRows};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::lease::Lease;
use crate::trainable::Device;
use crate::transformer::block::TransformerBlock;
use crate::transformer::query_key_norms::{QueryKeyNormsScratch, QueryKeyPass};

/// Memory for the inputs of attention, where these are not the projections' product itself.
pub(crate) struct QueryKeyValueScratch<B: Backend> {
    /// `[b t, 3 h p]`, in a model that clips.
    clipped: Option<B::Buffer<B::Activation>>,
    /// In a model that norms.
    norms: Option<QueryKeyNormsScratch<B>>,
    /// `table[positions, p]` of rotary positions.
    table: Option<B::Buffer<f32>>,
}

/// The positions of rows, for rotary positions.
pub(crate) struct Places<'a, B: Backend> {
    /// `starts[b t]`: the position in its sample of the first token of the row's document.
    pub starts: Option<Slice<'a, B, u32>>,
    /// `past[b]`: the number of positions of each sequence before its rows.
    pub past: Option<Slice<'a, B, u32>>,
}

impl<'a, B: Backend> Places<'a, B> {
    fn of(self, table: &'a B::Buffer<f32>) -> RotaryInputs<'a, B> {
        let Self { starts, past } = self;
        RotaryInputs { table: Slice::all(table), starts, past }
    }
}

impl<B: Backend> Clone for Places<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Places<'_, B> {}

/// The rows of a pass, and the parameters of their block.
pub struct Rows<'a, B: Backend> {
    /// The parameters of the block's segment.
    pub parameters: Lease<'a, B>,
    /// The rows, and how they divide into grains.
    pub grains: GrainRows,
}

impl<B: Backend> Clone for Rows<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend> Copy for Rows<'_, B> {}

impl<B: Backend> QueryKeyValueScratch<B> {
    pub(crate) fn plan(
        block: &TransformerBlock,
        device: &mut Device<'_, B>,
        grains: GrainRows,
        positions: usize,
    ) -> Result<Self> {
        let attention = &block.attention;
        let table = match attention.rotary {
            Some(_) if attention.clip.is_some() => {
                return Err(ModelError::config("rotary positions", "no clip beside them", "one"));
            }
            Some(rotary) => Some(rotary.table_on(device, positions, attention.head_width)?),
            None => None,
        };
        let Device { backend, stream } = device;
        let (rows, width) = (grains.rows(), block.attention.width());
        let clipped = match block.attention.clip {
            Some(_) => Some(backend.allocate(stream, rows * 3 * width)?),
            None => None,
        };
        let norms = match &block.query_key_norms {
            Some(norms) => Some(norms.plan(device, attention, grains)?),
            None => None,
        };
        Ok(Self { clipped, norms, table })
    }

    /// Applies rotary positions to queries and keys of `qkv[b t, (h + 2 g) p]` in place, in a model
    /// that has them and no norms; after norms, [`prepare`](Self::prepare) applies them.
    pub(crate) fn turn(
        &self,
        block: &TransformerBlock,
        device: &mut Device<'_, B>,
        qkv: &mut B::Buffer<B::Activation>,
        places: Places<'_, B>,
        shape: AttentionShape,
    ) -> Result<()> {
        let (Some(table), None) = (&self.table, &self.norms) else { return Ok(()) };
        let attention = &block.attention;
        let qkv: MatrixMut<'_, B, _> =
            SliceMut::all(qkv).matrix(shape.sequences().rows(), attention.projected_width())?;
        let qk = qkv.columns(0, attention.width() + attention.key_value_width())?;
        let inputs = places.of(table);
        Ok(device.backend.rotary_forward(device.stream, qk, inputs, shape)?)
    }

    /// Turns the first `(h + 2 g) p` columns of `dqkv[b t, 3 h p]` into the gradient of the input
    /// of [`turn`](Self::turn).
    pub(crate) fn turn_back(
        &self,
        block: &TransformerBlock,
        device: &mut Device<'_, B>,
        dqkv: &mut B::Buffer<B::Activation>,
        starts: Option<Slice<'_, B, u32>>,
        shape: AttentionShape,
    ) -> Result<()> {
        let Some(table) = &self.table else { return Ok(()) };
        let rows = shape.sequences().rows();
        let dqkv = SliceMut::all(dqkv).matrix(rows, 3 * block.attention.width())?;
        let inputs = RotaryInputs { table: Slice::all(table), starts, past: None };
        Ok(device.backend.rotary_backward(device.stream, dqkv, inputs, shape)?)
    }

    /// Computes the inputs of attention from the projections' product `qkv[b t, (h + 2 g) p]`.
    pub(crate) fn prepare(
        &mut self,
        block: &TransformerBlock,
        device: &mut Device<'_, B>,
        qkv: &B::Buffer<B::Activation>,
        pass: Rows<'_, B>,
        places: Places<'_, B>,
        shape: AttentionShape,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let (rows, width) = (pass.grains.rows(), block.attention.width());
        let qkv = Slice::all(qkv).matrix(rows, block.attention.projected_width())?;
        if let (Some(clipped), Some(clip)) = (&mut self.clipped, block.attention.clip) {
            let clipped = SliceMut::all(clipped).matrix(rows, 3 * width)?;
            backend.clamp(stream, clipped, qkv, clip)?;
        }
        let (Some(scratch), Some(norms)) = (&mut self.norms, &block.query_key_norms) else {
            return Ok(());
        };
        let input = match &self.clipped {
            Some(clipped) => Slice::all(clipped).matrix(rows, 3 * width)?,
            None => qkv,
        };
        let attention = &block.attention;
        let input = input.columns(0, width + attention.key_value_width())?;
        norms.forward(device, scratch, QueryKeyPass { attention, input, rows: pass })?;
        if let Some(table) = &self.table {
            let (normed, inputs) = (scratch.normed_mut(rows)?, places.of(table));
            device.backend.rotary_forward(device.stream, normed, inputs, shape)?;
        }
        Ok(())
    }

    /// `q[b t, h p]`, `k[b t, g p]` and `v[b t, g p]` as attention reads them, once [`prepare`](Self::prepare) has run.
    pub(crate) fn matrices<'a>(
        &'a self,
        block: &TransformerBlock,
        qkv: &'a B::Buffer<B::Activation>,
        rows: usize,
    ) -> Result<[Matrix<'a, B, B::Activation>; 3]> {
        let (width, shared) = (block.attention.width(), block.attention.key_value_width());
        let all = block.attention.projected_width();
        let qkv = Slice::all(self.clipped.as_ref().unwrap_or(qkv)).matrix(rows, all)?;
        let v = qkv.columns(width + shared, shared)?;
        let qk = match &self.norms {
            Some(norms) => norms.normed(rows)?,
            None => qkv,
        };
        Ok([qk.columns(0, width)?, qk.columns(width, shared)?, v])
    }

    /// Turns `dqkv[b t, 3 h p]`, the gradient of attention's inputs, into that of the projections'
    /// product `qkv`, and adds the gradients of the norms to `lane`. [`prepare`](Self::prepare) has
    /// run for the same `qkv`.
    pub(crate) fn backward(
        &mut self,
        block: &TransformerBlock,
        device: &mut Device<'_, B>,
        dqkv: &mut B::Buffer<B::Activation>,
        lane: &mut SliceMut<'_, B, f32>,
        qkv: &B::Buffer<B::Activation>,
        pass: Rows<'_, B>,
    ) -> Result<()> {
        let (rows, attention) = (pass.grains.rows(), &block.attention);
        let width = attention.width();
        let qkv = Slice::all(qkv).matrix(rows, attention.projected_width())?;
        if let (Some(scratch), Some(norms)) = (&mut self.norms, &block.query_key_norms) {
            let input = match &self.clipped {
                Some(clipped) => Slice::all(clipped).matrix(rows, 3 * width)?,
                None => qkv,
            };
            let both = width + attention.key_value_width();
            let grad: MatrixMut<'_, B, _> = SliceMut::all(&mut *dqkv).matrix(rows, 3 * width)?;
            let pass = QueryKeyPass { attention, input: input.columns(0, both)?, rows: pass };
            norms.backward(device, grad.columns(0, both)?, lane, scratch, pass)?;
        }
        if let Some(clip) = attention.clip {
            let dqkv = SliceMut::all(dqkv).matrix(rows, 3 * width)?;
            device.backend.clamp_backward(device.stream, dqkv, qkv, clip)?;
        }
        Ok(())
    }
}
