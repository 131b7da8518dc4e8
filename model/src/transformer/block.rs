//! One transformer block: attention and an MLP, each over a norm and beside the residual stream.
//!
//! ```text
//! [q | k | v] = norm_1(input) projections^T + bias              [b t, h p], and [b t, g p] twice
//! middle      = input + attention(q, k, v) out_proj^T + bias    after clipping, norms of q and k, rotary positions
//! out         = middle + mlp(norm_2(middle))
//! ```
//!
//! Forward keeps the outputs of both norms, `[q | k | v]` (as projected; in a model without norms of
//! queries and keys, after rotary positions), attention's output with its log-sum-exp, `middle`, and
//! the input of the MLP's activation function. Backward recomputes cheap values: clipping, norms and
//! rotary positions of queries and keys, and the activation function.

use std::num::NonZeroUsize;

use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::shape::{AttentionShape, SequenceShape};
use tidemill_kernels::{Backend, SliceMut};

use crate::block::{Block, BlockPass, ResidualGradient, SampleBytes, weights_scratch_bytes};
use crate::error::Result;
use crate::linear::Linear;
use crate::norm::{Norm, NormScratch, Normed};
use crate::sample::MicrobatchShape;
use crate::trainable::Device;
use crate::transformer::mlp::Mlp;
use crate::transformer::query_key_norms::QueryKeyNorms;
use crate::transformer::query_key_value::QueryKeyValueScratch;
use crate::transformer::rotary::Rotary;
use crate::transformer::{backward, forward};

/// The settings of a block's attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// h, heads of queries.
    pub heads: usize,
    /// p, the width of a head.
    pub head_width: usize,
    /// Rotary positions, where the model has them; such a model has no clip.
    pub rotary: Option<Rotary>,
    /// The factor of `q . k`.
    pub scale: f32,
    /// The most positions that a query attends to, its own among them; `None`: all before it.
    pub window: Option<NonZeroUsize>,
    /// `slopes[h]` of ALiBi.
    pub slopes: Option<Vec<f32>>,
    /// Queries, keys and values are clipped to this magnitude.
    pub clip: Option<f32>,
}

impl Attention {
    /// h p
    pub fn width(&self) -> usize {
        self.heads * self.head_width
    }

    /// g, heads of keys and values.
    pub fn key_value_heads(&self) -> usize {
        self.rotary.map_or(self.heads, |rotary| rotary.key_value_heads)
    }

    /// g p
    pub fn key_value_width(&self) -> usize {
        self.key_value_heads() * self.head_width
    }

    /// (h + 2 g) p, the columns of `[q | k | v]`.
    pub fn projected_width(&self) -> usize {
        self.width() + 2 * self.key_value_width()
    }

    /// The shape of attention over `sequences`.
    pub(crate) fn shape(&self, sequences: SequenceShape) -> Result<AttentionShape> {
        let Self { heads, head_width, scale, window, .. } = *self;
        let shape = AttentionShape::new(sequences, heads, head_width, scale, window)?;
        Ok(shape.with_key_value_heads(self.key_value_heads())?)
    }

    /// `slopes[h]` on the device, where the model has them.
    pub(crate) fn slopes_on<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
    ) -> Result<Option<B::Buffer<f32>>> {
        let Device { backend, stream } = device;
        let Some(slopes) = &self.slopes else { return Ok(None) };
        let mut buffer = backend.allocate(stream, slopes.len())?;
        backend.write(stream, SliceMut::all(&mut buffer), slopes)?;
        Ok(Some(buffer))
    }
}

/// One transformer block; the widths of its parts must match the formulas [above](self).
#[derive(Clone, Debug, PartialEq)]
pub struct TransformerBlock {
    /// Before attention.
    pub norm_1: Norm,
    /// One after the other, they make the columns of `[q | k | v]`.
    pub projections: Vec<Linear>,
    /// How it attends.
    pub attention: Attention,
    /// The norms over queries and over keys, where the model has them; alike except for their
    /// tensors.
    pub query_key_norms: Option<QueryKeyNorms>,
    /// From attention's `[b t, h p]` to the residual stream.
    pub out_proj: Linear,
    /// Before the MLP.
    pub norm_2: Norm,
    /// The second branch beside the residual stream.
    pub mlp: Mlp,
}

