//! The gradients of the scan of heads. A head of a sample is walked forwards, keeping the state before each chunk, and then chunk by
//! chunk from the last to the first, where its states are formed again.
//!
//! With `G` the gradient of a state `h_t`, `s = exp(delta A)` and sums over the channels p of a head and its states n:
//!
//! ```text
//! dy = dout silu(z);   dz = dout y silu'(z);   dC_t = dy h_t;   dD = sum of dy x
//! G_t = C_t dy_t + s_{t+1} G_{t+1}
//! dB_t = G_t delta_t x_t;   dx_t = delta_t (G_t . B_t) + dy_t D
//! ddelta_t = A q_t + x_t (G_t . B_t),   q_t = s_t (G_t . h_{t-1});   dA = sum of delta_t q_t
//! ddelta_raw = ddelta times the slope of delta;   da_log = dA A
//! ```
//!
//! B and C are shared by the heads of a group, so their gradients are sums over channels and heads: one chain per lane over the
//! blocks of a head, one tree, and the heads of the group in order. Gradients of parameters are formed per sample and then
//! added in the order of the samples of a grain, so samples are divided freely among threads.

use super::dispatch::Kernel;
use super::exponential::sigmoid;
use super::head_scan::{HeadLayout, Inputs, Steps, advance};
use super::rows::{Rows, RowsMut, exactly_mut};
use super::scan::{CHUNK, Coefficients, for_each_state};
use super::simd::{LANES, Lanes, Simd, Tile};
use super::{Cpu, DeviceStream};
use crate::backend::{HeadScanBackward, HeadScanGradients, HeadScanInputs};
use crate::error::Result;
use crate::shape::HeadScanShape;
use crate::view::Matrix;

/// Gradients of activations, for the samples of a compute thread.
struct RowGradients<'a> {
    dprojected: RowsMut<'a>,
    dxbc: RowsMut<'a>,
}

/// Gradients of parameters, `[grains, h]`.
struct ParameterGradients<'a> {
    da_log: &'a mut [f32],
    dd: &'a mut [f32],
    ddelta_bias: &'a mut [f32],
}

/// One sample's gradients of a head's parameters.
#[derive(Clone, Copy, Default)]
struct Partial {
    da_log: f32,
    dd: f32,
    ddelta_bias: f32,
}

/// Values of the positions of a chunk, for a block of channels.
#[derive(Clone, Copy)]
struct Positions {
    x: [Lanes; CHUNK],
    delta_x: [Lanes; CHUNK],
    y: [Lanes; CHUNK],
    dy: [Lanes; CHUNK],
    /// dout silu'(z), which y makes dz.
    gate: [Lanes; CHUNK],
    /// G . B
    gb: [Lanes; CHUNK],
}

impl Positions {
    const ZERO: Self = {
        let zero = [Lanes::ZERO; CHUNK];
        Self { x: zero, delta_x: zero, y: zero, dy: zero, gate: zero, gb: zero }
    };
    /// Vectors of one.
    const LANES: usize = size_of::<Self>() / size_of::<Lanes>();
}

/// A compute thread's scratch.
struct Scratch<'a> {
    /// The states before each chunk, `[chunks, blocks, tiles]` tiles.
    saved: &'a mut [Lanes],
    /// The gradient of the state before the chunk that was done last, `[blocks, tiles]` tiles.
    carry: &'a mut [Lanes],
    coefficients: &'a mut [Lanes],
}

impl<'a> Scratch<'a> {
    fn lanes(layout: &HeadLayout) -> usize {
        (layout.chunks + 1) * layout.state_lanes() + layout.coefficient_lanes()
    }

    fn new(lanes: &'a mut [Lanes], layout: &HeadLayout) -> Self {
        let (saved, lanes) = lanes.split_at_mut(layout.chunks * layout.state_lanes());
        let (carry, coefficients) = lanes.split_at_mut(layout.state_lanes());
        Self { saved, carry, coefficients }
    }
}

/// The samples of a compute thread.
struct Backward<'a> {
    rows: RowGradients<'a>,
    /// `[samples, h]`
    partials: &'a mut [Partial],
    scratch: Scratch<'a>,
    dout: Rows<'a>,
    inputs: Inputs<'a>,
    first_sample: usize,
    layout: HeadLayout,
}

impl HeadScanBackward for Cpu {
    fn head_scan_scratch_bytes(&self, shape: HeadScanShape) -> usize {
        // Of one thread that has all samples.
        let layout = HeadLayout::new(shape);
        let of_blocks = layout.blocks * Positions::LANES;
        (Scratch::lanes(&layout) + of_blocks) * size_of::<Lanes>()
            + layout.samples * layout.heads * size_of::<Partial>()
    }

