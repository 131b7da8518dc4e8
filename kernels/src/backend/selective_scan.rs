//! The selective scan.

use super::{
    OrderedProducts, Output, PieceState, Runtime, ScanGradients, ScanInputs, ScanSaved,
    ScanStepInputs,
};
use crate::error::{KernelError, Result};
use crate::shape::ScanShape;
use crate::view::{MatrixMut, SliceMut};

/// The selective scan of Mamba. See the [module](super) for what every kernel promises.
pub trait SelectiveScan: Runtime {
    /// The number of fp32 elements that [`selective_scan_forward`](Self::selective_scan_forward) saves for the backward scan; only
    /// the backend knows their meaning.
    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize;

    /// Selective scan with softplus, skip and gate (Gu and Dao, 2023, algorithm 2):
    ///
    /// ```text
    /// delta = softplus(delta_raw + delta_bias)
    /// h_t   = exp(delta_t A) h_{t-1} + delta_t B_t x_t,      A = -exp(a_log), h_0 = 0 for every sample and document
    /// y_t   = C_t . h_t + D x_t
    /// out_t = y_t * silu(z_t)
    /// ```
    fn selective_scan_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()>;
}

/// The gradients of the [selective scan](SelectiveScan).
pub trait SelectiveScanBackward: SelectiveScan {
    /// About the bytes that [`selective_scan_backward`](Self::selective_scan_backward) takes of the device's memory beside its
    /// arguments, and that a stream keeps for its next kernels; of a CPU, those of one thread.
    fn selective_scan_scratch_bytes(&self, shape: ScanShape) -> usize;

    /// The gradients of [`selective_scan_forward`](SelectiveScan::selective_scan_forward); states are
    /// recomputed chunk by chunk, never held as `[b, t, e, n]`.
    fn selective_scan_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradients: ScanGradients<'_, Self>,
        saved: ScanSaved<'_, Self>,
        shape: ScanShape,
    ) -> Result<()>;
}

/// The [selective scan](SelectiveScan) of pieces of sequences.
pub trait SelectiveScanPiece: Runtime {
    /// The selective scan of sequences that go on, for generation: `piece.state[b, e, n]` is h before the first position.
    fn selective_scan_piece(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        piece: PieceState<'_, Self>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()>;
}

/// A step of the [selective scan](SelectiveScan) together with the product that forms its raw steps of time.
pub trait SelectiveScanStep: SelectiveScanPiece + OrderedProducts {
    /// [`ordered_matmul`](OrderedProducts::ordered_matmul) of `low` and `dt_weight` into `delta_raw[b, e]`, and
    /// [`selective_scan_piece`](SelectiveScanPiece::selective_scan_piece) of one position of each sample with it, to the same bits:
    /// what a token costs where samples are few is one kernel after the other, and this may be one kernel. What `delta_raw` holds
    /// afterwards is not said.
    ///
    /// # Errors
    /// Shapes that do not fit one another, more than one position, or a device that fails.
    fn selective_scan_step(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, Self::Activation>,
        state: SliceMut<'_, Self, f32>,
        mut delta_raw: MatrixMut<'_, Self, Self::Activation>,
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

/// A step is one position of each sample.
pub(crate) fn check_one_position(shape: ScanShape) -> Result<()> {
    match shape.sequences().positions() {
        1 => Ok(()),
        found => Err(KernelError::shape("selective_scan_step", "positions", 1, found)),
    }
}
