//! Arguments of kernels beside their views and shapes: named fields instead of long lists.

use super::{Element, Runtime};
use crate::error::{KernelError, Result};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// A target that is not counted: it adds nothing to the loss, its gradient or the token count.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// The token of a row of logits that has none: one of its logits is not a finite number, or the device leaves the row's draw to
/// the host.
pub const NO_TOKEN: u32 = u32::MAX;

/// Whether a matrix product replaces its output or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// `out = a b`
    Overwrite,
    /// `out = out + a b`
    Add,
}

/// The contents of the logits after cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitGradient {
    /// The logits' contents are unspecified afterwards.
    None,
    /// The gradient of the *sum* of the rows' losses: `s (softmax - one_hot(target))`, s being the logit scale; zero in the
    /// padding.
    InPlace,
}

/// The most terms of one [`tree_sum`](super::TreeSums::tree_sum) on a GPU.
pub const MOST_TREE_TERMS: usize = 32;

/// A term of [`tree_sum`](super::TreeSums::tree_sum), and its place in the tree.
///
/// Terms come in the order of the tree's leaves. Each is put on a stack of sums; then the two sums on top are added, the lower
/// plus the upper, as often as `joins` says. In the end one sum is left.
pub struct TreeTerm<'a, B: Runtime> {
    /// The elements.
    pub values: TermValues<'a, B>,
    /// The number of additions that follow.
    pub joins: usize,
}

impl<B: Runtime> Clone for TreeTerm<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Runtime> Copy for TreeTerm<'_, B> {}

/// A sum that [`tree_sums`](super::TreeSums::tree_sums) forms.
pub struct TreeSum<'a, B: Runtime> {
    /// The output.
    pub out: SliceMut<'a, B, f32>,
    /// The leaves of its tree, in order.
    pub terms: Vec<TreeTerm<'a, B>>,
}

/// The place of a [`TreeTerm`]'s elements.
pub enum TermValues<'a, B: Runtime> {
    /// The output itself: the term is its contents before the call.
    Out,
    /// Memory of this device, or of a peer that it [reaches](Runtime::reach).
    Buffer(Slice<'a, B, f32>),
    /// The host's memory: an error on devices that have a memory of their own.
    Host(&'a [f32]),
}

impl<B: Runtime> Clone for TermValues<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Runtime> Copy for TermValues<'_, B> {}

/// Asks terms to be those of one tree; answers how many sums wait at most.
pub(crate) fn check_tree<B: Runtime>(terms: &[TreeTerm<'_, B>]) -> Result<usize> {
    const KERNEL: &str = "tree_sum";
    let in_place = terms.iter().filter(|term| matches!(term.values, TermValues::Out)).count();
    if in_place > 1 {
        return Err(KernelError::shape(KERNEL, "terms that out holds", "at most 1", in_place));
    }
    let (mut sums, mut most) = (0_usize, 0);
    for TreeTerm { joins, .. } in terms {
        most = most.max(sums + 1);
        sums = (sums + 1).checked_sub(*joins).filter(|&sums| sums > 0).ok_or_else(|| {
            KernelError::shape(KERNEL, "joins", format!("at most {sums}"), *joins)
        })?;
    }
    match sums {
        1 => Ok(most),
        _ => Err(KernelError::shape(KERNEL, "sums that are left", "1", sums)),
    }
}

/// Asks the uses of [`mean_gradient`](super::GradientSums::mean_gradient), which are `elements` long, to lie
/// inside `sums` elements, and none to overlap another.
pub(crate) fn check_uses(
    first: usize,
    others: &[usize],
    elements: usize,
    sums: usize,
) -> Result<()> {
    const KERNEL: &str = "mean_gradient";
    let mut starts = [&[first], others].concat();
    for start in &starts {
        if start.checked_add(elements).is_none_or(|end| end > sums) {
            let expected = format!("{elements} elements within {sums}");
            return Err(KernelError::shape(KERNEL, "use", expected, format!("those from {start}")));
        }
    }
    starts.sort_unstable();
    for pair in starts.windows(2) {
        if pair[1] - pair[0] < elements {
            let expected = format!("starts at least {elements} elements apart");
            let found = format!("{} and {}", pair[0], pair[1]);
            return Err(KernelError::shape(KERNEL, "uses", expected, found));
        }
    }
    Ok(())
}

/// Which GELU (Hendrycks and Gimpel, 2016).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `x Phi(x)`, Phi being the normal distribution.
    Erf,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, known as `gelu_new`.
    Tanh,
}

/// The outputs of GELU's backward pass, which also computes the forward output again.
pub struct GeluGradients<'a, B: Runtime> {
    /// `gradient[rows, n]`: that of `gelu(x + bias)` on entry, that of x afterwards.
    pub gradient: MatrixMut<'a, B, B::Activation>,
    /// `out[rows, n] = gelu(x + bias)`, with the bits of forward.
    pub out: MatrixMut<'a, B, B::Activation>,
    /// `dbias[grains, n]`, where it is asked for.
    pub dbias: Option<SliceMut<'a, B, f32>>,
}

