//! The forward scan of heads, of whole samples and of pieces of sequences: one walk, from a state of zeros or from one that is moved
//! on.

use super::dispatch::{Dispatch, Kernel};
use super::exponential::sigmoid;
use super::head_scan::{HeadLayout, Inputs, advance};
use super::rows::{Lengths, RowsMut, exactly_mut, no_documents};
use super::scan::{CHUNK, Coefficients, for_each_state};
use super::simd::{LANES, Lanes, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{HeadScan, HeadScanInputs, HeadScanPiece, PieceState};
use crate::error::Result;
use crate::shape::HeadScanShape;
use crate::view::MatrixMut;

/// Some heads of a sample.
struct Heads<'a> {
    /// Their channels of each position.
    out: Vec<&'a mut [f32]>,
    /// `[heads, p, n]`, moved on; without one the walk begins with zeros.
    state: Option<&'a mut [f32]>,
    inputs: Inputs<'a>,
    scratch: &'a mut [Lanes],
    first_row: usize,
    first_head: usize,
    layout: HeadLayout,
}

/// Vectors of a part's scratch: the state of a head, and B and C of a chunk.
fn scratch_lanes(layout: &HeadLayout) -> usize {
    layout.state_lanes() + layout.coefficient_lanes()
}

impl HeadScan for Cpu {
    fn head_scan_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "head_scan_forward";
        let out = RowsMut::new(KERNEL, "out", out, shape.sequences().rows(), shape.width())?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        walk(stream, self.dispatch, out, None, inputs, HeadLayout::new(shape))
    }
}

impl HeadScanPiece for Cpu {
    fn head_scan_piece(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "head_scan_piece";
        no_documents(KERNEL, inputs.starts.is_some())?;
        let sequences = shape.sequences();
        let out = RowsMut::new(KERNEL, "out", out, sequences.rows(), shape.width())?;
        let held = sequences.samples() * shape.width() * shape.states();
        let state = exactly_mut(KERNEL, "state", piece.state, held)?;
        let goes_on = Some((state, Lengths::new(KERNEL, piece.lengths, sequences)?));
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        walk(stream, self.dispatch, out, goes_on, inputs, HeadLayout::new(shape))
    }
}

/// Threads share samples, and the heads of each where there are more threads.
fn walk(
    stream: &mut DeviceStream,
    dispatch: Dispatch,
    out: RowsMut<'_>,
    goes_on: Option<(&mut [f32], Lengths<'_>)>,
    inputs: Inputs<'_>,
    layout: HeadLayout,
) -> Result<()> {
    let HeadLayout { samples, positions, heads, head_width, states, .. } = layout;
    let parts_of_sample = stream.threads().count().div_ceil(samples).min(heads).max(1);
    let part_heads = heads.div_ceil(parts_of_sample);
    let parts = samples * heads.div_ceil(part_heads);
    let (threads, scratch) = stream.with_scratch(parts * scratch_lanes(&layout))?;
    let (state, lengths) = goes_on.unzip();
    let mut state = state.map(|state| state.chunks_mut(heads * head_width * states));
    let mut heads_of_samples = Vec::with_capacity(parts);
    for (sample, out) in out.parts(positions).enumerate() {
        let there = lengths.map_or(positions, |lengths| lengths.of(sample));
        let of_sample = state.as_mut().and_then(Iterator::next);
        let mut of_parts =
            of_sample.map(|state| state.chunks_mut(part_heads * head_width * states));
        let of_columns = out.column_parts(part_heads * head_width, there);
        for (part, out) in of_columns.into_iter().enumerate() {
            let state = of_parts.as_mut().and_then(Iterator::next);
            heads_of_samples.push((sample, part, out, state));
        }
    }
    let parts = heads_of_samples.into_iter().zip(scratch.chunks_exact_mut(scratch_lanes(&layout)));
    let parts = parts.map(|((sample, part, out, state), scratch)| Heads {
        out,
        state,
        inputs,
        scratch,
        first_row: sample * positions,
        first_head: part * part_heads,
        layout,
    });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

impl Kernel for Heads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let HeadLayout { heads, head_width, states, .. } = self.layout;
        let channels = self.out.first().map_or(0, |row| row.len());
        let mut all_states = std::mem::take(&mut self.state);
        for local in 0..(channels / head_width).min(heads) {
            let elements = local * head_width * states..(local + 1) * head_width * states;
            let state = all_states.as_deref_mut().map(|states| &mut states[elements]);
            self.head(s, local, state);
        }
    }
}

