//! The gradients of the selective scan: states recomputed chunk by chunk from the saved ones, every
//! gradient formed in one pass from the last chunk to the first.
//!
//! With `G` the gradient of a state `h_t` and `a = exp(delta A)`:
//!
//! ```text
//! dy = dout silu(z);   dz = dout y silu'(z);   dC_t = dy h_t;   dD = sum of dy x
//! G_t = C_t dy_t + a_{t+1} G_{t+1}
//! dB_t = G_t delta_t x_t;   dx_t = delta_t (G_t . B_t) + dy_t D
//! ddelta_t = x_t (G_t . B_t) + (a_t G_t h_{t-1}) . A;   dA = sum of a_t G_t h_{t-1} delta_t
//! ddelta_raw = ddelta sigmoid(delta_raw + delta_bias);   da_log = dA A
//! ```
//!
//! B and C are shared by all channels, so their gradients are sums over channels: one chain per lane
//! over the blocks, then one tree. Gradients of parameters are formed per sample and then added in the
//! order of the samples of a grain, so samples are divided freely among threads.

use super::dispatch::Kernel;
use super::exponential::{sigmoid, softplus_and_slope};
use super::rows::{Rows, RowsMut, exactly, exactly_mut};
use super::scan::{
    CHUNK, Coefficients, Inputs, PrepareDecay, ScanLayout, advance, decays, for_each_state, tile,
};
use super::simd::{LANES, Lanes, Simd, Tile};
use super::{Cpu, DeviceStream};
use crate::backend::{ScanGradients, ScanSaved, SelectiveScan, SelectiveScanBackward};
use crate::error::Result;
use crate::shape::ScanShape;

/// Gradients of activations, for the samples of a compute thread.
struct RowGradients<'a> {
    ddelta_raw: RowsMut<'a>,
    dx: RowsMut<'a>,
    dbc: RowsMut<'a>,
    dz: RowsMut<'a>,
    regated: Option<RowsMut<'a>>,
}

/// Gradients of parameters, `[grains, ...]`.
struct ParameterGradients<'a> {
    da_log: &'a mut [f32],
    dd: &'a mut [f32],
    ddelta_bias: &'a mut [f32],
}

/// The inputs of the backward scan.
#[derive(Clone, Copy)]
struct BackwardInputs<'a> {
    dout: Rows<'a>,
    inputs: Inputs<'a>,
    saved: &'a [f32],
}

impl<'a> RowGradients<'a> {
    fn parts(self, rows: usize) -> impl Iterator<Item = RowGradients<'a>> {
        let mut regated = self.regated.map(|regated| regated.parts(rows));
        let (ddelta_raw, dx) = (self.ddelta_raw.parts(rows), self.dx.parts(rows));
        let (dbc, dz) = (self.dbc.parts(rows), self.dz.parts(rows));
        ddelta_raw.zip(dx).zip(dbc.zip(dz)).map(move |((ddelta_raw, dx), (dbc, dz))| {
            let regated = regated.as_mut().and_then(Iterator::next);
            RowGradients { ddelta_raw, dx, dbc, dz, regated }
        })
    }
}

/// Vectors of one sample's gradients of parameters: dA (per `A log2(e)` layout), then dD and ddelta_bias.
fn partial_lanes(layout: &ScanLayout) -> usize {
    layout.state_lanes() + 2 * layout.blocks
}

/// Vectors of one tile for each position of a chunk.
const CHUNK_LANES: usize = CHUNK * LANES;
/// Half of 4 KiB: see [`Scratch`].
const HALF_PAGE_LANES: usize = 2 * LANES;

/// A compute thread's scratch.
///
/// A processor takes a load for dependent on an earlier store whose address is equal modulo 4 KiB, so
/// the states, stored between loads of the decays and the sums, lie 2 KiB away from those.
struct Scratch<'a> {
    /// The decays of a block's positions.
    decay: &'a mut [Tile],
    /// The states before the first position and after each.
    h: &'a mut [Tile],
    /// Per-lane sums over blocks for dC and dB, a tile for each of `[tiles, CHUNK]`.
    dc: &'a mut [Tile],
    db: &'a mut [Tile],
    /// The gradient of the state before the chunk that was done last, `[blocks, tiles]` tiles.
    carry: &'a mut [Lanes],
    coefficients: &'a mut [Lanes],
}

