//! About how much memory a sample takes in a workspace, from sizes alone.

use tidemill_kernels::Backend;
use tidemill_kernels::shape::{GrainRows, ScanShape, SequenceShape};

use crate::block::Block;
use crate::error::Result;
use crate::family::Model;
use crate::language_model::Recompute;
use crate::layer_block::LayerBlock;
use crate::mamba::MambaBlock;
use crate::trainable::MicrobatchShape;
use crate::transformer::TransformerBlock;

/// Bytes of one sample.
#[derive(Clone, Copy, Debug, Default)]
struct SampleBytes {
    /// What forward leaves for backward.
    kept: usize,
    /// What blocks use one after the other.
    scratch: usize,
}

impl Model {
    /// About what one sample of `positions` positions, a grain by itself, needs in a workspace: what each layer keeps for its
    /// backward pass, and the scratch of the layer that takes most.
    ///
    /// # Errors
    /// No positions, or more than can be counted.
    pub fn sample_bytes<B: Backend>(&self, backend: &B, positions: usize) -> Result<usize> {
        let (mut total, mut scratch) = (0, 0);
        let mut owners: Vec<&LayerBlock> = Vec::new();
        for block in self.bodies() {
            let bytes = match block {
                LayerBlock::Mamba(block) => block.sample_bytes(backend, positions)?,
                LayerBlock::Transformer(block) => block.sample_bytes(backend, positions)?,
            };
            total += positions * self.width() * size_of::<f32>();
            let is_shared = self.recompute() == Recompute::Block
                && owners.iter().any(|owner| Block::<B>::shares_saved(*owner, block));
            if !is_shared {
                owners.push(block);
                total += bytes.kept;
            }
            scratch = scratch.max(bytes.scratch);
        }
        Ok(total + scratch)
    }
}

/// What the gradient of that of `weights` takes that takes most: they are formed one after the other.
fn weights_scratch_bytes<B: Backend>(
    backend: &B,
    weights: &[[usize; 2]],
    positions: usize,
) -> Result<usize> {
    let grains = GrainRows::new(positions, positions)?;
    let bytes = weights.iter().map(|&weight| backend.weight_gradient_scratch_bytes(weight, grains));
    Ok(bytes.max().unwrap_or(0))
}

impl MambaBlock {
    fn sample_bytes<B: Backend>(&self, backend: &B, positions: usize) -> Result<SampleBytes> {
        let (d, e, narrow) = (self.width, self.inner, self.dt_bc_width());
        let one = SequenceShape::new(1, positions)?;
        let shape = ScanShape::new(one, 1, e, self.states)?;
        let scan = backend.selective_scan_saved_elements(shape);
        let of_scan = backend.selective_scan_scratch_bytes(shape);
        let activation = size_of::<B::Activation>();
        let forward = activation * (d + 2 * e);
        let backward = activation * (d + 5 * e + narrow) + 3 * 4 * d;
        let of_parameters = 4 * (3 * e + e * self.states + e * self.taps + d);
        let weights = [[2 * e, d], [narrow, e], [e, self.rank], [d, e]];
        let of_weights = weights_scratch_bytes(backend, &weights, positions)?;
        Ok(SampleBytes {
            kept: activation * positions * (3 * e + narrow) + 4 * scan,
            scratch: positions * (forward + backward) + of_parameters + of_scan + of_weights,
        })
    }
}

impl TransformerBlock {
    fn sample_bytes<B: Backend>(&self, backend: &B, positions: usize) -> Result<SampleBytes> {
        let (d, width, f) = (self.width(), self.attention.width(), self.mlp_width());
        let activation = size_of::<B::Activation>();
        let clipped = self.attention.clip.map_or(0, |_| 3 * width);
        let normed = self.query_key_norms.as_ref().map_or(0, |_| 2 * width);
        let forward = activation * (d + f + clipped + normed);
        let backward = activation * (d + f + 4 * width) + 3 * 4 * d;
        let of_parameters = 4 * (2 * d + f.max(3 * width) + 2 * width);
        let one = MicrobatchShape { samples: 1, positions, samples_per_grain: 1 };
        let of_attention = backend.attention_scratch_bytes(self.attention_shape(one)?);
        let others = [&self.out_proj, &self.up_proj, &self.down_proj];
        let maps = self.projections.iter().chain(others);
        let weights: Vec<[usize; 2]> = maps.map(|map| [map.outputs, map.inputs]).collect();
        let of_weights = weights_scratch_bytes(backend, &weights, positions)?;
        Ok(SampleBytes {
            kept: positions * (activation * (4 * width + f) + 4 * (self.attention.heads + d)),
            scratch: positions * (forward + backward) + of_parameters + of_attention + of_weights,
        })
    }
}
