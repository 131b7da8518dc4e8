//! Biases of rows and their gradients, and clamps.

use super::dispatch::Kernel;
use super::row_map::{Arguments, MapInputs, Operation, map_rows};
use super::rows::{Rows, exactly_mut};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{self, Bias};
use crate::error::Result;
use crate::shape::{GrainRows, check_limit};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// x with its bias.
#[derive(Clone, Copy)]
struct Biased;

impl Operation for Biased {
    #[inline(always)]
    fn apply<S: Simd>(self, _: S, arguments: Arguments<S::Vector>) -> S::Vector {
        arguments.x
    }
}

/// x within plus and minus the limit.
#[derive(Clone, Copy)]
struct Clamp(f32);

impl Operation for Clamp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector {
        s.max(s.splat(-self.0), s.min(s.splat(self.0), arguments.x))
    }
}

/// The gradient where x is within the limit, else zero.
#[derive(Clone, Copy)]
struct ClampGradient(f32);

impl Operation for ClampGradient {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, arguments: Arguments<S::Vector>) -> S::Vector {
        let left = s.sub(s.splat(self.0), s.abs(arguments.x));
        s.select_by_sign(left, arguments.dout, s.splat(0.0))
    }
}

impl Bias for Cpu {
    fn add_bias(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        let inputs = MapInputs { bias: Some(bias), ..MapInputs::default() };
        map_rows(stream.threads(), self.dispatch, "add_bias", out, inputs, Biased)
    }

    fn add_bias_f32(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        let inputs = MapInputs { bias: Some(bias), ..MapInputs::default() };
        map_rows(stream.threads(), self.dispatch, "add_bias_f32", out, inputs, Biased)
    }

    fn bias_backward(
        &self,
        stream: &mut DeviceStream,
        dbias: SliceMut<'_, Cpu, f32>,
        dout: Matrix<'_, Cpu, f32>,
        grains: GrainRows,
    ) -> Result<()> {
        const KERNEL: &str = "bias_backward";
        let width = dout.columns;
        let dout = Rows::new(KERNEL, "dout", dout, grains.rows(), width)?;
        let dbias = exactly_mut(KERNEL, "dbias", dbias, grains.grains() * width)?;
        let parts = dbias.chunks_exact_mut(width.max(1)).enumerate();
        let parts =
            parts.map(|(grain, dbias)| BiasBackward { dbias, dout, rows: grains.range(grain) });
        stream.threads().for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

impl backend::Clamp for Cpu {
    fn clamp(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        limit: f32,
    ) -> Result<()> {
        const KERNEL: &str = "clamp";
        check_limit(KERNEL, limit)?;
        let inputs = MapInputs { x: Some(x), ..MapInputs::default() };
        map_rows(stream.threads(), self.dispatch, KERNEL, out, inputs, Clamp(limit))
    }

    fn clamp_backward(
        &self,
        stream: &mut DeviceStream,
        dx: MatrixMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        limit: f32,
    ) -> Result<()> {
        const KERNEL: &str = "clamp_backward";
        check_limit(KERNEL, limit)?;
        let inputs = MapInputs { x: Some(x), ..MapInputs::default() };
        map_rows(stream.threads(), self.dispatch, KERNEL, dx, inputs, ClampGradient(limit))
    }
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
