//! The norms of queries and of keys.
//!
//! ```text
//! q, k = layer_norm(q), layer_norm(k)        over all heads together, as in MPT, or
//! q, k = rms_norm(q), rms_norm(k)            of each head, as in Qwen3
//! ```
//!
//! Queries and keys are columns of one matrix, and so are their gradients. Forward leaves the normed
//! ones in a [`QueryKeyNormsScratch`]; backward needs the same scratch and the same input.

use std::ops::Range;

use tidemill_kernels::backend::{
    KernelGroup, NormGradient, NormGradients, NormInput, NormInputs, NormSaved,
};
use tidemill_kernels::shape::{GrainRows, NormShape};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::Result;
use crate::norm::{Norm, NormKind};
use crate::trainable::Device;
use crate::transformer::block::Attention;
use crate::transformer::query_key_value::Rows;

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

/// Memory of the norms while they run: the normed queries and keys, and what backward needs.
pub struct QueryKeyNormsScratch<B: Backend> {
    /// `[b t, (h + g) p]`: queries, then keys.
    normed: B::Buffer<B::Activation>,
    /// (h + g) p
    columns: usize,
    /// The statistics of queries, then those of keys: `[2, b t]` each for layer norms, else `[b t,
    /// h]` and `[b t, g]`.
    statistics: B::Buffer<f32>,
    /// `[grains, d]`, d being the norms' width.
    weight_gradients: B::Buffer<f32>,
    /// `[grains, d]`, where there are biases.
    bias_gradients: B::Buffer<f32>,
}

impl<B: Backend> QueryKeyNormsScratch<B> {
    /// `[q | k][rows, (h + g) p]` as [`QueryKeyNorms::forward`] left them.
    ///
    /// # Errors
    /// More rows than memory was planned for.
    pub fn normed(&self, rows: usize) -> Result<Matrix<'_, B, B::Activation>> {
        Ok(Slice::all(&self.normed).matrix(rows, self.columns)?)
    }

    /// [`normed`](Self::normed), for a kernel that changes them.
    ///
    /// # Errors
    /// More rows than memory was planned for.
    pub fn normed_mut(&mut self, rows: usize) -> Result<MatrixMut<'_, B, B::Activation>> {
        Ok(SliceMut::all(&mut self.normed).matrix(rows, self.columns)?)
    }
}

/// The arguments that forward and backward of the norms share.
pub struct QueryKeyPass<'a, B: Backend> {
    /// The heads of queries and of keys.
    pub attention: &'a Attention,
    /// `[q | k][rows, (h + g) p]`: the input of forward.
    pub input: Matrix<'a, B, B::Activation>,
    /// The rows, and the parameters of the segment that holds the norms.
    pub rows: Rows<'a, B>,
}

impl QueryKeyNorms {
    /// The kernels that they launch, for [`Block::kernels`](crate::block::Block::kernels) of a block
    /// with such norms.
    pub fn kernels(&self) -> KernelGroup {
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

    /// Bytes of one row's normed queries and keys, and of their statistics, in a
    /// [`QueryKeyNormsScratch`] whose activations have `activation_bytes` bytes each.
    pub fn row_bytes(&self, attention: &Attention, activation_bytes: usize) -> usize {
        let columns = attention.width() + attention.key_value_width();
        let statistics: usize = self.row_statistics(attention).iter().sum();
        columns * activation_bytes + statistics * size_of::<f32>()
    }

    /// Memory for microbatches up to `grains`.
    ///
    /// # Errors
    /// A device without room.
    pub fn plan<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        attention: &Attention,
        grains: GrainRows,
    ) -> Result<QueryKeyNormsScratch<B>> {
        let Device { backend, stream } = device;
        let (rows, elements) = (grains.rows(), grains.grains() * self.query.width);
        let biases = self.query.bias.as_ref().map_or(0, |_| elements);
        let columns = attention.width() + attention.key_value_width();
        let statistics: usize = self.row_statistics(attention).iter().sum();
        Ok(QueryKeyNormsScratch {
            normed: backend.allocate(stream, rows * columns)?,
            columns,
            statistics: backend.allocate(stream, rows * statistics)?,
            weight_gradients: backend.allocate(stream, elements)?,
            bias_gradients: backend.allocate(stream, biases)?,
        })
    }

