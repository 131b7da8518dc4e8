//! Causal depthwise convolution with SiLU, forward.
//!
//! Lanes are sixteen channels. Taps are rearranged once per call, so that the taps of a block are
//! consecutive.

use super::dispatch::Kernel;
use super::documents::Documents;
use super::exponential::sigmoid;
use super::rows::{Rows, RowsMut, exactly};
use super::simd::{LANES, Lanes, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{CausalConv1d, ConvInputs};
use crate::error::Result;
use crate::shape::ConvShape;
use crate::view::{MatrixMut, Slice};

/// The most taps that a [`ConvShape`] has.
pub(crate) const MAX_WIDTH: usize = 16;

/// `weight[e, k]` and `bias[e]`.
#[derive(Clone, Copy)]
pub(crate) struct Taps<'a> {
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
}

/// The inputs of the convolution.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) x: Rows<'a>,
    pub(crate) taps: Taps<'a>,
    pub(crate) documents: Documents<'a>,
}

impl<'a> Inputs<'a> {
    pub(crate) fn new(
        kernel: &'static str,
        inputs: ConvInputs<'a, Cpu>,
        shape: &ConvShape,
    ) -> Result<Self> {
        let rows = shape.sequences().rows();
        Ok(Self {
            x: Rows::new(kernel, "x", inputs.x, rows, shape.channels())?,
            taps: Taps::new(kernel, inputs.weight, inputs.bias, shape)?,
            documents: Documents::new(kernel, inputs.starts, rows)?,
        })
    }
}

/// Vectors that hold the taps and the bias of every block of channels: `[blocks, k + 1]`.
pub(crate) fn tap_lanes(shape: &ConvShape) -> usize {
    shape.channels().div_ceil(LANES) * (shape.width() + 1)
}

impl<'a> Taps<'a> {
    fn new(
        kernel: &'static str,
        weight: Slice<'a, Cpu, f32>,
        bias: Option<Slice<'a, Cpu, f32>>,
        shape: &ConvShape,
    ) -> Result<Self> {
        let weight = exactly(kernel, "weight", weight, shape.channels() * shape.width())?;
        let bias = bias.map(|bias| exactly(kernel, "bias", bias, shape.channels())).transpose()?;
        Ok(Self { weight, bias })
    }

    /// Writes `[blocks, k + 1]`: each block's taps, then its bias; zero in the padding.
    pub(crate) fn arrange(self, out: &mut [Lanes], shape: &ConvShape) {
        out.fill(Lanes::ZERO);
        let width = shape.width();
        for (channel, taps) in self.weight.chunks_exact(width).enumerate() {
            let (block, lane) = (channel / LANES, channel % LANES);
            let out = &mut out[block * (width + 1)..][..width + 1];
            for (out, &tap) in out.iter_mut().zip(taps) {
                out.0[lane] = tap;
            }
            out[width].0[lane] = self.bias.map_or(0.0, |bias| bias[channel]);
        }
    }
}

/// The samples of a compute thread.
struct Forward<'a> {
    out: RowsMut<'a>,
    x: Rows<'a>,
    taps: &'a [Lanes],
    documents: Documents<'a>,
    samples: std::ops::Range<usize>,
    shape: ConvShape,
}

/// Positions between a row of x that is read and the one that is asked for.
const AHEAD: usize = 4;

impl CausalConv1d for Cpu {
    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_forward";
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        let out = RowsMut::new(KERNEL, "out", out, rows, channels)?;
        let inputs = Inputs::new(KERNEL, inputs, &shape)?;
        let (threads, arranged) = stream.with_scratch(tap_lanes(&shape))?;
        inputs.taps.arrange(arranged, &shape);
        let arranged = &*arranged;
        let samples = shape.sequences().samples();
        let share = threads.share(samples);
        let parts = out.parts(share * shape.sequences().positions()).enumerate();
        let parts = parts.map(|(part, out)| Forward {
            out,
            x: inputs.x,
            taps: arranged,
            documents: inputs.documents,
            samples: part * share..((part + 1) * share).min(samples),
            shape,
        });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // The widths that models use get a loop without a loop over taps.
        match self.shape.width() {
            4 => self.rows(s, 4),
            width => self.rows(s, width),
        }
    }
}

impl Forward<'_> {
    #[inline(always)]
    fn rows<S: Simd>(mut self, s: S, width: usize) {
        let positions = self.shape.sequences().positions();
        for (local, sample) in self.samples.clone().enumerate() {
            for position in 0..positions {
                let row = sample * positions + position;
                // Taps before the document's first position see zeros: they are left out.
                let start = self.documents.start(row, position);
                let skipped = (width - 1).saturating_sub(position - start);
                let mut x = [self.x.row(row); MAX_WIDTH];
                for (tap, x) in x[..width].iter_mut().enumerate().skip(skipped) {
                    *x = self.x.row(row + 1 + tap - width);
                }
                let ahead = self.x.row(row + AHEAD.min(positions - 1 - position));
                let out = self.out.row_mut(local * positions + position);
                let blocks = out.chunks_mut(LANES).zip(self.taps.chunks_exact(width + 1));
                for (block, (out, taps)) in blocks.enumerate() {
                    let channel = block * LANES;
                    s.prefetch(ahead[channel..].as_ptr());
                    let mut sum = s.load(&taps[width].0);
                    for (tap, (weight, x)) in taps[..width].iter().zip(x).enumerate() {
                        if tap >= skipped {
                            let x = s.load_row(&x[channel..]);
                            sum = s.mul_add(s.load(&weight.0), x, sum);
                        }
                    }
                    s.store_row(out, s.mul(sum, sigmoid(s, sum)));
                }
            }
        }
    }
}
