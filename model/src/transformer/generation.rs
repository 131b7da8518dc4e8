//! A transformer block in generation: a cache of the keys and values of all earlier tokens, which
//! every new token attends to.
//!
//! Memory grows with the tokens; the cache is allocated for the longest sequence at once, so that
//! the same buffers serve every token. Rows that pad a piece write into the cache too, past the
//! tokens of their sequence: these places are overwritten before they are read.

use tidemill_kernels::backend::{GrowingCache, KernelGroup, KeyValueCache};
use tidemill_kernels::shape::{GrainRows, SequenceShape};
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::block::incremental::{Capacity, Incremental, PiecePass, adopt_row, keep_rows};
use crate::error::Result;
use crate::linear::Products;
use crate::norm::Normed;
use crate::trainable::Device;
use crate::transformer::query_key_value::{Places, QueryKeyValueScratch, Rows};
use crate::transformer::{TransformerBlock, forward};

/// The state of a [`TransformerBlock`].
pub struct TransformerState<B: Backend> {
    /// `keys[b, capacity, g p]`
    keys: B::Buffer<B::Activation>,
    /// `values[b, capacity, g p]`
    values: B::Buffer<B::Activation>,
    capacity: usize,
    /// `slopes[h]`
    slopes: Option<B::Buffer<f32>>,
}

/// Activations of one piece; rows are ordered by sequence, then by position.
pub struct TransformerRows<B: Backend> {
    /// Of one norm, then of the other.
    normed: Normed<B>,
    /// `qkv[b t, (h + 2 g) p]`
    qkv: B::Buffer<B::Activation>,
    query_key_value: QueryKeyValueScratch<B>,
    /// `attended[b t, h p]`
    attended: B::Buffer<B::Activation>,
    /// `up[b t, f]`, or `[gate | up][b t, 2 f]`
    up: B::Buffer<B::Activation>,
    /// `activated[b t, f]`
    activated: B::Buffer<B::Activation>,
}

/// The positions of a cache: those of the sequence, and the padding of its last piece.
fn cache_positions(capacity: Capacity) -> usize {
    capacity.positions.saturating_add(capacity.piece_positions())
}

impl<B: Backend> Incremental<B> for TransformerBlock {
    type State = TransformerState<B>;
    type Workspace = TransformerRows<B>;

    fn generation_kernels(&self) -> Vec<KernelGroup> {
        let has_slopes = self.attention.slopes.is_some();
        let head_width = self.attention.head_width;
        let attention = KernelGroup::AttentionCached { head_width, has_slopes };
        self.kernels_around(attention)
    }

    fn plan_state(
        &self,
        device: &mut Device<'_, B>,
        capacity: Capacity,
    ) -> Result<TransformerState<B>> {
        let positions = cache_positions(capacity);
        let elements = capacity
            .sequences
            .saturating_mul(positions)
            .saturating_mul(self.attention.key_value_width());
        let slopes = self.attention.slopes_on(device)?;
        let Device { backend, stream } = device;
        let keys = backend.allocate(stream, elements)?;
        let values = backend.allocate(stream, elements)?;
        Ok(TransformerState { keys, values, capacity: positions, slopes })
    }

    fn plan_workspace(
        &self,
        device: &mut Device<'_, B>,
        capacity: Capacity,
    ) -> Result<TransformerRows<B>> {
        let (rows, width) = (capacity.rows, self.attention.width());
        let grains = GrainRows::new(rows, rows)?;
        let normed = self.norm_1.plan_normed(device, rows)?;
        let query_key_value =
            QueryKeyValueScratch::plan(self, device, grains, cache_positions(capacity))?;
        let Device { backend, stream } = device;
        Ok(TransformerRows {
            normed,
            qkv: backend.allocate(stream, rows * self.attention.projected_width())?,
            query_key_value,
            attended: backend.allocate(stream, rows * width)?,
            up: backend.allocate(stream, rows * self.mlp.up_width())?,
            activated: backend.allocate(stream, rows * self.mlp_width())?,
        })
    }

    fn state_bytes(&self, capacity: Capacity) -> usize {
        let positions = capacity.sequences.saturating_mul(cache_positions(capacity));
        let elements = positions.saturating_mul(2 * self.attention.key_value_width());
        elements.saturating_mul(size_of::<B::Activation>())
    }

