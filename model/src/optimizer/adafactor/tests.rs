//! Adafactor against its published definition in f64.

use super::*;
use crate::layout::{Decay, Layout, Tensor};
use crate::optimizer::{OptimizerName, UpdateTerms, WeightDecay};

/// The states of a matrix in the paper: sums of rows and of columns.
struct Definition {
    parameters: Vec<Vec<f64>>,
    row_sums: Vec<f64>,
    column_sums: Vec<f64>,
}

/// The root mean square of a matrix.
fn rms(matrix: &[Vec<f64>]) -> f64 {
    let elements = matrix.iter().map(Vec::len).sum::<usize>() as f64;
    (matrix.iter().flatten().map(|x| x * x).sum::<f64>() / elements).sqrt()
}

impl Definition {
    /// Algorithm 4 of the paper, with the factored second moments of its section 3, the update clipping of its section 6 and the
    /// relative step size of its section 8; `rate` is its rho.
    fn update(&mut self, gradient: &[Vec<f64>], t: u64, rate: f64, own: &AdafactorSettings) {
        let (eps1, eps2, d) = (1e-30, own.parameter_rms_floor, own.clip_threshold);
        let beta = 1.0 - (t as f64).powf(-own.decay_exponent);
        let square = |i: usize, j: usize| gradient[i][j] * gradient[i][j] + eps1;
        let (n, m) = (gradient.len(), gradient[0].len());
        for i in 0..n {
            let sum: f64 = (0..m).map(|j| square(i, j)).sum();
            self.row_sums[i] = beta * self.row_sums[i] + (1.0 - beta) * sum;
        }
        for j in 0..m {
            let sum: f64 = (0..n).map(|i| square(i, j)).sum();
            self.column_sums[j] = beta * self.column_sums[j] + (1.0 - beta) * sum;
        }
        let total: f64 = self.row_sums.iter().sum();
        let moment = |i: usize, j: usize| self.row_sums[i] * self.column_sums[j] / total;
        let unclipped: Vec<Vec<f64>> = (0..n)
            .map(|i| (0..m).map(|j| gradient[i][j] / moment(i, j).sqrt()).collect())
            .collect();
        let size = match own.step_size {
            StepSize::Relative => rms(&self.parameters).max(eps2),
            StepSize::Absolute => 1.0,
        };
        let clip = (rms(&unclipped) / d).max(1.0);
        for (i, row) in self.parameters.iter_mut().enumerate() {
            for (j, parameter) in row.iter_mut().enumerate() {
                *parameter -= rate * size * unclipped[i][j] / clip;
            }
        }
    }
}

fn tensor(shape: &[usize]) -> Tensor {
    let mut layout = Layout::new();
    layout.segment("only");
    layout.tensor("only", shape, Decay::Decayed, 1);
    layout.tensors()[0].clone()
}

