//! The gradients of the causal convolution with SiLU; the convolution is recomputed from its input.
//!
//! ```text
//! g_t = dout_t silu'(c_t);   dx_t = sum over j of w[j] g_{t + k - 1 - j}
//! dw[j] = sum of g_t x_{t - (k - 1) + j};   dbias = sum of g_t
//! ```
//!
//! Positions go backward in chunks, blocks of channels inside. Gradients of parameters are formed per
//! sample and then added in the order of a grain's samples, so samples are divided freely among threads.

use super::conv::{Inputs, MAX_WIDTH, tap_lanes};
use super::dispatch::Kernel;
use super::documents::Documents;
use super::exponential::sigmoid;
use super::rows::{Rows, RowsMut, exactly_mut};
use super::simd::{LANES, Lanes, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{CausalConv1dBackward, ConvGradients, ConvInputs};
use crate::error::Result;
use crate::shape::ConvShape;
use crate::view::Matrix;

/// Positions of a chunk.
const CHUNK: usize = 64;

/// Gradients of parameters: `dweight[grains, e, k]` and `dbias[grains, e]`.
struct ParameterGradients<'a> {
    dweight: &'a mut [f32],
    dbias: Option<&'a mut [f32]>,
}

/// The samples of a compute thread.
struct Backward<'a> {
    dx: RowsMut<'a>,
    /// Each sample's gradients of parameters, arranged like its taps.
    partials: &'a mut [Lanes],
    /// g of the k - 1 positions after the chunk, `[blocks, k + 1]`, the farthest first.
    carry: &'a mut [Lanes],
    dout: Rows<'a>,
    x: Rows<'a>,
    taps: &'a [Lanes],
    documents: Documents<'a>,
    first_sample: usize,
    shape: ConvShape,
}

impl CausalConv1dBackward for Cpu {
    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: ConvGradients<'_, Self>,
        dout: Matrix<'_, Self, f32>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_backward";
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        let grains = shape.grains().grains();
        gradients.check(KERNEL, &inputs)?;
        let ConvGradients { dx, dweight, dbias } = gradients;
        let dx = RowsMut::new(KERNEL, "dx", dx, rows, channels)?;
        let parameters = ParameterGradients {
            dweight: exactly_mut(KERNEL, "dweight", dweight, grains * channels * shape.width())?,
            dbias: match dbias {
                Some(dbias) => Some(exactly_mut(KERNEL, "dbias", dbias, grains * channels)?),
                None => None,
            },
        };
        let dout = Rows::new(KERNEL, "dout", dout, rows, channels)?;
        let inputs = Inputs::new(KERNEL, inputs, &shape)?;
        let samples = shape.sequences().samples();
        let share = stream.threads().share(samples);
        let tap_lanes = tap_lanes(&shape);
        let lanes = tap_lanes * (1 + samples + samples.div_ceil(share));
        let (threads, scratch) = stream.with_scratch(lanes)?;
        let (taps, scratch) = scratch.split_at_mut(tap_lanes);
        let (partials, carries) = scratch.split_at_mut(tap_lanes * samples);
        inputs.taps.arrange(taps, &shape);
        let taps = &*taps;
        let parts = dx
            .parts(share * shape.sequences().positions())
            .zip(partials.chunks_mut(share * tap_lanes))
            .zip(carries.chunks_exact_mut(tap_lanes))
            .enumerate()
            .map(|(part, ((dx, partials), carry))| Backward {
                dx,
                partials,
                carry,
                dout,
                x: inputs.x,
                taps,
                documents: inputs.documents,
                first_sample: part * share,
                shape,
            });
        threads.for_each(parts, |part| self.dispatch.run(part));
        add_partials(parameters, partials, tap_lanes, &shape);
        Ok(())
    }
}

/// Each grain's gradients of parameters: its samples' added in order, from +0.0.
fn add_partials(
    parameters: ParameterGradients<'_>,
    partials: &[Lanes],
    tap_lanes: usize,
    shape: &ConvShape,
) {
    let (channels, width, samples_per_grain) =
        (shape.channels(), shape.width(), shape.samples_per_grain());
    let mut dbias = parameters.dbias.map(|dbias| dbias.chunks_exact_mut(channels));
    let grains = partials.chunks(samples_per_grain * tap_lanes);
    for (partials, dweight) in grains.zip(parameters.dweight.chunks_exact_mut(channels * width)) {
        let sum = |channel: usize, tap: usize| {
            let vector = channel / LANES * (width + 1) + tap;
            let samples = partials.chunks_exact(tap_lanes);
            samples.fold(0.0, |sum, partial| sum + partial[vector].0[channel % LANES])
        };
        for (channel, taps) in dweight.chunks_exact_mut(width).enumerate() {
            for (tap, out) in taps.iter_mut().enumerate() {
                *out = sum(channel, tap);
            }
        }
        if let Some(dbias) = dbias.as_mut().and_then(Iterator::next) {
            for (channel, out) in dbias.iter_mut().enumerate() {
                *out = sum(channel, width);
            }
        }
    }
}

/// Positions of a chunk that belong to one document.
struct Part {
    sample: usize,
    positions: std::ops::Range<usize>,
    /// The document's first position.
    start: usize,
    /// Whether another document follows: none of its gradients enters.
    ends_document: bool,
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // The widths that models use get loops without loops over taps.
        match self.shape.width() {
            4 => self.samples(s, 4),
            width => self.samples(s, width),
        }
    }
}

