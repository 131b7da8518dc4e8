//! A Mamba block as the recurrence that it is: a state that every token moves on.
//!
//! Memory does not grow with the number of tokens. Projections run over all rows of a piece at once, as matrix products want
//! it; convolution and scan go position by position, over the sequences that have a token there.

use tidemill_kernels::backend::{Output, ScanInputs};
use tidemill_kernels::shape::{ConvShape, GrainRows, ScanShape, SequenceShape};
use tidemill_kernels::{Backend, Matrix, MatrixMut, Slice, SliceMut};

use crate::error::{ModelError, Result};
use crate::generation::incremental::{Incremental, Piece, PiecePass, Room, keep_rows};
use crate::lease::Lease;
use crate::mamba::MambaBlock;
use crate::norm::{NormPass, NormScratch};
use crate::trainable::Device;

/// What a [`MambaBlock`] remembers.
pub struct MambaState<B: Backend> {
    /// `conv[b, e, k - 1]`: the last inputs of the convolution, oldest first.
    conv: B::Buffer<f32>,
    /// `scan[b, e, n]`
    scan: B::Buffer<f32>,
}

/// Activations of one piece; rows are ordered by sequence, then by position.
pub struct MambaRows<B: Backend> {
    norm: NormScratch<B>,
    /// `normed[b t, d]`
    normed: B::Buffer<B::Activation>,
    /// `xz[b t, 2 e]`
    xz: B::Buffer<B::Activation>,
    /// `x[b t, e]`, after the convolution.
    x: B::Buffer<B::Activation>,
    /// `dt_bc[b t, r + 2 n]`
    dt_bc: B::Buffer<B::Activation>,
    /// `delta_raw[b t, e]`
    delta_raw: B::Buffer<B::Activation>,
    /// `gated[b t, e]`
    gated: B::Buffer<B::Activation>,
}

impl MambaBlock {
    /// Elements of what the convolution remembers of a sequence.
    fn conv_elements(&self) -> usize {
        self.inner * (self.taps - 1)
    }

    /// Elements of what the scan remembers of a sequence.
    fn scan_elements(&self) -> usize {
        self.inner * self.states
    }
}

impl<B: Backend> Incremental<B> for MambaBlock {
    type State = MambaState<B>;
    type Workspace = MambaRows<B>;

    fn plan_state(&self, device: &mut Device<'_, B>, room: Room) -> Result<MambaState<B>> {
        let Device { backend, stream } = device;
        Ok(MambaState {
            // One tap remembers nothing, but no device likes a buffer of no elements.
            conv: backend.allocate(stream, (room.sequences * self.conv_elements()).max(1))?,
            scan: backend.allocate(stream, room.sequences * self.scan_elements())?,
        })
    }

    fn plan_workspace(
        blocks: &[&Self],
        device: &mut Device<'_, B>,
        room: Room,
    ) -> Result<MambaRows<B>> {
        let none = || ModelError::config("n_layers", "at least 1", 0);
        let block = blocks.iter().max_by_key(|block| block.inner).ok_or_else(none)?;
        let (rows, d, e) = (room.rows, block.width, block.inner);
        let norm = block.norm.plan(device, GrainRows::new(rows, rows)?)?;
        let Device { backend, stream } = device;
        Ok(MambaRows {
            norm,
            normed: backend.allocate(stream, rows * d)?,
            xz: backend.allocate(stream, rows * 2 * e)?,
            x: backend.allocate(stream, rows * e)?,
            dt_bc: backend.allocate(stream, rows * block.dt_bc_width())?,
            delta_raw: backend.allocate(stream, rows * e)?,
            gated: backend.allocate(stream, rows * e)?,
        })
    }

    fn state_bytes(&self, _positions: usize) -> usize {
        (self.conv_elements() + self.scan_elements()) * size_of::<f32>()
    }

