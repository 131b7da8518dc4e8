//! What stands between the projections and attention: clipping and a layer norm over queries and over keys, or rotary positions.
//!
//! ```text
//! [q | k | v] = clamp([q | k | v], -clip, clip)        where the model clips
//! q, k        = layer_norm(q), layer_norm(k)           over all heads together, where the model norms
//! ```
//!
//! Both are cheap, so backward forms them again from the projections' product. Rotary positions turn queries and keys where they are
//! projected, and stay.

use tidemill_kernels::backend::{NormGradient, NormInput, RotaryInputs};
use tidemill_kernels::shape::{AttentionShape, GrainRows, NormShape};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::lease::Lease;
use crate::norm::Norm;
use crate::trainable::Device;
use crate::transformer::block::TransformerBlock;

/// The layer norms over queries and over keys, each over all heads together.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryKeyNorms {
    /// Over queries.
    pub query: Norm,
    /// Over keys.
    pub key: Norm,
}

impl QueryKeyNorms {
    fn both(&self) -> [&Norm; 2] {
        [&self.query, &self.key]
    }
}

/// Memory for what attention reads, where that is not the projections' product itself.
pub(crate) struct QueryKeyValueScratch<B: Backend> {
    /// `[b t, 3 h p]`, of a model that clips.
    clipped: Option<B::Buffer<B::Activation>>,
    /// Of a model that norms.
    norms: Option<NormsScratch<B>>,
    /// `table[positions, p]` of rotary positions.
    table: Option<B::Buffer<f32>>,
}

/// Where rows stand, for rotary positions.
pub(crate) struct Places<'a, B: Backend> {
    /// `starts[b t]`: the position in its sample of the first token of the row's document.
    pub starts: Option<Slice<'a, B, u32>>,
    /// `past[b]`: positions of each sequence before its rows.
    pub past: Option<Slice<'a, B, u32>>,
}

struct NormsScratch<B: Backend> {
    /// `[b t, 2 h p]`: queries, then keys.
    normed: B::Buffer<B::Activation>,
    /// `[2, 2, b t]`: those of queries, then those of keys.
    statistics: B::Buffer<f32>,
    /// `[grains, h p]`
    weight_gradients: B::Buffer<f32>,
    /// `[grains, h p]`, where there are biases.
    bias_gradients: B::Buffer<f32>,
}

/// The rows at hand, and the parameters of their block.
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
            Some(_) if attention.clip.is_some() || block.query_key_norms.is_some() => {
                let expected = "neither a clip nor norms of queries and keys";
                return Err(ModelError::config("rotary positions", expected, "some"));
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
                let elements = grains.grains() * width;
                let biases = norms.query.bias.as_ref().map_or(0, |_| elements);
                Some(NormsScratch {
                    normed: backend.allocate(stream, rows * 2 * width)?,
                    statistics: backend.allocate(stream, 4 * rows)?,
                    weight_gradients: backend.allocate(stream, elements)?,
                    bias_gradients: backend.allocate(stream, biases)?,
                })
            }
            None => None,
        };
        Ok(Self { clipped, norms, table })
    }

    /// Turns queries and keys of `qkv[b t, (h + 2 g) p]` by the angles of their positions, where the model does.
    pub(crate) fn turn(
        &self,
        block: &TransformerBlock,
        device: &mut Device<'_, B>,
        qkv: &mut B::Buffer<B::Activation>,
        places: Places<'_, B>,
        shape: AttentionShape,
    ) -> Result<()> {
        let Some(table) = &self.table else { return Ok(()) };
        let attention = &block.attention;
        let qkv: MatrixMut<'_, B, _> =
            SliceMut::all(qkv).matrix(shape.sequences().rows(), attention.projected_width())?;
        let qk = qkv.columns(0, attention.width() + attention.key_value_width())?;
        let Places { starts, past } = places;
        let inputs = RotaryInputs { table: Slice::all(table), starts, past };
        Ok(device.backend.rotary_forward(device.stream, qk, inputs, shape)?)
    }

    /// Leaves in the first `(h + 2 g) p` columns of `dqkv[b t, 3 h p]` the gradient of what [`turn`](Self::turn) was given.
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

    /// Forms what attention reads of the projections' product `qkv[b t, 3 h p]`.
    pub(crate) fn prepare(
        &mut self,
        block: &TransformerBlock,
        device: &mut Device<'_, B>,
        qkv: &B::Buffer<B::Activation>,
        pass: Rows<'_, B>,
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
        for (index, norm) in norms.both().into_iter().enumerate() {
            let normed: MatrixMut<'_, B, _> =
                SliceMut::all(&mut scratch.normed).matrix(rows, 2 * width)?;
            let bias = norm.bias.as_ref().map(|place| pass.parameters.vector(place));
            backend.layer_norm_forward(
                stream,
                normed.columns(index * width, width)?,
                SliceMut::new(&mut scratch.statistics, index * 2 * rows, 2 * rows)?,
                NormInput::Activation(input.columns(index * width, width)?),
                pass.parameters.vector(&norm.weight)?,
                bias.transpose()?,
                NormShape::layer(pass.grains, width, norm.eps)?,
            )?;
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
            Some(norms) => Slice::all(&norms.normed).matrix(rows, 2 * width)?,
            None => qkv,
        };
        Ok([qk.columns(0, width)?, qk.columns(width, shared)?, v])
    }

    /// Turns `dqkv[b t, 3 h p]`, the gradient of what attention read, into that of the projections' product `qkv`, and adds
    /// the gradients of the norms to `lane`. [`prepare`](Self::prepare) has run for the same `qkv`.
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
        let elements = pass.grains.grains() * width;
        let qkv = Slice::all(qkv).matrix(rows, block.attention.projected_width())?;
        if let (Some(scratch), Some(norms)) = (&mut self.norms, &block.query_key_norms) {
            let input = match &self.clipped {
                Some(clipped) => Slice::all(clipped).matrix(rows, 3 * width)?,
                None => qkv,
            };
            for (index, norm) in norms.both().into_iter().enumerate() {
                let NormsScratch { statistics, weight_gradients, bias_gradients, .. } =
                    &mut *scratch;
                let dqkv: MatrixMut<'_, B, _> = SliceMut::all(dqkv).matrix(rows, 3 * width)?;
                let dbias = match norm.bias {
                    Some(_) => Some(SliceMut::new(bias_gradients, 0, elements)?),
                    None => None,
                };
                backend.layer_norm_backward(
                    stream,
                    NormGradient::InPlace(dqkv.columns(index * width, width)?),
                    SliceMut::new(weight_gradients, 0, elements)?,
                    dbias,
                    NormInput::Activation(input.columns(index * width, width)?),
                    Slice::new(statistics, index * 2 * rows, 2 * rows)?,
                    pass.parameters.vector(&norm.weight)?,
                    NormShape::layer(pass.grains, width, norm.eps)?,
                )?;
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