/// Inputs of the causal convolution that forward and backward share.
pub struct ConvInputs<'a, B: Runtime> {
    /// `x[b t, e]`
    pub x: Matrix<'a, B, B::Activation>,
    /// `weight[e, k]`, row-major.
    pub weight: Slice<'a, B, f32>,
    /// `bias[e]`
    pub bias: Option<Slice<'a, B, f32>>,
    /// `starts[b t]`: the position in its sample of the first token of the row's document; x before it is taken as zero.
    pub starts: Option<Slice<'a, B, u32>>,
}

/// Outputs of the backward convolution.
pub struct ConvGradients<'a, B: Runtime> {
    /// `dx[b t, e]`, may be strided.
    pub dx: MatrixMut<'a, B, B::Activation>,
    /// `dweight[grains, e, k]`
    pub dweight: SliceMut<'a, B, f32>,
    /// `dbias[grains, e]`: present exactly when the bias is.
    pub dbias: Option<SliceMut<'a, B, f32>>,
}

impl<B: Runtime> ConvGradients<'_, B> {
    /// Asks for a gradient of the bias exactly where there is one.
    pub(crate) fn check(&self, kernel: &'static str, inputs: &ConvInputs<'_, B>) -> Result<()> {
        if self.dbias.is_some() == inputs.bias.is_some() {
            return Ok(());
        }
        let presence = |present| if present { "present" } else { "absent" };
        let (expected, found) = (presence(inputs.bias.is_some()), presence(self.dbias.is_some()));
        Err(KernelError::shape(kernel, "dbias", expected, found))
    }
}

/// The state that a piece of a sequence continues from, for generation. Neither the cut of a sequence into pieces nor the rest of
/// the batch changes a bit. A piece has no document starts: its state carries over from document to document.
pub struct PieceState<'a, B: Runtime, T: Element = f32> {
    /// The state before the first position on entry, that behind the last position afterwards.
    pub state: SliceMut<'a, B, T>,
    /// Sample i has `lengths[i]` positions, all of them where there are no lengths; its rows behind these are neither read nor
    /// written.
    pub lengths: Option<Slice<'a, B, u32>>,
}

/// Inputs of the selective scan that forward and backward share.
pub struct ScanInputs<'a, B: Runtime> {
    /// `delta_raw[b t, e]`: dt_proj's product, before its bias and softplus.
    pub delta_raw: Matrix<'a, B, B::Activation>,
    /// `delta_bias[e]`.
    pub delta_bias: Slice<'a, B, f32>,
    /// `x[b t, e]`, after convolution and SiLU.
    pub x: Matrix<'a, B, B::Activation>,
    /// `bc[b t, 2 n]`: B in columns 0..n, C in columns n..2n.
    pub bc: Matrix<'a, B, B::Activation>,
    /// `z[b t, e]`: the gate, before SiLU.
    pub z: Matrix<'a, B, B::Activation>,
    /// `a_log[e, n]`, row-major.
    pub a_log: Slice<'a, B, f32>,
    /// `d[e]`: the skip.
    pub d: Slice<'a, B, f32>,
    /// `starts[b t]`, as in [`ConvInputs`]: the state before a document's first row is zero. A single step takes none.
    pub starts: Option<Slice<'a, B, u32>>,
}

