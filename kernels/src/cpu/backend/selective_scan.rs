//! [`SelectiveScan`] for [`Cpu`].

use crate::backend::{
    OrderedProducts, Output, PieceState, ScanGradients, ScanInputs, ScanSaved, ScanStepInputs,
    SelectiveScan, check_one_position,
};
use crate::cpu::rows::{Lengths, Rows, RowsMut, exactly, exactly_mut, no_documents};
use crate::cpu::scan::{Inputs, ScanLayout};
use crate::cpu::scan_backward::{self, selective_scan_backward};
use crate::cpu::scan_forward::selective_scan_forward;
use crate::cpu::scan_piece::selective_scan_piece;
use crate::cpu::{Cpu, DeviceStream};
use crate::error::Result;
use crate::shape::ScanShape;
use crate::view::{MatrixMut, SliceMut};

impl SelectiveScan for Cpu {
    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize {
        ScanLayout::new(shape).saved_elements() * shape.sequences().samples()
    }

    fn selective_scan_scratch_bytes(&self, shape: ScanShape) -> usize {
        scan_backward::scratch_bytes(&ScanLayout::new(shape))
    }

    fn selective_scan_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_forward";
        let out = RowsMut::new(KERNEL, "out", out, shape.sequences().rows(), shape.channels())?;
        let expected = self.selective_scan_saved_elements(shape);
        let saved = exactly_mut(KERNEL, "saved", saved, expected)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = ScanLayout::new(shape);
        selective_scan_forward(stream, self.dispatch, out, saved, inputs, layout)
    }

    fn selective_scan_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: ScanGradients<'_, Self>,
        ScanSaved { dout, inputs, saved }: ScanSaved<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_backward";
        let ScanGradients { ddelta_raw, dx, dbc, dz, da_log, dd, ddelta_bias, regated } = gradients;
        let (rows, grains) = (shape.sequences().rows(), shape.grains().grains());
        let (channels, states) = (shape.channels(), shape.states());
        let row_gradients = scan_backward::RowGradients {
            ddelta_raw: RowsMut::new(KERNEL, "ddelta_raw", ddelta_raw, rows, channels)?,
            dx: RowsMut::new(KERNEL, "dx", dx, rows, channels)?,
            dbc: RowsMut::new(KERNEL, "dbc", dbc, rows, 2 * states)?,
            dz: RowsMut::new(KERNEL, "dz", dz, rows, channels)?,
            regated: match regated {
                Some(regated) => Some(RowsMut::new(KERNEL, "regated", regated, rows, channels)?),
                None => None,
            },
        };
        let parameters = scan_backward::ParameterGradients {
            da_log: exactly_mut(KERNEL, "da_log", da_log, grains * channels * states)?,
            dd: exactly_mut(KERNEL, "dd", dd, grains * channels)?,
            ddelta_bias: exactly_mut(KERNEL, "ddelta_bias", ddelta_bias, grains * channels)?,
        };
        let read = scan_backward::BackwardInputs {
            dout: Rows::new(KERNEL, "dout", dout, rows, channels)?,
            inputs: Inputs::new(KERNEL, inputs, shape)?,
            saved: exactly(KERNEL, "saved", saved, self.selective_scan_saved_elements(shape))?,
        };
        let layout = ScanLayout::new(shape);
        selective_scan_backward(stream, self.dispatch, row_gradients, parameters, read, layout)
    }

    fn selective_scan_piece(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_piece";
        no_documents(KERNEL, inputs.starts.is_some())?;
        let sequences = shape.sequences();
        let out = RowsMut::new(KERNEL, "out", out, sequences.rows(), shape.channels())?;
        let held = sequences.samples() * shape.channels() * shape.states();
        let state = exactly_mut(KERNEL, "state", piece.state, held)?;
        let lengths = Lengths::new(KERNEL, piece.lengths, sequences)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = ScanLayout::new(shape);
        selective_scan_piece(stream, self.dispatch, out, (state, lengths), inputs, layout)
    }

    fn selective_scan_step(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        state: SliceMut<'_, Self, f32>,
        mut delta_raw: MatrixMut<'_, Self, f32>,
        inputs: ScanStepInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        check_one_position(shape)?;
        let (low, weight) = (inputs.low, inputs.dt_weight);
        self.ordered_matmul(stream, delta_raw.reborrow(), low, weight, Output::Overwrite)?;
        let inputs = inputs.with(delta_raw.as_matrix());
        let piece = PieceState { state, lengths: None };
        self.selective_scan_piece(stream, out, piece, inputs, shape)
    }
}
