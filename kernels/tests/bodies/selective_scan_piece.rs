//! The selective scan over pieces of sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::PieceState;
use tidemill_kernels::reference::selective_scan::step;
use tidemill_kernels::shape::{ScanShape, SequenceShape};

use super::agreement::{Transcript, assert_close_beside, assert_each_close, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, from_tail_to_tail, wide};
use super::number::{Number, rounded};
use super::pieces::{Cut, LENGTHS, cuts, rows_there, slice};
use super::scan_case::{PlacedInputs, Regime, ScanCase};

/// Steps from a given state agree with the definition, and so do the resulting states.
pub fn steps_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut shapes = Vec::new();
    for states in [1, 3, 8, 16, 17, 256] {
        for channels in device.sizes.choose(vec![1, 3, 16, 17, 40, 64], vec![1, 17, 64]) {
            for samples in device.sizes.choose(vec![1, 2, 3], vec![2]) {
                shapes.push(([states, channels, samples], MARGINS[shapes.len() % 2]));
            }
        }
    }
    // So many that a thread steps two samples, of which the last thread of a channel has one; and rows that are not aligned.
    let many = device.sizes.choose_for_gpu(vec![4096], vec![64])[0];
    shapes.extend(MARGINS.map(|margin| ([16, many, 33], margin)));
    for (seed, ([states, channels, samples], margin)) in shapes.into_iter().enumerate() {
        device.margin = margin;
        let mut inputs = Inputs::new(seed as u64);
        let sequences = SequenceShape::new(samples, 1).unwrap();
        let shape = ScanShape::new(sequences, 1, channels, states).unwrap();
        let held = samples * channels * states;
        let initial = inputs.uniform(held, -1.0, 1.0);
        let mut state = Placed::new(&mut device, Layout::range(held), &initial);
        let mut expected_state = wide(&initial);
        for position in 0..6 {
            let regime = [Regime::Mild, Regime::Saturated][position / 3];
            let label = format!("scan step {shape:?} position {position} seed {seed}");
            let case = ScanCase::new::<B::Activation>(&mut inputs, shape, regime);
            let placed = PlacedInputs::new(&mut device, &case, shape);
            let packed = Layout::packed(samples, channels);
            let mut out = Placed::poisoned(&mut device, packed);
            backend
                .selective_scan_piece(
                    &mut device.stream,
                    out.matrix_mut(),
                    PieceState { state: state.slice_mut(), lengths: None },
                    placed.view(),
                    shape,
                )
                .expect(&label);
            let expected = step(&mut expected_state, &case.wide().view(), shape);
            let (out, state) = (out.read(&mut device), state.read(&mut device));
            let of_state = tolerance::<f32>(states * (position + 1));
            let of_out = tolerance::<B::Activation>(states * (position + 1));
            assert_close_beside(&label, &out, &expected, of_out.rounded_twice(), 1.0);
            let label = format!("{label} state");
            assert_close_beside(&label, &state, &expected_state, of_state, 1.0);
            transcript.record(&label, &out);
            transcript.record(&label, &state);
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
    let sizes = [(1, 3), (3, 17), (16, 40), (16, 64), (16, 32), (17, 5), (256, 3)];
    for (seed, (states, channels)) in sizes.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let mut inputs = Inputs::new(seed as u64);
        let shape_of = |samples, positions| {
            let sequences = SequenceShape::new(samples, positions).unwrap();
            ScanShape::new(sequences, samples, channels, states).unwrap()
        };
        let (whole, held) = (shape_of(samples, positions), channels * states);
        let regime = [Regime::Mild, Regime::Saturated][seed % 2];
        let case = ScanCase::new::<B::Activation>(&mut inputs, whole, regime);
        let initial = inputs.uniform(samples * held, -1.0, 1.0);

        let (mut expected, mut expected_state) = (Vec::new(), Vec::new());
        for (sample, length) in LENGTHS.into_iter().enumerate() {
            let mut state = wide(&initial[sample * held..][..held]);
            for row in sample * positions..sample * positions + length {
                let one = case.rows(&(row..row + 1), whole).wide();
                expected.extend(step(&mut state, &one.view(), shape_of(1, 1)));
            }
            expected_state.extend(state);
        }
        for pieces in cuts() {
            let label = format!("scan of {states} states, {channels} channels, pieces {pieces:?}");
            let mut state = Placed::new(&mut device, Layout::range(samples * held), &initial);
            let mut all = vec![f32::NAN; samples * positions * channels];
            for cut in Cut::all(&pieces) {
                let shape = shape_of(cut.lengths.len(), cut.positions.len());
                let piece = ScanCase {
                    delta_raw: cut.rows(&case.delta_raw, channels),
                    x: cut.rows(&case.x, channels),
                    bc: cut.rows(&case.bc, 2 * states),
                    z: cut.rows(&case.z, channels),
                    ..case.clone()
                };
                let placed = PlacedInputs::new(&mut device, &piece, shape);
                let packed = Layout::packed(shape.sequences().rows(), channels);
                let mut out = Placed::<_, B::Activation>::poisoned(&mut device, packed);
                let lengths = cut.told(&mut device);
                let (results, lengths) = (out.matrix_mut(), slice::<B>(&lengths));
                let state = state.slice_mut().sub(0, cut.lengths.len() * held).unwrap();
                let stream = &mut device.stream;
                backend
                    .selective_scan_piece(
                        stream,
                        results,
                        PieceState { state, lengths },
                        placed.view(),
                        shape,
                    )
                    .expect(&label);
                cut.place::<B::Activation>(&out.read(&mut device), channels, &mut all);
            }
            let found = rows_there(&all, channels);
            let state = state.read(&mut device);
            let of_state = tolerance::<f32>(states * positions);
            let of_out = tolerance::<B::Activation>(states * positions);
            assert_close_beside(&label, &found, &expected, of_out.rounded_twice(), 1.0);
            assert_close_beside(&format!("{label} state"), &state, &expected_state, of_state, 1.0);
            // One label for all cuts, whose results must be equal.
            let label = format!("scan of {states} states, {channels} channels");
            transcript.record(&label, &found);
            transcript.record(&format!("{label} state"), &state);
        }
    }
    transcript.assert_each_label_has_one_result();
    transcript
}

