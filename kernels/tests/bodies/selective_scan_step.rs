//! Selective scan, one position at a time.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::selective_scan::step;
use tidemill_kernels::shape::{ScanShape, SequenceShape};

use super::agreement::{Transcript, assert_close, tolerance};
use super::device::{Device, Layout, Placed};
use super::inputs::{Inputs, wide};
use super::scan_case::{PlacedInputs, Regime, ScanCase};

/// Steps from a given state agree with the definition, and so does the state that they leave.
pub fn agrees<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for states in [1, 3, 8, 16, 17] {
        for channels in [1, 3, 16, 17, 40] {
            for samples in [1, 2, 3] {
                seed += 1;
                let mut inputs = Inputs::new(seed);
                let sequences = SequenceShape::new(samples, 1).unwrap();
                let shape = ScanShape::new(sequences, 1, channels, states).unwrap();
                let held = samples * channels * states;
                let initial = inputs.uniform(held, -1.0, 1.0);
                let mut state = Placed::new(&mut device, Layout::range(held), &initial);
                let mut expected_state = wide(&initial);
                for position in 0..6 {
                    let regime = [Regime::Mild, Regime::Saturated][position / 3];
                    let label = format!("scan step {shape:?} position {position} seed {seed}");
                    let case = ScanCase::new(&mut inputs, shape, regime);
                    let placed = PlacedInputs::new(&mut device, &case, shape);
                    let packed = Layout::packed(samples, channels);
                    let mut out = Placed::poisoned(&mut device, packed);
                    backend
                        .selective_scan_step(
                            &mut device.stream,
                            out.matrix_mut(),
                            state.slice_mut(),
                            placed.view(),
                            shape,
                        )
                        .expect(&label);
                    let expected = step(&mut expected_state, &case.wide().view(), shape);
                    let (out, state) = (out.read(&mut device), state.read(&mut device));
                    let single = if samples * channels < 16 { 8.0 } else { 1.0 };
                    let tolerance = tolerance::<f32>(states * (position + 1)) * single;
                    assert_close(&label, &out, &expected, tolerance);
                    assert_close(&format!("{label} state"), &state, &expected_state, tolerance);
                    transcript.record(&label, &out);
                    transcript.record(&label, &state);
                }
            }
        }
    }
    transcript
}
