//! The contract between a model and a device.
//!
//! A backend owns nothing of a model: it allocates opaque [`Buffer`](Backend::Buffer)s, runs kernels
//! in order on a [`DeviceStream`](Backend::DeviceStream), and moves bytes to and from the host only
//! where a caller says so ([`write`](Backend::write), [`read`](Backend::read)). Kernels of one device
//! stream run in the order of the calls; on a GPU a call returns before the kernel has run, so an
//! error of a kernel may be answered by a later call on the same device stream.
//!
//! # What every kernel promises
//!
//! - **Row independence.** Outputs of a sample depend on nothing else in the microbatch, nor on the
//!   number of rows, on compute threads or on launch shape. So the microbatch is never numerics.
//! - **Grains.** A kernel that forms gradients of parameters writes one complete fp32 gradient per
//!   grain (`[grains, ...]`, formed from +0.0), never a sum over grains; the caller adds them to the lane
//!   in order with [`accumulate`](Backend::accumulate). Kernels whose names end in `_add` add each grain's
//!   complete gradient to the lane themselves, in order.
//! - **No atomics** in floating-point sums: the same inputs give the same bits, always.
//! - Outputs come first, then inputs, then sizes. Outputs are overwritten unless a method says that it adds.

mod arguments;
mod element;

pub use self::arguments::{
    AdamWStep, AttentionInputs, ConvInputs, Gelu, KeyValueCache, LogitGradient, NormGradient,
    NormInput, Output, ScanGradients, ScanInputs,
};
pub use self::element::{ActivationElement, Element};
use crate::error::Result;
use crate::shape::{AttentionShape, ConvShape, CrossEntropyShape, GrainRows, NormShape, ScanShape};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Raised whenever a kernel's results change in any bit; part of the kind of device.
pub const NUMERICS_VERSION: u32 = 1;

/// A target that is not counted: it adds nothing to the loss, its gradient or the token count.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// Where the buffers of a backend lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPlace {
    /// In the host's memory: reading and writing them are copies within it.
    Host,
    /// In a memory of the device's own: every read waits for the device, and bytes cross a bus.
    Device,
}

/// What two workers must have in common for their bits to agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKind {
    /// `cpu`, `cuda` or `rocm`.
    pub backend: String,
    /// `x86-64-fma`, `sm_90a`, `gfx942` ...
    pub architecture: String,
    /// [`NUMERICS_VERSION`] of the kernels.
    pub numerics_version: u32,
    /// The matrix library and its version.
    pub matrix_library: String,
}

/// What a kernel took, all its launches together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel.
    pub kernel: &'static str,
    /// How often it was launched.
    pub launches: u64,
    /// Device time.
    pub milliseconds: f64,
}

