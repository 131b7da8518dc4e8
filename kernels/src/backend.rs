//! The contract between a model and a device.
//!
//! A backend owns nothing of a model. It is one type with several traits, of which [`Backend`] is the sum.
//!
//! | trait | what it holds |
//! |---|---|
//! | [`Runtime`] | memory, copies, device streams, events, recorded graphs, profiles |
//! | [`CausalConv1d`], [`SelectiveScan`], [`HeadScan`], [`Attention`] | the kernels that look from one position of a sample at others, and their pieces for generation |
//! | [`Elementwise`] | scaled sums, and gradients added up |
//! | [`Backend`] | the kernels of single rows, of weights and of gradients |
//!
//! # What every kernel promises
//!
//! - **Row independence.** Outputs of a sample depend on nothing else in the microbatch, nor on the number of rows, on compute
//!   threads or on launch shape. So the microbatch is never numerics.
//! - **Grains.** A kernel that forms gradients of parameters writes one complete fp32 gradient per grain (`[grains, ...]`, formed
//!   from +0.0), never a sum over grains; the caller adds them to the lane in order with [`accumulate`](GradientSums::accumulate).
//!   Kernels whose names end in `_add` add each grain's complete gradient to the lane themselves, in order.
//! - **No atomics** in floating-point sums: the same inputs give the same bits, always.
//! - Outputs come first, then inputs, then sizes. Outputs are overwritten unless a method says that it adds.

mod adamw;
mod arguments;
mod attention;
mod bias;
mod causal_conv1d;
mod clamp;
mod cross_entropy;
mod draw;
mod element;
mod elementwise;
mod embedding;
mod gated_silu;
mod gelu;
mod gradient_sums;
mod head_scan;
mod kernel_group;
mod likeliest;
mod lion;
mod masters;
mod runtime;
mod selective_scan;
mod tree_sums;

pub use self::adamw::AdamW;
pub use self::arguments::{
    AdamWStep, AttentionInputs, ConvInputs, Gelu, GeluGradients, GrowingCache, IGNORED_TARGET,
    KeyValueCache, LionStep, LogitGradient, MOST_TREE_TERMS, NO_TOKEN, NormGradient, NormInput,
    Output, RotaryInputs, ScanGradients, ScanInputs, ScanStepInputs, TermValues, TreeSum, TreeTerm,
};
pub(crate) use self::arguments::{check_tree, check_uses};
pub use self::attention::Attention;
pub use self::bias::Bias;
pub use self::causal_conv1d::CausalConv1d;
pub use self::clamp::Clamp;
pub use self::cross_entropy::CrossEntropy;
pub use self::draw::{Draw, DrawSettings};
pub use self::element::{ActivationElement, Element};
pub(crate) use self::elementwise::check_axpby;
pub use self::elementwise::{Elementwise, Values, ValuesMut};
pub use self::embedding::Embedding;
pub use self::gated_silu::GatedSilu;
pub use self::gelu::BiasedGelu;
pub use self::gradient_sums::GradientSums;
pub use self::head_scan::{DeltaLimits, HeadScan, HeadScanGradients, HeadScanInputs};
pub use self::kernel_group::KernelGroup;
pub use self::likeliest::Likeliest;
pub use self::lion::Lion;
pub use self::masters::Masters;
pub use self::runtime::{DeviceKind, KernelTime, MemoryPlace, PeerAccess, Runtime};
pub use self::selective_scan::SelectiveScan;
pub(crate) use self::selective_scan::check_one_position;
pub use self::tree_sums::TreeSums;
use crate::error::Result;
use crate::shape::{GrainRows, NormShape};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Raised whenever a kernel's results change in any bit; part of the kind of device.
pub const NUMERICS_VERSION: u32 = 5;

