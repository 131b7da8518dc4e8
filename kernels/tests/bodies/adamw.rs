//! AdamW.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::AdamWStep;
use tidemill_kernels::reference::optimizer::{AdamWState, adamw};

use super::agreement::{Transcript, assert_close, assert_each_close, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};

/// Step `number`, counted from 1.
pub fn step(number: i32) -> AdamWStep {
    let (beta1, beta2, learning_rate) = (0.9_f32, 0.95_f32, 3e-3_f32);
    AdamWStep {
        learning_rate,
        beta1,
        beta2,
        eps: 1e-8,
        decay_factor: 1.0 - learning_rate * 0.1,
        bias_correction1: 1.0 - beta1.powi(number),
        bias_correction2: 1.0 - beta2.powi(number),
        gradient_scale: if number == 2 { 0.37 } else { 1.0 },
    }
}

/// Parameters and moments on the device.
pub struct PlacedState<B: Backend> {
    parameters: Placed<B>,
    exp_avg: Placed<B>,
    exp_avg_sq: Placed<B>,
}

impl<B: Backend> PlacedState<B> {
    /// Parameters whose moments are zero.
    pub fn new(device: &mut Device<'_, B>, parameters: &[f32]) -> Self {
        let layout = Layout::range(parameters.len());
        let zeros = vec![0.0; parameters.len()];
        Self {
            parameters: Placed::new(device, layout, parameters),
            exp_avg: Placed::new(device, layout, &zeros),
            exp_avg_sq: Placed::new(device, layout, &zeros),
        }
    }

    pub fn update(&mut self, device: &mut Device<'_, B>, gradient: &[f32], step: AdamWStep) {
        let gradient = Placed::new(device, Layout::range(gradient.len()), gradient);
        let (backend, stream) = (device.backend, &mut device.stream);
        let parameters = self.parameters.slice_mut();
        let (exp_avg, exp_avg_sq) = (self.exp_avg.slice_mut(), self.exp_avg_sq.slice_mut());
        backend.adamw(stream, parameters, [exp_avg, exp_avg_sq], gradient.slice(), step).unwrap();
    }

    pub fn read(&self, device: &mut Device<'_, B>) -> [Vec<f32>; 3] {
        [&self.parameters, &self.exp_avg, &self.exp_avg_sq].map(|placed| placed.read(device))
    }
}

/// Steps agree with the definition, and an element's bits do not depend on the chunk it is in.
pub fn agrees<B: Backend>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for elements in
        device.sizes.choose(vec![1, 3, 16, 17, 1000, 150_001], vec![1, 3, 17, 1000, 5003])
    {
        device.margin = MARGINS[elements % 2];
        let mut inputs = Inputs::new(elements as u64);
        let parameters = inputs.uniform(elements, -1.0, 1.0);
        let mut placed = PlacedState::new(&mut device, &parameters);
        let last = elements / 2..elements;
        let mut placed_last = PlacedState::new(&mut device, &parameters[last.clone()]);
        let mut expected = AdamWState {
            parameters: wide(&parameters),
            exp_avg: vec![0.0; elements],
            exp_avg_sq: vec![0.0; elements],
        };
        // Zero and tiny gradients are included, where eps bounds the update.
        for (number, magnitude) in [(1, 1.0), (2, 10.0), (3, 1e-9), (4, 0.0), (1000, 0.1)] {
            let label = format!("adamw {elements} elements, step {number}");
            let gradient = inputs.uniform(elements, -magnitude, magnitude);
            placed.update(&mut device, &gradient, step(number));
            placed_last.update(&mut device, &gradient[last.clone()], step(number));
            adamw(&mut expected, &wide(&gradient), step(number));
            let found = placed.read(&mut device);
            let found_last = placed_last.read(&mut device);
            let expected = [&expected.parameters, &expected.exp_avg, &expected.exp_avg_sq];
            for (what, ((found, part), expected)) in ["parameters", "exp_avg", "exp_avg_sq"]
                .into_iter()
                .zip(found.iter().zip(&found_last).zip(expected))
            {
                let label = format!("{label} {what}");
                assert_close(&label, found, expected, tolerance::<f32>(1));
                assert_same_bits(&label, part, &found[last.clone()]);
                transcript.record(&label, found);
            }
        }
    }
    transcript
}

/// Without weight decay, the first update is the learning rate with the opposite sign of the gradient.
pub fn moves_by_the_learning_rate<B: Backend>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let mut placed = PlacedState::new(&mut device, &[1.0, 2.0, 3.0]);
    let first = AdamWStep { decay_factor: 1.0, ..step(1) };
    placed.update(&mut device, &[0.5, -7.0, 100.0], first);
    let [parameters, ..] = placed.read(&mut device);
    let rate = f64::from(first.learning_rate);
    let expected = [1.0 - rate, 2.0 + rate, 3.0 - rate];
    assert_each_close("adamw first step", &parameters, &expected, tolerance::<f32>(0));
}
