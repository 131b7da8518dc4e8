//! One transformer block: attention and an MLP, each over a norm and beside the residual stream.
//!
//! ```text
//! [q | k | v] = norm_1(input) projections^T + bias              [b t, h p] each
//! middle      = input + attention(q, k, v) out_proj^T + bias    after clipping and norms of q and k
//! up          = norm_2(middle) up_proj^T                        [b t, f]
//! out         = middle + gelu(up + bias) down_proj^T + bias
//! ```
//!
//! Forward keeps `[q | k | v]` as projected, attention's output with the logarithms of its sums, `middle` and `up`. Backward
//! forms again what is cheap: norms, clipping and GELU.

use std::num::NonZeroUsize;

use tidemill_kernels::backend::{Gelu, KernelGroup};
use tidemill_kernels::shape::AttentionShape;
use tidemill_kernels::{Backend, SliceMut};

use crate::block::{Block, BlockPass, ResidualGradient, SampleBytes, weights_scratch_bytes};
use crate::error::Result;
use crate::linear::Linear;
use crate::norm::{Norm, NormScratch};
use crate::trainable::{Device, MicrobatchShape};
use crate::transformer::query_key_value::{QueryKeyNorms, QueryKeyValueScratch};
use crate::transformer::{backward, forward};

/// How a block attends.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// h
    pub heads: usize,
    /// p, the width of a head.
    pub head_width: usize,
    /// The factor of `q . k`.
    pub scale: f32,
    /// How many positions a query sees at most, its own among them; `None`: all before it.
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

    /// `slopes[h]` on the device, where there are some.
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

/// One transformer block; the parts fit together where widths are those of the formulas [above](self).
#[derive(Clone, Debug, PartialEq)]
pub struct TransformerBlock {
    /// Before attention.
    pub norm_1: Norm,
    /// One after the other, they make the columns of `[q | k | v]`.
    pub projections: Vec<Linear>,
    /// How it attends.
    pub attention: Attention,
    /// The norms over queries and keys, where the model has them; alike but for their tensors.
    pub query_key_norms: Option<QueryKeyNorms>,
    /// From attention's `[b t, h p]` to the residual stream.
    pub out_proj: Linear,
    /// Before the MLP.
    pub norm_2: Norm,
    /// From d to f.
    pub up_proj: Linear,
    /// Which GELU lies between the two.
    pub gelu: Gelu,
    /// From f to the residual stream.
    pub down_proj: Linear,
}

/// What the forward pass of a [`TransformerBlock`] leaves for its backward pass.
pub struct TransformerSaved<B: Backend> {
    /// `qkv[b t, 3 h p]` as projected, biases included.
    pub(crate) qkv: B::Buffer<B::Activation>,
    /// `attended[b t, h p]`
    pub(crate) attended: B::Buffer<B::Activation>,
    /// `log_sum_exp[b, h, t]`
    pub(crate) log_sum_exp: B::Buffer<f32>,
    /// `middle[b t, d]`
    pub(crate) middle: B::Buffer<f32>,
    /// `up[b t, f]`, without its bias.
    pub(crate) up: B::Buffer<B::Activation>,
    /// `slopes[h]`, written when memory is planned.
    pub(crate) slopes: Option<B::Buffer<f32>>,
}

/// Memory that alike transformer blocks use one after the other.
pub struct TransformerScratch<B: Backend> {
    pub(crate) norm: NormScratch<B>,
    /// `normed[b t, d]`
    pub(crate) normed: B::Buffer<B::Activation>,
    pub(crate) query_key_value: QueryKeyValueScratch<B>,
    /// `activated[b t, f]`: `gelu(up)`
    pub(crate) activated: B::Buffer<B::Activation>,
    /// Used by backward alone.
    pub(crate) gradients: TransformerGradients<B>,
}

