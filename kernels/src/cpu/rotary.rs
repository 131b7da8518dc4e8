//! Rotary positions (RoFormer, Su et al., 2021): pairs of elements, half a head apart, turned by the angles of their row's position.

use super::dispatch::Kernel;
use super::rows::{RowsMut, exactly};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{Rotary, RotaryInputs};
use crate::error::{KernelError, Result};
use crate::shape::AttentionShape;
use crate::view::MatrixMut;

impl Rotary for Cpu {
    fn rotary_forward(
        &self,
        stream: &mut DeviceStream,
        qk: MatrixMut<'_, Cpu, f32>,
        inputs: RotaryInputs<'_, Cpu>,
        shape: AttentionShape,
    ) -> Result<()> {
        const KERNEL: &str = "rotary_forward";
        let threads = stream.threads();
        let rows = shape.sequences().rows();
        let angles = Angles::new(KERNEL, inputs, shape)?;
        let columns = shape.width() + shape.key_value_width();
        let qk = RowsMut::new(KERNEL, "qk", qk, rows, columns)?;
        let share = threads.share(rows);
        let parts = qk.parts(share).enumerate().map(|(part, qk)| {
            let first_row = part * share;
            Forward { qk, first_row, rows: share.min(rows - first_row), angles }
        });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }

    fn rotary_backward(
        &self,
        stream: &mut DeviceStream,
        dqkv: MatrixMut<'_, Cpu, f32>,
        inputs: RotaryInputs<'_, Cpu>,
        shape: AttentionShape,
    ) -> Result<()> {
        const KERNEL: &str = "rotary_backward";
        let threads = stream.threads();
        let rows = shape.sequences().rows();
        let angles = Angles::new(KERNEL, inputs, shape)?;
        let dqkv = RowsMut::new(KERNEL, "dqkv", dqkv, rows, 3 * shape.width())?;
        let share = threads.share(rows);
        let parts = dqkv.parts(share).enumerate().map(|(part, dqkv)| {
            let first_row = part * share;
            Backward { dqkv, first_row, rows: share.min(rows - first_row), angles }
        });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

/// The checked inputs.
#[derive(Clone, Copy)]
struct Angles<'a> {
    table: &'a [f32],
    starts: Option<&'a [u32]>,
    past: Option<&'a [u32]>,
    shape: AttentionShape,
}

impl<'a> Angles<'a> {
    fn new(
        kernel: &'static str,
        inputs: RotaryInputs<'a, Cpu>,
        shape: AttentionShape,
    ) -> Result<Self> {
        let sequences = shape.sequences();
        let (p, table) = (shape.head_width(), inputs.table);
        shape.check_rotary(kernel, table.elements)?;
        let starts =
            inputs.starts.map(|starts| exactly(kernel, "starts", starts, sequences.rows()));
        let past = inputs.past.map(|past| exactly(kernel, "past", past, sequences.samples()));
        let (starts, past) = (starts.transpose()?, past.transpose()?);
        let most = past.into_iter().flatten().copied().max().unwrap_or_default() as usize;
        let (last, positions) = (most + sequences.positions(), table.elements / p);
        if last > positions {
            let expected = format!("at least {last} positions");
            return Err(KernelError::shape(kernel, "table", expected, positions));
        }
        Ok(Self { table: exactly(kernel, "table", table, positions * p)?, starts, past, shape })
    }

    /// The cosines and sines of a row's position.
    #[inline(always)]
    fn of_row(&self, row: usize) -> (&'a [f32], &'a [f32]) {
        let (t, p) = (self.shape.sequences().positions(), self.shape.head_width());
        let past = self.past.map_or(0, |past| past[row / t] as usize);
        let start = self.starts.map_or(0, |starts| starts[row] as usize);
        let position = (past + row % t).saturating_sub(start);
        self.table[position * p..(position + 1) * p].split_at(p / 2)
    }
}

/// The direction of a rotation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Back,
}

/// Turns the pairs of the head whose halves these are.
#[inline(always)]
fn turn<S: Simd>(
    s: S,
    [first, second]: [&mut [f32]; 2],
    (cosines, sines): (&[f32], &[f32]),
    direction: Direction,
) {
    let halves = first.chunks_mut(LANES).zip(second.chunks_mut(LANES));
    for ((first, second), (cosine, sine)) in
        halves.zip(cosines.chunks(LANES).zip(sines.chunks(LANES)))
    {
        let (x, y) = (s.load_row(first), s.load_row(second));
        let (cosine, sine) = (s.load_row(cosine), s.load_row(sine));
        let sine = match direction {
            Direction::Forward => sine,
            Direction::Back => s.sub(s.splat(0.0), sine),
        };
        s.store_row(first, s.neg_mul_add(y, sine, s.mul(x, cosine)));
        s.store_row(second, s.mul_add(x, sine, s.mul(y, cosine)));
    }
}

/// The part's rows, whose first of the sequences is `first_row`.
struct Forward<'a> {
    qk: RowsMut<'a>,
    first_row: usize,
    rows: usize,
    angles: Angles<'a>,
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let p = self.angles.shape.head_width();
        for row in 0..self.rows {
            let angles = self.angles.of_row(self.first_row + row);
            for head in self.qk.row_mut(row).chunks_exact_mut(p) {
                turn(s, head.split_at_mut(p / 2).into(), angles, Direction::Forward);
            }
        }
    }
}

struct Backward<'a> {
    dqkv: RowsMut<'a>,
    first_row: usize,
    rows: usize,
    angles: Angles<'a>,
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let shape = self.angles.shape;
        let (p, width, group) = (shape.head_width(), shape.width(), shape.group());
        for row in 0..self.rows {
            let angles = self.angles.of_row(self.first_row + row);
            let dqkv = self.dqkv.row_mut(row);
            for head in dqkv[..width].chunks_exact_mut(p) {
                turn(s, head.split_at_mut(p / 2).into(), angles, Direction::Back);
            }
            // A sum lies before all terms that are still to be added, so no term is overwritten.
            for part in 0..2 {
                for head in 0..shape.key_value_heads() {
                    let from = (1 + part) * width + head * group * p;
                    let to = width + (part * shape.key_value_heads() + head) * p;
                    for column in (0..p).step_by(LANES) {
                        let columns = LANES.min(p - column);
                        let mut sum = s.load_row(&dqkv[from + column..][..columns]);
                        for other in 1..group {
                            let term = &dqkv[from + other * p + column..][..columns];
                            sum = s.add(sum, s.load_row(term));
                        }
                        s.store_row(&mut dqkv[to + column..][..columns], sum);
                    }
                    if part == 0 {
                        let halves = dqkv[to..to + p].split_at_mut(p / 2).into();
                        turn(s, halves, angles, Direction::Back);
                    }
                }
            }
        }
    }
}
