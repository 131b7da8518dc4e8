//! The kernels' sources, embedded in the program, and how they are compiled.

use std::fmt;

use crate::backend::KernelGroup;
use crate::gpu::driver::ElementKind;
use crate::gpu::launch::{HeadStates, HeadWidth};

/// A macro and its value.
pub type Definition = (&'static str, &'static str);

/// A file of kernels, or what becomes of it with some definitions.
#[derive(Debug)]
pub struct Source {
    /// The file's name.
    pub name: &'static str,
    /// The text of the file.
    pub text: &'static str,
    /// The macros that it is compiled with: a file of kernels for several cases is a source for each.
    pub definitions: &'static [Definition],
}

impl Source {
    /// The key of the source, which no other source has.
    pub(super) fn key(&self) -> (&'static str, &'static [Definition]) {
        (self.name, self.definitions)
    }

    /// All definitions, one line for each option of the compiler.
    pub fn arguments(&self, options: SourceOptions) -> impl Iterator<Item = String> {
        let own = self.definitions.iter().map(|&(name, value)| (name, value.to_owned()));
        let all = own.chain(options.definitions());
        all.map(|(name, value)| format!("-D{name}={value}"))
    }
}

/// The file's name, and definitions behind it: `scan_forward.cu DOCUMENTS=1`.
impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name)?;
        self.definitions.iter().try_for_each(|(name, value)| write!(formatter, " {name}={value}"))
    }
}

/// A header that sources include.
#[derive(Debug)]
pub struct Header {
    /// The name after `#include`.
    pub name: &'static str,
    /// The text of the file.
    pub text: &'static str,
}

/// A source: a file, and the macros that it is compiled with.
macro_rules! source {
    ($name:literal $(, $macro:ident = $value:literal)*) => {
        Source {
            name: $name,
            text: include_str!(concat!("../../gpu/", $name)),
            definitions: &[$((stringify!($macro), $value)),*],
        }
    };
}

/// The headers that sources may include.
pub static HEADERS: &[Header] = &[
    Header { name: "attention.h", text: include_str!("../../gpu/attention.h") },
    Header {
        name: "attention_forward_groups.h",
        text: include_str!("../../gpu/attention_forward_groups.h"),
    },
    Header {
        name: "attention_backward_groups.h",
        text: include_str!("../../gpu/attention_backward_groups.h"),
    },
    Header {
        name: "attention_backward_groups_copy.h",
        text: include_str!("../../gpu/attention_backward_groups_copy.h"),
    },
    Header {
        name: "attention_backward_groups_kernels.h",
        text: include_str!("../../gpu/attention_backward_groups_kernels.h"),
    },
    Header {
        name: "attention_backward_groups_walk.h",
        text: include_str!("../../gpu/attention_backward_groups_walk.h"),
    },
    Header { name: "attention_groups.h", text: include_str!("../../gpu/attention_groups.h") },
    Header {
        name: "attention_groups_copy.h",
        text: include_str!("../../gpu/attention_groups_copy.h"),
    },
    Header { name: "causal_conv1d.h", text: include_str!("../../gpu/causal_conv1d.h") },
    Header { name: "dialect.h", text: include_str!("../../gpu/dialect.h") },
    Header { name: "documents.h", text: include_str!("../../gpu/documents.h") },
    Header { name: "group_instructions.h", text: include_str!("../../gpu/group_instructions.h") },
    Header { name: "group_product.h", text: include_str!("../../gpu/group_product.h") },
    Header { name: "group_rows.h", text: include_str!("../../gpu/group_rows.h") },
    Header { name: "head_scan.h", text: include_str!("../../gpu/head_scan.h") },
    Header { name: "head_scan_chunk.h", text: include_str!("../../gpu/head_scan_chunk.h") },
    Header { name: "norm.h", text: include_str!("../../gpu/norm.h") },
    Header { name: "norm_ahead.h", text: include_str!("../../gpu/norm_ahead.h") },
    Header { name: "ordered_groups.h", text: include_str!("../../gpu/ordered_groups.h") },
    Header { name: "ordered_product.h", text: include_str!("../../gpu/ordered_product.h") },
    Header { name: "ordered_staged.h", text: include_str!("../../gpu/ordered_staged.h") },
    Header { name: "pack.h", text: include_str!("../../gpu/pack.h") },
    Header { name: "row_map.h", text: include_str!("../../gpu/row_map.h") },
    Header { name: "runs.h", text: include_str!("../../gpu/runs.h") },
    Header { name: "scan.h", text: include_str!("../../gpu/scan.h") },
    Header { name: "scan_backward.h", text: include_str!("../../gpu/scan_backward.h") },
    Header { name: "scan_walk.h", text: include_str!("../../gpu/scan_walk.h") },
    Header { name: "split_product.h", text: include_str!("../../gpu/split_product.h") },
    Header { name: "tile_product.h", text: include_str!("../../gpu/tile_product.h") },
];

