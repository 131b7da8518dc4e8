//! The scan of heads (Dao and Gu, 2024): what forward, backward and pieces share.
//!
//! Lanes are sixteen channels of a head, and states lie in tiles of sixteen, as in the selective [`scan`](super::scan); but a head
//! has one decay for each position, so no exponential is computed for a state. The heads of a sample are walked one after the
//! other, each in chunks of [`CHUNK`] positions. Lanes and states past the end are padding whose inputs are zero, so their state
//! and their part of every sum stay zero.

use super::Cpu;
use super::documents::Documents;
use super::exponential::{exp, softplus_and_slope};
use super::rows::{Rows, exactly};
use super::scan::{CHUNK, Coefficients, for_each_state};
use super::simd::{LANES, Lanes, Simd};
use crate::backend::{DeltaLimits, HeadScanInputs};
use crate::error::Result;
use crate::shape::HeadScanShape;

/// The sizes of a scan in blocks, tiles and chunks.
#[derive(Clone, Copy)]
pub(crate) struct HeadLayout {
    pub(crate) samples: usize,
    pub(crate) positions: usize,
    pub(crate) samples_per_grain: usize,
    pub(crate) heads: usize,
    pub(crate) head_width: usize,
    pub(crate) groups: usize,
    pub(crate) states: usize,
    /// Blocks of sixteen channels of a head.
    pub(crate) blocks: usize,
    /// Tiles of sixteen states.
    pub(crate) tiles: usize,
    /// Chunks of a sample.
    pub(crate) chunks: usize,
}

impl HeadLayout {
    pub(crate) fn new(shape: HeadScanShape) -> Self {
        let positions = shape.sequences().positions();
        Self {
            samples: shape.sequences().samples(),
            positions,
            samples_per_grain: shape.samples_per_grain(),
            heads: shape.heads(),
            head_width: shape.head_width(),
            groups: shape.groups(),
            states: shape.states(),
            blocks: shape.head_width().div_ceil(LANES),
            tiles: shape.states().div_ceil(LANES),
            chunks: positions.div_ceil(CHUNK),
        }
    }

    /// Vectors that hold the state of a head: `[blocks, tiles, 16 states]`.
    pub(crate) fn state_lanes(&self) -> usize {
        self.blocks * self.tiles * LANES
    }

    /// Vectors of the [`Coefficients`] of a chunk.
    pub(crate) fn coefficient_lanes(&self) -> usize {
        CHUNK * self.tiles * 2
    }

    /// Channels of the head in block `block`.
    pub(crate) fn channels(&self, block: usize) -> usize {
        LANES.min(self.head_width - block * LANES)
    }

    /// The group of head `head`.
    pub(crate) fn group(&self, head: usize) -> usize {
        head / (self.heads / self.groups)
    }
}

/// The inputs of the scan as slices, their shapes checked.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    delta_raw: Rows<'a>,
    delta_bias: &'a [f32],
    pub(crate) x: Rows<'a>,
    bc: Rows<'a>,
    pub(crate) z: Rows<'a>,
    a_log: &'a [f32],
    pub(crate) d: &'a [f32],
    delta_limits: DeltaLimits,
    documents: Documents<'a>,
}

/// The steps of a chunk's positions of one head, a lane each.
#[derive(Clone, Copy)]
pub(crate) struct Steps {
    pub(crate) delta: Lanes,
    /// The derivative of delta by delta_raw.
    pub(crate) slope: Lanes,
    /// `exp(delta A)`
    pub(crate) decay: Lanes,
}

