//! Causal convolution and SiLU, one position at a time.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::causal_conv1d::step;
use tidemill_kernels::shape::{ConvShape, SequenceShape};

use super::agreement::{Transcript, assert_close_beside, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// Steps from a given state agree with the definition, and the state with the inputs to the bit.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for width in [1, 2, 4, 5] {
        for channels in [1, 3, 16, 17, 40] {
            for samples in [1, 2, 3] {
                seed += 1;
                let mut inputs = Inputs::new(seed);
                let sequences = SequenceShape::new(samples, 1).unwrap();
                let shape = ConvShape::new(sequences, 1, channels, width).unwrap();
                let held = samples * channels * (width - 1);
                let weight = inputs.uniform(channels * width, -1.0, 1.0);
                let bias = (seed % 2 == 0).then(|| inputs.uniform(channels, -1.0, 1.0));
                let mut expected_state = inputs.uniform(held, -1.0, 1.0);
                let mut state = Placed::new(&mut device, Layout::range(held), &expected_state);
                let placed_weight =
                    Placed::new(&mut device, Layout::range(channels * width), &weight);
                let placed_bias = bias
                    .as_ref()
                    .map(|bias| Placed::new(&mut device, Layout::range(channels), bias));
                for position in 0..6 {
                    let label = format!("conv step {shape:?} position {position} seed {seed}");
                    let x = inputs.uniform_of::<B::Activation>(samples * channels, -2.0, 2.0);
                    let half = Layout::columns_of(samples, 2 * channels, 0, channels);
                    let placed_x = Placed::new(&mut device, half, &x);
                    let packed = Layout::packed(samples, channels);
                    let mut out = Placed::poisoned(&mut device, packed);
                    backend
                        .causal_conv1d_silu_step(
                            &mut device.stream,
                            out.matrix_mut(),
                            state.slice_mut(),
                            placed_x.matrix(),
                            placed_weight.slice(),
                            placed_bias.as_ref().map(Placed::slice),
                            shape,
                        )
                        .expect(&label);
                    let mut wide_state = wide(&expected_state);
                    let bias = bias.as_deref().map(wide);
                    let expected =
                        step(&mut wide_state, &wide(&x), &wide(&weight), bias.as_deref(), shape);
                    expected_state = wide_state.iter().map(|&x| x as f32).collect();
                    let out = out.read(&mut device);
                    let tolerance = tolerance::<B::Activation>(width);
                    assert_close_beside(&label, &out, &expected, tolerance, 2.0);
                    assert_same_bits(&label, &state.read(&mut device), &expected_state);
                    transcript.record(&label, &out);
                }
            }
        }
    }
    transcript
}
