//! The selective scan (Gu and Dao, 2023): common parts of forward, backward and the single step.
//!
//! Lanes are sixteen channels; the states of a channel lie in sixteen vectors, a [`Tile`]. Positions are walked in chunks of
//! [`CHUNK`]: chunks outermost, blocks of channels inside, so that a chunk's inputs and the state of all channels stay in cache,
//! and within a chunk in phases (softplus, decays, recurrence, gate) whose operations do not wait for each other. More than sixteen
//! states are several tiles; lanes and states past the end are padding whose inputs are zero, so their state and their part of
//! every sum stay zero.
//!
//! Forward saves the state at the start of each chunk, and nothing else: backward recomputes the rest. Where a document
//! begins, the state is replaced by zero before it moves on; one that was saved there belongs to the document before.

use super::Cpu;
use super::dispatch::Kernel;
use super::documents::Documents;
use super::exponential::{exp, exp2_each};
use super::rows::{Rows, exactly};
use super::simd::{LANES, Lanes, Simd, Tile};
use crate::backend::ScanInputs;
use crate::error::Result;
use crate::shape::ScanShape;

/// Positions between saved states, as many as [`Inputs::start_bits`] has bits. With 8, what a chunk recomputes fits the nearest cache.
pub(crate) const CHUNK: usize = 8;

/// Runs `$body` for each state of a tile, `$i` being a constant: an array of vectors that is indexed by
/// constants alone stays in registers, and the optimizer does not unroll a long loop by itself.
macro_rules! for_each_state {
    ($i:ident, $body:block) => {
        for_each_state!(@each $i, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@each $i:ident, $body:block, $($value:literal)+) => {
        $({
            const $i: usize = $value;
            $body
        })+
    };
}
pub(crate) use for_each_state;

/// The sizes of a scan in blocks, tiles and chunks.
#[derive(Clone, Copy)]
pub(crate) struct ScanLayout {
    pub(crate) samples: usize,
    pub(crate) positions: usize,
    pub(crate) samples_per_grain: usize,
    pub(crate) channels: usize,
    pub(crate) states: usize,
    /// Blocks of sixteen channels.
    pub(crate) blocks: usize,
    /// Tiles of sixteen states.
    pub(crate) tiles: usize,
    /// Chunks of a sample.
    pub(crate) chunks: usize,
}

impl ScanLayout {
    pub(crate) fn new(shape: ScanShape) -> Self {
        Self {
            samples: shape.sequences().samples(),
            positions: shape.sequences().positions(),
            samples_per_grain: shape.samples_per_grain(),
            channels: shape.channels(),
            states: shape.states(),
            blocks: shape.channels().div_ceil(LANES),
            tiles: shape.states().div_ceil(LANES),
            chunks: shape.sequences().positions().div_ceil(CHUNK),
        }
    }

    /// Vectors that hold the state of all channels.
    pub(crate) fn state_lanes(&self) -> usize {
        self.blocks * self.tiles * LANES
    }

    /// Elements that forward saves for a sample.
    pub(crate) fn saved_elements(&self) -> usize {
        self.chunks * self.state_lanes() * LANES
    }

    /// Vectors of scratch for the coefficients of a chunk: [`Coefficients`].
    pub(crate) fn coefficient_lanes(&self) -> usize {
        CHUNK * self.tiles * 2
    }

    /// The positions of chunk `chunk`.
    pub(crate) fn positions_of(&self, chunk: usize) -> std::ops::Range<usize> {
        chunk * CHUNK..((chunk + 1) * CHUNK).min(self.positions)
    }
}

/// The inputs of the scan as slices, their shapes checked.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) delta_raw: Rows<'a>,
    pub(crate) delta_bias: &'a [f32],
    pub(crate) x: Rows<'a>,
    pub(crate) bc: Rows<'a>,
    pub(crate) z: Rows<'a>,
    pub(crate) a_log: &'a [f32],
    pub(crate) d: &'a [f32],
    pub(crate) documents: Documents<'a>,
}

impl<'a> Inputs<'a> {
    pub(crate) fn new(
        kernel: &'static str,
        inputs: ScanInputs<'a, Cpu>,
        shape: ScanShape,
    ) -> Result<Self> {
        let rows = shape.sequences().rows();
        let (channels, states) = (shape.channels(), shape.states());
        Ok(Self {
            delta_raw: Rows::new(kernel, "delta_raw", inputs.delta_raw, rows, channels)?,
            delta_bias: exactly(kernel, "delta_bias", inputs.delta_bias, channels)?,
            x: Rows::new(kernel, "x", inputs.x, rows, channels)?,
            bc: Rows::new(kernel, "bc", inputs.bc, rows, 2 * states)?,
            z: Rows::new(kernel, "z", inputs.z, rows, channels)?,
            a_log: exactly(kernel, "a_log", inputs.a_log, channels * states)?,
            d: exactly(kernel, "d", inputs.d, channels)?,
            documents: Documents::new(kernel, inputs.starts, rows)?,
        })
    }