    /// The contents of a cache past its sequence are never read.
    fn forget(&self, _device: &mut Device<'_, B>, _state: &mut TransformerState<B>) -> Result<()> {
        Ok(())
    }

    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut TransformerState<B>,
        kept: &[usize],
    ) -> Result<()> {
        let elements = state.capacity * self.attention.key_value_width();
        keep_rows(device, &mut state.keys, elements, kept)?;
        keep_rows(device, &mut state.values, elements, kept)
    }

    fn adopt(
        &self,
        device: &mut Device<'_, B>,
        state: &mut TransformerState<B>,
        place: usize,
        from: &TransformerState<B>,
        positions: usize,
    ) -> Result<()> {
        let width = self.attention.key_value_width();
        let (elements, count) = (state.capacity * width, positions * width);
        adopt_row(device, (&mut state.keys, elements), place, (&from.keys, count))?;
        adopt_row(device, (&mut state.values, elements), place, (&from.values, count))
    }

    /// `residual += attention(norm_1(residual))`, then `residual += mlp(norm_2(residual))`
    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut TransformerState<B>,
        workspace: &mut TransformerRows<B>,
    ) -> Result<()> {
        let (parameters, products, count) = (pass.parameters, pass.products, pass.piece.rows());
        let (d, width) = (self.width(), self.attention.width());
        let rows = Rows { parameters, grains: GrainRows::new(count, count)? };
        let TransformerRows { normed, qkv, query_key_value, attended, up, activated } = workspace;
        forward::normalize(&self.norm_1, device, normed, residual, rows)?;
        forward::project(self, device, products, qkv, normed.rows(count)?, rows)?;
        let sequences = SequenceShape::new(pass.piece.sequences(), pass.piece.positions())?;
        let shape = self.attention.shape(sequences)?;
        let places = Places { starts: None, past: Some(pass.past) };
        query_key_value.prepare(self, device, qkv, rows, places, shape)?;
        query_key_value.turn(self, device, qkv, places, shape)?;
        let [q, k, v] = query_key_value.matrices(self, qkv, count)?;
        let elements = pass.piece.sequences() * state.capacity * self.attention.key_value_width();
        let slopes = state.slopes.as_ref().map(Slice::all);
        let out = SliceMut::all(&mut *attended).matrix(count, width)?;
        if products == Products::Ordered {
            let cache = GrowingCache {
                keys: SliceMut::new(&mut state.keys, 0, elements)?,
                values: SliceMut::new(&mut state.values, 0, elements)?,
                capacity: state.capacity,
                past: pass.past,
                slopes,
            };
            device.backend.attention_step(device.stream, out, [q, k, v], cache, shape)?;
        } else {
            for (cache, rows) in [(&mut state.keys, k), (&mut state.values, v)] {
                let cache = SliceMut::new(cache, 0, elements)?;
                device.backend.append_to_cache(
                    device.stream,
                    cache,
                    rows,
                    pass.past,
                    state.capacity,
                )?;
            }
            let cache = KeyValueCache {
                keys: Slice::new(&state.keys, 0, elements)?,
                values: Slice::new(&state.values, 0, elements)?,
                capacity: state.capacity,
                past: pass.past,
                slopes,
            };
            device.backend.attention_cached(device.stream, out, q, cache, shape)?;
        }
        let attended = Slice::all(&*attended).matrix(count, width)?;
        let out = SliceMut::all(&mut *residual).matrix(count, d)?;
        self.out_proj.forward_residual(device, products, out, attended, parameters)?;
        forward::normalize(&self.norm_2, device, normed, residual, rows)?;
        let normed = normed.rows(count)?;
        let mlp = &self.mlp;
        let mut up = SliceMut::all(up).matrix(count, mlp.up_width())?;
        mlp.project(device, products, up.reborrow(), normed, parameters)?;
        let mut activated = SliceMut::all(activated).matrix(count, mlp.width())?;
        mlp.activate(device, activated.reborrow(), up.as_matrix(), parameters)?;
        let out = SliceMut::all(residual).matrix(count, d)?;
        mlp.down_proj.forward_residual(device, products, out, activated.as_matrix(), parameters)
    }
}
