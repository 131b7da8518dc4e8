//! [`HeadScan`] for [`Cpu`].

use crate::backend::{HeadScan, HeadScanGradients, HeadScanInputs, PieceState};
use crate::cpu::head_scan::{HeadLayout, Inputs};
use crate::cpu::head_scan_backward::{self, head_scan_backward};
use crate::cpu::head_scan_forward::head_scan_forward;
use crate::cpu::rows::{Lengths, Rows, RowsMut, exactly_mut, no_documents};
use crate::cpu::{Cpu, DeviceStream};
use crate::error::Result;
use crate::shape::HeadScanShape;
use crate::view::{Matrix, MatrixMut};

impl HeadScan for Cpu {
    fn head_scan_scratch_bytes(&self, shape: HeadScanShape) -> usize {
        head_scan_backward::scratch_bytes(&HeadLayout::new(shape))
    }

    fn head_scan_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "head_scan_forward";
        let out = RowsMut::new(KERNEL, "out", out, shape.sequences().rows(), shape.width())?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        head_scan_forward(stream, self.dispatch, out, None, inputs, HeadLayout::new(shape))
    }

    fn head_scan_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: HeadScanGradients<'_, Self>,
        dout: Matrix<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "head_scan_backward";
        let HeadScanGradients { dprojected, dxbc, da_log, dd, ddelta_bias } = gradients;
        let (rows, width) = (shape.sequences().rows(), shape.width());
        let row_gradients = head_scan_backward::RowGradients {
            dprojected: RowsMut::new(
                KERNEL,
                "dprojected",
                dprojected,
                rows,
                shape.projected_width(),
            )?,
            dxbc: RowsMut::new(KERNEL, "dxbc", dxbc, rows, shape.xbc_width())?,
        };
        let of_grains = shape.grains().grains() * shape.heads();
        let parameters = head_scan_backward::ParameterGradients {
            da_log: exactly_mut(KERNEL, "da_log", da_log, of_grains)?,
            dd: exactly_mut(KERNEL, "dd", dd, of_grains)?,
            ddelta_bias: exactly_mut(KERNEL, "ddelta_bias", ddelta_bias, of_grains)?,
        };
        let dout = Rows::new(KERNEL, "dout", dout, rows, width)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = HeadLayout::new(shape);
        head_scan_backward(stream, self.dispatch, row_gradients, parameters, dout, inputs, layout)
    }

    fn head_scan_piece(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "head_scan_piece";
        no_documents(KERNEL, inputs.starts.is_some())?;
        let sequences = shape.sequences();
        let out = RowsMut::new(KERNEL, "out", out, sequences.rows(), shape.width())?;
        let held = sequences.samples() * shape.width() * shape.states();
        let state = exactly_mut(KERNEL, "state", piece.state, held)?;
        let goes_on = Some((state, Lengths::new(KERNEL, piece.lengths, sequences)?));
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        head_scan_forward(stream, self.dispatch, out, goes_on, inputs, HeadLayout::new(shape))
    }
}
