//! One Mamba-2 block: norm, mixer and residual (Dao and Gu, 2024, section 7).
//!
//! ```text
//! u          = rms_norm(input)
//! [z | . | delta_raw] = u in_proj^T                     [b t, e + c + h], c = e + 2 g n
//! [x | B | C] = silu(conv1d(.) + bias)                  [b t, c], causal, k taps a channel
//! v          = head_scan(x, delta_raw, B, C, z)         softplus, skip D x and gate silu(z) inside
//! out        = input + rms_norm(v) out_proj^T
//! ```
//!
//! Forward keeps u, in_proj's product, the convolution's output, and v, in fp32. Backward recomputes
//! the norm of v.

use tidemill_kernels::backend::{ConvInputs, DeltaLimits, HeadScanInputs, KernelGroup};
use tidemill_kernels::shape::{ConvShape, HeadScanShape, HeadScanSizes, SequenceShape};
use tidemill_kernels::{Backend, Matrix, Slice, SliceMut};

use crate::block::{Block, BlockPass, ResidualGradient, SampleBytes, weights_scratch_bytes};
use crate::error::Result;
use crate::lease::Lease;
use crate::mamba2::backward;
use crate::mamba2::config::Mamba2Config;
use crate::mamba2::forward;
use crate::mamba2::tensors::Mamba2Tensors;
use crate::norm::{Norm, NormPass, NormScratch, Normed};
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// One Mamba-2 block.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Block {
    pub(crate) norm: Norm,
    /// The norm over the gated output.
    pub(crate) gated_norm: Norm,
    pub(crate) tensors: Mamba2Tensors,
    /// d
    pub(crate) width: usize,
    pub(crate) sizes: HeadScanSizes,
    /// k
    pub(crate) taps: usize,
    pub(crate) delta_limits: DeltaLimits,
}

/// The values that the forward pass of a [`Mamba2Block`] keeps for its backward pass.
pub struct Mamba2Saved<B: Backend> {
    /// `u[b t, d]`
    pub(crate) normed: Normed<B>,
    /// `projected[b t, e + c + h]`: in_proj's product.
    pub(crate) projected: B::Buffer<B::Activation>,
    /// `xbc[b t, c]`, after convolution and SiLU.
    pub(crate) xbc: B::Buffer<B::Activation>,
    /// `gated[b t, e]`: v, the scan's output.
    pub(crate) gated: B::Buffer<f32>,
}

/// Memory that alike Mamba-2 blocks use one after the other.
pub struct Mamba2Scratch<B: Backend> {
    pub(crate) norm: NormScratch<B>,
    /// `gated_normed[b t, e]`: the norm of v.
    pub(crate) gated_normed: Normed<B>,
    pub(crate) gated_norm: NormScratch<B>,
    /// Allocated for training; only backward uses them.
    pub(crate) gradients: Mamba2Gradients<B>,
}

/// Gradients of activations, and of parameters grain by grain, within one block.
pub struct Mamba2Gradients<B: Backend> {
    /// `[b t, d]`
    pub(crate) normed: B::Buffer<B::Activation>,
    /// `[b t, e + c + h]`
    pub(crate) projected: B::Buffer<B::Activation>,
    /// `[b t, c]`
    pub(crate) xbc: B::Buffer<B::Activation>,
    /// `[b t, e]`
    pub(crate) gated_normed: B::Buffer<B::Activation>,
    /// `[b t, e]`
    pub(crate) gated: ResidualGradient<B>,
    /// `[grains, h]` each.
    pub(crate) a_log: B::Buffer<f32>,
    pub(crate) d: B::Buffer<f32>,
    pub(crate) dt_bias: B::Buffer<f32>,
    /// `[grains, c, k]`
    pub(crate) conv_weight: B::Buffer<f32>,
    /// `[grains, c]`
    pub(crate) conv_bias: B::Buffer<f32>,
}

impl Mamba2Block {
    pub(crate) fn new(config: &Mamba2Config, norms: [Norm; 2], tensors: Mamba2Tensors) -> Self {
        let [norm, gated_norm] = norms;
        let sizes = HeadScanSizes {
            heads: config.n_heads(),
            head_width: config.head_width,
            groups: config.n_groups,
            states: config.d_state,
        };
        Self {
            norm,
            gated_norm,
            tensors,
            width: config.d_model,
            sizes,
            taps: config.d_conv,
            // A checked config has limits that kernels accept.
            delta_limits: config.kernel_limits().unwrap_or(DeltaLimits::NONE),
        }
    }

    /// e
    pub(crate) fn inner(&self) -> usize {
        self.sizes.heads * self.sizes.head_width
    }

    /// c
    pub(crate) fn conv_width(&self) -> usize {
        self.inner() + 2 * self.sizes.groups * self.sizes.states
    }

    /// e + c + h
    pub(crate) fn projected_width(&self) -> usize {
        self.inner() + self.conv_width() + self.sizes.heads
    }

