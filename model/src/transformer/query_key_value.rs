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

use std::ops::Range;

use tidemill_kernels::backend::{
    KernelGroup, NormGradient, NormGradients, NormInput, NormInputs, NormSaved, RotaryInputs,
};
use tidemill_kernels::shape::{AttentionShape, GrainRows, NormShape};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::lease::Lease;
use crate::norm::{Norm, NormKind};
use crate::trainable::Device;
use crate::transformer::block::{Attention, TransformerBlock};

/// The norms of queries and of keys, both of one kind: layer norms over all heads together, or
/// norms by the root mean square over each head, with one weight for all heads (Henry et al.,
/// 2020).
#[derive(Clone, Debug, PartialEq)]
pub struct QueryKeyNorms {
    /// Over queries.
    pub query: Norm,
    /// Over keys.
    pub key: Norm,
}

impl QueryKeyNorms {
    /// The kernels that they launch.
    pub(crate) fn kernels(&self) -> KernelGroup {
        match self.query.kind {
            NormKind::RootMeanSquare => KernelGroup::RmsNormOfActivations,
            NormKind::Layer => KernelGroup::LayerNormOfActivations,
        }
    }

    /// Statistics of the queries and of the keys of a row.
    fn row_statistics(&self, attention: &Attention) -> [usize; 2] {
        match self.query.kind {
            NormKind::RootMeanSquare => [attention.heads, attention.key_value_heads()],
            NormKind::Layer => [2, 2],
        }
    }

    /// Bytes of one row's normed queries and keys, and their statistics.
    pub(crate) fn row_bytes(&self, attention: &Attention, activation: usize) -> usize {
        let columns = attention.width() + attention.key_value_width();
        let statistics: usize = self.row_statistics(attention).iter().sum();
        columns * activation + statistics * size_of::<f32>()
    }

    /// Queries, then keys, of `grains`.
    fn parts<'a>(&'a self, attention: &Attention, grains: GrainRows) -> Result<[Part<'a>; 2]> {
        let [of_query, of_key] =
            self.row_statistics(attention).map(|of_row| of_row * grains.rows());
        let (width, shared) = (attention.width(), attention.key_value_width());
        let part = |norm: &'a Norm, columns: Range<usize>, statistics| -> Result<Part<'a>> {
            let Norm { kind, width, eps, .. } = *norm;
            let shape = match kind {
                NormKind::RootMeanSquare => {
                    NormShape::rms_of_heads(grains, columns.len() / width, width, eps)?
                }
                NormKind::Layer => NormShape::layer(grains, width, eps)?,
            };
            Ok(Part { norm, columns, statistics, shape })
        };
        Ok([
            part(&self.query, 0..width, 0..of_query)?,
            part(&self.key, width..width + shared, of_query..of_query + of_key)?,
        ])
    }
}

/// Queries or keys, and their norm.
struct Part<'a> {
    norm: &'a Norm,
    /// Their columns in rows of `[q | k | v]`, and in rows of normed queries and keys.
    columns: Range<usize>,
    statistics: Range<usize>,
    shape: NormShape,
}