    fn head_scan_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: HeadScanGradients<'_, Self>,
        dout: Matrix<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "head_scan_backward";
        let HeadScanGradients { dprojected, dxbc, da_log, dd, ddelta_bias } = gradients;
        let (rows, width) = (shape.sequences().rows(), shape.width());
        let projected_width = shape.projected_width();
        let dprojected = RowsMut::new(KERNEL, "dprojected", dprojected, rows, projected_width)?;
        let dxbc = RowsMut::new(KERNEL, "dxbc", dxbc, rows, shape.xbc_width())?;
        let of_grains = shape.grains().grains() * shape.heads();
        let parameters = ParameterGradients {
            da_log: exactly_mut(KERNEL, "da_log", da_log, of_grains)?,
            dd: exactly_mut(KERNEL, "dd", dd, of_grains)?,
            ddelta_bias: exactly_mut(KERNEL, "ddelta_bias", ddelta_bias, of_grains)?,
        };
        let dout = Rows::new(KERNEL, "dout", dout, rows, width)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = HeadLayout::new(shape);
        let share = stream.threads().share(layout.samples);
        let parts = layout.samples.div_ceil(share);
        let (threads, scratch) = stream.with_scratch(parts * Scratch::lanes(&layout))?;
        let mut partials = vec![Partial::default(); layout.samples * layout.heads];
        let of_part = share * layout.positions;
        let parts = dprojected
            .parts(of_part)
            .zip(dxbc.parts(of_part))
            .zip(partials.chunks_mut(share * layout.heads))
            .zip(scratch.chunks_exact_mut(Scratch::lanes(&layout)))
            .enumerate()
            .map(|(part, (((dprojected, dxbc), partials), scratch))| Backward {
                rows: RowGradients { dprojected, dxbc },
                partials,
                scratch: Scratch::new(scratch, &layout),
                dout,
                inputs,
                first_sample: part * share,
                layout,
            });
        threads.for_each(parts, |part| self.dispatch.run(part));
        add_partials(parameters, &partials, &layout);
        Ok(())
    }
}

/// Each grain's gradients of parameters: its samples' added in order, from +0.0.
fn add_partials(parameters: ParameterGradients<'_>, partials: &[Partial], layout: &HeadLayout) {
    let heads = layout.heads;
    let grains = partials
        .chunks(layout.samples_per_grain * heads)
        .zip(parameters.da_log.chunks_exact_mut(heads))
        .zip(parameters.dd.chunks_exact_mut(heads))
        .zip(parameters.ddelta_bias.chunks_exact_mut(heads));
    for (((partials, da_log), dd), ddelta_bias) in grains {
        for head in 0..heads {
            let of_samples = || partials.chunks_exact(heads).map(|sample| sample[head]);
            da_log[head] = of_samples().fold(0.0, |sum, partial| sum + partial.da_log);
            dd[head] = of_samples().fold(0.0, |sum, partial| sum + partial.dd);
            ddelta_bias[head] = of_samples().fold(0.0, |sum, partial| sum + partial.ddelta_bias);
        }
    }
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let partials = std::mem::take(&mut self.partials);
        let mut at = vec![Positions::ZERO; self.layout.blocks];
        for (index, partial) in partials.iter_mut().enumerate() {
            let (sample, head) = (index / self.layout.heads, index % self.layout.heads);
            let rate = self.inputs.rate(s, head);
            self.save_states(s, sample, head, rate);
            self.scratch.carry.fill(Lanes::ZERO);
            let mut dd = s.splat(0.0);
            for chunk in (0..self.layout.chunks).rev() {
                let chunk = Chunk::new(&self, s, [sample, head, chunk], rate);
                self.scratch_coefficients(head, &chunk);
                for (block, at) in at.iter_mut().enumerate() {
                    dd = self.load(s, at, &chunk, block, dd);
                }
                self.chunk(s, &mut at, &chunk, partial);
            }
            partial.da_log *= rate;
            partial.dd = s.sum(dd);
        }
    }
}

/// Some positions of one head of one sample.
struct Chunk {
    head: usize,
    rate: f32,
    chunk: usize,
    /// Their first row among the inputs, and among the gradients.
    row: usize,
    out_row: usize,
    count: usize,
    start_bits: u8,
    steps: Steps,
}

impl Chunk {
    #[inline(always)]
    fn new<S: Simd>(of: &Backward<'_>, s: S, [sample, head, chunk]: [usize; 3], rate: f32) -> Self {
        let positions = of.layout.positions;
        let first = chunk * CHUNK;
        let count = CHUNK.min(positions - first);
        let out_row = sample * positions + first;
        let row = of.first_sample * positions + out_row;
        Self {
            head,
            rate,
            chunk,
            row,
            out_row,
            count,
            start_bits: of.inputs.start_bits(row, first, count),
            steps: of.inputs.steps(s, head, rate, row, count),
        }
    }