/// Biases of rows and their gradients, and clamps.
pub static BIAS: Source = source!("bias.cu");
/// Into the cache that attention reads.
pub static ATTENTION_CACHE: Source = source!("attention_cache.cu");
/// The gradients of attention, by rising width that heads are padded to.
pub static ATTENTION_BACKWARD: [Source; 4] = [
    source!("attention_backward.cu", HEAD_WIDTH = "32"),
    source!("attention_backward.cu", HEAD_WIDTH = "64"),
    source!("attention_backward.cu", HEAD_WIDTH = "128"),
    source!("attention_backward.cu", HEAD_WIDTH = "256"),
];
/// Attention, for training and from a cache, by the same widths.
pub static ATTENTION_FORWARD: [Source; 4] = [
    source!("attention_forward.cu", HEAD_WIDTH = "32"),
    source!("attention_forward.cu", HEAD_WIDTH = "64"),
    source!("attention_forward.cu", HEAD_WIDTH = "128"),
    source!("attention_forward.cu", HEAD_WIDTH = "256"),
];
/// The same where groups of warps multiply together and heads have slopes, by the widths that there are such kernels for. Devices
/// without such groups have one kernel for both.
pub static ATTENTION_FORWARD_SLOPES: [Source; 2] = [
    source!("attention_forward.cu", HEAD_WIDTH = "64", HAS_SLOPES = "1"),
    source!("attention_forward.cu", HEAD_WIDTH = "128", HAS_SLOPES = "1"),
];
/// Attention of one new position from a cache.
pub static ATTENTION_STEP: Source = source!("attention_step.cu");
/// The convolution, and its single step.
pub static CAUSAL_CONV1D: Source = source!("causal_conv1d.cu");
/// The gradients of the convolution.
pub static CAUSAL_CONV1D_BACKWARD: Source = source!("causal_conv1d_backward.cu");
/// The convolution where samples hold several documents.
pub static CAUSAL_CONV1D_DOCUMENTS: Source = source!("causal_conv1d.cu", DOCUMENTS = "1");
/// The gradients of the convolution where samples hold several documents.
pub static CAUSAL_CONV1D_BACKWARD_DOCUMENTS: Source =
    source!("causal_conv1d_backward.cu", DOCUMENTS = "1");
/// The kernel that writes the start bits of documents.
pub static DOCUMENTS: Source = source!("documents.cu");
/// Tokens drawn from rows of logits.
pub static DRAW: Source = source!("draw.cu");
/// Cross-entropy and its gradient.
pub static CROSS_ENTROPY: Source = source!("cross_entropy.cu");
/// Rows of a table, and their gradients.
pub static EMBEDDING: Source = source!("embedding.cu");
/// The gate of SwiGLU and its gradients.
pub static GATED_SILU: Source = source!("gated_silu.cu");
/// GELU and its derivatives.
pub static GELU: Source = source!("gelu.cu");
/// Sums of gradients, and of their squares.
pub static GRADIENT_SUMS: Source = source!("gradient_sums.cu");
/// Layer norm.
pub static LAYER_NORM: Source = source!("layer_norm.cu", OF_ACTIVATIONS = "0", BACKWARD = "0");
/// Its gradients.
pub static LAYER_NORM_BACKWARD: Source =
    source!("layer_norm.cu", OF_ACTIVATIONS = "0", BACKWARD = "1");
