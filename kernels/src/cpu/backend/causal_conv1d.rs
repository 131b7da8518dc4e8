//! [`CausalConv1d`] for [`Cpu`].

use crate::backend::{CausalConv1d, ConvGradients, ConvInputs, PieceState};
use crate::cpu::conv::{self, causal_conv1d_silu_forward};
use crate::cpu::conv_backward::{self, causal_conv1d_silu_backward};
use crate::cpu::conv_piece::causal_conv1d_silu_piece;
use crate::cpu::rows::{Lengths, Rows, RowsMut, exactly_mut, no_documents};
use crate::cpu::{Cpu, DeviceStream};
use crate::error::Result;
use crate::shape::ConvShape;
use crate::view::{Matrix, MatrixMut};

impl CausalConv1d for Cpu {
    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_forward";
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        let out = RowsMut::new(KERNEL, "out", out, rows, channels)?;
        let inputs = conv::Inputs::new(KERNEL, inputs, &shape)?;
        causal_conv1d_silu_forward(stream, self.dispatch, out, inputs, shape)
    }

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
        let dweight = exactly_mut(KERNEL, "dweight", dweight, grains * channels * shape.width())?;
        let dbias = match dbias {
            Some(dbias) => Some(exactly_mut(KERNEL, "dbias", dbias, grains * channels)?),
            None => None,
        };
        let read = conv_backward::BackwardInputs {
            dout: Rows::new(KERNEL, "dout", dout, rows, channels)?,
            inputs: conv::Inputs::new(KERNEL, inputs, &shape)?,
        };
        let parameters = conv_backward::ParameterGradients { dweight, dbias };
        causal_conv1d_silu_backward(stream, self.dispatch, dx, parameters, read, shape)
    }

    fn causal_conv1d_silu_piece(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_piece";
        no_documents(KERNEL, inputs.starts.is_some())?;
        let (sequences, channels) = (shape.sequences(), shape.channels());
        let out = RowsMut::new(KERNEL, "out", out, sequences.rows(), channels)?;
        let held = sequences.samples() * channels * (shape.width() - 1);
        let state = exactly_mut(KERNEL, "state", piece.state, held)?;
        let lengths = Lengths::new(KERNEL, piece.lengths, sequences)?;
        let inputs = conv::Inputs::new(KERNEL, inputs, &shape)?;
        causal_conv1d_silu_piece(stream, self.dispatch, out, (state, lengths), inputs, shape)
    }
}
