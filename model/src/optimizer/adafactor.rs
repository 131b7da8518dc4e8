//! Adafactor (Shazeer and Stern, 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4 to 6).
//!
//! For a matrix it keeps the mean squares of rows and of columns instead of those of every element,
//! so that its states take little memory. Names and means are those of PyTorch and Hugging Face;
//! the paper has sums, which give the same update.

use serde::{Deserialize, Serialize};
use tidemill_kernels::Backend;

use super::OptimizerSettings;
use super::on_host::on_host;
use super::rule::{
    HostViews, StateExtent, StateSpec, StateTensors, UpdateRule, UpdateScalars, UpdateUnit,
    UpdateViews,
};
use crate::error::{ModelError, Result};
use crate::layout::{Layout, Tensor};
use crate::trainable::Device;

/// The mean squares of rows and of columns of matrices, and those of each element of vectors.
pub(super) const STATES: [StateSpec; 3] = [
    StateSpec { name: "exp_avg_sq_row", extent: StateExtent::Row, tensors: StateTensors::MATRICES },
    StateSpec {
        name: "exp_avg_sq_col",
        extent: StateExtent::Column,
        tensors: StateTensors::MATRICES,
    },
    StateSpec { name: "exp_avg_sq", extent: StateExtent::Element, tensors: StateTensors::VECTORS },
];

/// `[optimizer.adafactor]`: settings that no other optimizer has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdafactorSettings {
    /// The second moments of update t decay by `1 - t^-decay_exponent`: 0.8.
    pub decay_exponent: f64,
    /// The largest root mean square of a tensor's update, before the learning rate: 1.
    pub clip_threshold: f64,
    /// The unit of the learning rate; by default the size of the parameters.
    pub step_size: StepSize,
    /// The least root mean square of a tensor's parameters that a relative step counts with: 1e-3.
    pub parameter_rms_floor: f64,
}

/// The unit of a learning rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepSize {
    /// The root mean square of the tensor's parameters: the paper's relative step size.
    #[default]
    Relative,
    /// One.
    Absolute,
}

impl Default for AdafactorSettings {
    fn default() -> Self {
        Self {
            decay_exponent: 0.8,
            clip_threshold: 1.0,
            step_size: StepSize::Relative,
            parameter_rms_floor: 1e-3,
        }
    }
}

impl AdafactorSettings {
    /// Checks every value.
    ///
    /// # Errors
    /// A value that no update can use, named by its key.
    pub(super) fn check(&self) -> Result<()> {
        for (key, value) in [
            ("decay_exponent", self.decay_exponent),
            ("clip_threshold", self.clip_threshold),
            ("parameter_rms_floor", self.parameter_rms_floor),
        ] {
            if !((value as f32).is_finite() && value as f32 > 0.0) {
                let key = format!("optimizer.adafactor.{key}");
                return Err(ModelError::config(key, "a finite number above 0, in fp32", value));
            }
        }
        Ok(())
    }
}

/// The update rule of Adafactor without a first moment. With `g` the clipped gradient of a tensor X
/// in update t, `b = 1 - t^-0.8`, and RMS the root mean square over the tensor:
///
/// ```text
/// R = b R + (1 - b) mean over columns of (g^2 + eps)      of matrices, one number a row
/// C = b C + (1 - b) mean over rows of (g^2 + eps)         and one a column
/// V = R C / mean(R);  V = b V + (1 - b) (g^2 + eps)       of vectors
/// U = g / sqrt(V)
/// X = X decay_factor - learning_rate max(parameter_rms_floor, RMS(X)) U / max(1, RMS(U) / clip_threshold)
/// ```
///
/// The learning rate is the run's and its schedule's, where the paper has `min(1e-2, 1 / sqrt(t))`.
/// The update is computed on the host in f64, from states in fp32, and every sum over a tensor has
/// a fixed order.
#[derive(Clone, Debug)]
pub struct Adafactor {
    settings: OptimizerSettings,
}

impl Adafactor {
    /// The rule of `settings`.
    pub fn new(settings: OptimizerSettings) -> Self {
        Self { settings }
    }

