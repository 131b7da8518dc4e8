//! The forward selective scan of whole samples, with softplus, skip and gate fused.

use super::dispatch::Kernel;
use super::exponential::{sigmoid, softplus_and_slope};
use super::rows::{Rows, RowsMut, exactly_mut};
use super::scan::{
    CHUNK, Coefficients, Inputs, PrepareDecay, ScanLayout, advance, decays, for_each_state, tile,
};
use super::simd::{LANES, Lanes, Simd, Tile};
use super::{Cpu, DeviceStream};
use crate::backend::{ScanInputs, SelectiveScan};
use crate::error::Result;
use crate::shape::ScanShape;
use crate::view::{MatrixMut, SliceMut};

/// The samples of a compute thread.
struct Forward<'a> {
    out: RowsMut<'a>,
    saved: &'a mut [f32],
    inputs: Inputs<'a>,
    decay_rates: &'a [Lanes],
    coefficients: &'a mut [Lanes],
    first_sample: usize,
    layout: ScanLayout,
}

impl SelectiveScan for Cpu {
    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize {
        ScanLayout::new(shape).saved_elements() * shape.sequences().samples()
    }

    fn selective_scan_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_forward";
        let out = RowsMut::new(KERNEL, "out", out, shape.sequences().rows(), shape.channels())?;
        let expected = self.selective_scan_saved_elements(shape);
        let saved = exactly_mut(KERNEL, "saved", saved, expected)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = ScanLayout::new(shape);
        let share = stream.threads().share(layout.samples);
        let parts = layout.samples.div_ceil(share);
        let state_lanes = layout.state_lanes();
        let lanes = state_lanes + parts * layout.coefficient_lanes();
        let (threads, scratch) = stream.with_scratch(lanes)?;
        let (decay_rates, coefficients) = scratch.split_at_mut(state_lanes);
        self.dispatch.run(PrepareDecay { out: &mut *decay_rates, a_log: inputs.a_log, layout });
        let decay_rates = &*decay_rates;
        let parts = out
            .parts(share * layout.positions)
            .zip(saved.chunks_mut(share * layout.saved_elements()))
            .zip(coefficients.chunks_exact_mut(layout.coefficient_lanes()))
            .enumerate()
            .map(|(part, ((out, saved), coefficients))| Forward {
                out,
                saved,
                inputs,
                decay_rates,
                coefficients,
                first_sample: part * share,
                layout,
            });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let state_elements = self.layout.state_lanes() * LANES;
        let saved = std::mem::take(&mut self.saved);
        for (sample, saved) in saved.chunks_exact_mut(self.layout.saved_elements()).enumerate() {
            saved[..state_elements].fill(0.0);
            for chunk in 0..self.layout.chunks {
                let (now, next) = saved[chunk * state_elements..].split_at_mut(state_elements);
                let (next, after) = next.split_at_mut(next.len().min(state_elements));
                self.chunk(s, sample, chunk, now, [next, after]);
            }
        }
    }
}

impl<'a> Forward<'a> {
    /// One chunk: from the states in `now` to those in `next`, which is empty for the last chunk; `after` is written next.
    #[inline(always)]
    fn chunk<S: Simd>(
        &mut self,
        s: S,
        sample: usize,
        chunk: usize,
        now: &[f32],
        [next, after]: [&mut [f32]; 2],
    ) {
        let ScanLayout { blocks, tiles, positions, .. } = self.layout;
        let inputs = self.inputs;
        let range = self.layout.positions_of(chunk);
        let steps = range.len().min(CHUNK);
        let first_out = sample * positions + range.start;
        let first = self.first_sample * positions + first_out;
        let bc = inputs.coefficients(first, self.layout.states);
        Coefficients::gather(self.coefficients, bc, steps, tiles);
        let start_bits = inputs.start_bits(first, range.start, steps);

        let mut decay: [Tile; CHUNK] = [[Lanes::ZERO; LANES]; CHUNK];
        let mut delta = [Lanes::ZERO; CHUNK];
        let mut x = [Lanes::ZERO; CHUNK];
        let mut y = [Lanes::ZERO; CHUNK];
        for block in 0..blocks {
            let channel = block * LANES;
            let bias = s.load_row(&inputs.delta_bias[channel..]);
            let skip = s.load_row(&inputs.d[channel..]);
            let rows = |rows: &Rows<'a>| rows.vectors(first, steps, channel);
            for (q, (raw, v)) in (0..CHUNK).zip(rows(&inputs.delta_raw).zip(rows(&inputs.x))) {
                // Prefetches the data of the next chunk, a little at a time.
                for rows in [&inputs.delta_raw, &inputs.x, &inputs.z] {
                    s.prefetch(rows.address(first + q + CHUNK, channel));
                }
                let (softplus, _) = softplus_and_slope(s, s.add(s.load_row(raw), bias));
                s.store(&mut delta[q].0, softplus);
                let v = s.load_row(v);
                s.store(&mut x[q].0, v);
                s.store(&mut y[q].0, s.mul(skip, v));
            }
            for tile_index in 0..tiles {
                let offset = (block * tiles + tile_index) * LANES;
                let rates = tile(&self.decay_rates[offset..]);
                decays(s, &mut decay[..steps], &delta, rates);
                let (now, _) = now[offset * LANES..].as_chunks::<LANES>();
                let mut h = [s.splat(0.0); LANES];
                for_each_state!(I, {
                    h[I] = s.load(&now[I]);
                });
                for q in 0..steps {
                    if start_bits >> q & 1 != 0 {
                        h = [s.splat(0.0); LANES];
                    }
                    if tile_index == 0 {
                        s.prefetch(self.out.address(first_out + q + CHUNK, channel));
                    }
                    for state in [2 * q, 2 * q + 1] {
                        s.prefetch(after.as_ptr().wrapping_add((offset + state) * LANES));
                    }
                    let delta_x = s.mul(s.load(&delta[q].0), s.load(&x[q].0));
                    let bc = Coefficients::of(self.coefficients, q, tile_index, tiles);
                    let sum = advance(s, &mut h, &decay[q], delta_x, bc, s.load(&y[q].0));
                    s.store(&mut y[q].0, sum);
                }
                if let Some(next) = next.get_mut(offset * LANES..) {
                    let (next, _) = next.as_chunks_mut::<LANES>();
                    if next.len() >= LANES {
                        for_each_state!(I, {
                            s.store(&mut next[I], h[I]);
                        });
                    }
                }
            }
            let out = self.out.vectors_mut(first_out, steps, channel);
            for ((out, z), y) in out.zip(rows(&inputs.z)).zip(&y) {
                let z = s.load_row(z);
                s.store_row(out, s.mul(s.load(&y.0), s.mul(z, sigmoid(s, z))));
            }
        }
    }
}