impl<'a> Inputs<'a> {
    pub(crate) fn new(
        kernel: &'static str,
        inputs: HeadScanInputs<'a, Cpu>,
        shape: HeadScanShape,
    ) -> Result<Self> {
        let (rows, heads, width) = (shape.sequences().rows(), shape.heads(), shape.width());
        let projected =
            Rows::new(kernel, "projected", inputs.projected, rows, shape.projected_width())?;
        let xbc = Rows::new(kernel, "xbc", inputs.xbc, rows, shape.xbc_width())?;
        Ok(Self {
            delta_raw: projected.part(0, width + shape.xbc_width(), heads),
            delta_bias: exactly(kernel, "delta_bias", inputs.delta_bias, heads)?,
            x: xbc.part(0, 0, width),
            bc: xbc.part(0, width, shape.bc_width()),
            z: projected.part(0, 0, width),
            a_log: exactly(kernel, "a_log", inputs.a_log, heads)?,
            d: exactly(kernel, "d", inputs.d, heads)?,
            delta_limits: inputs.delta_limits,
            documents: Documents::new(kernel, inputs.starts, rows)?,
        })
    }

    /// A bit for each of the `steps` positions of a sample from `position`, whose rows begin at `first_row`: set where the
    /// position begins a document after another.
    pub(crate) fn start_bits(&self, first_row: usize, position: usize, steps: usize) -> u8 {
        self.documents.start_bits(first_row, position, steps)
    }

    /// Copies B and C of head `head` in `count` rows from `first_row` on.
    #[inline(always)]
    pub(crate) fn gather(
        &self,
        out: &mut [Lanes],
        head: usize,
        first_row: usize,
        count: usize,
        layout: &HeadLayout,
    ) {
        let HeadLayout { groups, states, tiles, .. } = *layout;
        let group = layout.group(head);
        let of_group = |group: usize| self.bc.part(first_row, group * states, states);
        Coefficients::gather(out, [of_group(group), of_group(groups + group)], count, tiles);
    }

    /// `A = -exp(a_log)` of a head.
    #[inline(always)]
    pub(crate) fn rate<S: Simd>(&self, s: S, head: usize) -> f32 {
        let mut rate = Lanes::ZERO;
        s.store(&mut rate.0, exp(s, s.splat(self.a_log[head])));
        -rate.0[0]
    }

    /// The steps of `count` rows from `first_row` on of a head whose A is `rate`.
    #[inline(always)]
    pub(crate) fn steps<S: Simd>(
        &self,
        s: S,
        head: usize,
        rate: f32,
        first_row: usize,
        count: usize,
    ) -> Steps {
        let mut raw = Lanes::ZERO;
        for (q, raw) in raw.0[..count].iter_mut().enumerate() {
            *raw = self.delta_raw.row(first_row + q)[head];
        }
        let biased = s.add(s.load(&raw.0), s.splat(self.delta_bias[head]));
        let (free, slope) = softplus_and_slope(s, biased);
        let (least, most) = (self.delta_limits.least(), self.delta_limits.most());
        let delta = s.min(s.splat(most), s.max(s.splat(least), free));
        let mut steps = Steps { delta: Lanes::ZERO, slope: Lanes::ZERO, decay: Lanes::ZERO };
        s.store(&mut steps.delta.0, delta);
        s.store(&mut steps.slope.0, slope);
        s.store(&mut steps.decay.0, exp(s, s.mul(delta, s.splat(rate))));
        let mut unclamped = Lanes::ZERO;
        s.store(&mut unclamped.0, free);
        for (slope, free) in steps.slope.0.iter_mut().zip(unclamped.0) {
            if free < least || free > most {
                *slope = 0.0;
            }
        }
        steps
    }
}

/// One position of a tile: `h = decay h + delta x B`, answering `y + C . h` in two chains.
#[inline(always)]
pub(crate) fn advance<S: Simd>(
    s: S,
    h: &mut [S::Vector; LANES],
    decay: S::Vector,
    delta_x: S::Vector,
    coefficients: Coefficients<'_>,
    y: S::Vector,
) -> S::Vector {
    let Coefficients { b, c } = coefficients;
    let mut even = y;
    let mut odd = s.splat(0.0);
    for_each_state!(I, {
        h[I] = s.mul_add(decay, h[I], s.mul(delta_x, s.splat(b[I])));
        if I.is_multiple_of(2) {
            even = s.mul_add(h[I], s.splat(c[I]), even);
        } else {
            odd = s.mul_add(h[I], s.splat(c[I]), odd);
        }
    });
    s.add(even, odd)
}
