//! A Mamba block in generation: a recurrent state that every token advances.
//!
//! Memory does not grow with the number of tokens. Projections, convolution and scan each run over
//! all rows of a piece at once.

use tidemill_kernels::backend::{ConvInputs, KernelGroup, PieceState, ScanStepInputs};
use tidemill_kernels::shape::{ConvShape, GrainRows, ScanShape, SequenceShape};
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::block::incremental::{Capacity, Incremental, PiecePass, adopt_row, keep_rows};
use crate::error::Result;
use crate::linear::Products;
use crate::mamba::MambaBlock;
use crate::norm::{NormPass, Normed};
use crate::trainable::Device;

/// The state of a [`MambaBlock`].
pub struct MambaState<B: Backend> {
    /// `conv[b, k - 1, e]`: the last inputs of the convolution, oldest first.
    conv: B::Buffer<B::Activation>,
    /// `scan[b, e, n]`
    scan: B::Buffer<f32>,
}

/// Activations of one piece; rows are ordered by sequence, then by position.
pub struct MambaRows<B: Backend> {
    normed: Normed<B>,
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
    /// Elements of the convolution's state of one sequence.
    fn conv_elements(&self) -> usize {
        self.inner * (self.taps - 1)
    }

    /// Elements of the scan's state of one sequence.
    fn scan_elements(&self) -> usize {
        self.inner * self.states
    }
}

impl<B: Backend> Incremental<B> for MambaBlock {
    type State = MambaState<B>;
    type Workspace = MambaRows<B>;

    fn generation_kernels(&self) -> Vec<KernelGroup> {
        let scan = KernelGroup::SelectiveScanPiece { channels: self.inner, states: self.states };
        vec![self.norm.kernels(), KernelGroup::CausalConv1dPiece, scan]
    }

    fn plan_state(&self, device: &mut Device<'_, B>, capacity: Capacity) -> Result<MambaState<B>> {
        let Device { backend, stream } = device;
        Ok(MambaState {
            // A convolution of one tap has no state, but devices refuse a buffer of no elements.
            conv: backend.allocate(stream, (capacity.sequences * self.conv_elements()).max(1))?,
            scan: backend.allocate(stream, capacity.sequences * self.scan_elements())?,
        })
    }

    fn plan_workspace(
        &self,
        device: &mut Device<'_, B>,
        capacity: Capacity,
    ) -> Result<MambaRows<B>> {
        let (rows, e) = (capacity.rows, self.inner);
        let normed = self.norm.plan_normed(device, rows)?;
        let Device { backend, stream } = device;
        Ok(MambaRows {
            normed,
            xz: backend.allocate(stream, rows * 2 * e)?,
            x: backend.allocate(stream, rows * e)?,
            dt_bc: backend.allocate(stream, rows * self.dt_bc_width())?,
            delta_raw: backend.allocate(stream, rows * e)?,
            gated: backend.allocate(stream, rows * e)?,
        })
    }

    fn state_bytes(&self, capacity: Capacity) -> usize {
        let conv = self.conv_elements() * size_of::<B::Activation>();
        capacity.sequences.saturating_mul(conv + self.scan_elements() * size_of::<f32>())
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
    ) -> Result<()> {
        keep_rows(device, &mut state.conv, self.conv_elements(), kept)?;
        keep_rows(device, &mut state.scan, self.scan_elements(), kept)
    }

    fn adopt(
        &self,
        device: &mut Device<'_, B>,
        state: &mut MambaState<B>,
        place: usize,
        from: &MambaState<B>,
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
        state: &mut MambaState<B>,
        workspace: &mut MambaRows<B>,
    ) -> Result<()> {
        let PiecePass { parameters, products, piece, lengths, .. } = pass;
        let (rows, d, e) = (piece.rows(), self.width, self.inner);
        let (columns, places) = (self.dt_bc_width(), &self.tensors);
        let sequences = SequenceShape::new(piece.sequences(), piece.positions())?;
        let samples = sequences.samples();
        let input = Slice::all(residual).matrix(rows, d)?;
        let grains = GrainRows::new(rows, rows)?;
        let norm_pass = NormPass { parameters, input, grains };
        self.norm.forward(device, &mut workspace.normed, norm_pass)?;
        products.multiply(
            device,
            SliceMut::all(&mut workspace.xz).matrix(rows, 2 * e)?,
            workspace.normed.rows(rows)?,
            parameters.weight(&places.in_proj, 2 * e, d)?,
        )?;
        let bias = places.conv_bias.as_ref().map(|place| parameters.vector(place));
        device.backend.causal_conv1d_silu_piece(
            device.stream,
            SliceMut::all(&mut workspace.x).matrix(rows, e)?,
            PieceState {
                state: SliceMut::new(&mut state.conv, 0, samples * self.conv_elements())?,
                lengths,
            },
            ConvInputs {
                x: Slice::all(&workspace.xz).matrix(rows, 2 * e)?.columns(0, e)?,
                weight: parameters.vector(&places.conv_weight)?,
                bias: bias.transpose()?,
                starts: None,
            },
            ConvShape::new(sequences, samples, e, self.taps)?,
        )?;
        products.multiply(
            device,
            SliceMut::all(&mut workspace.dt_bc).matrix(rows, columns)?,
            Slice::all(&workspace.x).matrix(rows, e)?,
            parameters.weight(&places.x_proj, columns, e)?,
        )?;
        let out = SliceMut::all(&mut workspace.gated).matrix(rows, e)?;
        let scanned = SliceMut::new(&mut state.scan, 0, samples * self.scan_elements())?;
        let mut delta_raw = SliceMut::all(&mut workspace.delta_raw).matrix(rows, e)?;
        let dt_bc = Slice::all(&workspace.dt_bc).matrix(rows, columns)?;
        let inputs = ScanStepInputs {
            low: dt_bc.columns(0, self.rank)?,
            dt_weight: parameters.weight(&places.dt_proj, e, self.rank)?,
            delta_bias: parameters.vector(&places.dt_bias)?,
            x: Slice::all(&workspace.x).matrix(rows, e)?,
            bc: dt_bc.columns(self.rank, 2 * self.states)?,
            z: Slice::all(&workspace.xz).matrix(rows, 2 * e)?.columns(e, e)?,
            a_log: parameters.vector(&places.a_log)?,
            d: parameters.vector(&places.d)?,
        };
        let shape = ScanShape::new(sequences, samples, e, self.states)?;
        let is_step = sequences.positions() == 1 && lengths.is_none();
        if is_step && products == Products::Ordered {
            let Device { backend, stream } = device;
            backend.selective_scan_step(stream, out, scanned, delta_raw, inputs, shape)?;
        } else {
            products.multiply(device, delta_raw.reborrow(), inputs.low, inputs.dt_weight)?;
            let inputs = inputs.with(delta_raw.as_matrix());
            let Device { backend, stream } = device;
            let piece = PieceState { state: scanned, lengths };
            backend.selective_scan_piece(stream, out, piece, inputs, shape)?;
        }
        products.add(
            device,
            SliceMut::all(residual).matrix(rows, d)?,
            Slice::all(&workspace.gated).matrix(rows, e)?,
            parameters.weight(&places.out_proj, d, e)?,
        )
    }
}