    #[inline(always)]
    fn begins(&self, q: usize) -> bool {
        self.start_bits >> q & 1 != 0
    }
}

impl Backward<'_> {
    #[inline(always)]
    fn scratch_coefficients(&mut self, head: usize, chunk: &Chunk) {
        let coefficients = &mut *self.scratch.coefficients;
        self.inputs.gather(coefficients, head, chunk.row, chunk.count, &self.layout);
    }

    /// Walks a head forwards and keeps the state before each chunk.
    #[inline(always)]
    fn save_states<S: Simd>(&mut self, s: S, sample: usize, head: usize, rate: f32) {
        let HeadLayout { blocks, tiles, head_width, chunks, .. } = self.layout;
        let state_lanes = self.layout.state_lanes();
        self.scratch.saved[..state_lanes].fill(Lanes::ZERO);
        for index in 0..chunks - 1 {
            let chunk = Chunk::new(self, s, [sample, head, index], rate);
            self.scratch_coefficients(head, &chunk);
            let (now, next) = self.scratch.saved[index * state_lanes..][..2 * state_lanes]
                .split_at_mut(state_lanes);
            for block in 0..blocks {
                let channel = head * head_width + block * LANES;
                let channels = self.layout.channels(block);
                for tile in 0..tiles {
                    let place = (block * tiles + tile) * LANES;
                    let mut h = [s.splat(0.0); LANES];
                    for_each_state!(I, {
                        h[I] = s.load(&now[place + I].0);
                    });
                    for q in 0..chunk.count {
                        if chunk.begins(q) {
                            h = [s.splat(0.0); LANES];
                        }
                        let x =
                            s.load_row(&self.inputs.x.row(chunk.row + q)[channel..][..channels]);
                        let delta_x = s.mul(s.splat(chunk.steps.delta.0[q]), x);
                        let decay = s.splat(chunk.steps.decay.0[q]);
                        let bc = Coefficients::of(self.scratch.coefficients, q, tile, tiles);
                        for_each_state!(I, {
                            h[I] = s.mul_add(decay, h[I], s.mul(delta_x, s.splat(bc.b[I])));
                        });
                    }
                    for_each_state!(I, {
                        s.store(&mut next[place + I].0, h[I]);
                    });
                }
            }
        }
    }

    /// Loads the inputs of a chunk, for a block of channels, and what follows from them alone, into `at`. Returns `dd` with dy x
    /// added, each lane in the order of the walk.
    #[inline(always)]
    fn load<S: Simd>(
        &self,
        s: S,
        at: &mut Positions,
        chunk: &Chunk,
        block: usize,
        mut dd: S::Vector,
    ) -> S::Vector {
        let channel = chunk.head * self.layout.head_width + block * LANES;
        let channels = self.layout.channels(block);
        let (skip, one) = (s.splat(self.inputs.d[chunk.head]), s.splat(1.0));
        for q in 0..chunk.count {
            let of_row =
                |rows: &Rows<'_>| s.load_row(&rows.row(chunk.row + q)[channel..][..channels]);
            let (x, z, dout) = (of_row(&self.inputs.x), of_row(&self.inputs.z), of_row(&self.dout));
            let share = sigmoid(s, z);
            let dy = s.mul(dout, s.mul(z, share));
            let slope = s.mul(share, s.mul_add(z, s.sub(one, share), one));
            s.store(&mut at.x[q].0, x);
            s.store(&mut at.delta_x[q].0, s.mul(s.splat(chunk.steps.delta.0[q]), x));
            s.store(&mut at.y[q].0, s.mul(skip, x));
            s.store(&mut at.dy[q].0, dy);
            s.store(&mut at.gate[q].0, s.mul(dout, slope));
            s.store(&mut at.gb[q].0, s.splat(0.0));
            dd = s.mul_add(dy, x, dd);
        }
        dd
    }

    /// One chunk, from the states saved before it and the gradient of the state behind it.
    #[inline(always)]
    fn chunk<S: Simd>(&mut self, s: S, at: &mut [Positions], chunk: &Chunk, partial: &mut Partial) {
        let HeadLayout { tiles, head_width, states, groups, .. } = self.layout;
        let Steps { delta, slope, decay } = &chunk.steps;
        let first_of_group = chunk.head.is_multiple_of(self.layout.heads / groups);
        let group = self.layout.group(chunk.head);
        let width = self.layout.heads * head_width;
        let first_delta = 2 * (width + groups * states);
        let state_lanes = self.layout.state_lanes();
        let saved = &self.scratch.saved[chunk.chunk * state_lanes..][..state_lanes];
        // s (G . h), lane by lane.
        let mut q_lanes = [Lanes::ZERO; CHUNK];
        for tile in 0..tiles {
            let mut dc: [Tile; CHUNK] = [[Lanes::ZERO; LANES]; CHUNK];
            let mut db: [Tile; CHUNK] = [[Lanes::ZERO; LANES]; CHUNK];
            for (block, at) in at.iter_mut().enumerate() {
                let place = (block * tiles + tile) * LANES;
                let mut h: [Tile; CHUNK] = [[Lanes::ZERO; LANES]; CHUNK];
                let mut now = [s.splat(0.0); LANES];
                for_each_state!(I, {
                    now[I] = s.load(&saved[place + I].0);
                });
                for q in 0..chunk.count {
                    if chunk.begins(q) {
                        now = [s.splat(0.0); LANES];
                    }
                    let (before, dc) = (&mut h[q], &mut dc[q]);
                    for_each_state!(I, {
                        s.store(&mut before[I].0, now[I]);
                    });
                    let bc = Coefficients::of(self.scratch.coefficients, q, tile, tiles);
                    let (decay, delta_x) = (s.splat(decay.0[q]), s.load(&at.delta_x[q].0));
                    let y = advance(s, &mut now, decay, delta_x, bc, s.load(&at.y[q].0));
                    s.store(&mut at.y[q].0, y);
                    let dy = s.load(&at.dy[q].0);
                    for_each_state!(I, {
                        let sum = s.mul_add(dy, now[I], s.load(&dc[I].0));
                        s.store(&mut dc[I].0, sum);
                    });
                }
                let carry = &mut self.scratch.carry[place..][..LANES];
                let mut g = [s.splat(0.0); LANES];
                for_each_state!(I, {
                    g[I] = s.load(&carry[I].0);
                });
                for q in (0..chunk.count).rev() {
                    let bc = Coefficients::of(self.scratch.coefficients, q, tile, tiles);
                    let (dy, delta_x) = (s.load(&at.dy[q].0), s.load(&at.delta_x[q].0));
                    let (before, db, decay) = (&h[q], &mut db[q], s.splat(decay.0[q]));
                    let mut gb = s.load(&at.gb[q].0);
                    let mut gh = s.load(&q_lanes[q].0);
                    for_each_state!(I, {
                        let total = s.mul_add(dy, s.splat(bc.c[I]), g[I]);
                        let sum = s.mul_add(total, delta_x, s.load(&db[I].0));
                        s.store(&mut db[I].0, sum);
                        gb = s.mul_add(total, s.splat(bc.b[I]), gb);
                        g[I] = s.mul(total, decay);
                        gh = s.mul_add(g[I], s.load(&before[I].0), gh);
                    });
                    s.store(&mut at.gb[q].0, gb);
                    s.store(&mut q_lanes[q].0, gh);
                    if chunk.begins(q) {
                        g = [s.splat(0.0); LANES];
                    }
                }
                for_each_state!(I, {
                    s.store(&mut carry[I].0, g[I]);
                });
            }
            let held = LANES.min(states - tile * LANES);
            for q in 0..chunk.count {
                let row = &mut self.rows.dxbc.row_mut(chunk.out_row + q)[width..];
                for (group, sums) in [(group, &db[q]), (groups + group, &dc[q])] {
                    let row = &mut row[group * states + tile * LANES..][..held];
                    let sums = s.sums(sums);
                    let sums = if first_of_group { sums } else { s.add(s.load_row(row), sums) };
                    s.store_row(row, sums);
                }
            }
        }
        let skip = s.splat(self.inputs.d[chunk.head]);
        for q in (0..chunk.count).rev() {
            let mut x_gb = s.splat(0.0);
            for (block, at) in at.iter().enumerate() {
                let channel = chunk.head * head_width + block * LANES;
                let channels = self.layout.channels(block);
                let (gb, dy) = (s.load(&at.gb[q].0), s.load(&at.dy[q].0));
                x_gb = s.mul_add(s.load(&at.x[q].0), gb, x_gb);
                let dx = s.mul_add(s.splat(delta.0[q]), gb, s.mul(dy, skip));
                let row = self.rows.dxbc.row_mut(chunk.out_row + q);
                s.store_row(&mut row[channel..][..channels], dx);
                let row = self.rows.dprojected.row_mut(chunk.out_row + q);
                let dz = s.mul(s.load(&at.y[q].0), s.load(&at.gate[q].0));
                s.store_row(&mut row[channel..][..channels], dz);
            }
            let gh = s.sum(s.load(&q_lanes[q].0));
            let ddelta = chunk.rate * gh + s.sum(x_gb);
            let ddelta_raw = ddelta * slope.0[q];
            let row = self.rows.dprojected.row_mut(chunk.out_row + q);
            row[first_delta + chunk.head] = ddelta_raw;
            partial.da_log += delta.0[q] * gh;
            partial.ddelta_bias += ddelta_raw;
        }
    }
}
