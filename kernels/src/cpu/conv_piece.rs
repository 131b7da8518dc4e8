//! Causal depthwise convolution with SiLU of pieces of sequences, for generation: the operations of forward.

use super::conv::{Inputs, tap_lanes};
use super::device_stream::DeviceStream;
use super::dispatch::{Dispatch, Kernel};
use super::exponential::sigmoid;
use super::rows::{Lengths, Rows, RowsMut};
use super::simd::{LANES, Lanes, Simd};
use crate::error::Result;
use crate::shape::ConvShape;

/// The rows of a compute thread.
struct Piece<'a> {
    out: RowsMut<'a>,
    /// `[b, k - 1, e]`: the inputs before the piece, oldest first.
    state: &'a [f32],
    lengths: Lengths<'a>,
    x: Rows<'a>,
    taps: &'a [Lanes],
    rows: std::ops::Range<usize>,
    shape: ConvShape,
}

/// `state` is read by all rows, and moved on behind them.
pub(crate) fn causal_conv1d_silu_piece(
    stream: &mut DeviceStream,
    dispatch: Dispatch,
    out: RowsMut<'_>,
    (state, lengths): (&mut [f32], Lengths<'_>),
    inputs: Inputs<'_>,
    shape: ConvShape,
) -> Result<()> {
    let (threads, arranged) = stream.with_scratch(tap_lanes(&shape))?;
    inputs.taps.arrange(arranged, &shape);
    let (rows, taps) = (shape.sequences().rows(), &*arranged);
    let share = threads.share(rows);
    let before = &*state;
    let parts = out.parts(share).enumerate().map(|(part, out)| Piece {
        out,
        state: before,
        lengths,
        x: inputs.x,
        taps,
        rows: part * share..((part + 1) * share).min(rows),
        shape,
    });
    threads.for_each(parts, |part| dispatch.run(part));
    move_on(state, lengths, inputs.x, shape);
    Ok(())
}

/// The last inputs of each sample, of those before the piece and those of it.
fn move_on(state: &mut [f32], lengths: Lengths<'_>, x: Rows<'_>, shape: ConvShape) {
    let (channels, held) = (shape.channels(), shape.width() - 1);
    if held == 0 {
        return;
    }
    let positions = shape.sequences().positions();
    for (sample, state) in state.chunks_exact_mut(channels * held).enumerate() {
        let length = lengths.of(sample);
        // Inputs that stay in the state.
        let kept = held.saturating_sub(length);
        state.copy_within((held - kept) * channels.., 0);
        for (tap, inputs) in state.chunks_exact_mut(channels).enumerate().skip(kept) {
            inputs.copy_from_slice(x.row(sample * positions + length + tap - held));
        }
    }
}

impl Kernel for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (channels, width) = (self.shape.channels(), self.shape.width());
        let (held, positions) = (width - 1, self.shape.sequences().positions());
        for (local, row) in self.rows.clone().enumerate() {
            let (sample, position) = (row / positions, row % positions);
            if position >= self.lengths.of(sample) {
                continue;
            }
            let state = &self.state[sample * channels * held..][..channels * held];
            // Taps that reach back to before the piece.
            let before = held.saturating_sub(position);
            let blocks = self.out.row_mut(local).chunks_mut(LANES);
            for (block, (out, taps)) in blocks.zip(self.taps.chunks_exact(width + 1)).enumerate() {
                let first = block * LANES;
                let mut sum = s.load(&taps[width].0);
                for (tap, weight) in taps[..before].iter().enumerate() {
                    let inputs = &state[(position + tap) * channels..][..channels];
                    sum = s.mul_add(s.load(&weight.0), s.load_row(&inputs[first..]), sum);
                }
                for (tap, weight) in taps[..width].iter().enumerate().skip(before) {
                    let x = s.load_row(&self.x.row(row + tap - held)[first..]);
                    sum = s.mul_add(s.load(&weight.0), x, sum);
                }
                s.store_row(out, s.mul(sum, sigmoid(s, sum)));
            }
        }
    }
}