/// A device that trains: buffers, order and kernels.
///
/// Dispatch is static: models are generic over their backend. See the [module](self) for what every
/// kernel promises.
pub trait Backend: Send + Sync + Sized + 'static {
    /// Element type of activations and of the weights that matrix products read: the precision.
    type Activation: ActivationElement;
    /// Device memory holding elements of one type.
    type Buffer<T: Element>: Send + Sync;
    /// An in-order queue of kernels and the scratch memory that they use.
    type DeviceStream: Send;
    /// A point in a device stream.
    type Event: Send;
    /// Kernels that were recorded to be enqueued together; [`Infallible`](std::convert::Infallible) where none can be.
    type Graph: Send;
    /// The copies of the parameters that matrix products read where activations have another type than the fp32 masters.
    /// Where they have not it holds nothing, and the masters serve.
    type ComputeWeights: Send + Sync;

    /// What this device must have in common with its peers.
    fn device_kind(&self) -> DeviceKind;

    /// Bytes of the device's own memory that are free now; `None` where buffers lie in host memory.
    fn free_memory_bytes(&self) -> Result<Option<usize>>;

    /// Where buffers lie.
    fn memory(&self) -> MemoryPlace;

    /// The rows of logits that a language model's head forms at a time, within a grain. Numerics of
    /// the kind of device: a grain of more rows adds up one product of its table's gradient a chunk.
    fn logit_chunk_rows(&self) -> usize;

    /// A new device stream.
    fn device_stream(&self) -> Result<Self::DeviceStream>;

    /// `elements` zeros.
    fn allocate<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        elements: usize,
    ) -> Result<Self::Buffer<T>>;

    /// The number of elements of a buffer.
    fn elements<T: Element>(buffer: &Self::Buffer<T>) -> usize;

    /// Room for copies of `elements` parameters in activation precision; none where the masters serve.
    fn compute_weights(
        &self,
        stream: &mut Self::DeviceStream,
        elements: usize,
    ) -> Result<Self::ComputeWeights>;

    /// Rounds `elements` of the masters from `start` into `weights`, where there are copies.
    fn refresh_compute_weights(
        &self,
        stream: &mut Self::DeviceStream,
        weights: &mut Self::ComputeWeights,
        master: &Self::Buffer<f32>,
        start: usize,
        elements: usize,
    ) -> Result<()>;

    /// The buffer that matrix products read weights from: a parameter stands at the same element as
    /// in `master`.
    fn compute_buffer<'a>(
        master: &'a Self::Buffer<f32>,
        weights: &'a Self::ComputeWeights,
    ) -> &'a Self::Buffer<Self::Activation>;

    /// Copies from the host; `host` may be reused when the call returns.
    fn write<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, T>,
        host: &[T],
    ) -> Result<()>;

    /// Copies to the host; waits for everything before it on the device stream.
    fn read<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        host: &mut [T],
        from: Slice<'_, Self, T>,
    ) -> Result<()>;

    /// `out = from`, on the device.
    fn copy<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, T>,
        from: Slice<'_, Self, T>,
    ) -> Result<()>;

    /// `out = 0`.
    fn fill_zero<T: Element>(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, T>,
    ) -> Result<()>;

    /// The point after everything enqueued so far.
    fn record(&self, stream: &mut Self::DeviceStream) -> Result<Self::Event>;

    /// Whether the device has reached `event`.
    fn is_complete(&self, event: &Self::Event) -> Result<bool>;

    /// Waits until the device has reached `event`.
    fn wait(&self, event: &Self::Event) -> Result<()>;

    /// Milliseconds between two points of one device stream, both of which the device has reached.
    fn elapsed_milliseconds(&self, from: &Self::Event, to: &Self::Event) -> Result<f64>;

    /// Records the kernels that `enqueue` enqueues, instead of running them, so that [`replay`](Self::replay) can enqueue them
    /// all at once as often as they are wanted. `None` on a device where that saves nothing: then they are enqueued as usual.
    ///
    /// What is recorded runs on the buffers that it was recorded with. The same calls must have run once before, so that all
    /// scratch memory is there and all kernels are loaded. The recording ends with `enqueue`, also where that fails or panics.
    ///
    /// # Errors
    /// What `enqueue` answers; [`KernelError::NotRecordable`](crate::KernelError::NotRecordable) for what it may not do: allocate,
    /// read or write from the host, record events or graphs, or need scratch memory or kernels that are not there yet.
    fn record_graph(
        &self,
        stream: &mut Self::DeviceStream,
        enqueue: &mut dyn FnMut(&mut Self::DeviceStream) -> Result<()>,
    ) -> Result<Option<Self::Graph>>;

    /// Enqueues what was recorded on the same device stream.
    ///
    /// # Errors
    /// Another device stream than that of the recording. A fault of a kernel in the graph, such as a token outside the
    /// vocabulary, is answered by the next read.
    fn replay(&self, stream: &mut Self::DeviceStream, graph: &Self::Graph) -> Result<()>;

    /// Starts to note the device time of every kernel; a device that cannot tell notes nothing.
    fn start_profile(&self) {}

    /// Ends what [`start_profile`](Self::start_profile) began: device time by kernel, the longest first.
    fn finish_profile(&self) -> Result<Vec<KernelTime>> {
        Ok(Vec::new())
    }

    /// `out[m, n] (+)= a[m, k] b[k, n]` with an activation output.
    ///
    /// Each element is a chain of fused multiply-adds over k that depends on k alone: neither on m,
    /// n, nor on the element's place.
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

    /// For each grain in order: `lane[m, k] += grad_out^T input` over the grain's rows of
    /// `grad_out[rows, m]` and `input[rows, k]`: the gradient of a weight. The grain's product is
    /// formed from +0.0 and added with one rounding.
    fn weight_gradient_add(
        &self,
        stream: &mut Self::DeviceStream,
        lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, Self::Activation>,
        input: Matrix<'_, Self, Self::Activation>,
        grains: GrainRows,
    ) -> Result<()>;

    /// `out[rows, d] (+)= table[tokens[row]]`, rows of the fp32 residual stream.
    fn embedding_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        table: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        output: Output,
    ) -> Result<()>;

    /// For each grain in order: `lane_table[v, d] += sum over the grain's rows, in order, of dout`.
    /// The grain's sum is formed from +0.0, then added.
    fn embedding_backward_add(
        &self,
        stream: &mut Self::DeviceStream,
        lane_table: MatrixMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        grains: GrainRows,
    ) -> Result<()>;

    /// `y = x * reciprocal_rms * weight`, `reciprocal_rms = (mean(x^2) + eps)^-1/2` for every row of
    /// the fp32 residual stream `x[rows, d]`.
    fn rms_norm_forward(
        &self,
        stream: &mut Self::DeviceStream,
        y: MatrixMut<'_, Self, Self::Activation>,
        reciprocal_rms: SliceMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()>;

    /// Adds to `dx[rows, d]` (the residual's own gradient is already there) and writes
    /// `dweight[grains, d]`.
    #[allow(clippy::too_many_arguments)]
    fn rms_norm_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dx: MatrixMut<'_, Self, f32>,
        dweight: SliceMut<'_, Self, f32>,
        dy: Matrix<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, f32>,
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

    /// `out[rows, n] = gelu(x + bias)`
    fn gelu_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()>;

    /// `dx[rows, n] = dout gelu'(x + bias)`
    #[allow(clippy::too_many_arguments)]
    fn gelu_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dx: MatrixMut<'_, Self, Self::Activation>,
        dout: Matrix<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()>;

    /// `out[rows, n] += bias[n]`
    fn add_bias(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// [`add_bias`](Self::add_bias) of an fp32 matrix.
    fn add_bias_f32(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// `dbias[grains, n]`: the sums of each grain's rows of `dout[rows, n]`.
    fn bias_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dbias: SliceMut<'_, Self, f32>,
        dout: Matrix<'_, Self, Self::Activation>,
        grains: GrainRows,
    ) -> Result<()>;

    /// `out[rows, n]` is x, but not beyond `limit` and its negative; a NaN stays.
    ///
    /// # Errors
    /// A limit that is not a finite number above zero, beside shapes that do not fit.
    fn clamp(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
        limit: f32,
    ) -> Result<()>;

    /// Sets `dx[rows, n]` to zero where |x| is above `limit`; elsewhere it stays.
    ///
    /// # Errors
    /// As [`clamp`](Self::clamp).
    fn clamp_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dx: MatrixMut<'_, Self, Self::Activation>,
        x: Matrix<'_, Self, Self::Activation>,
        limit: f32,
    ) -> Result<()>;

    /// `out[b t, e] = silu(bias[e] + sum over j of weight[e, j] x[row - (k - 1) + j])`, rows before
    /// a sample's first, or a document's, being zero. `x` may be strided.
    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()>;

    /// Writes `dx[b t, e]` (may be strided), `dweight[grains, e, k]` and `dbias[grains, e]`; the
    /// convolution is recomputed from `x`. `dbias` is present exactly when `bias` is.
    #[allow(clippy::too_many_arguments)]
    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dx: MatrixMut<'_, Self, Self::Activation>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        dout: Matrix<'_, Self, Self::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()>;

    /// The fp32 elements that [`selective_scan_forward`](Self::selective_scan_forward) saves for the
    /// backward scan; what they mean is the backend's own matter.
    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize;

    /// Selective scan with softplus, skip and gate (Gu and Dao, 2023, algorithm 2):
    ///
    /// ```text
    /// delta = softplus(delta_raw + delta_bias)
    /// h_t   = exp(delta_t A) h_{t-1} + delta_t B_t x_t,      A = -exp(a_log), h_0 = 0 for every sample and document
    /// y_t   = C_t . h_t + D x_t
    /// out_t = y_t * silu(z_t)
    /// ```
    fn selective_scan_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()>;

    /// The gradients of [`selective_scan_forward`](Self::selective_scan_forward); states are
    /// recomputed chunk by chunk, never held as `[b, t, e, n]`. `regated[b t, e]`, where given,
    /// receives the forward output again, so that a caller need not keep it.
    #[allow(clippy::too_many_arguments)]
    fn selective_scan_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradients: ScanGradients<'_, Self>,
        regated: Option<MatrixMut<'_, Self, Self::Activation>>,
        dout: Matrix<'_, Self, Self::Activation>,
        inputs: ScanInputs<'_, Self>,
        saved: Slice<'_, Self, f32>,
        shape: ScanShape,
    ) -> Result<()>;

    /// One position of [`causal_conv1d_silu_forward`](Self::causal_conv1d_silu_forward) for
    /// generation: `shape.sequences.positions` is 1; `state[b, e, k - 1]` holds the last inputs,
    /// oldest first, and is moved on.
    #[allow(clippy::too_many_arguments)]
    fn causal_conv1d_silu_step(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        state: SliceMut<'_, Self, f32>,
        x: Matrix<'_, Self, Self::Activation>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: ConvShape,
    ) -> Result<()>;

    /// One position of the selective scan for generation: `shape.sequences.positions` is 1 and
    /// `state[b, e, n]` is moved on.
    fn selective_scan_step(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        state: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()>;

    /// Causal attention of every head over each sample by itself (Vaswani et al., 2017), in tiles with an online softmax
    /// (Milakov and Gimelshein, 2018; Dao et al., 2022), so that memory is linear in t:
    ///
    /// ```text
    /// s_ij  = scale q_i . k_j - slope (i - j)        j from max(start_i, i - window + 1) to i
    /// out_i = sum over j of exp(s_ij - log_sum_exp_i) v_j,    log_sum_exp_i = log(sum over j of exp(s_ij))
    /// ```
    ///
    /// Writes `out[b t, h p]` and `log_sum_exp[b, h, t]`. Keys are taken in tiles that begin at whole multiples of one size,
    /// counted from the sample's first position: a query's bits depend on the keys and values that it sees alone.
    fn attention_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        log_sum_exp: SliceMut<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()>;

    /// The gradients of [`attention_forward`](Self::attention_forward) in `dqkv[b t, 3 h p]`: those of q, then of k, then of
    /// v. Probabilities are formed again from `log_sum_exp`.
    #[allow(clippy::too_many_arguments)]
    fn attention_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dqkv: MatrixMut<'_, Self, Self::Activation>,
        dout: Matrix<'_, Self, Self::Activation>,
        out: Matrix<'_, Self, Self::Activation>,
        log_sum_exp: Slice<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()>;

    /// `cache[b, past[b] + i, w] = rows[b t, w]` for the t new positions i of each sample: keys or values enter a cache.
    fn append_to_cache(
        &self,
        stream: &mut Self::DeviceStream,
        cache: SliceMut<'_, Self, Self::Activation>,
        rows: Matrix<'_, Self, Self::Activation>,
        past: Slice<'_, Self, u32>,
        capacity: usize,
    ) -> Result<()>;

    /// [`attention_forward`](Self::attention_forward) for generation: row i of sample b of `q[b t, h p]` stands at position
    /// `past[b] + i` and sees the keys of its cache up to that position. The same bits as in one forward pass over
    /// everything.
    fn attention_cached(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        q: Matrix<'_, Self, Self::Activation>,
        cache: KeyValueCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()>;

    /// Cross-entropy of each row: `losses[row] = logsumexp(s logits[row, ..v]) - s logits[row, target]`, s being the shape's
    /// logit scale; 0 where the target is [`IGNORED_TARGET`]. `logits` then holds what `gradient` says.
    fn cross_entropy(
        &self,
        stream: &mut Self::DeviceStream,
        losses: SliceMut<'_, Self, f32>,
        logits: SliceMut<'_, Self, Self::Activation>,
        targets: Slice<'_, Self, u32>,
        gradient: LogitGradient,
        shape: CrossEntropyShape,
    ) -> Result<()>;

    /// `lane[i] = lane[i] + gradients[g, i]` for each grain g in order; `gradients` is
    /// `[grains, lane.elements]`.
    fn accumulate(
        &self,
        stream: &mut Self::DeviceStream,
        lane: SliceMut<'_, Self, f32>,
        gradients: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// `out[i] = (uses[0][i] + uses[1][i] + ...) / count`: the mean gradient of a chunk of
    /// parameters from the sums of its uses.
    fn mean_gradient(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, f32>,
        uses: &[Slice<'_, Self, f32>],
        count: f32,
    ) -> Result<()>;

    /// The sums of squares of consecutive ranges of `x`, which end at `ends`: `0..ends[0]`,
    /// `ends[0]..ends[1]` and so on; the last end is `x.elements()`. Each is formed in f64 over a
    /// fixed tree that depends on the range's length alone.
    fn sums_of_squares(
        &self,
        stream: &mut Self::DeviceStream,
        x: Slice<'_, Self, f32>,
        ends: &[usize],
    ) -> Result<Vec<f64>>;

    /// One AdamW update of a chunk: with `g = gradient * gradient_scale`,
    ///
    /// ```text
    /// p *= decay_factor
    /// m  = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
    /// p -= learning_rate / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + eps)
    /// ```
    fn adamw(
        &self,
        stream: &mut Self::DeviceStream,
        parameters: SliceMut<'_, Self, f32>,
        exp_avg: SliceMut<'_, Self, f32>,
        exp_avg_sq: SliceMut<'_, Self, f32>,
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()>;
}