    /// Writes the [normed](QueryKeyNormsScratch::normed) queries and keys of `pass.input`, and
    /// leaves in the scratch the statistics that [`backward`](Self::backward) needs.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn forward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        scratch: &mut QueryKeyNormsScratch<B>,
        pass: QueryKeyPass<'_, B>,
    ) -> Result<()> {
        let QueryKeyPass { attention, input, rows: Rows { parameters, grains } } = pass;
        for part in self.parts(attention, grains)? {
            let Part { norm, columns, statistics, shape } = part;
            let normed =
                SliceMut::all(&mut scratch.normed).matrix(grains.rows(), scratch.columns)?;
            let normed: MatrixMut<'_, B, _> = normed.columns(columns.start, columns.len())?;
            let places = (statistics.start, statistics.len());
            let statistics = SliceMut::new(&mut scratch.statistics, places.0, places.1)?;
            let bias = norm.bias.as_ref().map(|place| parameters.vector(place));
            let inputs = NormInputs {
                x: NormInput::Activation(input.columns(columns.start, columns.len())?),
                weight: parameters.vector(&norm.weight)?,
                bias: bias.transpose()?,
            };
            device.backend.norm_forward(device.stream, normed, statistics, inputs, shape)?;
        }
        Ok(())
    }

    /// Turns `grad[rows, (h + g) p]`, the gradient of the normed queries and keys, into that of
    /// `pass.input`, in place, and adds the gradients of the norms' parameters to `lane`, laid out
    /// as their segment, grain by grain. The scratch must be as [`forward`](Self::forward) left it
    /// for the same input; its normed queries and keys may have changed since.
    ///
    /// # Errors
    /// Views of other sizes, parameters of another layout, or a device that fails.
    pub fn backward<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        mut grad: MatrixMut<'_, B, B::Activation>,
        lane: &mut SliceMut<'_, B, f32>,
        scratch: &mut QueryKeyNormsScratch<B>,
        pass: QueryKeyPass<'_, B>,
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let QueryKeyPass { attention, input, rows: Rows { parameters, grains } } = pass;
        for part in self.parts(attention, grains)? {
            let Part { norm, columns, statistics, shape } = part;
            let elements = grains.grains() * norm.width;
            let QueryKeyNormsScratch { statistics: all, weight_gradients, bias_gradients, .. } =
                &mut *scratch;
            let dbias = norm.bias.as_ref().map(|_| SliceMut::new(bias_gradients, 0, elements));
            let dx = grad.reborrow().columns(columns.start, columns.len())?;
            let gradients = NormGradients {
                x: NormGradient::InPlace(dx),
                dweight: SliceMut::new(weight_gradients, 0, elements)?,
                dbias: dbias.transpose()?,
            };
            let saved = NormSaved {
                x: NormInput::Activation(input.columns(columns.start, columns.len())?),
                statistics: Slice::new(all, statistics.start, statistics.len())?,
                weight: parameters.vector(&norm.weight)?,
            };
            backend.norm_backward(stream, gradients, saved, shape)?;
            let places = [(Some(&norm.weight), &*weight_gradients)];
            let places = places.into_iter().chain([(norm.bias.as_ref(), &*bias_gradients)]);
            for (place, gradients) in places {
                if let Some(place) = place {
                    let lane = lane.reborrow().sub(place.start, place.len())?;
                    backend.accumulate(stream, lane, Slice::new(gradients, 0, elements)?)?;
                }
            }
        }
        Ok(())
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
    /// Their columns, before and after the norm.
    columns: Range<usize>,
    statistics: Range<usize>,
    shape: NormShape,
}