/// Memory for the inputs of attention, where these are not the projections' product itself.
pub(crate) struct QueryKeyValueScratch<B: Backend> {
    /// `[b t, 3 h p]`, in a model that clips.
    clipped: Option<B::Buffer<B::Activation>>,
    /// In a model that norms.
    norms: Option<NormsScratch<B>>,
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

struct NormsScratch<B: Backend> {
    /// `[b t, (h + g) p]`: queries, then keys.
    normed: B::Buffer<B::Activation>,
    /// The statistics of queries, then those of keys: `[2, b t]` each for layer norms, else `[b t,
    /// h]` and `[b t, g]`.
    statistics: B::Buffer<f32>,
    /// `[grains, d]`, d being the norms' width.
    weight_gradients: B::Buffer<f32>,
    /// `[grains, d]`, where there are biases.
    bias_gradients: B::Buffer<f32>,
}

/// The rows, and the parameters of their block.
pub(crate) struct Rows<'a, B: Backend> {
    pub parameters: Lease<'a, B>,
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
            Some(norms) => {
                let elements = grains.grains() * norms.query.width;
                let biases = norms.query.bias.as_ref().map_or(0, |_| elements);
                let columns = width + attention.key_value_width();
                let statistics: usize = norms.row_statistics(attention).iter().sum();
                Some(NormsScratch {
                    normed: backend.allocate(stream, rows * columns)?,
                    statistics: backend.allocate(stream, rows * statistics)?,
                    weight_gradients: backend.allocate(stream, elements)?,
                    bias_gradients: backend.allocate(stream, biases)?,
                })
            }
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
        let both = width + block.attention.key_value_width();
        for part in norms.parts(&block.attention, pass.grains)? {
            let Part { norm, columns, statistics, shape } = part;
            let normed: MatrixMut<'_, B, _> =
                SliceMut::all(&mut scratch.normed).matrix(rows, both)?;
            let normed = normed.columns(columns.start, columns.len())?;
            let places = (statistics.start, statistics.len());
            let statistics = SliceMut::new(&mut scratch.statistics, places.0, places.1)?;
            let bias = norm.bias.as_ref().map(|place| pass.parameters.vector(place));
            let inputs = NormInputs {
                x: NormInput::Activation(input.columns(columns.start, columns.len())?),
                weight: pass.parameters.vector(&norm.weight)?,
                bias: bias.transpose()?,
            };
            backend.norm_forward(stream, normed, statistics, inputs, shape)?;
        }
        if let Some(table) = &self.table {
            let normed = SliceMut::all(&mut scratch.normed).matrix(rows, both)?;
            backend.rotary_forward(stream, normed, places.of(table), shape)?;
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
            Some(norms) => Slice::all(&norms.normed).matrix(rows, width + shared)?,
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
        let Device { backend, stream } = device;
        let (rows, width) = (pass.grains.rows(), block.attention.width());
        let qkv = Slice::all(qkv).matrix(rows, block.attention.projected_width())?;
        if let (Some(scratch), Some(norms)) = (&mut self.norms, &block.query_key_norms) {
            let input = match &self.clipped {
                Some(clipped) => Slice::all(clipped).matrix(rows, 3 * width)?,
                None => qkv,
            };
            for part in norms.parts(&block.attention, pass.grains)? {
                let Part { norm, columns, statistics, shape } = part;
                let elements = pass.grains.grains() * norm.width;
                let NormsScratch { statistics: all, weight_gradients, bias_gradients, .. } =
                    &mut *scratch;
                let dqkv: MatrixMut<'_, B, _> = SliceMut::all(dqkv).matrix(rows, 3 * width)?;
                let dbias = norm.bias.as_ref().map(|_| SliceMut::new(bias_gradients, 0, elements));
                let gradients = NormGradients {
                    x: NormGradient::InPlace(dqkv.columns(columns.start, columns.len())?),
                    dweight: SliceMut::new(weight_gradients, 0, elements)?,
                    dbias: dbias.transpose()?,
                };
                let saved = NormSaved {
                    x: NormInput::Activation(input.columns(columns.start, columns.len())?),
                    statistics: Slice::new(all, statistics.start, statistics.len())?,
                    weight: pass.parameters.vector(&norm.weight)?,
                };
                backend.norm_backward(stream, gradients, saved, shape)?;
                let places = [(Some(&norm.weight), &*weight_gradients)];
                for (place, gradients) in
                    places.into_iter().chain([(norm.bias.as_ref(), &*bias_gradients)])
                {
                    if let Some(place) = place {
                        let lane = lane.reborrow().sub(place.start, place.len())?;
                        backend.accumulate(stream, lane, Slice::new(gradients, 0, elements)?)?;
                    }
                }
            }
        }
        if let Some(clip) = block.attention.clip {
            let dqkv = SliceMut::all(dqkv).matrix(rows, 3 * width)?;
            backend.clamp_backward(stream, dqkv, qkv, clip)?;
        }
        Ok(())
    }
}
