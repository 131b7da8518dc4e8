//! A Mamba-2 block in generation: a recurrent state that every token advances.
//!
//! Memory does not grow with the number of tokens. Projections, convolution and scan each run over
//! all rows of a piece at once.

use tidemill_kernels::backend::{KernelGroup, PieceState};
use tidemill_kernels::shape::{GrainRows, SequenceShape};
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::block::incremental::{Capacity, Incremental, PiecePass, adopt_row, keep_rows};
use crate::error::Result;
use crate::mamba2::Mamba2Block;
use crate::norm::{NormPass, Normed};
use crate::trainable::Device;

/// The state of a [`Mamba2Block`].
pub struct Mamba2State<B: Backend> {
    /// `conv[b, k - 1, c]`: the last inputs of the convolution, oldest first.
    conv: B::Buffer<B::Activation>,
    /// `scan[b, h, p, n]`
    scan: B::Buffer<f32>,
}

/// Activations of one piece; rows are ordered by sequence, then by position.
pub struct Mamba2Rows<B: Backend> {
    normed: Normed<B>,
    /// `projected[b t, e + c + h]`
    projected: B::Buffer<B::Activation>,
    /// `xbc[b t, c]`, after the convolution.
    xbc: B::Buffer<B::Activation>,
    /// `gated[b t, e]`
    gated: B::Buffer<f32>,
    gated_normed: Normed<B>,
}

impl Mamba2Block {
    /// Elements of the convolution's state of one sequence.
    fn conv_elements(&self) -> usize {
        self.conv_width() * (self.taps - 1)
    }

    /// Elements of the scan's state of one sequence.
    fn scan_elements(&self) -> usize {
        self.inner() * self.sizes.states
    }
}

impl<B: Backend> Incremental<B> for Mamba2Block {
    type State = Mamba2State<B>;
    type Workspace = Mamba2Rows<B>;

    fn generation_kernels(&self) -> Vec<KernelGroup> {
        let scan = KernelGroup::HeadScanPiece { states: self.sizes.states };
        vec![self.norm.kernels(), KernelGroup::CausalConv1dPiece, scan]
    }

    fn plan_state(&self, device: &mut Device<'_, B>, capacity: Capacity) -> Result<Mamba2State<B>> {
        let Device { backend, stream } = device;
        Ok(Mamba2State {
            // A convolution of one tap has no state, but devices refuse a buffer of no elements.
            conv: backend.allocate(stream, (capacity.sequences * self.conv_elements()).max(1))?,
            scan: backend.allocate(stream, capacity.sequences * self.scan_elements())?,
        })
    }

    fn plan_workspace(
        &self,
        device: &mut Device<'_, B>,
        capacity: Capacity,
    ) -> Result<Mamba2Rows<B>> {
        let (rows, e) = (capacity.rows, self.inner());
        let normed = self.norm.plan_normed(device, rows)?;
        let gated_normed = self.gated_norm.plan_normed(device, rows)?;
        let Device { backend, stream } = device;
        Ok(Mamba2Rows {
            normed,
            projected: backend.allocate(stream, rows * self.projected_width())?,
            xbc: backend.allocate(stream, rows * self.conv_width())?,
            gated: backend.allocate(stream, rows * e)?,
            gated_normed,
        })
    }

    fn state_bytes(&self, capacity: Capacity) -> usize {
        let conv = self.conv_elements() * size_of::<B::Activation>();
        capacity.sequences.saturating_mul(conv + self.scan_elements() * size_of::<f32>())
    }

    fn forget(&self, device: &mut Device<'_, B>, state: &mut Mamba2State<B>) -> Result<()> {
        device.backend.fill_zero(device.stream, SliceMut::all(&mut state.conv))?;
        Ok(device.backend.fill_zero(device.stream, SliceMut::all(&mut state.scan))?)
    }

    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut Mamba2State<B>,
        kept: &[usize],
    ) -> Result<()> {
        keep_rows(device, &mut state.conv, self.conv_elements(), kept)?;
        keep_rows(device, &mut state.scan, self.scan_elements(), kept)
    }

    fn adopt(
        &self,
        device: &mut Device<'_, B>,
        state: &mut Mamba2State<B>,
        place: usize,
        from: &Mamba2State<B>,
        _positions: usize,
    ) -> Result<()> {
        let (conv, scan) = (self.conv_elements(), self.scan_elements());
        adopt_row(device, (&mut state.conv, conv), place, (&from.conv, conv))?;
        adopt_row(device, (&mut state.scan, scan), place, (&from.scan, scan))
    }

    /// `residual += mixer(norm(residual))`
    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut Mamba2State<B>,
        workspace: &mut Mamba2Rows<B>,
    ) -> Result<()> {
        let PiecePass { parameters, products, piece, lengths, .. } = pass;
        let (rows, d, e, c) = (piece.rows(), self.width, self.inner(), self.conv_width());
        let columns = self.projected_width();
        let sequences = SequenceShape::new(piece.sequences(), piece.positions())?;
        let samples = sequences.samples();
        let grains = GrainRows::new(rows, rows)?;
        let input = Slice::all(residual).matrix(rows, d)?;
        let norm_pass = NormPass { parameters, input, grains };
        self.norm.forward(device, &mut workspace.normed, norm_pass)?;
        products.multiply(
            device,
            SliceMut::all(&mut workspace.projected).matrix(rows, columns)?,
            workspace.normed.rows(rows)?,
            parameters.weight(&self.tensors.in_proj, columns, d)?,
        )?;
        let projected = Slice::all(&workspace.projected).matrix(rows, columns)?;
        device.backend.causal_conv1d_silu_piece(
            device.stream,
            SliceMut::all(&mut workspace.xbc).matrix(rows, c)?,
            PieceState {
                state: SliceMut::new(&mut state.conv, 0, samples * self.conv_elements())?,
                lengths,
            },
            self.conv_inputs(parameters, projected, None)?,
            self.conv_shape(sequences, samples)?,
        )?;
        let xbc = Slice::all(&workspace.xbc).matrix(rows, c)?;
        device.backend.head_scan_piece(
            device.stream,
            SliceMut::all(&mut workspace.gated).matrix(rows, e)?,
            PieceState {
                state: SliceMut::new(&mut state.scan, 0, samples * self.scan_elements())?,
                lengths,
            },
            self.scan_inputs(parameters, [projected, xbc], None)?,
            self.scan_shape(sequences, samples)?,
        )?;
        let input = Slice::all(&workspace.gated).matrix(rows, e)?;
        let norm_pass = NormPass { parameters, input, grains };
        self.gated_norm.forward(device, &mut workspace.gated_normed, norm_pass)?;
        products.add(
            device,
            SliceMut::all(residual).matrix(rows, d)?,
            workspace.gated_normed.rows(rows)?,
            parameters.weight(&self.tensors.out_proj, d, e)?,
        )
    }
}