impl Backward<'_> {
    #[inline(always)]
    fn samples<S: Simd>(mut self, s: S, width: usize) {
        let partials = std::mem::take(&mut self.partials);
        let tap_lanes = tap_lanes(&self.shape);
        let positions = self.shape.sequences().positions();
        for (sample, partial) in partials.chunks_exact_mut(tap_lanes).enumerate() {
            partial.fill(Lanes::ZERO);
            self.carry.fill(Lanes::ZERO);
            for chunk in (0..positions.div_ceil(CHUNK)).rev() {
                let range = chunk * CHUNK..((chunk + 1) * CHUNK).min(positions);
                for block in 0..self.shape.channels().div_ceil(LANES) {
                    let mut end = range.end;
                    while end > range.start {
                        let part = self.part_before(sample, range.start, end);
                        end = part.positions.start;
                        self.block(s, width, part, block, partial);
                    }
                }
            }
        }
    }

    /// The row of a sample's first position in the inputs, and in the gradients.
    fn first_rows(&self, sample: usize) -> (usize, usize) {
        let positions = self.shape.sequences().positions();
        ((self.first_sample + sample) * positions, sample * positions)
    }

    /// The positions of one document from `first` or later that end at `end`.
    fn part_before(&self, sample: usize, first: usize, end: usize) -> Part {
        let (first_row, _) = self.first_rows(sample);
        let start = self.documents.start(first_row + end - 1, end - 1);
        let ends_document =
            end < self.shape.sequences().positions() && self.documents.begins(first_row + end, end);
        Part { sample, positions: first.max(start)..end, start, ends_document }
    }

    /// The positions of a part for one block of channels.
    #[inline(always)]
    fn block<S: Simd>(
        &mut self,
        s: S,
        width: usize,
        part: Part,
        block: usize,
        partial: &mut [Lanes],
    ) {
        let channel = block * LANES;
        let (first, first_out) = self.first_rows(part.sample);
        let Part { positions: range, start, ends_document, .. } = part;
        let lanes = block * (width + 1)..(block + 1) * (width + 1);
        let taps = &self.taps[lanes.clone()];
        let partial = &mut partial[lanes.clone()];
        let carry = &mut self.carry[lanes][..width - 1];
        if ends_document {
            carry.fill(Lanes::ZERO);
        }

        let one = s.splat(1.0);
        let mut weight = [s.splat(0.0); MAX_WIDTH];
        let mut dweight = [s.splat(0.0); MAX_WIDTH];
        for tap in 0..width {
            weight[tap] = s.load(&taps[tap].0);
            dweight[tap] = s.load(&partial[tap].0);
        }
        let bias = s.load(&taps[width].0);
        let mut dbias = s.load(&partial[width].0);

        // The x and g that position p needs, x[tap] and g[tap] for tap `tap`; both shift by one tap
        // with every position. x before the document's first position is zero.
        let mut x = [s.splat(0.0); MAX_WIDTH];
        let mut g = [s.splat(0.0); MAX_WIDTH];
        for tap in 1..width {
            // The taps for the position after the last, which the first shift turns into those of
            // the last.
            if range.end + tap >= width + start {
                let row = self.x.row(first + range.end + tap - width);
                x[tap - 1] = s.load_row(&row[channel..]);
            }
            g[tap] = s.load(&carry[tap - 1].0);
        }
        for position in range.rev() {
            // The g that the chunk before needs of these channels.
            let before = position.wrapping_sub(CHUNK);
            s.prefetch(self.x.address(first.wrapping_add(before), channel));
            s.prefetch(self.dout.address(first.wrapping_add(before), channel));
            s.prefetch(self.dx.address(first_out.wrapping_add(before), channel));
            for tap in (1..width).rev() {
                x[tap] = x[tap - 1];
            }
            x[0] = s.splat(0.0);
            if position + 1 >= width + start {
                let row = self.x.row(first + position + 1 - width);
                x[0] = s.load_row(&row[channel..]);
            }
            let mut c = bias;
            for tap in 0..width {
                c = s.mul_add(weight[tap], x[tap], c);
            }
            let sigmoid = sigmoid(s, c);
            let slope = s.mul(sigmoid, s.mul_add(c, s.sub(one, sigmoid), one));
            let dout = s.load_row(&self.dout.row(first + position)[channel..]);
            for tap in 1..width {
                g[tap - 1] = g[tap];
            }
            let gradient = s.mul(dout, slope);
            g[width - 1] = gradient;
            let mut dx = s.splat(0.0);
            for tap in 0..width {
                dx = s.mul_add(weight[tap], g[tap], dx);
                dweight[tap] = s.mul_add(gradient, x[tap], dweight[tap]);
            }
            dbias = s.add(dbias, gradient);
            let row = self.dx.row_mut(first_out + position);
            s.store_row(&mut row[channel..], dx);
        }
        for tap in 1..width {
            s.store(&mut carry[tap - 1].0, g[tap]);
        }
        for tap in 0..width {
            s.store(&mut partial[tap].0, dweight[tap]);
        }
        s.store(&mut partial[width].0, dbias);
    }
}