/// Numbers between -1 and 1, different for each seed.
fn numbers(seed: u64, elements: usize) -> Vec<f32> {
    let number = |index: usize| {
        let mut x = (seed << 32 | index as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 27;
        (x >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..elements).map(number).collect()
}

fn rule(own: AdafactorSettings, weight_decay: f64) -> Adafactor {
    let settings = OptimizerSettings::of(OptimizerName::Adafactor);
    Adafactor::new(OptimizerSettings { adafactor: Some(own), weight_decay, ..settings })
}

/// A tensor and its states.
struct State {
    tensor: Tensor,
    parameters: Vec<f32>,
    states: [Vec<f32>; 3],
}

impl State {
    fn new(shape: &[usize], parameters: Vec<f32>) -> Self {
        let tensor = tensor(shape);
        let [rows, columns] = tensor.matrix();
        let numbers = if shape.len() > 1 { [rows, columns, 0] } else { [0, 0, rows] };
        Self { tensor, parameters, states: numbers.map(|numbers| vec![0.0; numbers]) }
    }

    fn update(&mut self, rule: &Adafactor, gradient: &[f32], update: u64, scale: f32) {
        let terms = UpdateTerms { learning_rate_factor: 1.0, weight_decay: WeightDecay::OfRule };
        let scalars = UpdateScalars::new(update, RATE, scale, terms);
        let views = HostViews {
            tensor: Some(&self.tensor),
            parameters: &mut self.parameters,
            states: self.states.iter_mut().map(Vec::as_mut_slice).collect(),
            gradient,
        };
        rule.apply(views, &scalars).expect("updated");
    }
}

const RATE: f64 = 0.02;

#[test]
fn matrices_are_updated_as_the_paper_has_it() {
    let absolute = AdafactorSettings { step_size: StepSize::Absolute, ..Default::default() };
    let clipped =
        AdafactorSettings { clip_threshold: 0.3, decay_exponent: 0.5, ..Default::default() };
    for (own, shape) in [
        (AdafactorSettings::default(), &[5, 37][..]),
        (absolute, &[33, 3]),
        (clipped, &[4, 1, 6]),
        (clipped, &[1, 1]),
    ] {
        let [rows, columns] = tensor(shape).matrix();
        let elements = rows * columns;
        let wide = |values: &[f32], scale: f64| -> Vec<Vec<f64>> {
            let rows = values.chunks(columns);
            rows.map(|row| row.iter().map(|&x| f64::from(x) * scale).collect()).collect()
        };
        let initial: Vec<f32> = numbers(7, elements).iter().map(|x| 0.05 * x).collect();
        let mut expected = Definition {
            parameters: wide(&initial, 1.0),
            row_sums: vec![0.0; rows],
            column_sums: vec![0.0; columns],
        };
        let mut state = State::new(shape, initial);
        for (update, size) in [(1, 1.0), (2, 1e-4), (3, 30.0), (4, 0.1)] {
            let gradient: Vec<f32> = numbers(update, elements).iter().map(|x| size * x).collect();
            state.update(&rule(own, 0.0), &gradient, update, 0.25);
            expected.update(&wide(&gradient, 0.25), update, RATE, &own);
            let found = wide(&state.parameters, 1.0);
            for (found, expected) in
                found.iter().flatten().zip(expected.parameters.iter().flatten())
            {
                let most = 1e-6 * expected.abs().max(0.01);
                assert!((found - expected).abs() < most, "{shape:?} {update}: {found} {expected}");
            }
            let sums = state.states[0].iter().map(|&mean| f64::from(mean) * columns as f64);
            for (found, expected) in sums.zip(&expected.row_sums) {
                assert!((found / expected - 1.0).abs() < 1e-6, "{shape:?} {update}");
            }
        }
    }
}

/// `V = b V + (1 - b) (g^2 + eps)`, computed by hand.
#[test]
fn vectors_keep_a_number_of_each_element() {
    let mut state = State::new(&[2], vec![3.0, -4.0]);
    // The first update has b = 0, so it is the sign of the gradient; the root mean square of the
    // parameters is sqrt(12.5).
    state.update(&rule(AdafactorSettings::default(), 0.0), &[0.5, -2.0], 1, 1.0);
    let size = RATE * 12.5_f64.sqrt();
    for (found, expected) in state.parameters.iter().zip([3.0 - size, -4.0 + size]) {
        assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} {expected}");
    }
    assert_eq!(state.states[2], [0.25, 4.0]);
    let before: Vec<f64> = state.parameters.iter().map(|&x| f64::from(x)).collect();
    state.update(&rule(AdafactorSettings::default(), 0.5), &[0.5, 2.0], 2, 2.0);
    let rest = 2.0_f64.powf(-0.8);
    let moments = [0.25 + rest * 0.75, 4.0 + rest * 12.0];
    let updates = [1.0 / moments[0].sqrt(), 4.0 / moments[1].sqrt()];
    let clip = ((updates[0].powi(2) + updates[1].powi(2)) / 2.0).sqrt();
    assert!(clip > 1.0, "the update is clipped");
    let size = ((before[0].powi(2) + before[1].powi(2)) / 2.0).sqrt();
    for index in 0..2 {
        let expected = before[index] * (1.0 - RATE * 0.5) - RATE * size * updates[index] / clip;
        let found = f64::from(state.parameters[index]);
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

#[test]
fn parameters_of_zero_move_by_the_floor_and_those_without_gradient_stay() {
    let own = AdafactorSettings { parameter_rms_floor: 0.5, ..Default::default() };
    let mut state = State::new(&[2, 2], vec![0.0; 4]);
    state.update(&rule(own, 0.0), &[1.0, 1.0, 1.0, -1.0], 1, 1.0);
    let moved = (RATE * 0.5) as f32;
    for (found, expected) in state.parameters.iter().zip([-moved, -moved, -moved, moved]) {
        assert!((found - expected).abs() < 1e-8, "{found}");
    }
    let mut state = State::new(&[2, 2], vec![1.0; 4]);
    state.update(&rule(own, 0.0), &[0.0; 4], 1, 1.0);
    assert_eq!(state.parameters, [1.0; 4]);
    State::new(&[0, 3], Vec::new()).update(&rule(own, 0.0), &[], 1, 1.0);
}

#[test]
fn a_sum_has_one_order() {
    let values: Vec<f64> = numbers(3, 1001).iter().map(|&x| f64::from(x) * 1e8).collect();
    let mut lanes = [0.0; 16];
    values.iter().enumerate().for_each(|(index, value)| lanes[index % 16] += value);
    let pairs = |lanes: &[f64]| -> Vec<f64> {
        let (low, high) = lanes.split_at(lanes.len() / 2);
        low.iter().zip(high).map(|(a, b)| a + b).collect()
    };
    let expected = pairs(&pairs(&pairs(&pairs(&lanes))))[0];
    assert_eq!(sum(values.len(), |index| values[index]).to_bits(), expected.to_bits());
    assert_eq!(sum(0, |_| 1.0), 0.0);
}