/// A device that trains: its [`Runtime`] and every kernel, which the [module](self) says the promises of. Models are generic over it.
pub trait Backend:
    Runtime
    + CausalConv1d
    + SelectiveScan
    + HeadScan
    + Attention
    + Elementwise
    + CrossEntropy
    + Draw
    + Likeliest
    + Embedding
    + TreeSums
    + GradientSums
    + AdamW
    + Lion
    + Masters
    + Bias
    + Clamp
    + BiasedGelu
    + GatedSilu
{
    /// `out[m, n] (+)= a[m, k] b[k, n]` with an activation output.
    ///
    /// Each element is a chain of fused multiply-adds over k that depends on k alone: neither on m, n, nor on the element's place.
    fn matmul(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;

    /// [`matmul`](Self::matmul) with an fp32 output: the residual stream and gradients of weights.
    fn matmul_f32(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;

    /// `out[m, n] = base[m, n] + a[m, k] b[k, n] + bias[n]` in fp32, with the bits of a copy of `base` that
    /// [`matmul_f32`](Self::matmul_f32) adds to and [`add_bias_f32`](Self::add_bias_f32) after it. Rows of `base` are as far apart as
    /// those of `out`.
    #[allow(clippy::too_many_arguments)]
    fn matmul_onto(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        base: Matrix<'_, Self, f32>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
    ) -> Result<()>;

    /// `out[m, n] = a[m, k] b[k, n] + bias[n]` with an activation output. The sum is rounded once where the matrix library adds the bias,
    /// which is then rounded to activations; else the product is rounded before the bias is added.
    fn matmul_biased(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        a: Matrix<'_, Self, Self::Activation>,
        b: Matrix<'_, Self, Self::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// `out[m, n] (+)= a[m, k] weight[n, k]^T` with an activation output, in an order over k that is stated: the product of
    /// generation, fast for a few rows and for many.
    ///
    /// The bits of an element follow from its row of `a`, its row of `weight` and k alone, whatever m and n are and wherever the
    /// operands lie. k is cut into segments (of 512 terms on GPUs, 256 on the CPU). A segment's sum begins with +0.0, and has its
    /// terms added in ascending order by fused multiply-adds, or, of bf16 on GPUs, 16 consecutive ones at a time by matrix cores,
    /// with zeros past k. Sums of segments are added in ascending order in fp32; what `out` holds is added to the whole (the CPU
    /// adds segments to it one after the other), which is rounded once.
    ///
    /// # Errors
    /// Shapes that do not fit one another, rows that are not contiguous, no terms, or a device that fails.
    fn ordered_matmul(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        a: Matrix<'_, Self, Self::Activation>,
        weight: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;

    /// [`ordered_matmul`](Self::ordered_matmul) with an fp32 output: the residual stream and logits.
    ///
    /// # Errors
    /// As there.
    fn ordered_matmul_f32(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, Self::Activation>,
        weight: Matrix<'_, Self, Self::Activation>,
        output: Output,
    ) -> Result<()>;

    /// For each grain in order: `lane[m, k] += grad_out^T input` over the grain's rows of `grad_out[rows, m]` and `input[rows, k]`: the
    /// gradient of a weight. The grain's product is formed from +0.0 and added with one rounding.
    ///
    /// On GPUs the product of a grain of a weight of at most 2^20 elements is the sum of the products of its parts, in ascending
    /// order in fp32: parts of 4,096 rows, or where that were more than 16, of a sixteenth of the rows rounded up to a multiple of 64;
    /// the last may be shorter.
    fn weight_gradient_add(
        &self,
        stream: &mut Self::DeviceStream,
        lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, Self::Activation>,
        input: Matrix<'_, Self, Self::Activation>,
        grains: GrainRows,
    ) -> Result<()>;

    /// The bytes that [`weight_gradient_add`](Self::weight_gradient_add) of a `weight[m, k]` takes of the device's memory beside its
    /// arguments, and that a stream keeps for its next kernels.
    fn weight_gradient_scratch_bytes(&self, weight: [usize; 2], grains: GrainRows) -> usize;

    /// `y = x * reciprocal_rms * weight`, `reciprocal_rms[rows, h] = (mean(x^2) + eps)^-1/2`, for every row of x, or for every head of
    /// rows of activations, `y[rows, h d]`, where the shape has several; those of the residual stream are refused.
    fn rms_norm_forward(
        &self,
        stream: &mut Self::DeviceStream,
        y: MatrixMut<'_, Self, Self::Activation>,
        reciprocal_rms: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()>;

    /// The gradient of x as `gradient` says, of x's kind, and `dweight[grains, d]`, over all heads of a grain's rows.
    #[allow(clippy::too_many_arguments)]
    fn rms_norm_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradient: NormGradient<'_, Self>,
        dweight: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        reciprocal_rms: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()>;

    /// `y = (x - mean) (variance + eps)^-1/2 weight + bias` for every row of x (Ba, Kiros and Hinton, 2016), the variance biased
    /// and of two passes. Writes `statistics[2, rows]` too: the means, then the reciprocal deviations.
    #[allow(clippy::too_many_arguments)]
    fn layer_norm_forward(
        &self,
        stream: &mut Self::DeviceStream,
        y: MatrixMut<'_, Self, Self::Activation>,
        statistics: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: NormShape,
    ) -> Result<()>;

    /// The gradient of x as `gradient` says, and `dweight[grains, d]` and, where asked for, `dbias[grains, d]`.
    ///
    /// # Errors
    /// A gradient of another kind than x, beside shapes that do not fit.
    #[allow(clippy::too_many_arguments)]
    fn layer_norm_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradient: NormGradient<'_, Self>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        x: NormInput<'_, Self>,
        statistics: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()>;
}