    /// One update of a tensor; the tensor is a matrix if it has states of rows.
    fn apply(&self, views: HostViews<'_>, scalars: &UpdateScalars) -> Result<()> {
        let HostViews { parameters, states, gradient, .. } = views;
        let found = states.len();
        let [row, column, element]: [&mut [f32]; 3] =
            states.try_into().map_err(|_| ModelError::UpdateStates { expected: 3, found })?;
        let elements = parameters.len();
        if elements == 0 {
            return Ok(());
        }
        let own = self.settings.adafactor.unwrap_or_default();
        let averages = Averages {
            rest: libm::pow(scalars.update as f64, -own.decay_exponent),
            // The check of a run's settings ensures that there is one.
            eps: self.settings.eps.unwrap_or_default(),
        };
        let scale = f64::from(scalars.gradient_scale);
        let mut update: Vec<f64> = gradient.iter().map(|&g| f64::from(g) * scale).collect();
        match row.is_empty() {
            true => averages.divide_vector(&mut update, element),
            false => averages.divide_matrix(&mut update, row, column),
        }
        let root_mean = |squares: f64| (squares / elements as f64).sqrt();
        let clipped = root_mean(sum(elements, |index| update[index] * update[index]));
        let size = match own.step_size {
            StepSize::Absolute => 1.0,
            StepSize::Relative => {
                let parameter = |index: usize| f64::from(parameters[index]);
                let squares = sum(elements, |index| parameter(index) * parameter(index));
                root_mean(squares).max(own.parameter_rms_floor)
            }
        };
        let step = scalars.learning_rate * size / (clipped / own.clip_threshold).max(1.0);
        let decay_factor = self.settings.decay_factor(scalars);
        for (parameter, update) in parameters.iter_mut().zip(&update) {
            *parameter = (f64::from(*parameter) * decay_factor - step * update) as f32;
        }
        Ok(())
    }
}

/// The moving average of second moments: `1 - rest` is the weight of the old value.
struct Averages {
    rest: f64,
    eps: f64,
}

impl Averages {
    fn add(&self, state: &mut f32, mean_square: f64) {
        *state = ((1.0 - self.rest) * f64::from(*state) + self.rest * mean_square) as f32;
    }

    /// Divides the gradient of a vector by the roots of its second moments.
    fn divide_vector(&self, gradient: &mut [f64], element: &mut [f32]) {
        for (g, state) in gradient.iter_mut().zip(element) {
            self.add(state, *g * *g + self.eps);
            *g /= f64::from(*state).sqrt();
        }
    }

    /// The same for a matrix, whose second moments are the products of those of rows and columns.
    fn divide_matrix(&self, gradient: &mut [f64], row: &mut [f32], column: &mut [f32]) {
        let [rows, columns] = [row.len(), column.len()];
        let square = |g: f64| g * g + self.eps;
        let mut of_columns = vec![0.0; columns];
        for (values, state) in gradient.chunks_exact(columns).zip(row.iter_mut()) {
            self.add(state, sum(columns, |index| square(values[index])) / columns as f64);
            for (of_column, &g) in of_columns.iter_mut().zip(values) {
                *of_column += square(g);
            }
        }
        for (state, of_column) in column.iter_mut().zip(&of_columns) {
            self.add(state, of_column / rows as f64);
        }
        let mean = sum(rows, |index| f64::from(row[index])) / rows as f64;
        for (of_column, &state) in of_columns.iter_mut().zip(&*column) {
            *of_column = 1.0 / f64::from(state).sqrt();
        }
        for (values, &state) in gradient.chunks_exact_mut(columns).zip(&*row) {
            let of_row = (mean / f64::from(state)).sqrt();
            for (g, of_column) in values.iter_mut().zip(&of_columns) {
                *g *= of_row * of_column;
            }
        }
    }
}

/// `of(0) + of(1) + ...`, `elements` terms, in a fixed order: sixteen partial sums over every
/// sixteenth term, then a tree over them.
fn sum(elements: usize, of: impl Fn(usize) -> f64) -> f64 {
    let mut sums = [0.0; 16];
    for start in (0..elements).step_by(sums.len()) {
        for (index, sum) in (start..elements).zip(&mut sums) {
            *sum += of(index);
        }
    }
    for half in [8, 4, 2, 1] {
        for index in 0..half {
            sums[index] += sums[index + half];
        }
    }
    sums[0]
}

impl<B: Backend> UpdateRule<B> for Adafactor {
    fn states(&self) -> &[StateSpec] {
        &STATES
    }

    fn unit(&self) -> UpdateUnit {
        UpdateUnit::Tensor
    }

    fn scratch_bytes(&self, layout: &Layout) -> usize {
        size_of::<f32>() * layout.tensors().iter().map(Tensor::elements).max().unwrap_or(0)
    }

    fn update(
        &self,
        device: &mut Device<'_, B>,
        views: UpdateViews<'_, B>,
        scalars: UpdateScalars,
    ) -> Result<()> {
        on_host(device, views, |views| self.apply(views, &scalars))
    }
}

#[cfg(test)]
mod tests;
