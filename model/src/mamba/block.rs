//! One Mamba block: norm, mixer and residual (Gu and Dao, 2023, section 3.4).
//!
//! ```text
//! u          = rms_norm(input)
//! [x | z]    = u in_proj^T                              [b t, e] each
//! x          = silu(conv1d(x) + bias)                   causal, k taps a channel
//! [dt, B, C] = x x_proj^T                               r, n and n columns
//! y          = selective_scan(dt dt_proj^T, x, B, C)    softplus, skip D x and gate silu(z) inside
//! out        = input + y out_proj^T
//! ```
//!
//! Forward keeps the norm's output, `[x | z]` before the convolution, `x` after it, `[dt, B, C]` and
//! the values that the scan saves. Backward recomputes cheap values: dt_proj's product, and the
//! gated output, which the backward scan returns.

use tidemill_kernels::backend::{ConvInputs, KernelGroup, ScanInputs};
use tidemill_kernels::shape::{ConvShape, ScanShape, SequenceShape};
use tidemill_kernels::{Backend, Matrix, Slice, SliceMut};

use crate::block::{Block, BlockPass, ResidualGradient, SampleBytes, weights_scratch_bytes};
use crate::error::Result;
use crate::mamba::backward;
use crate::mamba::config::MambaConfig;
use crate::mamba::forward;
use crate::mamba::tensors::MambaTensors;
use crate::norm::{Norm, NormPass, NormScratch, Normed};
use crate::sample::MicrobatchShape;
use crate::trainable::Device;

/// One Mamba block.
#[derive(Clone, Debug, PartialEq)]
pub struct MambaBlock {
    pub(crate) norm: Norm,
    pub(crate) tensors: MambaTensors,
    /// d
    pub(crate) width: usize,
    /// e
    pub(crate) inner: usize,
    /// n
    pub(crate) states: usize,
    /// r
    pub(crate) rank: usize,
    /// k
    pub(crate) taps: usize,
}

/// The values that the forward pass of a [`MambaBlock`] keeps for its backward pass.
pub struct MambaSaved<B: Backend> {
    /// `u[b t, d]`
    pub(crate) normed: Normed<B>,
    /// `xz[b t, 2 e]`: in_proj's product.
    pub(crate) xz: B::Buffer<B::Activation>,
    /// `x[b t, e]`, after convolution and SiLU.
    pub(crate) x: B::Buffer<B::Activation>,
    /// `dt_bc[b t, r + 2 n]`: x_proj's product.
    pub(crate) dt_bc: B::Buffer<B::Activation>,
    /// The values that the scan saves.
    pub(crate) scan: B::Buffer<f32>,
}

/// The activations that the scan reads, views of [`MambaSaved`] and [`MambaScratch`].
pub(crate) struct ScanSources<'a, B: Backend> {
    pub xz: &'a B::Buffer<B::Activation>,
    pub x: &'a B::Buffer<B::Activation>,
    pub dt_bc: &'a B::Buffer<B::Activation>,
    pub delta_raw: &'a B::Buffer<B::Activation>,
}

/// Memory that alike Mamba blocks use one after the other.
pub struct MambaScratch<B: Backend> {
    pub(crate) norm: NormScratch<B>,
    /// `delta_raw[b t, e]`: dt_proj's product.
    pub(crate) delta_raw: B::Buffer<B::Activation>,
    /// `gated[b t, e]`: the scan's output.
    pub(crate) gated: B::Buffer<B::Activation>,
    /// Allocated for training; only backward uses them.
    pub(crate) gradients: MambaGradients<B>,
}

/// Gradients of activations, and of parameters grain by grain, within one block.
pub struct MambaGradients<B: Backend> {
    /// `[b t, d]`
    pub(crate) normed: B::Buffer<B::Activation>,
    /// `[b t, 2 e]`
    pub(crate) xz: B::Buffer<B::Activation>,
    /// `[b t, e]`
    pub(crate) x: B::Buffer<B::Activation>,
    /// `[b t, r + 2 n]`
    pub(crate) dt_bc: B::Buffer<B::Activation>,
    /// `[b t, e]`
    pub(crate) delta_raw: B::Buffer<B::Activation>,
    /// `[b t, e]`
    pub(crate) gated: B::Buffer<B::Activation>,
    /// `[grains, e]`, of D and the convolution's bias.
    pub(crate) channels: B::Buffer<f32>,
    /// `[grains, e]`
    pub(crate) dt_bias: B::Buffer<f32>,
    /// `[grains, e, n]`
    pub(crate) a_log: B::Buffer<f32>,
    /// `[grains, e, k]`
    pub(crate) conv_weight: B::Buffer<f32>,
}

impl MambaBlock {
    pub(crate) fn new(config: &MambaConfig, norm: Norm, tensors: MambaTensors) -> Self {
        Self {
            norm,
            tensors,
            width: config.d_model,
            inner: config.d_inner(),
            states: config.d_state,
            rank: config.dt_rank,
            taps: config.d_conv,
        }
    }

