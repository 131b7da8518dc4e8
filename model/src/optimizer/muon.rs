//! Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al., 2025, "Muon is Scalable for LLM
//! Training"), in the order of PyTorch's `torch.optim.Muon`.
//!
//! A hidden layer's matrix moves by its orthogonalized momentum: five iterations of matrix products
//! take the place of a second moment. AdamW updates all other tensors: tables, vectors and filters.

use serde::{Deserialize, Serialize};
use tidemill_kernels::backend::{Output, Values, ValuesMut};
use tidemill_kernels::{Backend, Run, Slice, SliceMut};

use super::rule::{
    StateExtent, StateSpec, StateTensors, UpdateRule, UpdateScalars, UpdateUnit, UpdateViews,
};
use super::{AdamW, OptimizerSettings};
use crate::error::{ModelError, Result};
use crate::layout::{Layout, Tensor};
use crate::trainable::Device;

const OTHERS: StateTensors = StateTensors::ALL_BUT_HIDDEN_MATRICES;

/// The momentum of hidden matrices, and AdamW's moments of all other tensors.
pub(super) const STATES: [StateSpec; 3] = [
    StateSpec {
        name: "momentum_buffer",
        extent: StateExtent::Element,
        tensors: StateTensors::HIDDEN_MATRICES,
    },
    StateSpec { name: "exp_avg", extent: StateExtent::Element, tensors: OTHERS },
    StateSpec { name: "exp_avg_sq", extent: StateExtent::Element, tensors: OTHERS },
];

/// Jordan's coefficients of `X = a X + b (X X^T) X + c (X X^T)^2 X`, which bring singular values
/// from (0, 1] close to 1 in five steps.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];
/// The least norm that a matrix is divided by.
const LEAST_NORM: f64 = 1e-7;

/// `[optimizer.muon]`: settings that no other optimizer has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MuonSettings {
    /// The decay of the momentum: 0.95.
    pub momentum: f64,
    /// Which momentum is orthogonalized.
    pub lookahead: Lookahead,
    /// Newton-Schulz iterations: 5.
    pub iterations: u32,
    /// The factor on the learning rate of a matrix.
    pub step_size: MuonStepSize,
}

/// Which momentum is orthogonalized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookahead {
    /// The momentum one gradient ahead (Nesterov).
    #[default]
    Nesterov,
    /// The momentum itself.
    None,
}

/// The factor on the learning rate of a matrix of `rows` and `columns`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MuonStepSize {
    /// `0.2 sqrt(max(rows, columns))`: updates are then as large as AdamW's, so that one rate
    /// serves both (Liu et al.).
    #[default]
    LikeAdamw,
    /// `sqrt(max(1, rows / columns))` (Jordan et al.).
    Original,
}

impl MuonStepSize {
    fn factor(self, [rows, columns]: [usize; 2]) -> f64 {
        match self {
            Self::LikeAdamw => 0.2 * (rows.max(columns) as f64).sqrt(),
            Self::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
        }
    }
}

impl Default for MuonSettings {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            lookahead: Lookahead::default(),
            iterations: 5,
            step_size: MuonStepSize::default(),
        }
    }
}

impl MuonSettings {
    /// Checks every value.
    ///
    /// # Errors
    /// A value that no update can use, named by its key.
    pub(super) fn check(&self) -> Result<()> {
        if !(self.momentum >= 0.0 && (self.momentum as f32) < 1.0) {
            let expected = "a number of at least 0 and below 1, in fp32";
            return Err(ModelError::config("optimizer.muon.momentum", expected, self.momentum));
        }
        if !(1..=20).contains(&self.iterations) {
            let key = "optimizer.muon.iterations";
            return Err(ModelError::config(key, "a number from 1 to 20", self.iterations));
        }
        Ok(())
    }
}

/// The update rule of Muon. With `g` the clipped gradient of a hidden matrix P of r rows and c columns:
///
/// ```text
/// M = momentum M + (1 - momentum) g;   U = momentum M + (1 - momentum) g   (without lookahead: M)
/// X = U / max(|U|, 1e-7), |.| the Frobenius norm
/// five times: A = X X^T;   X = 3.4445 X + (-4.775 A + 2.0315 A A) X        (of more rows than columns: of the transpose)
/// P = P decay_factor - learning_rate 0.2 sqrt(max(r, c)) X
/// ```
///
/// X, A and the products of them have the activation type, as matrix products read it: bf16 in bf16
/// training, as published. The norm is computed in f64.
#[derive(Clone, Debug)]
pub struct Muon {
    settings: OptimizerSettings,
    others: AdamW,
}

impl Muon {
    /// The rule of `settings`.
    pub fn new(settings: OptimizerSettings) -> Self {
        Self { others: AdamW::new(settings.clone()), settings }
    }