impl<'a> Scratch<'a> {
    fn lanes(layout: &ScanLayout) -> usize {
        // Decays, a gap, the states (a tile more than a chunk), a gap: 20 KiB.
        let fixed = 2 * CHUNK_LANES + LANES + HALF_PAGE_LANES + LANES;
        let sums = 2 * layout.tiles * CHUNK_LANES;
        fixed + sums + layout.state_lanes() + layout.coefficient_lanes()
    }

    fn new(lanes: &'a mut [Lanes], layout: &ScanLayout) -> Self {
        let (decay, lanes) = lanes.split_at_mut(CHUNK_LANES);
        let (h, lanes) = lanes[HALF_PAGE_LANES..].split_at_mut(CHUNK_LANES + LANES);
        let (dc, lanes) = lanes[LANES..].split_at_mut(layout.tiles * CHUNK_LANES);
        let (db, lanes) = lanes.split_at_mut(layout.tiles * CHUNK_LANES);
        let (carry, coefficients) = lanes.split_at_mut(layout.state_lanes());
        let [decay, h, dc, db] = [decay, h, dc, db].map(|lanes| lanes.as_chunks_mut().0);
        Self { decay, h, dc, db, carry, coefficients }
    }
}

/// The samples of a compute thread.
struct Backward<'a> {
    rows: RowGradients<'a>,
    partials: &'a mut [Lanes],
    scratch: Scratch<'a>,
    read: BackwardInputs<'a>,
    decay_rates: &'a [Lanes],
    first_sample: usize,
    layout: ScanLayout,
}

impl SelectiveScanBackward for Cpu {
    fn selective_scan_scratch_bytes(&self, shape: ScanShape) -> usize {
        // Of one thread that has all samples.
        let layout = ScanLayout::new(shape);
        let of_samples = layout.samples * partial_lanes(&layout);
        (layout.state_lanes() + of_samples + Scratch::lanes(&layout)) * size_of::<Lanes>()
    }

    fn selective_scan_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: ScanGradients<'_, Self>,
        ScanSaved { dout, inputs, saved }: ScanSaved<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_backward";
        let ScanGradients { ddelta_raw, dx, dbc, dz, da_log, dd, ddelta_bias, regated } = gradients;
        let (rows, grains) = (shape.sequences().rows(), shape.grains().grains());
        let (channels, states) = (shape.channels(), shape.states());
        let row_gradients = RowGradients {
            ddelta_raw: RowsMut::new(KERNEL, "ddelta_raw", ddelta_raw, rows, channels)?,
            dx: RowsMut::new(KERNEL, "dx", dx, rows, channels)?,
            dbc: RowsMut::new(KERNEL, "dbc", dbc, rows, 2 * states)?,
            dz: RowsMut::new(KERNEL, "dz", dz, rows, channels)?,
            regated: match regated {
                Some(regated) => Some(RowsMut::new(KERNEL, "regated", regated, rows, channels)?),
                None => None,
            },
        };
        let parameters = ParameterGradients {
            da_log: exactly_mut(KERNEL, "da_log", da_log, grains * channels * states)?,
            dd: exactly_mut(KERNEL, "dd", dd, grains * channels)?,
            ddelta_bias: exactly_mut(KERNEL, "ddelta_bias", ddelta_bias, grains * channels)?,
        };
        let read = BackwardInputs {
            dout: Rows::new(KERNEL, "dout", dout, rows, channels)?,
            inputs: Inputs::new(KERNEL, inputs, shape)?,
            saved: exactly(KERNEL, "saved", saved, self.selective_scan_saved_elements(shape))?,
        };
        let layout = ScanLayout::new(shape);
        let share = stream.threads().share(layout.samples);
        let parts = layout.samples.div_ceil(share);
        let (state_lanes, partial_lanes) = (layout.state_lanes(), partial_lanes(&layout));
        let lanes = state_lanes + layout.samples * partial_lanes + parts * Scratch::lanes(&layout);
        let (threads, scratch) = stream.with_scratch(lanes)?;
        let (decay_rates, scratch) = scratch.split_at_mut(state_lanes);
        let (partials, scratch) = scratch.split_at_mut(layout.samples * partial_lanes);
        let a_log = read.inputs.a_log;
        self.dispatch.run(PrepareDecay { out: &mut *decay_rates, a_log, layout });
        let decay_rates = &*decay_rates;
        let parts = row_gradients
            .parts(share * layout.positions)
            .zip(partials.chunks_mut(share * partial_lanes))
            .zip(scratch.chunks_exact_mut(Scratch::lanes(&layout)))
            .enumerate()
            .map(|(part, ((rows, partials), scratch))| Backward {
                rows,
                partials,
                scratch: Scratch::new(scratch, &layout),
                read,
                decay_rates,
                first_sample: part * share,
                layout,
            });
        threads.for_each(parts, |part| self.dispatch.run(part));
        add_partials(parameters, partials, decay_rates, &layout);
        Ok(())
    }
}

