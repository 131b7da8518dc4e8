//! Lion.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::LionStep;
use tidemill_kernels::master::remainder_elements;
use tidemill_kernels::reference::optimizer::{LionState, lion};
use tidemill_kernels::{MasterMut, Slice};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::master::PlacedMaster;
use super::number::Number;
use super::refusal_case::{Bench, assert_answer, slice, slice_mut, wrong_by_one};

/// Step `number`, counted from 1.
fn step(number: i32) -> LionStep {
    let learning_rate = 3e-3;
    LionStep {
        learning_rate,
        beta1: 0.9,
        beta2: 0.99,
        decay_factor: 1.0 - learning_rate * 0.1,
        gradient_scale: if number == 2 { 0.37 } else { 1.0 },
    }
}

/// Masters and their average on the device.
struct PlacedState<B: Backend<Activation: Number>> {
    master: PlacedMaster<B>,
    exp_avg: Placed<B>,
}

impl<B: Backend<Activation: Number>> PlacedState<B> {
    /// Masters after `master_margin` elements of poison, whose average is zero, after `margin`.
    fn new(
        device: &mut Device<'_, B>,
        parameters: &[f32],
        [margin, master_margin]: [usize; 2],
    ) -> Self {
        device.margin = master_margin;
        let master = PlacedMaster::split(device, parameters);
        device.margin = margin;
        let zeros = vec![0.0; parameters.len()];
        Self { master, exp_avg: Placed::new(device, Layout::range(zeros.len()), &zeros) }
    }

    /// One update in chunks that end at `ends`.
    fn update(
        &mut self,
        device: &mut Device<'_, B>,
        gradient: &[f32],
        ends: &[usize],
        step: LionStep,
    ) {
        let gradient = Placed::new(device, Layout::range(gradient.len()), gradient);
        let mut start = 0;
        for &end in ends {
            let (backend, elements) = (device.backend, end - start);
            let master = self.master.master_mut().sub(start, elements).unwrap();
            let exp_avg = self.exp_avg.slice_mut().sub(start, elements).unwrap();
            let gradient: Slice<'_, B, f32> = gradient.slice().sub(start, elements).unwrap();
            backend.lion(&mut device.stream, master, exp_avg, gradient, step).unwrap();
            start = end;
        }
    }
}

/// Steps agree with the definition, and an element's bits depend neither on its chunk nor on its alignment.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let sizes = device.sizes.choose(vec![1, 3, 17, 1000, 150_001], vec![1, 3, 17, 1000, 5003]);
    for elements in sizes {
        let mut inputs = Inputs::new(elements as u64);
        let parameters = inputs.uniform(elements, -1.0, 1.0);
        let mut whole = PlacedState::new(&mut device, &parameters, [MARGINS[0]; 2]);
        let mut cut = PlacedState::new(&mut device, &parameters, [MARGINS[1], 4]);
        let mut expected =
            LionState { parameters: wide(&parameters), exp_avg: vec![0.0; elements] };
        // Where average and gradient are zero, only weight decay moves an element.
        for (number, magnitude) in [(1, 0.0), (2, 10.0), (3, 1e-9), (4, 0.0), (5, 0.1)] {
            let label = format!("lion {elements} elements, step {number}");
            let gradient = inputs.uniform(elements, -magnitude, magnitude);
            whole.update(&mut device, &gradient, &[elements], step(number));
            cut.update(&mut device, &gradient, &[elements / 3, elements], step(number));
            lion(&mut expected, &wide(&gradient), step(number));
            let parameters = whole.master.joined(&mut device);
            let exp_avg = whole.exp_avg.read(&mut device);
            assert_close(&label, &parameters, &expected.parameters, tolerance::<f32>(1));
            assert_close(&label, &exp_avg, &expected.exp_avg, tolerance::<f32>(1));
            assert_same_bits(&label, &cut.master.joined(&mut device), &parameters);
            assert_same_bits(&label, &cut.exp_avg.read(&mut device), &exp_avg);
            let copies = [&cut, &whole].map(|state| state.master.read(&mut device));
            copies[0].iter().zip(&copies[1]).for_each(|(a, b)| assert_same_bits(&label, a, b));
            transcript.record(&label, &parameters);
            transcript.record(&label, &exp_avg);
        }
    }
    transcript
}

/// A NaN in the gradient shows in the copy that products read; an infinite gradient acts like any gradient of its sign, and makes
/// the average infinite.
pub fn failures_reach_the_copy<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let mut state = PlacedState::new(&mut device, &[1.0; 9], [MARGINS[0]; 2]);
    let mut gradient = [0.5; 9];
    (gradient[2], gradient[8]) = (f32::NAN, f32::INFINITY);
    state.update(&mut device, &gradient, &[9], step(1));
    let [rounded, _] = state.master.read(&mut device);
    let joined = state.master.joined(&mut device);
    for (i, (rounded, joined)) in rounded.iter().zip(&joined).enumerate() {
        assert_eq!([rounded.is_nan(), joined.is_nan()], [i == 2; 2], "{i}: {rounded} {joined}");
    }
    let exp_avg = state.exp_avg.read(&mut device);
    assert!(exp_avg[2].is_nan() && exp_avg[8].is_infinite(), "{exp_avg:?}");
}

/// Operands whose lengths differ from the master's.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let mut remainder = bench.device.upload(&[0_u16; 4096]);
    for (wrong, [master, exp_avg, gradient]) in wrong_by_one([7, 7, 7]) {
        let kept = remainder_elements::<B>(master);
        let rounded = slice_mut(&mut bench.activation_outs[0], master);
        let parameters = MasterMut::new(rounded, slice_mut(&mut remainder, kept)).unwrap();
        let exp_avg = slice_mut(&mut bench.outs[0], exp_avg);
        let gradient = slice(&bench.zeros, gradient);
        let stream = &mut bench.device.stream;
        let result = backend.lion(stream, parameters, exp_avg, gradient, step(1));
        assert_answer("lion", wrong, result);
    }
    bench.finish();
}
