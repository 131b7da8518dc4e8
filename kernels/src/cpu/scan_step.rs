//! One position of the selective scan, for generation: the operations of the forward scan.

use super::dispatch::Kernel;
use super::exponential::{sigmoid, softplus_and_slope};
use super::rows::RowsMut;
use super::scan::{Coefficients, Inputs, ScanLayout, advance, decays, for_each_state, tile};
use super::simd::{LANES, Lanes, Simd};

/// `state[b, e, n]` is moved on by one position; `out[b, e]`.
pub(crate) struct ScanStep<'a> {
    pub(crate) out: RowsMut<'a>,
    pub(crate) state: &'a mut [f32],
    pub(crate) inputs: Inputs<'a>,
    pub(crate) decay_rates: &'a [Lanes],
    pub(crate) coefficients: &'a mut [Lanes],
    pub(crate) layout: ScanLayout,
}

impl Kernel for ScanStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let ScanLayout { channels, states, blocks, tiles, .. } = self.layout;
        let inputs = self.inputs;
        for (sample, state) in self.state.chunks_exact_mut(channels * states).enumerate() {
            Coefficients::gather(self.coefficients, inputs.bc, sample, 1, &self.layout);
            for block in 0..blocks {
                let channel = block * LANES;
                let bias = s.load_row(&inputs.delta_bias[channel..]);
                let raw = s.load_row(&inputs.delta_raw.row(sample)[channel..]);
                let (delta, _) = softplus_and_slope(s, s.add(raw, bias));
                let x = s.load_row(&inputs.x.row(sample)[channel..]);
                let mut y = s.mul(s.load_row(&inputs.d[channel..]), x);
                let mut delta_lanes = Lanes::ZERO;
                s.store(&mut delta_lanes.0, delta);
                let block_end = (channel + LANES).min(channels);
                let block_states = &mut state[channel * states..block_end * states];
                for tile_index in 0..tiles {
                    let offset = (block * tiles + tile_index) * LANES;
                    let mut decay = [[Lanes::ZERO; LANES]];
                    decays(s, &mut decay, &[delta_lanes], tile(&self.decay_rates[offset..]));
                    let first = tile_index * LANES;
                    let count = LANES.min(states - first);
                    let mut lanes = [Lanes::ZERO; LANES];
                    for (lane, states) in block_states.chunks_exact(states).enumerate() {
                        for (lanes, &h) in lanes.iter_mut().zip(&states[first..][..count]) {
                            lanes.0[lane] = h;
                        }
                    }
                    let mut h = [s.splat(0.0); LANES];
                    for_each_state!(I, {
                        h[I] = s.load(&lanes[I].0);
                    });
                    let bc = Coefficients::of(self.coefficients, 0, tile_index, tiles);
                    y = advance(s, &mut h, &decay[0], s.mul(delta, x), bc, y);
                    for_each_state!(I, {
                        s.store(&mut lanes[I].0, h[I]);
                    });
                    for (lane, states) in block_states.chunks_exact_mut(states).enumerate() {
                        for (lanes, h) in lanes.iter().zip(&mut states[first..][..count]) {
                            *h = lanes.0[lane];
                        }
                    }
                }
                let z = s.load_row(&inputs.z.row(sample)[channel..]);
                let gated = s.mul(y, s.mul(z, sigmoid(s, z)));
                s.store_row(&mut self.out.row_mut(sample)[channel..], gated);
            }
        }
    }
}