/// Each grain's gradients of parameters: its samples' added in order, from +0.0.
fn add_partials(
    parameters: ParameterGradients<'_>,
    partials: &[Lanes],
    decay_rates: &[Lanes],
    layout: &ScanLayout,
) {
    let ScanLayout { channels, states, tiles, blocks, .. } = *layout;
    let grains = partials
        .chunks(layout.samples_per_grain * partial_lanes(layout))
        .zip(parameters.da_log.chunks_exact_mut(channels * states))
        .zip(parameters.dd.chunks_exact_mut(channels))
        .zip(parameters.ddelta_bias.chunks_exact_mut(channels));
    for (((partials, da_log), dd), ddelta_bias) in grains {
        let samples = || partials.chunks_exact(partial_lanes(layout));
        let sum = |vector: usize, lane: usize| {
            samples().fold(0.0, |sum, partial| sum + partial[vector].0[lane])
        };
        for channel in 0..channels {
            let (block, lane) = (channel / LANES, channel % LANES);
            for state in 0..states {
                let vector = block * tiles * LANES + state;
                let a = decay_rates[vector].0[lane] * std::f32::consts::LN_2;
                da_log[channel * states + state] = sum(vector, lane) * a;
            }
            dd[channel] = sum(layout.state_lanes() + block, lane);
            ddelta_bias[channel] = sum(layout.state_lanes() + blocks + block, lane);
        }
    }
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let partials = std::mem::take(&mut self.partials);
        let saved_elements = self.layout.saved_elements();
        let state_elements = self.layout.state_lanes() * LANES;
        for (sample, partial) in partials.chunks_exact_mut(partial_lanes(&self.layout)).enumerate()
        {
            partial.fill(Lanes::ZERO);
            self.scratch.carry.fill(Lanes::ZERO);
            let saved = &self.read.saved[(self.first_sample + sample) * saved_elements..];
            for chunk in (0..self.layout.chunks).rev() {
                let (before, states) = saved.split_at(chunk * state_elements);
                let before = &before[before.len().saturating_sub(state_elements)..];
                self.chunk(s, sample, chunk, [&states[..state_elements], before], partial);
            }
        }
    }
}

/// Values of the positions of a chunk, for a block of channels.
struct Positions {
    delta: [Lanes; CHUNK],
    /// softplus'.
    slope: [Lanes; CHUNK],
    x: [Lanes; CHUNK],
    y: [Lanes; CHUNK],
    dy: [Lanes; CHUNK],
    silu: [Lanes; CHUNK],
    /// dout silu'(z), which y makes dz.
    gate: [Lanes; CHUNK],
    /// G . B
    gb: [Lanes; CHUNK],
    /// (a G h) . A log2(e)
    gha: [Lanes; CHUNK],
}