/// In a scan that reduces to softplus, every element is exact relative to its own size, in both
/// tails.
pub fn softplus_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let channels = 241;
    let shape = ScanShape::new(SequenceShape::new(1, 1).unwrap(), 1, channels, 1).unwrap();
    let case = ScanCase {
        delta_raw: rounded::<B::Activation>(&from_tail_to_tail(channels)),
        delta_bias: vec![0.0; channels],
        x: vec![1.0; channels],
        bc: vec![1.0; 2],
        z: vec![1.0; channels],
        a_log: vec![0.0; channels],
        d: vec![0.0; channels],
        dout: vec![0.0; channels],
        starts: None,
    };
    let placed = PlacedInputs::new(&mut device, &case, shape);
    let mut out = Placed::poisoned(&mut device, Layout::packed(1, channels));
    let mut state = Placed::new(&mut device, Layout::range(channels), &vec![0.0; channels]);
    let (out_mut, state_mut) = (out.matrix_mut(), state.slice_mut());
    let piece = PieceState { state: state_mut, lengths: None };
    backend.selective_scan_piece(&mut device.stream, out_mut, piece, placed.view(), shape).unwrap();
    let mut expected_state = vec![0.0; channels];
    let expected = step(&mut expected_state, &case.wide().view(), shape);
    let (out, state) = (out.read(&mut device), state.read(&mut device));
    assert_each_close("softplus", &state, &expected_state, tolerance::<f32>(1));
    let of_out = tolerance::<B::Activation>(1).rounded_twice();
    assert_each_close("gated softplus", &out, &expected, of_out);
    transcript.record("softplus", &state);
    transcript
}