/// The values that the forward pass of a [`TransformerBlock`] keeps for its backward pass.
pub struct TransformerSaved<B: Backend> {
    /// `normed[b t, d]` of `norm_1`.
    pub(crate) normed_1: Normed<B>,
    /// `qkv[b t, (h + 2 g) p]` as projected, biases included; in a model without norms of queries
    /// and keys, after rotary positions.
    pub(crate) qkv: B::Buffer<B::Activation>,
    /// `attended[b t, h p]`
    pub(crate) attended: B::Buffer<B::Activation>,
    /// `log_sum_exp[b, h, t]`
    pub(crate) log_sum_exp: B::Buffer<f32>,
    /// `middle[b t, d]`
    pub(crate) middle: B::Buffer<f32>,
    /// `normed[b t, d]` of `norm_2`.
    pub(crate) normed_2: Normed<B>,
    /// `up[b t, f]` without its bias, or `[gate | up][b t, 2 f]`.
    pub(crate) up: B::Buffer<B::Activation>,
    /// `slopes[h]`, written when memory is planned.
    pub(crate) slopes: Option<B::Buffer<f32>>,
}

/// Memory that alike transformer blocks use one after the other.
pub struct TransformerScratch<B: Backend> {
    pub(crate) norm: NormScratch<B>,
    pub(crate) query_key_value: QueryKeyValueScratch<B>,
    /// `activated[b t, f]`
    pub(crate) activated: B::Buffer<B::Activation>,
    /// Allocated for training; only backward uses them.
    pub(crate) gradients: TransformerGradients<B>,
}

/// Gradients within one block.
pub struct TransformerGradients<B: Backend> {
    /// `[b t, d]`
    pub(crate) normed: B::Buffer<B::Activation>,
    /// The gradient of the activation function's input, and as wide.
    pub(crate) activated: B::Buffer<B::Activation>,
    /// `[b t, h p]`
    pub(crate) attended: B::Buffer<B::Activation>,
    /// `[b t, 3 h p]`; the first `(h + 2 g) p` columns end as the gradient of the projections.
    pub(crate) qkv: B::Buffer<B::Activation>,
    /// `[grains, outputs]` of the widest linear map that has a bias.
    pub(crate) bias: B::Buffer<f32>,
}

impl TransformerBlock {
    /// d
    pub(crate) fn width(&self) -> usize {
        self.norm_1.width
    }

    /// f
    pub(crate) fn mlp_width(&self) -> usize {
        self.mlp.width()
    }

    pub(crate) fn attention_shape(&self, shape: MicrobatchShape) -> Result<AttentionShape> {
        self.attention.shape(shape.sequences()?)
    }

    /// The kernels that the block launches beside `attention`.
    pub(crate) fn kernels_around(&self, attention: KernelGroup) -> Vec<KernelGroup> {
        let mut kernels = vec![self.norm_1.kernels(), attention, self.mlp.kernels()];
        kernels.extend(self.attention.rotary.map(|_| KernelGroup::Rotary));
        if self.most_biases() > 0 || self.attention.clip.is_some() {
            kernels.push(KernelGroup::Bias);
        }
        let norms = self.query_key_norms.as_ref();
        kernels.extend(norms.map(QueryKeyNorms::kernels));
        kernels
    }

    /// The norm over queries, if any; the norm over keys is alike.
    fn query_key_norm(&self) -> Option<&Norm> {
        self.query_key_norms.as_ref().map(|norms| &norms.query)
    }

    /// Its linear maps.
    fn maps(&self) -> impl Iterator<Item = &Linear> {
        self.projections.iter().chain([&self.out_proj]).chain(self.mlp.maps())
    }

    /// Outputs of the widest linear map that has a bias.
    fn most_biases(&self) -> usize {
        self.maps()
            .filter(|map| map.bias.is_some())
            .map(|map| map.outputs)
            .max()
            .unwrap_or_default()
    }
}

impl<B: Backend> Block<B> for TransformerBlock {
    type Saved = TransformerSaved<B>;
    type Scratch = TransformerScratch<B>;

    /// Alike blocks may differ in the numbers of windows and clips, but not in whether they have
    /// one; slopes are among the saved values.
    fn is_alike(&self, other: &Self) -> bool {
        let sizes = |block: &Self| {
            let Attention { heads, head_width, rotary, clip, .. } = block.attention;
            let norms = [Some(&block.norm_1), Some(&block.norm_2), block.query_key_norm()];
            let norms = norms.map(|norm| norm.map(|norm| (norm.kind, norm.bias.is_some())));
            let of_mlp = (block.mlp_width(), block.mlp.up_width());
            let widths = (block.width(), of_mlp, block.most_biases());
            (heads, head_width, rotary, clip.is_some(), norms, widths)
        };
        sizes(self) == sizes(other) && self.attention.slopes == other.attention.slopes
    }