impl<'a> Backward<'a> {
    /// One chunk, from the states saved at its start; those of the chunk before it, which comes next, are asked for.
    #[inline(always)]
    fn chunk<S: Simd>(
        &mut self,
        s: S,
        sample: usize,
        chunk: usize,
        [saved, next_saved]: [&[f32]; 2],
        partial: &mut [Lanes],
    ) {
        let ScanLayout { blocks, tiles, positions, states, .. } = self.layout;
        let BackwardInputs { dout, inputs, .. } = self.read;
        let range = self.layout.positions_of(chunk);
        let steps = range.len().min(CHUNK);
        let first_out = sample * positions + range.start;
        let first = self.first_sample * positions + first_out;
        let Scratch { decay, h, dc, db, carry, coefficients } = &mut self.scratch;
        Coefficients::gather(coefficients, inputs.coefficients(first, states), steps, tiles);
        let coefficients = &**coefficients;
        let start_bits = inputs.start_bits(first, range.start, steps);
        dc.fill([Lanes::ZERO; LANES]);
        db.fill([Lanes::ZERO; LANES]);
        let (da, rest) = partial.split_at_mut(self.layout.state_lanes());
        let (dd, ddelta_bias) = rest.split_at_mut(blocks);

        let zero = [Lanes::ZERO; CHUNK];
        let mut at = Positions {
            delta: zero,
            slope: zero,
            x: zero,
            y: zero,
            dy: zero,
            silu: zero,
            gate: zero,
            gb: zero,
            gha: zero,
        };
        let one = s.splat(1.0);
        for block in 0..blocks {
            let channel = block * LANES;
            let bias = s.load_row(&inputs.delta_bias[channel..]);
            let skip = s.load_row(&inputs.d[channel..]);
            // In loops of their own, short enough that the processor overlaps the operations of
            // several positions.
            let vectors = |rows: &Rows<'a>| (0..CHUNK).zip(rows.vectors(first, steps, channel));
            for (q, raw) in vectors(&inputs.delta_raw) {
                // Prefetches the data of the next chunk, the one before this, a little at a time: a
                // processor has only about two dozen loads in flight.
                for rows in [&inputs.delta_raw, &inputs.x, &inputs.z, &dout] {
                    s.prefetch(rows.address((first + q).wrapping_sub(CHUNK), channel));
                }
                let (softplus, slope) = softplus_and_slope(s, s.add(s.load_row(raw), bias));
                s.store(&mut at.delta[q].0, softplus);
                s.store(&mut at.slope[q].0, slope);
            }
            for (q, x) in vectors(&inputs.x) {
                let x = s.load_row(x);
                s.store(&mut at.x[q].0, x);
                s.store(&mut at.y[q].0, s.mul(skip, x));
            }
            for ((q, z), (_, dout)) in vectors(&inputs.z).zip(vectors(&dout)) {
                let z = s.load_row(z);
                let sigmoid = sigmoid(s, z);
                let silu = s.mul(z, sigmoid);
                let dout = s.load_row(dout);
                s.store(&mut at.silu[q].0, silu);
                s.store(&mut at.dy[q].0, s.mul(dout, silu));
                let silu_slope = s.mul(sigmoid, s.mul_add(z, s.sub(one, sigmoid), one));
                s.store(&mut at.gate[q].0, s.mul(dout, silu_slope));
            }
            at.gb = zero;
            at.gha = zero;
            for tile_index in 0..tiles {
                let offset = (block * tiles + tile_index) * LANES;
                let rates = tile(&self.decay_rates[offset..]);
                decays(s, &mut decay[..steps], &at.delta, rates);
                let (saved, _) = saved[offset * LANES..].as_chunks::<LANES>();
                let dc = &mut dc[tile_index * CHUNK..][..CHUNK];
                let db = &mut db[tile_index * CHUNK..][..CHUNK];

                let mut now = [s.splat(0.0); LANES];
                for_each_state!(I, {
                    now[I] = s.load(&saved[I]);
                    s.store(&mut h[0][I].0, now[I]);
                });
                for q in 0..steps {
                    if start_bits >> q & 1 != 0 {
                        now = [s.splat(0.0); LANES];
                        h[q] = [Lanes::ZERO; LANES];
                    }
                    let delta_x = s.mul(s.load(&at.delta[q].0), s.load(&at.x[q].0));
                    let bc = Coefficients::of(coefficients, q, tile_index, tiles);
                    let y = s.load(&at.y[q].0);
                    let y = advance(s, &mut now, &decay[q], delta_x, bc, y);
                    s.store(&mut at.y[q].0, y);
                    let dy = s.load(&at.dy[q].0);
                    if tile_index == 0 {
                        let RowGradients { dx, ddelta_raw, dz, regated, .. } = &self.rows;
                        let row = (first_out + q).wrapping_sub(CHUNK);
                        for rows in [dx, ddelta_raw, dz] {
                            s.prefetch(rows.address(row, channel));
                        }
                        if let Some(regated) = regated {
                            s.prefetch(regated.address(row, channel));
                        }
                    }
                    let (h, dc) = (&mut h[q + 1], &mut dc[q]);
                    for_each_state!(I, {
                        s.store(&mut h[I].0, now[I]);
                        let sum = s.mul_add(dy, now[I], s.load(&dc[I].0));
                        s.store(&mut dc[I].0, sum);
                    });
                }

                let carry = &mut carry[offset..][..LANES];
                let da = &mut da[offset..][..LANES];
                let mut g = [s.splat(0.0); LANES];
                for_each_state!(I, {
                    g[I] = s.load(&carry[I].0);
                });
                for q in (0..steps).rev() {
                    for state in [2 * q, 2 * q + 1] {
                        s.prefetch(next_saved.as_ptr().wrapping_add((offset + state) * LANES));
                    }
                    let delta = s.load(&at.delta[q].0);
                    let delta_x = s.mul(delta, s.load(&at.x[q].0));
                    let dy = s.load(&at.dy[q].0);
                    let Coefficients { b, c } =
                        Coefficients::of(coefficients, q, tile_index, tiles);
                    let (before, decay, db) = (&h[q], &decay[q], &mut db[q]);
                    let mut gb = s.load(&at.gb[q].0);
                    let mut gha = s.load(&at.gha[q].0);
                    for_each_state!(I, {
                        let total = s.mul_add(dy, s.splat(c[I]), g[I]);
                        let sum = s.mul_add(total, delta_x, s.load(&db[I].0));
                        s.store(&mut db[I].0, sum);
                        gb = s.mul_add(total, s.splat(b[I]), gb);
                        g[I] = s.mul(total, s.load(&decay[I].0));
                        let gh = s.mul(g[I], s.load(&before[I].0));
                        gha = s.mul_add(gh, s.load(&rates[I].0), gha);
                        let sum = s.mul_add(gh, delta, s.load(&da[I].0));
                        s.store(&mut da[I].0, sum);
                    });
                    s.store(&mut at.gb[q].0, gb);
                    s.store(&mut at.gha[q].0, gha);
                    if start_bits >> q & 1 != 0 {
                        g = [s.splat(0.0); LANES];
                    }
                }
                for_each_state!(I, {
                    s.store(&mut carry[I].0, g[I]);
                });
            }

            let ln_2 = s.splat(std::f32::consts::LN_2);
            let mut dd_sum = s.load(&dd[block].0);
            let mut bias_sum = s.load(&ddelta_bias[block].0);
            for q in (0..steps).rev() {
                let (x, dy, gb) = (&at.x[q].0, &at.dy[q].0, &mut at.gb[q].0);
                let (x, dy, sum) = (s.load(x), s.load(dy), s.load(gb));
                dd_sum = s.mul_add(dy, x, dd_sum);
                s.store(gb, s.mul_add(s.load(&at.delta[q].0), sum, s.mul(dy, skip)));
                let gha = &mut at.gha[q].0;
                let ddelta = s.mul_add(s.load(gha), ln_2, s.mul(x, sum));
                let ddelta_raw = s.mul(ddelta, s.load(&at.slope[q].0));
                bias_sum = s.add(bias_sum, ddelta_raw);
                s.store(gha, ddelta_raw);
            }
            let RowGradients { ddelta_raw, dx, dz, regated, .. } = &mut self.rows;
            for (rows, values) in [(dx, &at.gb), (ddelta_raw, &at.gha)] {
                for (row, value) in rows.vectors_mut(first_out, steps, channel).zip(values) {
                    s.store_row(row, s.load(&value.0));
                }
            }
            for (rows, factors) in [(Some(dz), &at.gate), (regated.as_mut(), &at.silu)] {
                let Some(rows) = rows else { continue };
                let rows = rows.vectors_mut(first_out, steps, channel);
                for (row, (y, factor)) in rows.zip(at.y.iter().zip(factors)) {
                    s.store_row(row, s.mul(s.load(&y.0), s.load(&factor.0)));
                }
            }
            s.store(&mut dd[block].0, dd_sum);
            s.store(&mut ddelta_bias[block].0, bias_sum);
        }

        for q in 0..steps {
            let (db_row, dc_row) = self.rows.dbc.row_mut(first_out + q).split_at_mut(states);
            for (row, sums) in [(db_row, &**db), (dc_row, &**dc)] {
                for (tile_index, row) in row.chunks_mut(LANES).enumerate() {
                    s.store_row(row, s.sums(&sums[tile_index * CHUNK + q]));
                }
            }
        }
    }
}
