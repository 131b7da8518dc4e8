//! Names of groups of kernels that will be launched: devices that compile kernels at run time
//! compile them in parallel.

/// Kernels that are compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelGroup {
    /// Rows of a table, and their gradients.
    Embedding,
    /// Cross-entropy and its gradient.
    CrossEntropy,
    /// RMSNorm of the residual stream, and its gradients.
    RmsNorm,
    /// RMSNorm of activations or of their heads, and its gradients.
    RmsNormOfActivations,
    /// Layer norm of the residual stream, and its gradients.
    LayerNorm,
    /// Layer norm of activations, and its gradients.
    LayerNormOfActivations,
    /// Biases of rows and their gradients, and clamps.
    Bias,
    /// The likeliest token of each row of logits.
    Likeliest,
    /// A token drawn from each row of logits.
    Draw,
    /// GELU, its gradient and that of the bias before it.
    Gelu,
    /// The gate of SwiGLU, and its gradients.
    GatedSilu,
    /// Rotary positions, and their gradients.
    Rotary,
    /// The convolution and its gradients, of samples that are one document.
    CausalConv1d,
    /// The selective scan and its gradients, of samples that are one document.
    SelectiveScan {
        /// e
        channels: usize,
        /// n
        states: usize,
    },
    /// The scan of heads and its gradients.
    HeadScan {
        /// n
        states: usize,
    },
    /// Attention and its gradients.
    Attention {
        /// p
        head_width: usize,
        /// Whether heads have the slopes of ALiBi.
        has_slopes: bool,
    },
    /// The convolution of pieces of sequences.
    CausalConv1dPiece,
    /// The selective scan of pieces of sequences.
    SelectiveScanPiece {
        /// e
        channels: usize,
        /// n
        states: usize,
    },
    /// The scan of heads of pieces of sequences.
    HeadScanPiece {
        /// n
        states: usize,
    },
    /// Attention from a cache, and what brings keys and values there.
    AttentionCached {
        /// p
        head_width: usize,
        /// Whether heads have the slopes of ALiBi.
        has_slopes: bool,
    },
    /// Sums and means of gradients, and sums of their squares.
    GradientSums,
    /// The optimizer, and masters rounded, split and joined.
    Optimizer,
    /// Products with a stated order over k.
    OrderedProduct,
    /// Sums along a tree, of several workers.
    TreeSum,
}