/// Inputs of a single step of the selective scan, whose raw steps of time are `low[b, r] dt_weight[e, r]^T`; the others are as in
/// [`ScanInputs`].
pub struct ScanStepInputs<'a, B: Runtime> {
    /// `low[b, r]`: what dt_proj multiplies.
    pub low: Matrix<'a, B, B::Activation>,
    /// `dt_weight[e, r]`: dt_proj.
    pub dt_weight: Matrix<'a, B, B::Activation>,
    /// `delta_bias[e]`.
    pub delta_bias: Slice<'a, B, f32>,
    /// `x[b, e]`.
    pub x: Matrix<'a, B, B::Activation>,
    /// `bc[b, 2 n]`.
    pub bc: Matrix<'a, B, B::Activation>,
    /// `z[b, e]`.
    pub z: Matrix<'a, B, B::Activation>,
    /// `a_log[e, n]`.
    pub a_log: Slice<'a, B, f32>,
    /// `d[e]`.
    pub d: Slice<'a, B, f32>,
}

impl<'a, B: Runtime> ScanStepInputs<'a, B> {
    /// The inputs of a scan whose raw step sizes a product has computed.
    pub fn with(&self, delta_raw: Matrix<'a, B, B::Activation>) -> ScanInputs<'a, B> {
        let Self { delta_bias, x, bc, z, a_log, d, .. } = *self;
        ScanInputs { delta_raw, delta_bias, x, bc, z, a_log, d, starts: None }
    }
}

/// Outputs of the backward selective scan.
pub struct ScanGradients<'a, B: Runtime> {
    /// `ddelta_raw[b t, e]`.
    pub ddelta_raw: MatrixMut<'a, B, B::Activation>,
    /// `dx[b t, e]`.
    pub dx: MatrixMut<'a, B, B::Activation>,
    /// `dbc[b t, 2 n]`.
    pub dbc: MatrixMut<'a, B, B::Activation>,
    /// `dz[b t, e]`.
    pub dz: MatrixMut<'a, B, B::Activation>,
    /// `da_log[grains, e, n]`.
    pub da_log: SliceMut<'a, B, f32>,
    /// `dd[grains, e]`.
    pub dd: SliceMut<'a, B, f32>,
    /// `ddelta_bias[grains, e]`.
    pub ddelta_bias: SliceMut<'a, B, f32>,
    /// `regated[b t, e]`, where it is asked for: the forward output again, so that a caller need not keep it.
    pub regated: Option<MatrixMut<'a, B, B::Activation>>,
}

/// The inputs from which the gradients of the selective scan are computed.
pub struct ScanSaved<'a, B: Runtime> {
    /// `dout[b t, e]`
    pub dout: Matrix<'a, B, B::Activation>,
    /// The inputs of the forward pass.
    pub inputs: ScanInputs<'a, B>,
    /// The values that the forward pass saved.
    pub saved: Slice<'a, B, f32>,
}

/// The inputs of attention, forward and backward.
pub struct AttentionInputs<'a, B: Runtime> {
    /// `q[b t, h p]`: head h in columns `h p .. (h + 1) p`.
    pub q: Matrix<'a, B, B::Activation>,
    /// `k[b t, g p]`, g being the heads of keys and values.
    pub k: Matrix<'a, B, B::Activation>,
    /// `v[b t, g p]`
    pub v: Matrix<'a, B, B::Activation>,
    /// `slopes[h]`: a score falls by `slopes[h]` with every position between query and key (ALiBi, Press et al., 2022).
    pub slopes: Option<Slice<'a, B, f32>>,
    /// `starts[b t]`: the position in its sample of the first token of the row's document; a query sees nothing before it.
    pub starts: Option<Slice<'a, B, u32>>,
}