    /// B and C from row `first_row` on.
    #[inline(always)]
    pub(crate) fn coefficients(&self, first_row: usize, states: usize) -> [Rows<'a>; 2] {
        [0, states].map(|column| self.bc.part(first_row, column, states))
    }

    /// A bit for each of the `steps` positions of a sample from `position`, whose rows begin at `first_row`: set where the
    /// position begins a document after another.
    pub(crate) fn start_bits(&self, first_row: usize, position: usize, steps: usize) -> u8 {
        self.documents.start_bits(first_row, position, steps)
    }
}

/// Writes `A log2(e) = -exp(a_log) log2(e)` as tiles `[blocks, tiles]`, zero in the padding.
pub(crate) struct PrepareDecay<'a> {
    pub(crate) out: &'a mut [Lanes],
    pub(crate) a_log: &'a [f32],
    pub(crate) layout: ScanLayout,
}

impl Kernel for PrepareDecay<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ScanLayout { channels, states, tiles, .. } = self.layout;
        let minus_log2_e = s.splat(-std::f32::consts::LOG2_E);
        for (block, tiles) in self.out.chunks_exact_mut(tiles * LANES).enumerate() {
            let first = block * LANES;
            let count = LANES.min(channels - first);
            for (state, out) in tiles.iter_mut().enumerate() {
                let mut gathered = Lanes::ZERO;
                if state < states {
                    for (lane, a_log) in gathered.0[..count].iter_mut().enumerate() {
                        *a_log = self.a_log[(first + lane) * states + state];
                    }
                    let a = s.mul(exp(s, s.load(&gathered.0)), minus_log2_e);
                    s.store(&mut gathered.0, s.keep_first(a, count));
                }
                *out = gathered;
            }
        }
    }
}

/// B and C of one position for the sixteen states of a tile, zero in the padding.
pub(crate) struct Coefficients<'a> {
    pub(crate) b: &'a [f32; LANES],
    pub(crate) c: &'a [f32; LANES],
}

impl<'a> Coefficients<'a> {
    /// Copies the first `rows` rows of B and of C into `out`, so that none of their `tiles` is cut short.
    #[inline(always)]
    pub(crate) fn gather(out: &mut [Lanes], [b, c]: [Rows<'_>; 2], rows: usize, tiles: usize) {
        for (row, out) in out.chunks_exact_mut(2 * tiles).take(rows).enumerate() {
            for (lanes, coefficients) in out.chunks_exact_mut(tiles).zip([b.row(row), c.row(row)]) {
                lanes.fill(Lanes::ZERO);
                for (lanes, states) in lanes.iter_mut().zip(coefficients.chunks(LANES)) {
                    lanes.0[..states.len()].copy_from_slice(states);
                }
            }
        }
    }

    /// B and C of `row` for the states of `tile`, from the vectors that [`gather`](Self::gather) wrote.
    #[inline(always)]
    pub(crate) fn of(gathered: &'a [Lanes], row: usize, tile: usize, tiles: usize) -> Self {
        let row = &gathered[row * 2 * tiles..][..2 * tiles];
        Self { b: &row[tile].0, c: &row[tiles + tile].0 }
    }
}

/// Decays `2^(delta a)` of a chunk's positions, breadth first.
#[inline(always)]
pub(crate) fn decays<S: Simd>(s: S, out: &mut [Tile], delta: &[Lanes], a: &Tile) {
    /// Exponentials in flight.
    const BREADTH: usize = 4;
    for (group, a) in a.chunks_exact(BREADTH).enumerate() {
        for (out, delta) in out.iter_mut().zip(delta) {
            let delta = s.load(&delta.0);
            let mut x = [delta; BREADTH];
            for (x, a) in x.iter_mut().zip(a) {
                *x = s.mul(delta, s.load(&a.0));
            }
            let x = exp2_each::<S, BREADTH>(s, x);
            for (out, x) in out[group * BREADTH..][..BREADTH].iter_mut().zip(x) {
                s.store(&mut out.0, x);
            }
        }
    }
}

/// One position of a tile: `h = decay h + delta x B`, answering `y + C . h` in two chains.
#[inline(always)]
pub(crate) fn advance<S: Simd>(
    s: S,
    h: &mut [S::Vector; LANES],
    decay: &Tile,
    delta_x: S::Vector,
    coefficients: Coefficients<'_>,
    y: S::Vector,
) -> S::Vector {
    let Coefficients { b, c } = coefficients;
    let mut even = y;
    let mut odd = s.splat(0.0);
    for_each_state!(I, {
        h[I] = s.mul_add(s.load(&decay[I].0), h[I], s.mul(delta_x, s.splat(b[I])));
        if I.is_multiple_of(2) {
            even = s.mul_add(h[I], s.splat(c[I]), even);
        } else {
            odd = s.mul_add(h[I], s.splat(c[I]), odd);
        }
    });
    s.add(even, odd)
}

/// The sixteen vectors of `lanes`, which must hold exactly as many.
#[inline(always)]
pub(crate) fn tile(lanes: &[Lanes]) -> &Tile {
    lanes.first_chunk().expect("a tile is sixteen vectors")
}
