//! Elementwise functions over the rows of matrices: biases, and activation functions.

use super::Cpu;
use super::device_stream::ComputeThreads;
use super::dispatch::{Dispatch, Kernel};
use super::rows::{Rows, RowsMut, exactly};
use super::simd::{LANES, Simd};
use crate::error::Result;
use crate::view::{Matrix, MatrixMut, Slice};

/// The arguments of an element of the output.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<V> {
    /// x, with its column's bias where there is one.
    pub(crate) x: V,
    /// The gradient of a function of x; without a separate `dout`, the output's element before the
    /// map.
    pub(crate) dout: V,
}

/// A function of single elements.
pub(crate) trait Operation: Copy + Send {
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector;
}

/// The inputs of a map. Without x, or without dout, the output's elements are read in its place.
#[derive(Clone, Copy, Default)]
pub(crate) struct MapInputs<'a> {
    pub(crate) x: Option<Matrix<'a, Cpu, f32>>,
    pub(crate) dout: Option<Matrix<'a, Cpu, f32>>,
    pub(crate) bias: Option<Slice<'a, Cpu, f32>>,
}

/// [`MapInputs`] that fit the output.
#[derive(Clone, Copy)]
struct CheckedInputs<'a> {
    x: Option<Rows<'a>>,
    dout: Option<Rows<'a>>,
    bias: Option<&'a [f32]>,
}

/// `out = operation(x + bias, dout)` for each element.
///
/// # Errors
/// x or dout of another shape than `out`, or a bias of another width.
pub(crate) fn map_rows<'a, O: Operation>(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    kernel: &'static str,
    out: MatrixMut<'_, Cpu, f32>,
    inputs: MapInputs<'a>,
    operation: O,
) -> Result<()> {
    let (rows, width) = (out.rows, out.columns);
    let checked = |what, matrix: Option<Matrix<'a, Cpu, f32>>| {
        matrix.map(|matrix| Rows::new(kernel, what, matrix, rows, width)).transpose()
    };
    let inputs = CheckedInputs {
        x: checked("x", inputs.x)?,
        dout: checked("dout", inputs.dout)?,
        bias: inputs.bias.map(|bias| exactly(kernel, "bias", bias, width)).transpose()?,
    };
    let out = RowsMut::new(kernel, "out", out, rows, width)?;
    let share = threads.share(rows);
    let parts = out.parts(share).enumerate().map(|(part, out)| {
        let first_row = part * share;
        RowMap { out, rows: share.min(rows - first_row), inputs, first_row, operation }
    });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

/// The part's rows, whose first in the inputs is `first_row`.
struct RowMap<'a, O> {
    out: RowsMut<'a>,
    rows: usize,
    inputs: CheckedInputs<'a>,
    first_row: usize,
    operation: O,
}

impl<O: Operation> Kernel for RowMap<'_, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let CheckedInputs { x, dout, bias } = self.inputs;
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
