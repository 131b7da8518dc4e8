//! The block in generation: its state is the newest token.

use tidemill_kernels::cpu::Buffer;
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Cpu, Runtime, Slice, SliceMut};
use tidemill_model::generation::{Capacity, Incremental, PiecePass, adopt_row, keep_rows};
use tidemill_model::norm::{NormPass, Normed};
use tidemill_model::{Device, Result};

use super::{ShiftedGate, gate};

/// `n` of the newest token of each sequence, `[b, d]`.
pub struct State {
    newest: Buffer<f32>,
}

/// Activations of one piece.
pub struct Rows {
    normed: Normed<Cpu>,
    mixed: Buffer<f32>,
    up: Buffer<f32>,
    gated: Buffer<f32>,
}

impl Incremental<Cpu> for ShiftedGate {
    type State = State;
    type Workspace = Rows;

    fn plan_state(&self, device: &mut Device<'_, Cpu>, capacity: Capacity) -> Result<State> {
        let elements = capacity.sequences * self.width();
        Ok(State { newest: device.backend.allocate(device.stream, elements)? })
    }

    fn plan_workspace(&self, device: &mut Device<'_, Cpu>, capacity: Capacity) -> Result<Rows> {
        let (rows, d, f) = (capacity.rows, self.width(), self.gated_width());
        let normed = self.norm.plan_normed(device, rows)?;
        let mut allocate = |elements| device.backend.allocate(device.stream, elements);
        Ok(Rows {
            normed,
            mixed: allocate(rows * d)?,
            up: allocate(rows * 2 * f)?,
            gated: allocate(rows * f)?,
        })
    }

    fn state_bytes(&self, capacity: Capacity) -> usize {
        capacity.sequences.saturating_mul(4 * self.width())
    }

    fn forget(&self, device: &mut Device<'_, Cpu>, state: &mut State) -> Result<()> {
        let newest = SliceMut::all(&mut state.newest);
        Ok(device.backend.fill_zero(device.stream, newest)?)
    }

    fn keep(&self, device: &mut Device<'_, Cpu>, state: &mut State, kept: &[usize]) -> Result<()> {
        keep_rows(device, &mut state.newest, self.width(), kept)
    }

    fn adopt(
        &self,
        device: &mut Device<'_, Cpu>,
        state: &mut State,
        place: usize,
        from: &State,
        _positions: usize,
    ) -> Result<()> {
        let d = self.width();
        adopt_row(device, (&mut state.newest, d), place, (&from.newest, d))
    }

    fn advance(
        &self,
        device: &mut Device<'_, Cpu>,
        residual: &mut Buffer<f32>,
        pass: PiecePass<'_, Cpu>,
        state: &mut State,
        workspace: &mut Rows,
    ) -> Result<()> {
        let PiecePass { parameters, products, piece, lengths, .. } = pass;
        let (rows, d, f) = (piece.rows(), self.width(), self.gated_width());
        let Rows { normed, mixed, up, gated } = workspace;
        let input = Slice::all(&*residual).matrix(rows, d)?;
        let norm_pass = NormPass { parameters, input, grains: GrainRows::new(rows, rows)? };
        self.norm.forward(device, normed, norm_pass)?;

        let share = self.share(device, parameters)?;
        let lengths = match lengths {
            Some(lengths) => device.backend.to_vec(device.stream, lengths)?,
            None => vec![piece.positions() as u32; piece.sequences()],
        };
        let normed = normed.buffer().as_slice();
        for (sequence, &length) in lengths.iter().enumerate() {
            let newest = &mut state.newest.as_mut_slice()[sequence * d..][..d];
            for row in sequence * piece.positions()..sequence * piece.positions() + length as usize
            {
                for (column, newest) in newest.iter_mut().enumerate() {
                    let at = row * d + column;
                    let before = std::mem::replace(newest, normed[at]);
                    mixed.as_mut_slice()[at] = share[column].mul_add(before, normed[at]);
                }
            }
        }
        let mixed = Slice::all(&*mixed).matrix(rows, d)?;
        let out = SliceMut::all(&mut *up).matrix(rows, 2 * f)?;
        self.up.forward(device, products, out, mixed, parameters)?;
        gate(gated, up, rows, f);
        let out = SliceMut::all(residual).matrix(rows, d)?;
        let gated = Slice::all(&*gated).matrix(rows, f)?;
        self.down.forward_residual(device, products, out, gated, parameters)
    }
}
