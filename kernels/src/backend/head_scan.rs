//! The scan of heads.

use super::{PieceState, Runtime};
use crate::error::{KernelError, Result};
use crate::shape::HeadScanShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Between which numbers step sizes stay: delta is clamped to them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaLimits {
    least: f32,
    most: f32,
}

impl DeltaLimits {
    /// No step size is clamped.
    pub const NONE: Self = Self { least: 0.0, most: f32::INFINITY };

    /// A clamp of step sizes to `least ..= most`; `most` may be infinite.
    ///
    /// # Errors
    /// A negative or infinite least, or a most that is not above it.
    pub fn new(least: f32, most: f32) -> Result<Self> {
        if least.is_finite() && least >= 0.0 && most > least {
            return Ok(Self { least, most });
        }
        let expected = "0 or more, then more than that";
        let found = format!("{least} and {most}");
        Err(KernelError::shape("head_scan", "limits of delta", expected, found))
    }

    /// The least step size.
    pub fn least(self) -> f32 {
        self.least
    }

    /// The greatest step size.
    pub fn most(self) -> f32 {
        self.most
    }
}

/// The inputs of the scan of heads, forward and backward.
pub struct HeadScanInputs<'a, B: Runtime> {
    /// `projected[b t, e + c + h]`, in_proj's product, with e = h p and c = e + 2 g n: the gate z before SiLU, what the convolution
    /// reads, and the raw step sizes, before their bias and softplus. The columns between are not read.
    pub projected: Matrix<'a, B, B::Activation>,
    /// `xbc[b t, c]`, after convolution and SiLU: x (head i in columns `i p .. (i + 1) p`), B of every group, C of every group.
    pub xbc: Matrix<'a, B, B::Activation>,
    /// `delta_bias[h]`.
    pub delta_bias: Slice<'a, B, f32>,
    /// `a_log[h]`.
    pub a_log: Slice<'a, B, f32>,
    /// `d[h]`: the skip.
    pub d: Slice<'a, B, f32>,
    /// Between which numbers delta stays.
    pub delta_limits: DeltaLimits,
    /// `starts[b t]`, as in [`ConvInputs`](super::ConvInputs): the state before a document's first row is zero. A piece takes none.
    pub starts: Option<Slice<'a, B, u32>>,
}

/// Outputs of the backward scan of heads.
pub struct HeadScanGradients<'a, B: Runtime> {
    /// `dprojected[b t, e + c + h]`, of which z's and the raw step sizes' columns are written; those between are left as they are.
    pub dprojected: MatrixMut<'a, B, B::Activation>,
    /// `dxbc[b t, c]`.
    pub dxbc: MatrixMut<'a, B, B::Activation>,
    /// `da_log[grains, h]`.
    pub da_log: SliceMut<'a, B, f32>,
    /// `dd[grains, h]`.
    pub dd: SliceMut<'a, B, f32>,
    /// `ddelta_bias[grains, h]`.
    pub ddelta_bias: SliceMut<'a, B, f32>,
}

/// The scan of Mamba-2, whose heads have one decay each. See the [module](super) for what every kernel promises.
pub trait HeadScan: Runtime {
    /// The scan with softplus, skip and gate (Dao and Gu, 2024, section 7), for each of the p channels of a head:
    ///
    /// ```text
    /// delta = clamp(softplus(delta_raw + delta_bias))
    /// h_t   = exp(delta_t A) h_{t-1} + delta_t B_t x_t,      A = -exp(a_log), h_0 = 0 for every sample and document
    /// y_t   = C_t . h_t + D x_t
    /// out_t = y_t * silu(z_t)
    /// ```
    ///
    /// delta, A and D are a head's, B and C a group's. `out[b t, h p]` is fp32, as the norm that follows reads it.
    fn head_scan_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()>;
}

/// The gradients of the [scan of heads](HeadScan).
pub trait HeadScanBackward: Runtime {
    /// About the bytes that [`head_scan_backward`](Self::head_scan_backward) takes of the device's memory beside its arguments, and
    /// that a stream keeps for its next kernels; of a CPU, those of one thread.
    fn head_scan_scratch_bytes(&self, shape: HeadScanShape) -> usize;

    /// The gradients of [`head_scan_forward`](HeadScan::head_scan_forward), which saves nothing: states are formed again.
    fn head_scan_backward(
        &self,
        stream: &mut Self::DeviceStream,
        gradients: HeadScanGradients<'_, Self>,
        dout: Matrix<'_, Self, f32>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()>;
}

/// The [scan of heads](HeadScan) of pieces of sequences.
pub trait HeadScanPiece: Runtime {
    /// [`head_scan_forward`](HeadScan::head_scan_forward) of sequences that go on, for generation: `piece.state[b, h, p, n]` is h
    /// before the first position.
    fn head_scan_piece(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        piece: PieceState<'_, Self>,
        inputs: HeadScanInputs<'_, Self>,
        shape: HeadScanShape,
    ) -> Result<()>;
}