/// Gradients on their way through one block.
pub struct TransformerGradients<B: Backend> {
    /// `[b t, d]`
    pub(crate) normed: B::Buffer<B::Activation>,
    /// `[b t, f]`, then that of `up`.
    pub(crate) activated: B::Buffer<B::Activation>,
    /// `[b t, h p]`
    pub(crate) attended: B::Buffer<B::Activation>,
    /// `[b t, 3 h p]`
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
        self.up_proj.outputs
    }

    pub(crate) fn attention_shape(&self, shape: MicrobatchShape) -> Result<AttentionShape> {
        let Attention { heads, head_width, scale, window, .. } = self.attention;
        Ok(AttentionShape::new(shape.sequences()?, heads, head_width, scale, window)?)
    }

    /// What the block launches beside `attention`.
    pub(crate) fn kernels_around(&self, attention: KernelGroup) -> Vec<KernelGroup> {
        let mut kernels = vec![self.norm_1.kernels(), attention, KernelGroup::Gelu];
        if self.most_biases() > 0 || self.attention.clip.is_some() {
            kernels.push(KernelGroup::Bias);
        }
        let norms = self.query_key_norms.as_ref();
        kernels.extend(norms.map(|_| KernelGroup::LayerNormOfActivations));
        kernels
    }

    /// The norm over queries, which is as that over keys, where there are such.
    fn query_key_norm(&self) -> Option<&Norm> {
        self.query_key_norms.as_ref().map(|norms| &norms.query)
    }

    /// Outputs of the widest linear map that has a bias.
    fn most_biases(&self) -> usize {
        let maps = [&self.out_proj, &self.up_proj, &self.down_proj];
        let maps = self.projections.iter().chain(maps);
        maps.filter(|map| map.bias.is_some()).map(|map| map.outputs).max().unwrap_or_default()
    }
}

impl<B: Backend> Block<B> for TransformerBlock {
    type Saved = TransformerSaved<B>;
    type Scratch = TransformerScratch<B>;

    /// Windows and clips may differ in all but whether there is one; slopes lie in what forward leaves.
    fn is_alike(&self, other: &Self) -> bool {
        let sizes = |block: &Self| {
            let Attention { heads, head_width, clip, .. } = block.attention;
            let norms = [Some(&block.norm_1), Some(&block.norm_2), block.query_key_norm()];
            let norms = norms.map(|norm| norm.map(|norm| (norm.kind, norm.bias.is_some())));
            let widths = (block.width(), block.mlp_width(), block.most_biases());
            (heads, head_width, clip.is_some(), norms, widths)
        };
        sizes(self) == sizes(other) && self.attention.slopes == other.attention.slopes
    }

    fn plan_saved(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Saved> {
        let slopes = self.attention.slopes_on(device)?;
        let Device { backend, stream } = device;
        let (rows, width) = (shape.sequences()?.rows(), self.attention.width());
        Ok(TransformerSaved {
            qkv: backend.allocate(stream, rows * 3 * width)?,
            attended: backend.allocate(stream, rows * width)?,
            log_sum_exp: backend.allocate(stream, rows * self.attention.heads)?,
            middle: backend.allocate(stream, rows * self.width())?,
            up: backend.allocate(stream, rows * self.mlp_width())?,
            slopes,
        })
    }

    fn plan_scratch(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch> {
        let grains = shape.grain_rows()?;
        let norm = self.norm_1.plan(device, grains)?;
        let query_key_value = QueryKeyValueScratch::plan(self, device, grains)?;
        let Device { backend, stream } = device;
        let (rows, width) = (grains.rows(), self.attention.width());
        Ok(TransformerScratch {
            norm,
            normed: backend.allocate(stream, rows * self.width())?,
            query_key_value,
            activated: backend.allocate(stream, rows * self.mlp_width())?,
            gradients: TransformerGradients {
                normed: backend.allocate(stream, rows * self.width())?,
                activated: backend.allocate(stream, rows * self.mlp_width())?,
                attended: backend.allocate(stream, rows * width)?,
                qkv: backend.allocate(stream, rows * 3 * width)?,
                bias: backend.allocate(stream, grains.grains() * self.most_biases())?,
            },
        })
    }

    fn kernels(&self) -> Vec<KernelGroup> {
        self.kernels_around(KernelGroup::Attention { head_width: self.attention.head_width })
    }

    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes> {
        let (d, width, f) = (self.width(), self.attention.width(), self.mlp_width());
        let activation = size_of::<B::Activation>();
        let clipped = self.attention.clip.map_or(0, |_| 3 * width);
        let normed = self.query_key_norms.as_ref().map_or(0, |_| 2 * width);
        let forward = activation * (d + f + clipped + normed);
        let backward = activation * (d + f + 4 * width) + 3 * 4 * d;
        let of_parameters = 4 * (2 * d + f.max(3 * width) + 2 * width);
        let one = MicrobatchShape { samples: 1, positions, samples_per_grain: 1 };
        let of_attention = backend.attention_scratch_bytes(self.attention_shape(one)?);
        let others = [&self.out_proj, &self.up_proj, &self.down_proj];
        let maps = self.projections.iter().chain(others);
        let weights: Vec<[usize; 2]> = maps.map(|map| [map.outputs, map.inputs]).collect();
        let of_weights = weights_scratch_bytes(backend, &weights, positions)?;
        Ok(SampleBytes {
            saved: positions * (activation * (4 * width + f) + 4 * (self.attention.heads + d)),
            scratch: positions * (forward + backward) + of_parameters + of_attention + of_weights,
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
