//! The [backend](crate::backend)'s traits for [`Cpu`]: they check shapes, divide rows among the compute threads, call kernels.

mod attention;
mod causal_conv1d;
mod head_scan;
mod runtime;
mod selective_scan;

use super::layer_norm::{ParameterGradients, layer_norm_backward, layer_norm_forward};
use super::matmul::matmul;
use super::norm::{NormInputs, NormSaved, rms_norm_backward, rms_norm_forward};
use super::rows::{Rows, RowsMut, exactly};
use super::weight_gradient::weight_gradient_add;
use super::{Cpu, DeviceStream};
use crate::backend::{Backend, Bias, NormGradient, NormInput, Output};
use crate::error::Result;
use crate::shape::{GrainRows, NormShape};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl Backend for Cpu {
    fn matmul(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, b, output)
    }

    fn matmul_f32(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, b, output)
    }

    fn matmul_onto(
        &self,
        stream: &mut DeviceStream,
        mut out: MatrixMut<'_, Self, f32>,
        base: Matrix<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
    ) -> Result<()> {
        const KERNEL: &str = "matmul";
        let (rows, columns) = (out.rows, out.columns);
        let base = Rows::new(KERNEL, "base", base, rows, columns)?;
        if let Some(bias) = bias {
            exactly(KERNEL, "bias", bias, columns)?;
        }
        let mut to = RowsMut::new(KERNEL, "out", out.reborrow(), rows, columns)?;
        (0..rows).for_each(|row| to.row_mut(row).copy_from_slice(base.row(row)));
        matmul(stream.threads(), self.dispatch, out.reborrow(), a, b, Output::Add)?;
        match bias {
            Some(bias) => self.add_bias_f32(stream, out, bias),
            None => Ok(()),
        }
    }

    fn matmul_biased(
        &self,
        stream: &mut DeviceStream,
        mut out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        exactly("matmul", "bias", bias, out.columns)?;
        matmul(stream.threads(), self.dispatch, out.reborrow(), a, b, Output::Overwrite)?;
        self.add_bias(stream, out, bias)
    }

    fn ordered_matmul(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        weight: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, weight.transposed(), output)
    }

    fn ordered_matmul_f32(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        weight: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        self.ordered_matmul(stream, out, a, weight, output)
    }

    fn weight_gradient_add(
        &self,
        stream: &mut DeviceStream,
        lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, f32>,
        input: Matrix<'_, Self, f32>,
        grains: GrainRows,
    ) -> Result<()> {
        weight_gradient_add(stream, self.dispatch, lane, grad_out, input, grains)
    }

    fn weight_gradient_scratch_bytes(&self, [m, k]: [usize; 2], _: GrainRows) -> usize {
        m.saturating_mul(k).saturating_mul(size_of::<f32>())
    }

    fn rms_norm_forward(
        &self,
        stream: &mut DeviceStream,
        y: MatrixMut<'_, Self, f32>,
        reciprocal_rms: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        let inputs = NormInputs { x, weight, bias: None };
        rms_norm_forward(stream.threads(), self.dispatch, y, reciprocal_rms, inputs, shape)
    }

    fn rms_norm_backward(
        &self,
        stream: &mut DeviceStream,
        gradient: NormGradient<'_, Self>,
        dweight: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        reciprocal_rms: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        let saved = NormSaved { x, statistics: reciprocal_rms, weight };
        rms_norm_backward(stream.threads(), self.dispatch, gradient, dweight, saved, shape)
    }

    fn layer_norm_forward(
        &self,
        stream: &mut DeviceStream,
        y: MatrixMut<'_, Self, f32>,
        statistics: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: NormShape,
    ) -> Result<()> {
        let inputs = NormInputs { x, weight, bias };
        layer_norm_forward(stream.threads(), self.dispatch, y, statistics, inputs, shape)
    }

    fn layer_norm_backward(
        &self,
        stream: &mut DeviceStream,
        gradient: NormGradient<'_, Self>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        x: NormInput<'_, Self>,
        statistics: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        let parameters = ParameterGradients { dweight, dbias };
        let saved = NormSaved { x, statistics, weight };
        layer_norm_backward(stream.threads(), self.dispatch, gradient, parameters, saved, shape)
    }
}
