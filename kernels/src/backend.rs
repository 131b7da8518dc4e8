//! The contract between a model and a device.
//!
//! A backend knows nothing of models. It is one type that implements a trait for each kind of kernel; [`Backend`] is the sum of
//! them, and code that is generic over it names no other. A trait documents its kernels once; its implementations are in `cpu` and
//! `gpu/launch`.
//!
//! | trait | content |
//! |---|---|
//! | [`Runtime`] | memory, copies, device streams, events, recorded graphs, profiles |
//! | [`CausalConv1d`], [`SelectiveScan`], [`HeadScan`], [`Attention`], [`Rotary`] | the kernels that look from one position of a sample at others |
//! | [`CausalConv1dBackward`], [`SelectiveScanBackward`], [`HeadScanBackward`], [`AttentionBackward`] | their gradients |
//! | [`CausalConv1dPiece`], [`SelectiveScanPiece`], [`SelectiveScanStep`], [`HeadScanPiece`], [`CachedAttention`], [`AttentionStep`] | their pieces, for generation |
//! | [`MatrixProducts`], [`OrderedProducts`], [`WeightGradient`] | products of matrices |
//! | [`Norm`], [`Bias`], [`Clamp`], [`BiasedGelu`], [`GatedSilu`] | functions of rows |
//! | [`Embedding`], [`CrossEntropy`], [`Likeliest`], [`Draw`] | tokens |
//! | [`GradientSums`], [`TreeSums`], [`Elementwise`] | sums of gradients, along trees, and scaled |
//! | [`AdamW`], [`Lion`], [`Masters`] | updates |
//!
//! # What every kernel promises
//!
//! - **Row independence.** Outputs of a sample depend on nothing else in the microbatch, nor on the
//!   number of rows, compute threads or the launch shape. So the microbatch is never numerics.
//! - **Grains.** A kernel that forms gradients of parameters writes one complete fp32 gradient per grain (`[grains, ...]`, formed
//!   from +0.0), never a sum over grains; the caller adds them to the lane in order with [`accumulate`](GradientSums::accumulate).
//!   Kernels whose names end in `_add` add each grain's complete gradient to the lane themselves, in order.
//! - **No atomics** in floating-point sums: the same inputs always give the same bits.
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
mod matrix_products;
mod norm;
mod ordered_products;
mod rotary;
mod runtime;
mod selective_scan;
mod tree_sums;
mod weight_gradient;

pub use self::adamw::AdamW;
pub use self::arguments::{
    AdamWStep, AttentionInputs, AttentionSaved, ConvGradients, ConvInputs, Gelu, GeluGradients,
    GrowingCache, IGNORED_TARGET, KeyValueCache, LionStep, LogitGradient, MOST_TREE_TERMS,
    NO_TOKEN, Output, PieceState, RotaryInputs, ScanGradients, ScanInputs, ScanSaved,
    ScanStepInputs, TermValues, TreeSum, TreeTerm,
};
pub(crate) use self::arguments::{check_tree, check_uses};
pub use self::attention::{Attention, AttentionBackward, AttentionStep, CachedAttention};
pub use self::bias::Bias;
pub use self::causal_conv1d::{CausalConv1d, CausalConv1dBackward, CausalConv1dPiece};
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
pub use self::head_scan::{
    DeltaLimits, HeadScan, HeadScanBackward, HeadScanGradients, HeadScanInputs, HeadScanPiece,
};
pub use self::kernel_group::KernelGroup;
pub use self::likeliest::Likeliest;
pub use self::lion::Lion;
pub use self::masters::Masters;
pub use self::matrix_products::MatrixProducts;
pub use self::norm::{Norm, NormGradient, NormGradients, NormInput, NormInputs, NormSaved};
pub use self::ordered_products::OrderedProducts;
pub use self::rotary::Rotary;
pub use self::runtime::{DeviceKind, KernelTime, MemoryPlace, PeerAccess, Runtime};
pub(crate) use self::selective_scan::check_one_position;
pub use self::selective_scan::{
    SelectiveScan, SelectiveScanBackward, SelectiveScanPiece, SelectiveScanStep,
};
pub use self::tree_sums::TreeSums;
pub use self::weight_gradient::WeightGradient;

/// Raised whenever a kernel's results change in any bit; part of the kind of device.
pub const NUMERICS_VERSION: u32 = 8;

/// A device that trains: its [`Runtime`] and every kernel, which the [module](self) says the promises of. Models are generic over it. What
/// has all these traits is one.
pub trait Backend:
    Runtime
    + CausalConv1d
    + CausalConv1dBackward
    + CausalConv1dPiece
    + SelectiveScan
    + SelectiveScanBackward
    + SelectiveScanPiece
    + SelectiveScanStep
    + HeadScan
    + HeadScanBackward
    + HeadScanPiece
    + Attention
    + AttentionBackward
    + CachedAttention
    + AttentionStep
    + Rotary
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
    + MatrixProducts
    + OrderedProducts
    + WeightGradient
    + Norm
{
}

impl<B> Backend for B where
    B: Runtime
        + CausalConv1d
        + CausalConv1dBackward
        + CausalConv1dPiece
        + SelectiveScan
        + SelectiveScanBackward
        + SelectiveScanPiece
        + SelectiveScanStep
        + HeadScan
        + HeadScanBackward
        + HeadScanPiece
        + Attention
        + AttentionBackward
        + CachedAttention
        + AttentionStep
        + Rotary
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
        + MatrixProducts
        + OrderedProducts
        + WeightGradient
        + Norm
{
}