    /// The norm over the block's input.
    pub(crate) fn norm_pass<'a, B: Backend>(
        &self,
        pass: BlockPass<'a, B>,
    ) -> Result<NormPass<'a, B>> {
        let grains = pass.shape.grain_rows()?;
        let input = Slice::all(pass.input).matrix(grains.rows(), self.width)?;
        Ok(NormPass { parameters: pass.parameters, input, grains })
    }

    /// The norm over the gated output.
    pub(crate) fn gated_norm_pass<'a, B: Backend>(
        &self,
        pass: BlockPass<'a, B>,
        gated: &'a B::Buffer<f32>,
    ) -> Result<NormPass<'a, B>> {
        let grains = pass.shape.grain_rows()?;
        let input = Slice::all(gated).matrix(grains.rows(), self.inner())?;
        Ok(NormPass { parameters: pass.parameters, input, grains })
    }

    pub(crate) fn conv_shape(
        &self,
        sequences: SequenceShape,
        samples_per_grain: usize,
    ) -> Result<ConvShape> {
        Ok(ConvShape::new(sequences, samples_per_grain, self.conv_width(), self.taps)?)
    }

    pub(crate) fn scan_shape(
        &self,
        sequences: SequenceShape,
        samples_per_grain: usize,
    ) -> Result<HeadScanShape> {
        Ok(HeadScanShape::new(sequences, samples_per_grain, self.sizes)?)
    }

    /// The arguments of the convolution, which reads columns of `projected[b t, e + c + h]`.
    pub(crate) fn conv_inputs<'a, B: Backend>(
        &self,
        parameters: Lease<'a, B>,
        projected: Matrix<'a, B, B::Activation>,
        starts: Option<Slice<'a, B, u32>>,
    ) -> Result<ConvInputs<'a, B>> {
        let bias = self.tensors.conv_bias.as_ref().map(|place| parameters.vector(place));
        Ok(ConvInputs {
            x: projected.columns(self.inner(), self.conv_width())?,
            weight: parameters.vector(&self.tensors.conv_weight)?,
            bias: bias.transpose()?,
            starts,
        })
    }

    /// The arguments of the scan.
    pub(crate) fn scan_inputs<'a, B: Backend>(
        &self,
        parameters: Lease<'a, B>,
        [projected, xbc]: [Matrix<'a, B, B::Activation>; 2],
        starts: Option<Slice<'a, B, u32>>,
    ) -> Result<HeadScanInputs<'a, B>> {
        Ok(HeadScanInputs {
            projected,
            xbc,
            delta_bias: parameters.vector(&self.tensors.dt_bias)?,
            a_log: parameters.vector(&self.tensors.a_log)?,
            d: parameters.vector(&self.tensors.d)?,
            delta_limits: self.delta_limits,
            starts,
        })
    }
}

impl<B: Backend> Block<B> for Mamba2Block {
    type Saved = Mamba2Saved<B>;
    type Scratch = Mamba2Scratch<B>;

    fn is_alike(&self, other: &Self) -> bool {
        let sizes = |block: &Self| (block.width, block.sizes, block.taps, block.norm.kind);
        sizes(self) == sizes(other)
    }

    fn plan_saved(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Saved> {
        let rows = shape.sequences()?.rows();
        let normed = self.norm.plan_normed(device, rows)?;
        let Device { backend, stream } = device;
        Ok(Mamba2Saved {
            normed,
            projected: backend.allocate(stream, rows * self.projected_width())?,
            xbc: backend.allocate(stream, rows * self.conv_width())?,
            gated: backend.allocate(stream, rows * self.inner())?,
        })
    }

    fn plan_scratch(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch> {
        let (rows, grains) = (shape.sequences()?.rows(), shape.grain_rows()?.grains());
        let (e, c, h) = (self.inner(), self.conv_width(), self.sizes.heads);
        let norm = self.norm.plan_scratch(device, shape.grain_rows()?)?;
        let gated_norm = self.gated_norm.plan_scratch(device, shape.grain_rows()?)?;
        let gated_normed = self.gated_norm.plan_normed(device, rows)?;
        let gated = ResidualGradient::new(device, rows * e)?;
        let Device { backend, stream } = device;
        Ok(Mamba2Scratch {
            norm,
            gated_normed,
            gated_norm,
            gradients: Mamba2Gradients {
                normed: backend.allocate(stream, rows * self.width)?,
                projected: backend.allocate(stream, rows * self.projected_width())?,
                xbc: backend.allocate(stream, rows * c)?,
                gated_normed: backend.allocate(stream, rows * e)?,
                gated,
                a_log: backend.allocate(stream, grains * h)?,
                d: backend.allocate(stream, grains * h)?,
                dt_bias: backend.allocate(stream, grains * h)?,
                conv_weight: backend.allocate(stream, grains * c * self.taps)?,
                conv_bias: backend.allocate(stream, grains * c)?,
            },
        })
    }

    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes> {
        let (d, e, c, h) = (self.width, self.inner(), self.conv_width(), self.sizes.heads);
        let projected = self.projected_width();
        let shape = self.scan_shape(SequenceShape::new(1, positions)?, 1)?;
        let activation = size_of::<B::Activation>();
        let forward = self.gated_norm.row_bytes(activation);
        // The gradient of the gated output is fp32, with a copy in activation precision where that
        // is not fp32.
        let backward = activation * (d + projected + c + 2 * e) + 4 * e + 3 * 4 * d;
        let of_parameters = 4 * (3 * h + c * (self.taps + 1) + d + e);
        let weights = [[projected, d], [d, e]];
        let of_weights = weights_scratch_bytes(backend, &weights, positions)?;
        let of_scan = backend.head_scan_scratch_bytes(shape);
        Ok(SampleBytes {
            saved: positions
                * (self.norm.row_bytes(activation) + activation * (projected + c) + 4 * e),
            scratch: positions * (forward + backward) + of_parameters + of_scan + of_weights,
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

    fn kernels(&self) -> Vec<KernelGroup> {
        let scan = KernelGroup::HeadScan { states: self.sizes.states };
        vec![self.norm.kernels(), KernelGroup::CausalConv1d, scan]
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
