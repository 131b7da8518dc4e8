//! The [backend](crate::backend)'s traits for [`Cpu`]: they check shapes, divide rows among the compute threads, call kernels.

mod attention;
mod causal_conv1d;
mod head_scan;
mod runtime;
mod selective_scan;

use super::layer_norm::{ParameterGradients, layer_norm_backward, layer_norm_forward};
use super::norm::{NormInputs, NormSaved, rms_norm_backward, rms_norm_forward};
use super::{Cpu, DeviceStream};
use crate::backend::{Backend, NormGradient, NormInput};
use crate::error::Result;
use crate::shape::NormShape;
use crate::view::{MatrixMut, Slice, SliceMut};

impl Backend for Cpu {
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