    /// One update of a hidden matrix.
    fn update_matrix<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        tensor: &Tensor,
        views: UpdateViews<'_, B>,
        scalars: &UpdateScalars,
    ) -> Result<()> {
        let own = self.settings.muon.unwrap_or_default();
        let (mut parameters, [mut momentum, _, _], gradient) = views.split()?;
        let (sides, elements) = (tensor.matrix(), tensor.elements());
        let Device { backend, stream } = device;
        let kept = own.momentum as f32;
        let rest = ((1.0 - own.momentum) * f64::from(scalars.gradient_scale)) as f32;
        backend.axpby(
            stream,
            ValuesMut::Fp32(momentum.reborrow()),
            kept,
            rest,
            Values::Fp32(gradient),
        )?;
        let mut update = backend.allocate::<f32>(stream, elements)?;
        let mut direction = |keep, factor, of| {
            backend.axpby(stream, ValuesMut::Fp32(SliceMut::all(&mut update)), keep, factor, of)
        };
        match own.lookahead {
            Lookahead::Nesterov => {
                direction(0.0, rest, Values::Fp32(gradient))?;
                direction(1.0, kept, Values::Fp32(momentum.as_slice()))?;
            }
            Lookahead::None => direction(0.0, 1.0, Values::Fp32(momentum.as_slice()))?,
        }
        let orthogonal = orthogonalized(device, &update, sides, own.iterations)?;

        let Device { backend, stream } = device;
        let mut joined = update;
        let all = Run::all(elements);
        backend.join_master(stream, SliceMut::all(&mut joined), parameters.as_master(), &all)?;
        let step = scalars.learning_rate * own.step_size.factor(sides);
        backend.axpby(
            stream,
            ValuesMut::Fp32(SliceMut::all(&mut joined)),
            self.settings.decay_factor(scalars) as f32,
            -step as f32,
            Values::Activations(Slice::all(&orthogonal)),
        )?;
        Ok(backend.split_master(stream, parameters.reborrow(), Slice::all(&joined))?)
    }
}

/// Approximates `U V^T` for a matrix `U S V^T`: Newton-Schulz iterations bring its singular values
/// close to 1.
fn orthogonalized<B: Backend>(
    Device { backend, stream }: &mut Device<'_, B>,
    matrix: &B::Buffer<f32>,
    [rows, columns]: [usize; 2],
    iterations: u32,
) -> Result<B::Buffer<B::Activation>> {
    let elements = rows * columns;
    let mut squares = backend.allocate::<f64>(stream, 1)?;
    let (sums, all) = (SliceMut::all(&mut squares), Slice::all(matrix));
    backend.sums_of_squares(stream, sums, all, &[elements])?;
    let squares = backend.to_vec(stream, Slice::all(&squares))?;
    let norm = squares.iter().sum::<f64>().sqrt().max(LEAST_NORM);

    let side = rows.min(columns);
    let mut x = backend.allocate::<B::Activation>(stream, elements)?;
    let mut next = backend.allocate::<B::Activation>(stream, elements)?;
    let mut gram = backend.allocate::<B::Activation>(stream, side * side)?;
    let mut polynomial = backend.allocate::<B::Activation>(stream, side * side)?;
    let scaled = ValuesMut::Activations(SliceMut::all(&mut x));
    backend.axpby(stream, scaled, 0.0, (1.0 / norm) as f32, Values::Fp32(Slice::all(matrix)))?;
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..iterations {
        let own = Slice::all(&x).matrix(rows, columns)?;
        let out = SliceMut::all(&mut gram).matrix(side, side)?;
        let of_rows = rows <= columns;
        let factors = if of_rows { [own, own.transposed()] } else { [own.transposed(), own] };
        backend.matmul(stream, out, factors[0], factors[1], Output::Overwrite)?;
        let square = Slice::all(&gram).matrix(side, side)?;
        let out = SliceMut::all(&mut polynomial).matrix(side, side)?;
        backend.matmul(stream, out, square, square, Output::Overwrite)?;
        let sum = ValuesMut::Activations(SliceMut::all(&mut polynomial));
        backend.axpby(stream, sum, c, b, Values::Activations(Slice::all(&gram)))?;
        let square = Slice::all(&polynomial).matrix(side, side)?;
        let out = SliceMut::all(&mut next).matrix(rows, columns)?;
        let factors = if of_rows { [square, own] } else { [own, square] };
        backend.matmul(stream, out, factors[0], factors[1], Output::Overwrite)?;
        let sum = ValuesMut::Activations(SliceMut::all(&mut next));
        backend.axpby(stream, sum, 1.0, a, Values::Activations(Slice::all(&x)))?;
        std::mem::swap(&mut x, &mut next);
    }
    Ok(x)
}

impl<B: Backend> UpdateRule<B> for Muon {
    fn states(&self) -> &[StateSpec] {
        &STATES
    }

    fn unit(&self) -> UpdateUnit {
        UpdateUnit::Tensor
    }

    fn scratch_bytes(&self, layout: &Layout) -> usize {
        let of = |tensor: &Tensor| {
            let [rows, columns] = tensor.matrix();
            let side = rows.min(columns);
            let of_activations = 2 * (rows * columns + side * side) * size_of::<B::Activation>();
            rows * columns * size_of::<f32>() + of_activations
        };
        layout
            .tensors()
            .iter()
            .filter(|tensor| tensor.is_hidden_matrix())
            .map(of)
            .max()
            .unwrap_or(0)
    }

    fn update(
        &self,
        device: &mut Device<'_, B>,
        views: UpdateViews<'_, B>,
        scalars: UpdateScalars,
    ) -> Result<()> {
        match views.tensor {
            Some(tensor) if tensor.is_hidden_matrix() && tensor.elements() > 0 => {
                self.update_matrix(device, tensor, views, &scalars)
            }
            _ => {
                let UpdateViews { tensor, parameters, mut states, gradient } = views;
                // AdamW's states come after the momentum, which has no elements for this tensor.
                let states = states.split_off(1.min(states.len()));
                let views = UpdateViews { tensor, parameters, states, gradient };
                self.others.update(device, views, scalars)
            }
        }
    }
}

#[cfg(test)]
mod tests;