    fn forget(&self, device: &mut Device<'_, B>, state: &mut MambaState<B>) -> Result<()> {
        device.backend.fill_zero(device.stream, SliceMut::all(&mut state.conv))?;
        Ok(device.backend.fill_zero(device.stream, SliceMut::all(&mut state.scan))?)
    }

    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut MambaState<B>,
        kept: &[usize],
        _room: Room,
    ) -> Result<()> {
        keep_rows(device, &mut state.conv, self.conv_elements(), kept)?;
        keep_rows(device, &mut state.scan, self.scan_elements(), kept)
    }

    /// `residual += mixer(norm(residual))`
    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut MambaState<B>,
        workspace: &mut MambaRows<B>,
    ) -> Result<()> {
        let PiecePass { parameters, piece, .. } = pass;
        let (rows, d, e) = (piece.rows(), self.width, self.inner);
        let (columns, places) = (self.dt_bc_width(), &self.tensors);
        let mixer = Mixer { block: self, parameters, piece };
        let normed = SliceMut::all(&mut workspace.normed).matrix(rows, d)?;
        let input = Slice::all(residual).matrix(rows, d)?;
        let grains = GrainRows::new(rows, rows)?;
        let norm_pass = NormPass { parameters, input, grains };
        self.norm.forward(device, normed, &mut workspace.norm, norm_pass)?;
        device.backend.ordered_matmul(
            device.stream,
            SliceMut::all(&mut workspace.xz).matrix(rows, 2 * e)?,
            Slice::all(&workspace.normed).matrix(rows, d)?,
            parameters.weight(&places.in_proj, 2 * e, d)?,
            Output::Overwrite,
        )?;
        for position in 0..piece.positions() {
            mixer.convolve(device, state, workspace, position)?;
        }
        device.backend.ordered_matmul(
            device.stream,
            SliceMut::all(&mut workspace.dt_bc).matrix(rows, columns)?,
            Slice::all(&workspace.x).matrix(rows, e)?,
            parameters.weight(&places.x_proj, columns, e)?,
            Output::Overwrite,
        )?;
        device.backend.ordered_matmul(
            device.stream,
            SliceMut::all(&mut workspace.delta_raw).matrix(rows, e)?,
            Slice::all(&workspace.dt_bc).matrix(rows, columns)?.columns(0, self.rank)?,
            parameters.weight(&places.dt_proj, e, self.rank)?,
            Output::Overwrite,
        )?;
        for position in 0..piece.positions() {
            mixer.scan(device, state, workspace, position)?;
        }
        Ok(device.backend.ordered_matmul_f32(
            device.stream,
            SliceMut::all(residual).matrix(rows, d)?,
            Slice::all(&workspace.gated).matrix(rows, e)?,
            parameters.weight(&places.out_proj, d, e)?,
            Output::Add,
        )?)
    }
}

/// Convolution and scan of one block, a position at a time.
struct Mixer<'a, B: Backend> {
    block: &'a MambaBlock,
    parameters: Lease<'a, B>,
    piece: &'a Piece,
}

impl<B: Backend> Mixer<'_, B> {
    fn convolve(
        &self,
        device: &mut Device<'_, B>,
        state: &mut MambaState<B>,
        rows: &mut MambaRows<B>,
        position: usize,
    ) -> Result<()> {
        let MambaBlock { tensors, inner, taps, .. } = self.block;
        let bias = tensors.conv_bias.as_ref().map(|place| self.parameters.vector(place));
        let live = self.piece.live(position);
        Ok(device.backend.causal_conv1d_silu_step(
            device.stream,
            self.at_mut(&mut rows.x, position, *inner)?,
            SliceMut::new(&mut state.conv, 0, live * self.block.conv_elements())?,
            self.at(&rows.xz, position, 2 * inner)?.columns(0, *inner)?,
            self.parameters.vector(&tensors.conv_weight)?,
            bias.transpose()?,
            ConvShape::new(SequenceShape::new(live, 1)?, live, *inner, *taps)?,
        )?)
    }

    fn scan(
        &self,
        device: &mut Device<'_, B>,
        state: &mut MambaState<B>,
        rows: &mut MambaRows<B>,
        position: usize,
    ) -> Result<()> {
        let MambaBlock { tensors, inner, states, rank, .. } = self.block;
        let (live, columns) = (self.piece.live(position), self.block.dt_bc_width());
        let inputs = ScanInputs {
            delta_raw: self.at(&rows.delta_raw, position, *inner)?,
            delta_bias: self.parameters.vector(&tensors.dt_bias)?,
            x: self.at(&rows.x, position, *inner)?,
            bc: self.at(&rows.dt_bc, position, columns)?.columns(*rank, 2 * states)?,
            z: self.at(&rows.xz, position, 2 * inner)?.columns(*inner, *inner)?,
            a_log: self.parameters.vector(&tensors.a_log)?,
            d: self.parameters.vector(&tensors.d)?,
            starts: None,
        };
        Ok(device.backend.selective_scan_step(
            device.stream,
            self.at_mut(&mut rows.gated, position, *inner)?,
            SliceMut::new(&mut state.scan, 0, live * self.block.scan_elements())?,
            inputs,
            ScanShape::new(SequenceShape::new(live, 1)?, live, *inner, *states)?,
        )?)
    }

    /// The rows of one position of `rows[b t, columns]`, one of each sequence that has it.
    fn at<'b>(
        &self,
        rows: &'b B::Buffer<B::Activation>,
        position: usize,
        columns: usize,
    ) -> Result<Matrix<'b, B, B::Activation>> {
        let (live, stride) = (self.piece.live(position), self.piece.positions() * columns);
        Ok(Matrix::new(rows, position * columns, live, columns, stride, 1)?)
    }

    /// [`at`](Self::at), to be written.
    fn at_mut<'b>(
        &self,
        rows: &'b mut B::Buffer<B::Activation>,
        position: usize,
        columns: usize,
    ) -> Result<MatrixMut<'b, B, B::Activation>> {
        let (live, stride) = (self.piece.live(position), self.piece.positions() * columns);
        Ok(MatrixMut::new(rows, position * columns, live, columns, stride)?)
    }
}
