//! Attention, for training and from a cache.

use super::{AttentionInputs, AttentionSaved, GrowingCache, KeyValueCache, Runtime};
use crate::error::Result;
use crate::shape::AttentionShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Causal attention of several heads. See the [module](super) for what every kernel promises.
pub trait Attention: Runtime {
    /// Causal attention of every head over each sample by itself (Vaswani et al., 2017), in tiles with an online softmax
    /// (Milakov and Gimelshein, 2018; Dao et al., 2022), so that memory is linear in t:
    ///
    /// ```text
    /// s_ij  = scale q_i . k_j - slope (i - j)        j from max(start_i, i - window + 1) to i
    /// out_i = sum over j of exp(s_ij - log_sum_exp_i) v_j,    log_sum_exp_i = log(sum over j of exp(s_ij))
    /// ```
    ///
    /// Where g heads of keys and values are fewer than the h of queries, `h / g` of these in turn read the same one.
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
}

/// The gradients of [`Attention`].
pub trait AttentionBackward: Runtime {
    /// The bytes that [`attention_backward`](Self::attention_backward) takes of the device's memory beside its arguments, and that a
    /// stream keeps for its next kernels; of a CPU, that each thread takes.
    fn attention_scratch_bytes(&self, shape: AttentionShape) -> usize;

    /// The gradients of [`attention_forward`](Attention::attention_forward) in `dqkv[b t, 3 h p]`: those of q, then of k, then of
    /// v. Where heads of queries share keys and values, each leaves its own part of their gradients, in its own columns:
    /// [`rotary_backward`](super::Rotary::rotary_backward) adds them. Probabilities are formed again from `log_sum_exp`.
    fn attention_backward(
        &self,
        stream: &mut Self::DeviceStream,
        dqkv: MatrixMut<'_, Self, Self::Activation>,
        saved: AttentionSaved<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()>;
}

/// [`Attention`] over the keys and values of earlier positions, for generation.
pub trait CachedAttention: Runtime {
    /// `cache[b, past[b] + i, w] = rows[b t, w]` for the t new positions i of each sample: keys or values enter a cache.
    fn append_to_cache(
        &self,
        stream: &mut Self::DeviceStream,
        cache: SliceMut<'_, Self, Self::Activation>,
        rows: Matrix<'_, Self, Self::Activation>,
        past: Slice<'_, Self, u32>,
        capacity: usize,
    ) -> Result<()>;

    /// [`attention_forward`](Attention::attention_forward) for generation: row i of sample b of `q[b t, h p]` is at position
    /// `past[b] + i` and attends to the keys of its cache up to that position. The bits are those of one forward pass over all
    /// positions.
    fn attention_cached(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        q: Matrix<'_, Self, Self::Activation>,
        cache: KeyValueCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()>;
}

/// A step of [`CachedAttention`]: a token of each sequence.
pub trait AttentionStep: CachedAttention {
    /// One new position of each sample, t = 1: `q[b, h p]`, `k[b, g p]` and `v[b, g p]`. Key and value enter the cache as by
    /// [`append_to_cache`](CachedAttention::append_to_cache), and the query sees what it sees in
    /// [`attention_cached`](CachedAttention::attention_cached). A backend may add in an order of its own, that of the position alone: a
    /// row's bits depend neither on the batch nor on the capacity. A cache that is full already is refused where its `past` is known to
    /// the host; on a GPU that sequence's row is no number, and nothing is written.
    fn attention_step(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        [q, k, v]: [Matrix<'_, Self, Self::Activation>; 3],
        cache: GrowingCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let GrowingCache { mut keys, mut values, capacity, past, slopes } = cache;
        self.append_to_cache(stream, keys.reborrow(), k, past, capacity)?;
        self.append_to_cache(stream, values.reborrow(), v, past, capacity)?;
        let (keys, values) = (keys.as_slice(), values.as_slice());
        let cache = KeyValueCache { keys, values, capacity, past, slopes };
        self.attention_cached(stream, out, q, cache, shape)
    }
}