impl<B: Runtime> Clone for AttentionInputs<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Runtime> Copy for AttentionInputs<'_, B> {}

/// The inputs from which the gradients of attention are computed.
pub struct AttentionSaved<'a, B: Runtime> {
    /// `dout[b t, h p]`
    pub dout: Matrix<'a, B, B::Activation>,
    /// The inputs of the forward pass.
    pub inputs: AttentionInputs<'a, B>,
    /// `out[b t, h p]`, as forward left it.
    pub out: Matrix<'a, B, B::Activation>,
    /// `log_sum_exp[b, h, t]`, as forward left it.
    pub log_sum_exp: Slice<'a, B, f32>,
}

/// The angles of rotary positions (RoFormer, Su et al., 2021), and where rows stand.
pub struct RotaryInputs<'a, B: Runtime> {
    /// `table[positions, p]`: of each position the cosines of its `p / 2` angles, then their sines.
    pub table: Slice<'a, B, f32>,
    /// `starts[b t]`, as in [`AttentionInputs`]: the first token of a document stands at position 0.
    pub starts: Option<Slice<'a, B, u32>>,
    /// `past[b]`: how many positions each sequence has seen before its rows; none where it is absent.
    pub past: Option<Slice<'a, B, u32>>,
}

impl<B: Runtime> Clone for RotaryInputs<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Runtime> Copy for RotaryInputs<'_, B> {}

/// The keys and values of everything that sequences have seen, for generation.
pub struct KeyValueCache<'a, B: Runtime> {
    /// `keys[b, capacity, g p]`
    pub keys: Slice<'a, B, B::Activation>,
    /// `values[b, capacity, g p]`
    pub values: Slice<'a, B, B::Activation>,
    /// Positions that there is room for.
    pub capacity: usize,
    /// `past[b]`: the number of positions of each sequence before its new ones. The keys and values of the new ones are in the
    /// cache already. The caller ensures that no sequence outgrows the capacity.
    pub past: Slice<'a, B, u32>,
    /// `slopes[h]`, as in [`AttentionInputs`].
    pub slopes: Option<Slice<'a, B, f32>>,
}

/// A [`KeyValueCache`] which one more position of each sequence enters.
pub struct GrowingCache<'a, B: Runtime> {
    /// `keys[b, capacity, g p]`
    pub keys: SliceMut<'a, B, B::Activation>,
    /// `values[b, capacity, g p]`
    pub values: SliceMut<'a, B, B::Activation>,
    /// Positions that there is room for.
    pub capacity: usize,
    /// `past[b]`: how many positions each sequence has seen before, fewer than the capacity.
    pub past: Slice<'a, B, u32>,
    /// `slopes[h]`, as in [`AttentionInputs`].
    pub slopes: Option<Slice<'a, B, f32>>,
}

/// One update of Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionStep {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// The weight of the average in the update.
    pub beta1: f32,
    /// Decay of the average.
    pub beta2: f32,
    /// The factor that parameters are multiplied by before the update: `1 - learning_rate * weight_decay`.
    pub decay_factor: f32,
    /// The clipping coefficient that gradients are multiplied by first.
    pub gradient_scale: f32,
}

/// One update of AdamW (Loshchilov and Hutter, 2019) in the order of PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// The factor that parameters are multiplied by before the update: `1 - learning_rate *
    /// weight_decay` for AdamW.
    pub decay_factor: f32,
    /// `1 - beta1^step`, step counted from 1.
    pub bias_correction1: f32,
    /// `1 - beta2^step`.
    pub bias_correction2: f32,
    /// The clipping coefficient that gradients are multiplied by first.
    pub gradient_scale: f32,
}