impl Heads<'_> {
    /// Walks the part's head `local` over all its positions.
    #[inline(always)]
    fn head<S: Simd>(&mut self, s: S, local: usize, state: Option<&mut [f32]>) {
        let (layout, positions) = (self.layout, self.out.len());
        let head = self.first_head + local;
        let rate = self.inputs.rate(s, head);
        let held = &mut self.scratch[..layout.state_lanes()];
        held.fill(Lanes::ZERO);
        if let Some(state) = &state {
            each_element(&layout, |at, lane, element| held[at].0[lane] = state[element]);
        }
        for first in (0..positions).step_by(CHUNK) {
            self.chunk(s, local, rate, first, CHUNK.min(positions - first));
        }
        if let Some(state) = state {
            let held = &self.scratch[..layout.state_lanes()];
            each_element(&layout, |at, lane, element| state[element] = held[at].0[lane]);
        }
    }

    /// Moves the state of the part's head `local` on over `count` positions from `first` on.
    #[inline(always)]
    fn chunk<S: Simd>(&mut self, s: S, local: usize, rate: f32, first: usize, count: usize) {
        let HeadLayout { blocks, tiles, head_width, .. } = self.layout;
        let (inputs, head, row) = (self.inputs, self.first_head + local, self.first_row + first);
        let steps = inputs.steps(s, head, rate, row, count);
        let start_bits = inputs.start_bits(row, first, count);
        let (held, coefficients) = self.scratch.split_at_mut(self.layout.state_lanes());
        inputs.gather(coefficients, head, row, count, &self.layout);
        let skip = s.splat(inputs.d[head]);
        for block in 0..blocks {
            let channels = self.layout.channels(block);
            let (channel, local) =
                (head * head_width + block * LANES, local * head_width + block * LANES);
            let mut delta_x = [Lanes::ZERO; CHUNK];
            let mut y = [Lanes::ZERO; CHUNK];
            for q in 0..count {
                let x = s.load_row(&inputs.x.row(row + q)[channel..][..channels]);
                s.store(&mut delta_x[q].0, s.mul(s.splat(steps.delta.0[q]), x));
                s.store(&mut y[q].0, s.mul(skip, x));
            }
            for tile in 0..tiles {
                let held = &mut held[(block * tiles + tile) * LANES..][..LANES];
                let mut h = [s.splat(0.0); LANES];
                for_each_state!(I, {
                    h[I] = s.load(&held[I].0);
                });
                for q in 0..count {
                    if start_bits >> q & 1 != 0 {
                        h = [s.splat(0.0); LANES];
                    }
                    let bc = Coefficients::of(coefficients, q, tile, tiles);
                    let (decay, delta_x) = (s.splat(steps.decay.0[q]), s.load(&delta_x[q].0));
                    let sum = advance(s, &mut h, decay, delta_x, bc, s.load(&y[q].0));
                    s.store(&mut y[q].0, sum);
                }
                for_each_state!(I, {
                    s.store(&mut held[I].0, h[I]);
                });
            }
            for (q, y) in y.iter().enumerate().take(count) {
                let z = s.load_row(&inputs.z.row(row + q)[channel..][..channels]);
                let out = &mut self.out[first + q][local..][..channels];
                s.store_row(out, s.mul(s.load(&y.0), s.mul(z, sigmoid(s, z))));
            }
        }
    }
}

/// Calls `body` with the vector, the lane and the place in `[p, n]` of each element of a head's state.
#[inline(always)]
fn each_element(layout: &HeadLayout, mut body: impl FnMut(usize, usize, usize)) {
    let HeadLayout { head_width, states, tiles, .. } = *layout;
    for channel in 0..head_width {
        let first = channel / LANES * tiles * LANES;
        for state in 0..states {
            body(first + state, channel % LANES, channel * states + state);
        }
    }
}