/// Layer norm of activations.
pub static LAYER_NORM_OF_ACTIVATIONS: Source =
    source!("layer_norm.cu", OF_ACTIVATIONS = "1", BACKWARD = "0");
/// Its gradients.
pub static LAYER_NORM_OF_ACTIVATIONS_BACKWARD: Source =
    source!("layer_norm.cu", OF_ACTIVATIONS = "1", BACKWARD = "1");
/// The forward scan of heads, by rising number that states are padded to.
pub static HEAD_SCAN_FORWARD: [Source; 3] = [
    source!("head_scan_forward.cu", HEAD_STATES = "64"),
    source!("head_scan_forward.cu", HEAD_STATES = "128"),
    source!("head_scan_forward.cu", HEAD_STATES = "256"),
];
/// The backward one, by the same numbers.
pub static HEAD_SCAN_BACKWARD: [Source; 3] = [
    source!("head_scan_backward.cu", HEAD_STATES = "64"),
    source!("head_scan_backward.cu", HEAD_STATES = "128"),
    source!("head_scan_backward.cu", HEAD_STATES = "256"),
];
/// The scan of heads over pieces of sequences.
pub static HEAD_SCAN_PIECE: [Source; 3] = [
    source!("head_scan_piece.cu", HEAD_STATES = "64"),
    source!("head_scan_piece.cu", HEAD_STATES = "128"),
    source!("head_scan_piece.cu", HEAD_STATES = "256"),
];
/// The likeliest token of each row of logits.
pub static LIKELIEST: Source = source!("likeliest.cu");
/// AdamW and Lion, and masters rounded, split and joined.
pub static OPTIMIZER: Source = source!("optimizer.cu");
/// Products with a stated order over k.
pub static ORDERED_PRODUCT: Source = source!("ordered_product.cu");
/// Gradients of parameters from the partial sums of runs of rows.
pub static PARTIAL_SUMS: Source = source!("partial_sums.cu");
/// RMSNorm.
pub static RMS_NORM: Source = source!("rms_norm.cu", OF_ACTIVATIONS = "0", BACKWARD = "0");
/// Its gradients.
pub static RMS_NORM_BACKWARD: Source = source!("rms_norm.cu", OF_ACTIVATIONS = "0", BACKWARD = "1");
/// RMSNorm of activations, whose heads may be normed each by itself.
pub static RMS_NORM_OF_ACTIVATIONS: Source =
    source!("rms_norm.cu", OF_ACTIVATIONS = "1", BACKWARD = "0");
/// Its gradients.
pub static RMS_NORM_OF_ACTIVATIONS_BACKWARD: Source =
    source!("rms_norm.cu", OF_ACTIVATIONS = "1", BACKWARD = "1");
/// RMSNorm of rows or heads of at most 128 columns, and its gradients.
pub static RMS_NORM_HEADS: Source = source!("rms_norm_heads.cu", OF_ACTIVATIONS = "1");
/// Rotary positions and their gradients.
pub static ROTARY: Source = source!("rotary.cu");
/// The forward selective scan of sixteen states.
pub static SCAN_FORWARD: Source = source!("scan_forward.cu");
/// The backward selective scan of sixteen states.
pub static SCAN_BACKWARD: Source = source!("scan_backward.cu");
/// The scan of pieces of sequences of sixteen states.
pub static SCAN_PIECE: Source = source!("scan_piece.cu");
/// The scan of one position of each sequence, of sixteen states.
pub static SCAN_STEP: Source = source!("scan_step.cu");
/// The selective scan of any states, its pieces and its single step.
pub static SCAN_ANY: Source = source!("scan_any.cu");
/// The forward selective scan of sixteen states where samples hold several documents.
pub static SCAN_FORWARD_DOCUMENTS: Source = source!("scan_forward.cu", DOCUMENTS = "1");
/// The backward one.
pub static SCAN_BACKWARD_DOCUMENTS: Source = source!("scan_backward.cu", DOCUMENTS = "1");
/// The selective scan of any states where samples hold several documents.
pub static SCAN_ANY_DOCUMENTS: Source = source!("scan_any.cu", DOCUMENTS = "1");
/// The kernels before and after the walks of the scans: B and C packed for the walks, and sums over blocks and samples.
pub static SCAN_SUMS: Source = source!("scan_sums.cu");
/// Sums along a tree, over the memory of several devices.
pub static TREE_SUM: Source = source!("tree_sum.cu");

