//! The selective scan of pieces of sequences, for generation: the operations of the forward scan. Threads share samples, and the
//! channels of each where there are more threads.

use super::dispatch::Kernel;
use super::exponential::{sigmoid, softplus_and_slope};
use super::rows::{Lengths, Rows, RowsMut, exactly_mut, no_documents};
use super::scan::{
    CHUNK, Coefficients, Inputs, PrepareDecay, ScanLayout, advance, decays, for_each_state, tile,
};
use super::simd::{LANES, Lanes, Simd, Tile};
use super::{Cpu, DeviceStream};
use crate::backend::{PieceState, ScanInputs, SelectiveScanPiece, SelectiveScanStep};
use crate::error::Result;
use crate::shape::ScanShape;
use crate::view::MatrixMut;

/// Some blocks of channels of a sample.
struct Piece<'a> {
    /// These channels of each position.
    out: Vec<&'a mut [f32]>,
    /// `[channels, n]`, moved on.
    state: &'a mut [f32],
    inputs: Inputs<'a>,
    decay_rates: &'a [Lanes],
    /// The coefficients of the sample's positions.
    coefficients: &'a [Lanes],
    /// Room for the states of a block.
    states: &'a mut [Lanes],
    first_row: usize,
    first_channel: usize,
    layout: ScanLayout,
}

impl SelectiveScanPiece for Cpu {
    fn selective_scan_piece(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_piece";
        no_documents(KERNEL, inputs.starts.is_some())?;
        let sequences = shape.sequences();
        let out = RowsMut::new(KERNEL, "out", out, sequences.rows(), shape.channels())?;
        let held = sequences.samples() * shape.channels() * shape.states();
        let state = exactly_mut(KERNEL, "state", piece.state, held)?;
        let lengths = Lengths::new(KERNEL, piece.lengths, sequences)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = ScanLayout::new(shape);
        let ScanLayout { samples, positions, channels, states, blocks, tiles, .. } = layout;
        if samples == 0 || positions == 0 {
            return Ok(());
        }
        let parts_of_sample = stream.threads().count().div_ceil(samples).min(blocks).max(1);
        let part_channels = blocks.div_ceil(parts_of_sample) * LANES;
        let parts_of_sample = channels.div_ceil(part_channels);
        let (state_lanes, row_lanes) = (layout.state_lanes(), 2 * tiles);
        let lanes = [
            state_lanes,
            samples * positions * row_lanes,
            samples * parts_of_sample * tiles * LANES,
        ];
        let (threads, scratch) = stream.with_scratch(lanes.iter().sum())?;
        let (decay_rates, scratch) = scratch.split_at_mut(lanes[0]);
        let (coefficients, rooms) = scratch.split_at_mut(lanes[1]);
        self.dispatch.run(PrepareDecay { out: &mut *decay_rates, a_log: inputs.a_log, layout });
        let of_samples = coefficients.chunks_exact_mut(positions * row_lanes).enumerate();
        for (sample, coefficients) in of_samples {
            let (first, count) = (sample * positions, lengths.of(sample));
            Coefficients::gather(coefficients, inputs.coefficients(first, states), count, tiles);
        }
        let (decay_rates, coefficients) = (&*decay_rates, &*coefficients);
        let of_samples = out.parts(positions).zip(state.chunks_exact_mut(channels * states));
        let pieces = of_samples.enumerate().flat_map(|(sample, (out, state))| {
            let of_parts = out.column_parts(part_channels, lengths.of(sample)).into_iter();
            let of_parts = of_parts.zip(state.chunks_mut(part_channels * states)).enumerate();
            of_parts.map(move |(part, (out, state))| (sample, part, out, state))
        });
        let pieces = pieces.zip(rooms.chunks_exact_mut(tiles * LANES));
        let pieces = pieces.map(|((sample, part, out, state), room)| Piece {
            out,
            state,
            inputs,
            decay_rates,
            coefficients: &coefficients[sample * positions * row_lanes..][..positions * row_lanes],
            states: room,
            first_row: sample * positions,
            first_channel: part * part_channels,
            layout,
        });
        threads.for_each(pieces, |piece| self.dispatch.run(piece));
        Ok(())
    }
}

impl SelectiveScanStep for Cpu {}

impl Kernel for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (states, tiles) = (self.layout.states, self.layout.tiles);
        let state = std::mem::take(&mut self.state);
        for (block, state) in state.chunks_mut(LANES * states).enumerate() {
            self.states.fill(Lanes::ZERO);
            for (lane, states) in state.chunks_exact(states).enumerate() {
                for (lanes, &h) in self.states.iter_mut().zip(states) {
                    lanes.0[lane] = h;
                }
            }
            let positions = self.out.len();
            for first in (0..positions).step_by(CHUNK) {
                self.chunk(s, block * LANES, first, CHUNK.min(positions - first), tiles);
            }
            for (lane, states) in state.chunks_exact_mut(states).enumerate() {
                for (lanes, h) in self.states.iter().zip(states) {
                    *h = lanes.0[lane];
                }
            }
        }
    }
}

impl<'a> Piece<'a> {
    /// Moves the states of the block of channels from `local` of the part on over `steps` positions from `first` on.
    #[inline(always)]
    fn chunk<S: Simd>(&mut self, s: S, local: usize, first: usize, steps: usize, tiles: usize) {
        let (inputs, channel) = (self.inputs, self.first_channel + local);
        let row = self.first_row + first;
        let rows = |rows: &Rows<'a>| rows.vectors(row, steps, channel);
        let bias = s.load_row(&inputs.delta_bias[channel..]);
        let skip = s.load_row(&inputs.d[channel..]);
        let mut decay: [Tile; CHUNK] = [[Lanes::ZERO; LANES]; CHUNK];
        let mut delta = [Lanes::ZERO; CHUNK];
        let mut x = [Lanes::ZERO; CHUNK];
        let mut y = [Lanes::ZERO; CHUNK];
        for (q, (raw, v)) in rows(&inputs.delta_raw).zip(rows(&inputs.x)).enumerate() {
            let (softplus, _) = softplus_and_slope(s, s.add(s.load_row(raw), bias));
            s.store(&mut delta[q].0, softplus);
            let v = s.load_row(v);
            s.store(&mut x[q].0, v);
            s.store(&mut y[q].0, s.mul(skip, v));
        }
        for tile_index in 0..tiles {
            let offset = (channel / LANES * tiles + tile_index) * LANES;
            decays(s, &mut decay[..steps], &delta, tile(&self.decay_rates[offset..]));
            let states = &mut self.states[tile_index * LANES..][..LANES];
            let mut h = [s.splat(0.0); LANES];
            for_each_state!(I, {
                h[I] = s.load(&states[I].0);
            });
            for q in 0..steps {
                let delta_x = s.mul(s.load(&delta[q].0), s.load(&x[q].0));
                let bc = Coefficients::of(self.coefficients, first + q, tile_index, tiles);
                let sum = advance(s, &mut h, &decay[q], delta_x, bc, s.load(&y[q].0));
                s.store(&mut y[q].0, sum);
            }
            for_each_state!(I, {
                s.store(&mut states[I].0, h[I]);
            });
        }
        let out = self.out[first..][..steps].iter_mut();
        for ((out, z), y) in out.zip(rows(&inputs.z)).zip(&y) {
            let z = s.load_row(z);
            s.store_row(&mut out[local..], s.mul(s.load(&y.0), s.mul(z, sigmoid(s, z))));
        }
    }
}
