//! Causal depthwise convolution with SiLU of pieces of sequences, for generation: the operations of forward.

use super::conv::{Inputs, tap_lanes};
use super::dispatch::Kernel;
use super::exponential::sigmoid;
use super::rows::{Lengths, Rows, RowsMut, exactly_mut, no_documents};
use super::simd::{LANES, Lanes, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{CausalConv1dPiece, ConvInputs, PieceState};
use crate::error::Result;
use crate::shape::ConvShape;
use crate::view::MatrixMut;

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

impl CausalConv1dPiece for Cpu {
    fn causal_conv1d_silu_piece(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_piece";
        no_documents(KERNEL, inputs.starts.is_some())?;
        let (sequences, channels) = (shape.sequences(), shape.channels());
        let out = RowsMut::new(KERNEL, "out", out, sequences.rows(), channels)?;
        let held = sequences.samples() * channels * (shape.width() - 1);
        let state = exactly_mut(KERNEL, "state", piece.state, held)?;
        let lengths = Lengths::new(KERNEL, piece.lengths, sequences)?;
        let inputs = Inputs::new(KERNEL, inputs, &shape)?;
        let (threads, arranged) = stream.with_scratch(tap_lanes(&shape))?;
        inputs.taps.arrange(arranged, &shape);
        let (rows, taps) = (sequences.rows(), &*arranged);
        let share = threads.share(rows);
        // All rows read the state, which moves on behind them.
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
        threads.for_each(parts, |part| self.dispatch.run(part));
        move_on(state, lengths, inputs.x, shape);
        Ok(())
    }
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
