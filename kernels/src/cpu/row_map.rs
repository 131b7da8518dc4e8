//! Functions of single elements over the rows of matrices: biases, and activation functions.

use super::Cpu;
use super::device_stream::ComputeThreads;
use super::dispatch::{Dispatch, Kernel};
use super::rows::{Rows, RowsMut, exactly};
use super::simd::{LANES, Simd};
use crate::error::Result;
use crate::view::{Matrix, MatrixMut, Slice};

/// What an element of the output is a function of.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<V> {
    /// x, with its column's bias where there is one.
    pub(crate) x: V,
    /// The gradient of a function of x; what the output held, where no other is given.
    pub(crate) dout: V,
}

/// A function of single elements.
pub(crate) trait Operation: Copy + Send {
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector;
}

/// What a map reads.
#[derive(Clone, Copy)]
pub(crate) struct MapInputs<'a> {
    /// Absent: what the output holds.
    pub(crate) x: Option<Rows<'a>>,
    /// Absent: what the output holds.
    pub(crate) dout: Option<Rows<'a>>,
    pub(crate) bias: Option<&'a [f32]>,
}

impl<'a> MapInputs<'a> {
    /// x and dout, where given, must have the shape of `out`, and the bias its width.
    pub(crate) fn new(
        kernel: &'static str,
        out: &MatrixMut<'_, Cpu, f32>,
        [x, dout]: [Option<Matrix<'a, Cpu, f32>>; 2],
        bias: Option<Slice<'a, Cpu, f32>>,
    ) -> Result<Self> {
        let (rows, width) = (out.rows, out.columns);
        let checked = |what, matrix: Option<Matrix<'a, Cpu, f32>>| {
            matrix.map(|matrix| Rows::new(kernel, what, matrix, rows, width)).transpose()
        };
        Ok(Self {
            x: checked("x", x)?,
            dout: checked("dout", dout)?,
            bias: bias.map(|bias| exactly(kernel, "bias", bias, width)).transpose()?,
        })
    }
}

/// What a map writes, and its number of rows.
pub(crate) fn map_output<'a>(
    kernel: &'static str,
    out: MatrixMut<'a, Cpu, f32>,
) -> Result<(RowsMut<'a>, usize)> {
    let (rows, width) = (out.rows, out.columns);
    Ok((RowsMut::new(kernel, "out", out, rows, width)?, rows))
}

/// `out = operation(x + bias, dout)` for each of `rows` rows.
pub(crate) fn map_rows<O: Operation>(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    (out, rows): (RowsMut<'_>, usize),
    inputs: MapInputs<'_>,
    operation: O,
) {
    let share = threads.share(rows);
    let parts = out.parts(share).enumerate().map(|(part, out)| {
        let first_row = part * share;
        RowMap { out, rows: share.min(rows - first_row), inputs, first_row, operation }
    });
    threads.for_each(parts, |part| dispatch.run(part));
}

/// The part's rows, whose first in the inputs is `first_row`.
struct RowMap<'a, O> {
    out: RowsMut<'a>,
    rows: usize,
    inputs: MapInputs<'a>,
    first_row: usize,
    operation: O,
}

impl<O: Operation> Kernel for RowMap<'_, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let MapInputs { x, dout, bias } = self.inputs;
        for row in 0..self.rows {
            let x = x.map(|x| x.row(self.first_row + row));
            let dout = dout.map(|dout| dout.row(self.first_row + row));
            for (block, out) in self.out.row_mut(row).chunks_mut(LANES).enumerate() {
                let first = block * LANES;
                let x = match x {
                    Some(x) => s.load_row(&x[first..]),
                    None => s.load_row(out),
                };
                let x = match bias {
                    Some(bias) => s.add(x, s.load_row(&bias[first..])),
                    None => x,
                };
                let dout = match dout {
                    Some(dout) => s.load_row(&dout[first..]),
                    None => s.load_row(out),
                };
                s.store_row(out, self.operation.apply(s, Arguments { x, dout }));
            }
        }
    }
}
