//! Causal convolution and SiLU over pieces of sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{ConvInputs, PieceState};
use tidemill_kernels::reference::causal_conv1d::step;
use tidemill_kernels::shape::{ConvShape, SequenceShape};

use super::agreement::{Transcript, assert_close_beside, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::pieces::{Cut, LENGTHS, cuts, rows_there, slice};

/// Steps from a given state agree with the definition, and the new state equals the inputs to the bit.
pub fn steps_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for width in [1, 2, 4, 5] {
        for channels in [1, 3, 16, 17, 40] {
            for samples in [1, 2, 3] {
                seed += 1;
                device.margin = MARGINS[seed as usize / 2 % 2];
                let mut inputs = Inputs::new(seed);
                let sequences = SequenceShape::new(samples, 1).unwrap();
                let shape = ConvShape::new(sequences, 1, channels, width).unwrap();
                let held = samples * channels * (width - 1);
                let weight = inputs.uniform(channels * width, -1.0, 1.0);
                let bias = (seed % 2 == 0).then(|| inputs.uniform(channels, -1.0, 1.0));
                let mut expected_state = inputs.uniform_of::<B::Activation>(held, -1.0, 1.0);
                let mut state = Placed::<_, B::Activation>::new(
                    &mut device,
                    Layout::range(held),
                    &expected_state,
                );
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
                    let read = ConvInputs {
                        x: placed_x.matrix(),
                        weight: placed_weight.slice(),
                        bias: placed_bias.as_ref().map(Placed::slice),
                        starts: None,
                    };
                    let (results, state_mut) = (out.matrix_mut(), state.slice_mut());
                    let piece = PieceState { state: state_mut, lengths: None };
                    let stream = &mut device.stream;
                    backend
                        .causal_conv1d_silu_piece(stream, results, piece, read, shape)
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

/// Outputs agree with the definition and have the same bits however sequences are cut; so does the remembered state.
pub fn pieces_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (samples, positions) = (LENGTHS.len(), LENGTHS[0]);
    for (seed, (width, channels)) in
        [(1, 3), (2, 40), (4, 17), (4, 40), (16, 19)].into_iter().enumerate()
    {
        let mut inputs = Inputs::new(seed as u64);
        let held = channels * (width - 1);
        let x = inputs.uniform_of::<B::Activation>(samples * positions * channels, -2.0, 2.0);
        let weight = inputs.uniform(channels * width, -1.0, 1.0);
        let bias = inputs.uniform(channels, -1.0, 1.0);
        let initial = inputs.uniform_of::<B::Activation>(samples * held, -1.0, 1.0);
        let placed_weight =
            Placed::<_, f32>::new(&mut device, Layout::range(channels * width), &weight);
        let placed_bias = Placed::<_, f32>::new(&mut device, Layout::range(channels), &bias);

        let shape_of = |samples, positions| {
            let sequences = SequenceShape::new(samples, positions).unwrap();
            ConvShape::new(sequences, samples, channels, width).unwrap()
        };
        let (mut expected, mut expected_state) = (Vec::new(), Vec::new());
        for (sample, length) in LENGTHS.into_iter().enumerate() {
            let mut state = wide(&initial[sample * held..][..held]);
            for row in sample * positions..sample * positions + length {
                let x = wide(&x[row * channels..][..channels]);
                expected.extend(step(
                    &mut state,
                    &x,
                    &wide(&weight),
                    Some(&wide(&bias)),
                    shape_of(1, 1),
                ));
            }
            expected_state.extend(state.iter().map(|&x| x as f32));
        }
        for pieces in cuts() {
            let label = format!("conv of width {width}, {channels} channels, pieces {pieces:?}");
            let mut state = Placed::<_, B::Activation>::new(
                &mut device,
                Layout::range(samples * held),
                &initial,
            );
            let mut all = vec![f32::NAN; samples * positions * channels];
            for cut in Cut::all(&pieces) {
                let (samples, rows) = (cut.lengths.len(), cut.lengths.len() * cut.positions.len());
                let half = Layout::columns_of(rows, 2 * channels, 0, channels);
                let placed_x =
                    Placed::<_, B::Activation>::new(&mut device, half, &cut.rows(&x, channels));
                let mut out = Placed::<_, B::Activation>::poisoned(
                    &mut device,
                    Layout::packed(rows, channels),
                );
                let lengths = cut.told(&mut device);
                let read = ConvInputs {
                    x: placed_x.matrix(),
                    weight: placed_weight.slice(),
                    bias: Some(placed_bias.slice()),
                    starts: None,
                };
                let (results, lengths) = (out.matrix_mut(), slice::<B>(&lengths));
                let state = state.slice_mut().sub(0, samples * held).unwrap();
                let (stream, shape) = (&mut device.stream, shape_of(samples, cut.positions.len()));
                backend
                    .causal_conv1d_silu_piece(
                        stream,
                        results,
                        PieceState { state, lengths },
                        read,
                        shape,
                    )
                    .expect(&label);
                cut.place::<B::Activation>(&out.read(&mut device), channels, &mut all);
            }
            let found = rows_there(&all, channels);
            let tolerance = tolerance::<B::Activation>(width);
            assert_close_beside(&label, &found, &expected, tolerance, 2.0);
            assert_same_bits(&label, &state.read(&mut device), &expected_state);
            // One label for all cuts, whose results must be equal.
            transcript.record(&format!("conv of width {width}, {channels} channels"), &found);
        }
    }
    transcript.assert_each_label_has_one_result();
    transcript
}