    /// r + 2 n
    pub(crate) fn dt_bc_width(&self) -> usize {
        self.rank + 2 * self.states
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

    pub(crate) fn conv_shape(&self, shape: MicrobatchShape) -> Result<ConvShape> {
        let grain = shape.samples_per_grain;
        Ok(ConvShape::new(shape.sequences()?, grain, self.inner, self.taps)?)
    }

    pub(crate) fn scan_shape(&self, shape: MicrobatchShape) -> Result<ScanShape> {
        let grain = shape.samples_per_grain;
        Ok(ScanShape::new(shape.sequences()?, grain, self.inner, self.states)?)
    }

    /// `x[b t, e]` and `z[b t, e]`: the halves of in_proj's product.
    pub(crate) fn halves<'a, B: Backend>(
        &self,
        xz: &'a B::Buffer<B::Activation>,
        rows: usize,
    ) -> Result<[Matrix<'a, B, B::Activation>; 2]> {
        let xz = Slice::all(xz).matrix(rows, 2 * self.inner)?;
        Ok([xz.columns(0, self.inner)?, xz.columns(self.inner, self.inner)?])
    }

    /// The arguments of the convolution.
    pub(crate) fn conv_inputs<'a, B: Backend>(
        &self,
        pass: BlockPass<'a, B>,
        xz: &'a B::Buffer<B::Activation>,
    ) -> Result<ConvInputs<'a, B>> {
        let [x, _] = self.halves::<B>(xz, pass.shape.sequences()?.rows())?;
        let tensors = &self.tensors;
        let bias = tensors.conv_bias.as_ref().map(|place| pass.parameters.vector(place));
        Ok(ConvInputs {
            x,
            weight: pass.parameters.vector(&tensors.conv_weight)?,
            bias: bias.transpose()?,
            starts: pass.starts,
        })
    }

    /// The arguments of the scan.
    pub(crate) fn scan_inputs<'a, B: Backend>(
        &self,
        pass: BlockPass<'a, B>,
        sources: ScanSources<'a, B>,
    ) -> Result<ScanInputs<'a, B>> {
        let rows = pass.shape.sequences()?.rows();
        let dt_bc = Slice::all(sources.dt_bc).matrix(rows, self.dt_bc_width())?;
        let [_, z] = self.halves::<B>(sources.xz, rows)?;
        Ok(ScanInputs {
            delta_raw: Slice::all(sources.delta_raw).matrix(rows, self.inner)?,
            delta_bias: pass.parameters.vector(&self.tensors.dt_bias)?,
            x: Slice::all(sources.x).matrix(rows, self.inner)?,
            bc: dt_bc.columns(self.rank, 2 * self.states)?,
            z,
            a_log: pass.parameters.vector(&self.tensors.a_log)?,
            d: pass.parameters.vector(&self.tensors.d)?,
            starts: pass.starts,
        })
    }
}

impl<B: Backend> Block<B> for MambaBlock {
    type Saved = MambaSaved<B>;
    type Scratch = MambaScratch<B>;

    fn is_alike(&self, other: &Self) -> bool {
        let sizes = |block: &Self| {
            (block.width, block.inner, block.states, block.rank, block.taps, block.norm.kind)
        };
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
        let scan = backend.selective_scan_saved_elements(self.scan_shape(shape)?);
        Ok(MambaSaved {
            normed,
            xz: backend.allocate(stream, rows * 2 * self.inner)?,
            x: backend.allocate(stream, rows * self.inner)?,
            dt_bc: backend.allocate(stream, rows * self.dt_bc_width())?,
            scan: backend.allocate(stream, scan)?,
        })
    }

    fn plan_scratch(
        &self,
        device: &mut Device<'_, B>,
        shape: MicrobatchShape,
    ) -> Result<Self::Scratch> {
        let (rows, grains) = (shape.sequences()?.rows(), shape.grain_rows()?.grains());
        let (width, inner) = (self.width, self.inner);
        let norm = self.norm.plan_scratch(device, shape.grain_rows()?)?;
        let Device { backend, stream } = device;
        Ok(MambaScratch {
            norm,
            delta_raw: backend.allocate(stream, rows * inner)?,
            gated: backend.allocate(stream, rows * inner)?,
            gradients: MambaGradients {
                normed: backend.allocate(stream, rows * width)?,
                xz: backend.allocate(stream, rows * 2 * inner)?,
                x: backend.allocate(stream, rows * inner)?,
                dt_bc: backend.allocate(stream, rows * self.dt_bc_width())?,
                delta_raw: backend.allocate(stream, rows * inner)?,
                gated: backend.allocate(stream, rows * inner)?,
                channels: backend.allocate(stream, grains * inner)?,
                dt_bias: backend.allocate(stream, grains * inner)?,
                a_log: backend.allocate(stream, grains * inner * self.states)?,
                conv_weight: backend.allocate(stream, grains * inner * self.taps)?,
            },
        })
    }

    fn sample_bytes(&self, backend: &B, positions: usize) -> Result<SampleBytes> {
        let (d, e, narrow) = (self.width, self.inner, self.dt_bc_width());
        let one = SequenceShape::new(1, positions)?;
        let shape = ScanShape::new(one, 1, e, self.states)?;
        let scan = backend.selective_scan_saved_elements(shape);
        let of_scan = backend.selective_scan_scratch_bytes(shape);
        let activation = size_of::<B::Activation>();
        let forward = activation * 2 * e;
        let backward = activation * (d + 5 * e + narrow) + 3 * 4 * d;
        let of_parameters = 4 * (3 * e + e * self.states + e * self.taps + d);
        let weights = [[2 * e, d], [narrow, e], [e, self.rank], [d, e]];
        let of_weights = weights_scratch_bytes(backend, &weights, positions)?;
        Ok(SampleBytes {
            saved: positions * (self.norm.row_bytes(activation) + activation * (3 * e + narrow))
                + 4 * scan,
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
        let scan = KernelGroup::SelectiveScan { channels: self.inner, states: self.states };
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