/// Every source.
pub static ALL: &[&Source] = &[
    &BIAS,
    &ATTENTION_CACHE,
    &ATTENTION_BACKWARD[0],
    &ATTENTION_BACKWARD[1],
    &ATTENTION_BACKWARD[2],
    &ATTENTION_BACKWARD[3],
    &ATTENTION_FORWARD[0],
    &ATTENTION_FORWARD[1],
    &ATTENTION_FORWARD[2],
    &ATTENTION_FORWARD[3],
    &ATTENTION_FORWARD_SLOPES[0],
    &ATTENTION_FORWARD_SLOPES[1],
    &ATTENTION_STEP,
    &CAUSAL_CONV1D,
    &CAUSAL_CONV1D_BACKWARD,
    &CAUSAL_CONV1D_DOCUMENTS,
    &CAUSAL_CONV1D_BACKWARD_DOCUMENTS,
    &DOCUMENTS,
    &DRAW,
    &CROSS_ENTROPY,
    &EMBEDDING,
    &GATED_SILU,
    &GELU,
    &GRADIENT_SUMS,
    &HEAD_SCAN_FORWARD[0],
    &HEAD_SCAN_FORWARD[1],
    &HEAD_SCAN_FORWARD[2],
    &HEAD_SCAN_BACKWARD[0],
    &HEAD_SCAN_BACKWARD[1],
    &HEAD_SCAN_BACKWARD[2],
    &HEAD_SCAN_PIECE[0],
    &HEAD_SCAN_PIECE[1],
    &HEAD_SCAN_PIECE[2],
    &LAYER_NORM,
    &LAYER_NORM_BACKWARD,
    &LAYER_NORM_OF_ACTIVATIONS,
    &LAYER_NORM_OF_ACTIVATIONS_BACKWARD,
    &LIKELIEST,
    &OPTIMIZER,
    &ORDERED_PRODUCT,
    &PARTIAL_SUMS,
    &RMS_NORM,
    &RMS_NORM_BACKWARD,
    &RMS_NORM_OF_ACTIVATIONS,
    &RMS_NORM_OF_ACTIVATIONS_BACKWARD,
    &RMS_NORM_HEADS,
    &ROTARY,
    &SCAN_FORWARD,
    &SCAN_BACKWARD,
    &SCAN_PIECE,
    &SCAN_STEP,
    &SCAN_ANY,
    &SCAN_FORWARD_DOCUMENTS,
    &SCAN_BACKWARD_DOCUMENTS,
    &SCAN_ANY_DOCUMENTS,
    &SCAN_SUMS,
    &TREE_SUM,
];

