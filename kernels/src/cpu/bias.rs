//! Biases of rows and their gradients, and clamps.

use super::Cpu;
use super::device_stream::ComputeThreads;
use super::dispatch::{Dispatch, Kernel};
use super::row_map::{Arguments, Operation};
use super::rows::{Rows, exactly_mut};
use super::simd::{LANES, Simd};
use crate::error::Result;
use crate::shape::GrainRows;
use crate::view::{Matrix, SliceMut};

/// x with its bias.
#[derive(Clone, Copy)]
pub(crate) struct Biased;

impl Operation for Biased {
    #[inline(always)]
    fn apply<S: Simd>(self, _: S, arguments: Arguments<S::Vector>) -> S::Vector {
        arguments.x
    }
}

/// x within plus and minus the limit.
#[derive(Clone, Copy)]
pub(crate) struct Clamp(pub(crate) f32);

impl Operation for Clamp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector {
        s.max(s.splat(-self.0), s.min(s.splat(self.0), arguments.x))
    }
}

/// The gradient where x is within the limit, else zero.
#[derive(Clone, Copy)]
pub(crate) struct ClampGradient(pub(crate) f32);

impl Operation for ClampGradient {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector {
        let left = s.sub(s.splat(self.0), s.abs(arguments.x));
        s.select_by_sign(left, arguments.dout, s.splat(0.0))
    }
}

/// `dbias[grains, n]`: the sums of the grain's rows of `dout[rows, n]`, in order.
pub(crate) fn bias_backward(
    threads: &ComputeThreads,
    dispatch: Dispatch,
    dbias: SliceMut<'_, Cpu, f32>,
    dout: Matrix<'_, Cpu, f32>,
    grains: GrainRows,
) -> Result<()> {
    const KERNEL: &str = "bias_backward";
    let width = dout.columns;
    let dout = Rows::new(KERNEL, "dout", dout, grains.rows(), width)?;
    let dbias = exactly_mut(KERNEL, "dbias", dbias, grains.grains() * width)?;
    let parts = dbias.chunks_exact_mut(width.max(1)).enumerate();
    let parts = parts.map(|(grain, dbias)| BiasBackward { dbias, dout, rows: grains.range(grain) });
    threads.for_each(parts, |part| dispatch.run(part));
    Ok(())
}

struct BiasBackward<'a> {
    dbias: &'a mut [f32],
    dout: Rows<'a>,
    rows: std::ops::Range<usize>,
}

impl Kernel for BiasBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.dbias.fill(0.0);
        for row in self.rows {
            for (dbias, dout) in self.dbias.chunks_mut(LANES).zip(self.dout.row(row).chunks(LANES))
            {
                let sum = s.add(s.load_row(dbias), s.load_row(dout));
                s.store_row(dbias, sum);
            }
        }
    }
}