    fn plan_saved(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Saved> {
        let slopes = self.attention.slopes_on(device)?;
        let (rows, width) = (shape.sequences()?.rows(), self.attention.width());
        let normed_1 = self.norm_1.plan_normed(device, rows)?;
        let normed_2 = self.norm_2.plan_normed(device, rows)?;
        let Device { backend, stream } = device;
        Ok(TransformerSaved {
            normed_1,
            qkv: backend.allocate(stream, rows * self.attention.projected_width())?,
            attended: backend.allocate(stream, rows * width)?,
            log_sum_exp: backend.allocate(stream, rows * self.attention.heads)?,
            middle: backend.allocate(stream, rows * self.width())?,
            normed_2,
            up: backend.allocate(stream, rows * self.mlp.up_width())?,
            slopes,
        })
    }

    fn plan_scratch(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch> {
        let grains = shape.grain_rows()?;
        let norm = self.norm_1.plan_scratch(device, grains)?;
        let query_key_value = QueryKeyValueScratch::plan(self, device, grains, shape.positions)?;
        let Device { backend, stream } = device;
        let (rows, width) = (grains.rows(), self.attention.width());
        Ok(TransformerScratch {
            norm,
            query_key_value,
            activated: backend.allocate(stream, rows * self.mlp_width())?,
            gradients: TransformerGradients {
                normed: backend.allocate(stream, rows * self.width())?,
                activated: backend.allocate(stream, rows * self.mlp.up_width())?,
                attended: backend.allocate(stream, rows * width)?,
                qkv: backend.allocate(stream, rows * 3 * width)?,
                bias: backend.allocate(stream, grains.grains() * self.most_biases())?,
            },
        })
    }

    fn kernels(&self) -> Vec<KernelGroup> {
        let Attention { head_width, slopes, .. } = &self.attention;
        let (head_width, has_slopes) = (*head_width, slopes.is_some());
        self.kernels_around(KernelGroup::Attention { head_width, has_slopes })
    }

    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes> {
        let (d, width, f) = (self.width(), self.attention.width(), self.mlp_width());
        let (projected, up) = (self.attention.projected_width(), self.mlp.up_width());
        let activation = size_of::<B::Activation>();
        let clipped = self.attention.clip.map_or(0, |_| 3 * width);
        let norms = self.query_key_norms.as_ref();
        let normed = norms.map_or(0, |norms| norms.row_bytes(&self.attention, activation));
        let forward = activation * (f + clipped) + normed;
        let backward = activation * (d + up + 4 * width) + 3 * 4 * d;
        let table = self.attention.rotary.map_or(0, |_| 4 * self.attention.head_width);
        let of_parameters = 4 * (2 * d + f.max(3 * width) + 2 * width);
        let of_norms = [&self.norm_1, &self.norm_2].map(|norm| norm.row_bytes(activation));
        let one = MicrobatchShape { samples: 1, positions, samples_per_grain: 1 };
        let of_attention = backend.attention_scratch_bytes(self.attention_shape(one)?);
        let weights: Vec<[usize; 2]> = self.maps().map(|map| [map.outputs, map.inputs]).collect();
        let of_weights = weights_scratch_bytes(backend, &weights, positions)?;
        Ok(SampleBytes {
            saved: positions
                * (activation * (projected + width + up)
                    + 4 * (self.attention.heads + d)
                    + of_norms[0]
                    + of_norms[1]),
            scratch: positions * (forward + backward + table)
                + of_parameters
                + of_attention
                + of_weights,
        })
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        out: &mut B::Buffer<f32>,
        pass: BlockPass<'_, B>,
        saved: &mut Self::Saved,
        scratch: &mut Self::Scratch,
    ) -> Result<()> {
        forward::run(self, device, out, pass, saved, scratch)
    }

    fn backward(
        &self,
        device: &mut Device<'_, B>,
        grad: &mut ResidualGradient<B>,
        lane: SliceMut<'_, B, f32>,
        pass: BlockPass<'_, B>,
        saved: &mut Self::Saved,
        scratch: &mut Self::Scratch,
    ) -> Result<()> {
        backward::run(self, device, grad, lane, pass, saved, scratch)
    }
}