/// The sources of groups of kernels, each once. `is_scan_of_sixteen` says whether the device scans that many channels and states by
/// the kernels for sixteen states, and `takes_groups` whether groups of warps multiply together for heads of a width.
pub(super) fn of_groups(
    groups: &[KernelGroup],
    is_scan_of_sixteen: impl Fn(usize, usize) -> bool,
    takes_groups: impl Fn(HeadWidth) -> bool,
) -> Vec<&'static Source> {
    let mut sources: Vec<&'static Source> = Vec::new();
    let forward = |head_width: usize, has_slopes| {
        let width = HeadWidth::of(head_width);
        width.forward(has_slopes && takes_groups(width))
    };
    for &group in groups {
        match group {
            KernelGroup::Embedding => sources.push(&EMBEDDING),
            KernelGroup::CrossEntropy => sources.push(&CROSS_ENTROPY),
            KernelGroup::RmsNorm => {
                sources.extend([&RMS_NORM, &RMS_NORM_BACKWARD, &PARTIAL_SUMS]);
            }
            KernelGroup::RmsNormOfActivations => {
                sources.extend([&RMS_NORM_OF_ACTIVATIONS, &RMS_NORM_OF_ACTIVATIONS_BACKWARD]);
                sources.extend([&RMS_NORM_HEADS, &PARTIAL_SUMS]);
            }
            KernelGroup::LayerNorm => {
                sources.extend([&LAYER_NORM, &LAYER_NORM_BACKWARD, &PARTIAL_SUMS]);
            }
            KernelGroup::LayerNormOfActivations => {
                sources.extend([&LAYER_NORM_OF_ACTIVATIONS, &LAYER_NORM_OF_ACTIVATIONS_BACKWARD]);
                sources.push(&PARTIAL_SUMS);
            }
            KernelGroup::Bias => sources.extend([&BIAS, &PARTIAL_SUMS]),
            KernelGroup::Likeliest => sources.push(&LIKELIEST),
            KernelGroup::Draw => sources.push(&DRAW),
            KernelGroup::Gelu => sources.extend([&GELU, &PARTIAL_SUMS]),
            KernelGroup::GatedSilu => sources.push(&GATED_SILU),
            KernelGroup::Rotary => sources.push(&ROTARY),
            KernelGroup::CausalConv1d => sources.extend([&CAUSAL_CONV1D, &CAUSAL_CONV1D_BACKWARD]),
            KernelGroup::SelectiveScan { channels, states }
                if is_scan_of_sixteen(channels, states) =>
            {
                sources.extend([&SCAN_FORWARD, &SCAN_BACKWARD, &SCAN_SUMS]);
            }
            KernelGroup::SelectiveScan { .. } => sources.extend([&SCAN_ANY, &SCAN_SUMS]),
            KernelGroup::HeadScan { states } => {
                let class = HeadStates::of(states);
                sources.extend([class.forward(), class.backward(), &SCAN_SUMS]);
            }
            KernelGroup::Attention { head_width, has_slopes } => {
                let backward = HeadWidth::of(head_width).backward();
                sources.extend([forward(head_width, has_slopes), backward]);
            }
            KernelGroup::CausalConv1dPiece => sources.push(&CAUSAL_CONV1D),
            KernelGroup::SelectiveScanPiece { channels, states }
                if is_scan_of_sixteen(channels, states) =>
            {
                sources.extend([&SCAN_PIECE, &SCAN_STEP]);
            }
            KernelGroup::SelectiveScanPiece { .. } => sources.push(&SCAN_ANY),
            KernelGroup::HeadScanPiece { states } => sources.push(HeadStates::of(states).piece()),
            KernelGroup::AttentionCached { head_width, has_slopes } => {
                let forward = forward(head_width, has_slopes);
                sources.extend([forward, &ATTENTION_CACHE, &ATTENTION_STEP]);
            }
            KernelGroup::GradientSums => sources.push(&GRADIENT_SUMS),
            KernelGroup::OrderedProduct => sources.push(&ORDERED_PRODUCT),
            KernelGroup::Optimizer => sources.push(&OPTIMIZER),
            KernelGroup::TreeSum => sources.push(&TREE_SUM),
        }
    }
    sources.sort_by_key(|source| source.key());
    sources.dedup_by_key(|source| source.key());
    sources
}

/// The options that a source is compiled with, beside the architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceOptions {
    /// The type of activations.
    pub activation: ElementKind,
}

impl SourceOptions {
    /// Macros and their values.
    pub fn definitions(self) -> Vec<(&'static str, String)> {
        let bf16 = u8::from(self.activation == ElementKind::Bf16);
        let mut all = vec![("ACTIVATION_BF16", bf16.to_string())];
        // For compute-sanitizer (CONTRIBUTING.md).
        all.extend(cfg!(racecheck).then(|| ("EVERY_THREAD_ARRIVES", "1".to_owned())));
        all
    }
}
